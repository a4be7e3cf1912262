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


def pytest_collection_modifyitems(items):
    for item in items:
        if any(word in item.name for word in TOO_LONG):
            item.add_marker(pytest.mark.nowhere(when=lambda x: x.simulated))


@pytest.fixture(params=BACKENDS)
def place(request):
    """As `lab`, for the builders."""
    yield from lab_of(request)
