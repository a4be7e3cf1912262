"""A layer and its builder run all their operations on their own backend."""

import numpy as np
import pytest

from cumla.models.deepseek_v4 import DeepseekV4Attention
from support.backends import only
from support.models import GoldenLayer, V4Layer, V32Layer


@pytest.mark.parametrize("cache_format", ["float32", "fp8"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "own"])
@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_every_operation_is_on_the_layers_backend(case, given, cache_format):
    """Prefills, decodes and both, on a backend other than the default of their arrays."""
    golden = GoldenLayer(case)
    layer = (V32Layer if case == 13 else V4Layer)(golden, 2, backend="reference", cache_format=cache_format)
    with only("reference"):
        for scheduled in ([(0, 0, 9)], [(0, 9, 1)], [(0, 10, 1), (1, 0, 6)]):
            layer.step(scheduled, given)


def test_an_operation_on_another_backend_is_noticed():
    golden = GoldenLayer(2)
    layer = V4Layer(golden, backend="reference")
    assert isinstance(layer.layer, DeepseekV4Attention)
    layer.layer.backend = None
    with pytest.raises(AssertionError, match=r"operations on \['cpu'\], expected reference alone"), only("reference"):
        assert np.isfinite(layer.run([3])).all()
