"""The configuration's rms_norm_eps reaches every norm of a V4 layer."""

import numpy as np
import pytest

from support.models import GoldenLayer, V4Layer, relative_rms

SCALE = 2.0**7  # a power of 2, which scales float32 exactly
# Their outputs are normalised, by RMS norms with the configuration's epsilon.
NORMALISED = (
    "q_a_proj.weight",
    "q_b_proj.weight",
    "kv_proj.weight",
    "compressor.kv_proj.weight",
    "compressor.indexer.kv_proj.weight",
)


@pytest.mark.parametrize("case", [2, 3, 8])
def test_an_epsilon_scales_with_the_square_of_what_is_normalised(case):
    """x / sqrt(mean(x^2) + eps) has the same bits for 128 x and 128^2 eps, for all norms of a layer at once.

    A norm with a fixed epsilon of 1e-6 differs in the last bits of its rows.
    """
    golden, scaled = GoldenLayer(case), GoldenLayer(case)
    scaled.config = golden.config | {"rms_norm_eps": golden.config.get("rms_norm_eps", 1e-6) * SCALE**2}
    for name in NORMALISED:
        if name in scaled.weights:
            scaled.weights[name] = scaled.weights[name] * np.float32(SCALE)
    want, got = (V4Layer(x).run(x.splits, given=False) for x in (golden, scaled))
    np.testing.assert_array_equal(got, want)
    assert relative_rms(want, golden.out) < 1e-5
