"""A process with two GPUs: every example call gives on the second what it gives on the first, whichever is current."""

import numpy as np
import pytest

from support import operations

pytestmark = pytest.mark.gpu


def on(device, example):
    """The arguments of an example on a device, which are written, and arrays of its results."""
    import cupy

    def put(value):
        if isinstance(value, list | tuple):
            return type(value)(put(x) for x in value)
        return cupy.array(value) if isinstance(value, np.ndarray) else value

    with cupy.cuda.Device(device):
        return {name: put(x) for name, x in operations.arguments_of(example, 0).items()}


def arrays(value):
    if isinstance(value, list | tuple):
        return [array for x in value for array in arrays(x)]
    return [value] if hasattr(value, "dtype") and hasattr(value, "get") else []


@pytest.mark.parametrize("name", operations.EXAMPLES)
@pytest.mark.parametrize("backend", ["cuda", "numba_cuda"])
def test_examples(backend, name):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    if not operations.is_on(backend, name):
        pytest.skip("has no such kernels")
    example, found = operations.EXAMPLES[name], []
    for device, current in ((0, 0), (1, 1), (1, 0), (0, 1)):
        arguments = on(device, example)
        with cupy.cuda.Device(current):
            for _ in range(2):  # in full, and as it is remembered
                results = operations.public(example)(**arguments, backend=backend)
        assert {array.device.id for array in arrays(results)} <= {device}
        with cupy.cuda.Device(device):
            found.append([array.get().tobytes() for array in arrays([results, *arguments.values()])])
    assert all(other == found[0] for other in found[1:])
