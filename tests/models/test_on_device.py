"""Layers with bfloat16 activations by CUDA's kernels and cuBLAS, against transformers' outputs."""

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
