import pytest

from support.lab import Lab

BACKENDS = [
    "reference",
    "cpu",
    "numba_cuda",  # in the simulator
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("numba_cuda", marks=pytest.mark.gpu, id="numba_cuda-device"),
]


TOO_LONG = ("million", "thousands", "longer_batch")  # for Numba's simulator, which takes minutes


@pytest.fixture(params=BACKENDS)
def place(request):
    """As `lab`, for the builders."""
    place = Lab(request.param, on_device=request.node.get_closest_marker("gpu") is not None)
    if place.tiny and any(word in request.node.name for word in TOO_LONG):
        pytest.skip("too long for Numba's simulator")
    return place
