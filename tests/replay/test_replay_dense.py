"""Small runs with dense layers: checked samples, context in a workspace, shared rows, and errors that must be found."""

from dataclasses import replace

import numpy as np
import pytest

import cumla.layers.dense
from cumla.errors import InputError
from cumla.replay.dense import DenseLayer, dense_bytes_moved
from cumla.replay.engine import Engine
from cumla.replay.options import ReplayOptions, parse_layers
from cumla.replay.trace import TraceRequest

OPTIONS = ReplayOptions(
    backend="cpu",
    layers=("mla",),
    heads=2,
    window=16,
    topk=8,
    batch_tokens=300,
    cache_tokens=4096,
    max_len=None,
    seed=1,
)
REQUESTS = [
    TraceRequest(0.0, 600, 3, (0, 1)),
    TraceRequest(0.0, 40, 6, (2,)),
    TraceRequest(5000.0, 690, 4, (0, 3)),
]


def run(options=OPTIONS):
    engine = Engine(options, REQUESTS)
    return engine, list(engine.steps())


def failures(records):
    return [sample.failure for record in records for sample in record.samples if sample.failure]


@pytest.fixture(scope="module")
def finished():
    return run()


def test_samples_are_within_bounds(finished):
    _, records = finished
    assert failures(records) == []
    for record in records:
        assert len(record.samples) == (record.prefill_tokens > 0) + (record.decode_tokens > 0)
        assert {sample.layer for sample in record.samples} == {"mla"}


def test_prompts_in_parts_and_behind_shared_prefixes_attend_to_their_context(finished):
    engine, records = finished
    assert next(s for s in engine.scheduler.finished if s.index == 2).shared == 512
    with_context = [record for record in records if ("mla", "context") in record.seconds]
    assert len(with_context) >= 2
    for record in with_context:
        assert {("mla", "gather"), ("mla", "project"), ("mla", "context")} <= set(record.seconds)


def test_shared_rows_are_those_of_a_run_alone(finished):
    engine, _ = finished
    alone = Engine(OPTIONS, [replace(REQUESTS[2])], verify=False)
    for _ in alone.steps():
        pass
    positions = np.arange(690)
    rows = [
        e.layers[0].cached(next(s for s in e.scheduler.finished if s.request.input_length == 690), positions)
        for e in (engine, alone)
    ]
    np.testing.assert_array_equal(*rows)


def test_beside_sparse_layers():
    engine, records = run(replace(OPTIONS, layers=("swa", "mla")))
    assert isinstance(engine.layers[1], DenseLayer)
    assert failures(records) == []
    assert {sample.layer for record in records for sample in record.samples} == {"swa", "mla"}
    assert all({("swa", "insert"), ("mla", "insert")} <= set(record.bytes) for record in records)


def test_context_that_is_left_out_is_found(monkeypatch):
    def forgetful(*arguments, accumulate, **more):
        if not accumulate:
            cumla.mha_varlen(*arguments, **more)

    monkeypatch.setattr(cumla.layers.dense, "mha_varlen", forgetful)
    _, records = run()
    assert any("(prefill)" in failure for failure in failures(records))


def test_bytes_count_every_row_once(finished):
    _, records = finished
    total = sum(record.bytes["mla", "insert"] for record in records)
    tokens = sum(record.prefill_tokens + record.decode_tokens for record in records)
    assert total == tokens * (2 * 1152 + 8)
    for record in records:
        assert set(record.bytes) <= {*(("mla", op) for op in dense_ops())}
        assert set(record.bytes) <= set(record.seconds)


def dense_ops():
    return ("insert", "absorb", "decode", "gather", "project", "prefill", "context")


def test_bytes_of_a_decode():
    class Batch:
        num_decodes, num_tokens, scheduled = 1, 1, (None,)
        positions = np.array([9])

    moved = dense_bytes_moved(Batch, 2)
    assert set(moved) == {"insert", "absorb", "decode"}
    assert moved["decode"] == 10 * 1152 + 2 * (576 + 512) * 2


def test_layer_types_are_parsed():
    assert parse_layers("mla, swa") == ("mla", "swa")
    with pytest.raises(InputError, match="got 'mlb', expected a comma list of swa, c4a, c128a, mla"):
        parse_layers("mlb")


def test_fp8_caches():
    """The error of FP8 rows is measured; bf16 caches have none."""
    engine, records = run(replace(OPTIONS, mla_cache="fp8"))
    assert failures(records) == []
    samples = [sample for record in records for sample in record.samples]
    assert 0.001 < np.mean([sample.fp8_rms for sample in samples]) < 0.0625
    assert engine.layers[0].cache_bytes == OPTIONS.cache_tokens * 576
    assert sum(r.bytes["mla", "insert"] for r in records) == sum(
        (r.prefill_tokens + r.decode_tokens) * (1152 + 576 + 8) for r in records
    )


def test_bf16_caches_cost_nothing(finished):
    _, records = finished
    assert {sample.fp8_rms for record in records for sample in record.samples} == {None}
