"""Names of 0.1.0 that changed: they work for one more release, with a warning that names the new one."""

import importlib

import pytest

import cumla.parallel
from cumla.dispatch.deprecated import renamed_argument
from cumla.layers import SparseMLALayer, prefill_path


@renamed_argument("prefill_road", "prefill_path")
def step(prefill_path=None):
    return prefill_path


def test_an_argument():
    with pytest.warns(DeprecationWarning, match=r"step\(prefill_road=...\).*prefill_path"):
        assert step(prefill_road="rows") == "rows"
    with pytest.raises(TypeError, match="got prefill_road and prefill_path, expected prefill_path alone"):
        step(prefill_road="rows", prefill_path="rows")


def test_a_layer_takes_the_old_argument():
    with (
        pytest.warns(DeprecationWarning, match="prefill_path"),
        pytest.raises(ValueError, match="prefill_path: got 'sea'"),
    ):
        SparseMLALayer(1).step(None, None, None, None, prefill_road="sea")


@pytest.mark.parametrize(("old", "new"), [("QueryShares", "QueryShards"), ("share_queries", "shard_queries")])
def test_names_of_parallel(old, new):
    with pytest.warns(DeprecationWarning, match=f"cumla.parallel.{old} .*{new}"):
        assert getattr(cumla.parallel, old) is getattr(cumla.parallel, new)
    with pytest.raises(AttributeError, match="nothing"):
        cumla.parallel.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"),
    [("ROADS", "PATHS"), ("cheaper_road", "cheaper_path"), ("chunk_roads", "chunk_paths"), ("COSTS",) * 2],
)
def test_a_module(old, new):
    module = importlib.import_module("cumla.layers.prefill_road")
    with pytest.warns(DeprecationWarning, match=f"prefill_path.{new}"):
        assert getattr(module, old) is getattr(prefill_path, new)
