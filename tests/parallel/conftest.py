import pytest


@pytest.fixture
def need_gpus():
    """A function that skips the test if there are fewer GPUs than its argument."""
    import cupy

    def need(count):
        found = cupy.cuda.runtime.getDeviceCount()
        if found < count:
            pytest.skip(f"needs {count} GPUs, of which there are {found}")

    return need


@pytest.fixture
def two_gpus(need_gpus):
    need_gpus(2)


@pytest.fixture
def nccl():
    """The communicator's module, with a fake NCCL between threads on an emulated device."""
    from support import fake_nccl

    with fake_nccl.devices():
        from cumla.interop import nccl

        yield nccl
