import pytest

from support.lab import BACKENDS, DEVICES, lab_of

TOO_LONG = ("million", "thousands", "longer_batch")  # for Numba's simulator, which takes minutes


def pytest_collection_modifyitems(items):
    for item in items:
        if any(word in item.name for word in TOO_LONG):
            item.add_marker(pytest.mark.nowhere(when=lambda x: x.simulated))


@pytest.fixture(params=BACKENDS + DEVICES)
def place(request):
    """Like `lab`, for the builders."""
    yield from lab_of(request)
