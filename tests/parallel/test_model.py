"""The model of eight GPUs is close to the measurements on two."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("parallel_model", ROOT / "benchmarks/parallel_model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = json.loads((ROOT / "benchmarks/results/h200x2/parallel.json").read_text())["rows"]
    return module, module.Model.of(rows), rows


def test_what_was_measured(model):
    module, fitted, rows = model
    results = module.checked(fitted, rows)
    assert len(results) == 2
    for _, predicted, measured in results:
        assert predicted == pytest.approx(measured, rel=0.1)


def test_what_more_gpus_do(model):
    """Attention's time falls with each rank, the exchange's does not; only the memory of sharded rows falls."""
    module, fitted, _ = model
    one, *more = (fitted.dense(1, module.MILLION, ranks) for ranks in (1, 2, 4, 8))
    assert one["exchange"] == one["merge"] == 0
    times = [sum(parts.values()) for parts in (one, *more)]
    assert times == sorted(times, reverse=True)
    assert [parts["attend"] for parts in more] == pytest.approx([one["attend"] / n for n in (2, 4, 8)])
    whole, eighth = (module.v4_megabytes(module.MILLION, ranks) for ranks in (1, 8))
    assert eighth["compressed rows"] == whole["compressed rows"] / 8
    assert eighth["indexer's keys"] == whole["indexer's keys"]
