"""V3.2 attention layers against transformers' outputs, in any split, batched and shared."""

import numpy as np
import pytest

from support.models import GoldenLayer, V32Layer, relative_rms

BOUNDS = {"float32": 1e-5, "bfloat16": 3e-3, "fp8": 0.04}  # relative to the whole output, by the format of the rows
CASES = [13, *(pytest.param(case, marks=pytest.mark.slow) for case in (11, 12))]
TIED = {11: 1}  # rows whose last place is tied at a score of exactly 0


@pytest.mark.parametrize("cache_format", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_layer_equals_transformers(case, cache_format):
    golden = GoldenLayer(case)
    got = V32Layer(golden, cache_format=cache_format).run(golden.splits)
    assert relative_rms(got, golden.out) < BOUNDS[cache_format]


@pytest.mark.slow
@pytest.mark.parametrize("case", [11, 12, 13])
def test_layer_on_the_reference_backend(case):
    golden = GoldenLayer(case)
    got = V32Layer(golden, backend="reference").run(golden.splits)
    assert relative_rms(got, golden.out) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_own_selection_is_the_golden_one(case):
    golden = GoldenLayer(case)
    layer = V32Layer(golden)
    chosen = []
    select = layer.layer.indexer.select
    layer.layer.indexer.select = lambda *arguments: chosen.append(select(*arguments).copy()) or chosen[-1]
    got = layer.run(golden.splits, given=False)
    same = []
    for token, (row, want) in enumerate(zip(np.concatenate(chosen), golden.topk, strict=True)):
        same.append(set(row[row >= 0]) == set(want[(want >= 0) & (want <= token)]))
    assert np.count_nonzero(np.logical_not(same)) == TIED.get(case, 0)
    assert relative_rms(got[same], golden.out[same]) < 1e-5


@pytest.mark.parametrize("cache_format", ["float32", "fp8"])
def test_a_batch_in_other_splits_gives_the_same(cache_format):
    golden = GoldenLayer(13)
    layer = V32Layer(golden, requests=2, cache_format=cache_format, speculative=2)
    parts = {0: [], 1: []}
    for scheduled in ([(0, 0, 100)], [(0, 100, 1), (1, 0, 3)], [(1, 3, 2), (0, 101, 98)], [(1, 5, 194)]):
        for (request, _, _), out in zip(scheduled, layer.step(scheduled), strict=True):
            parts[request].append(out)
    for outs in parts.values():
        assert relative_rms(np.concatenate(outs), golden.out) < BOUNDS[cache_format]


def test_a_prefix_hit_goes_on_bit_for_bit():
    golden = GoldenLayer(13)
    layer = V32Layer(golden, requests=2, cache_format="fp8")
    layer.run([128])
    table = layer.paged.tables["window"]
    table[1, :2] = table[0, :2]
    (first,) = layer.step([(0, 128, 71)], given=False)
    (second,) = layer.step([(1, 128, 71)], given=False)
    np.testing.assert_array_equal(first, second)
