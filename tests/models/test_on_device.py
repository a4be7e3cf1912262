"""Layers with bfloat16 activations by CUDA's kernels and cuBLAS, against transformers' outputs."""

import dataclasses

import numpy as np
import pytest

from support.models import GoldenLayer, V4Layer, V32Layer, relative_rms

BOUNDS = {"bfloat16": 0.01, "fp8": 0.04}
QUICK, WHOLE = 9, 10_000  # tokens


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")  # the other backends' layers are tested on the host
@pytest.mark.parametrize("cache_format", BOUNDS)
@pytest.mark.parametrize("case", [0, 5, 10, 13])
def test_layer_equals_transformers(lab, case, cache_format):
    golden = GoldenLayer(case)
    make = V4Layer if golden.record["model"] == "v4" else V32Layer
    layer = make(golden, activations="bfloat16", cache_format=cache_format, backend="cuda", lab=lab)
    first, left, want = 0, [], QUICK if lab.emulated else WHOLE
    for count in golden.splits:
        left.append(min(count, want - first))
        first += left[-1]
        if first == want:
            break
    got = layer.run(left)
    assert relative_rms(got, golden.out[:first]) < BOUNDS[cache_format]


def outputs_beside_another(lab, case, cache_format, left_behind=0, poison=None):
    """Output of request 0, next to request 1 with hidden states of `poison`, over pages full of `left_behind`."""
    golden = GoldenLayer(case)
    make = V4Layer if golden.record["model"] == "v4" else V32Layer
    options = {"requests": 2, "activations": "bfloat16", "cache_format": cache_format}
    layer, caches = make(golden, **options, backend="cuda", lab=lab), make(golden, **options).caches
    for cache in vars(caches).values():
        if cache is not None:
            (cache if cache.base is None or cache.dtype != np.uint8 else cache.base).view(np.uint8)[...] = left_behind
    put = {name: cache if cache is None else lab.put(cache) for name, cache in vars(caches).items()}
    layer.caches = dataclasses.replace(caches, **put)
    steps = [[(0, 0, 5)], [(0, 5, 1), (1, 0, 2)], [(0, 6, 1), (1, 2, 1)]]
    hidden, found = golden.hidden, []
    for scheduled in steps:
        golden.hidden = hidden.copy()
        if poison is not None and len(scheduled) == 2:
            (_, first, count) = scheduled[1]
            golden.hidden[first : first + count] = poison
        with np.errstate(all="ignore"):
            found.append(layer.step(scheduled, given=False)[0])
    return np.concatenate(found)


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")
@pytest.mark.parametrize("cache_format", [pytest.param("bfloat16", marks=pytest.mark.slow), "fp8"])
@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.slow) for case in (2, 3)), 8, 13])
def test_poison_stays_with_its_request(lab, case, cache_format):
    """NaN in pages of earlier requests, or in the tokens of the other request: the same bits."""
    want = outputs_beside_another(lab, case, cache_format)
    assert np.isfinite(want.astype(np.float32)).all()
    for options in ({"left_behind": 255}, {"left_behind": 0x7F}, {"poison": np.nan}, {"poison": 1e30}):
        got = outputs_beside_another(lab, case, cache_format, **options)
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16), str(options))
