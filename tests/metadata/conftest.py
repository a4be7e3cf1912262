import pytest

from support.lab import lab_of

BACKENDS = [
    "reference",
    "cpu",
    "numba_cuda",  # in the simulator
    pytest.param("cuda", id="cuda-emulated"),
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("numba_cuda", marks=pytest.mark.gpu, id="numba_cuda-device"),
]


TOO_LONG = ("million", "thousands", "longer_batch")  # for Numba's simulator, which takes minutes


@pytest.fixture(params=BACKENDS)
def place(request):
    """As `lab`, for the builders."""
    for place in lab_of(request):
        if place.tiny and any(word in request.node.name for word in TOO_LONG):
            pytest.skip("too long for Numba's simulator")
        yield place
