import pytest


@pytest.fixture
def need_gpus():
    """A function that skips the test unless there are so many GPUs."""
    import cupy

    def need(count):
        found = cupy.cuda.runtime.getDeviceCount()
        if found < count:
            pytest.skip(f"needs {count} GPUs, of which there are {found}")

    return need


@pytest.fixture
def two_gpus(need_gpus):
    need_gpus(2)
