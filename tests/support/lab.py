"""Moves arrays to a backend's memory and back."""

import os

import ml_dtypes
import numpy as np
import pytest

BF16 = ml_dtypes.bfloat16

BACKENDS = [
    "reference",
    "cpu",
    "numba_cuda",  # in the simulator
    pytest.param("cuda", id="cuda-emulated"),
]
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("numba_cuda", marks=pytest.mark.gpu, id="numba_cuda-device"),
]


class Lab:
    """backend: the name given to every call; on_device: whether arrays are CuPy's; emulated: or fake ones."""

    def __init__(self, backend, on_device, emulated=False):
        self.backend = backend
        self.on_device = on_device
        self.emulated = emulated

    @property
    def tiny(self):
        """Whether a thread takes about a tenth of a millisecond: Numba's simulator."""
        return self.backend == "numba_cuda" and not self.on_device

    @property
    def xp(self):
        if not self.on_device:
            return np
        import cupy

        return cupy

    def put(self, array):
        """A NumPy array in this backend's memory; strides (and the bytes between rows) included."""
        if array is None or not self.on_device:
            return array
        import cupy

        base = array
        while isinstance(base.base, np.ndarray) and base.base.ndim:
            base = base.base
        if base is array or base.nbytes > 1 << 30 or not base.flags.c_contiguous:
            return cupy.array(array)
        device = cupy.array(base.view(np.uint8).reshape(-1))
        offset = array.ctypes.data - base.ctypes.data
        return cupy.ndarray(array.shape, array.dtype, device.data + offset, array.strides)

    def get(self, array):
        return array if isinstance(array, np.ndarray) else array.get()


def lab_of(request):
    """For a fixture whose parameter is a backend's name: the lab, while its devices are emulated if necessary."""
    on_device = request.node.get_closest_marker("gpu") is not None
    if on_device and os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("NUMBA_ENABLE_CUDASIM is set, as it is without -m gpu: no device is used")
    if on_device or request.param != "cuda":
        yield Lab(request.param, on_device)
        return
    import emulation

    if emulation.unavailable():
        pytest.skip(emulation.unavailable())
    with emulation.devices():
        yield Lab("cuda", on_device=True, emulated=True)


def bfloat16(bits):
    """uint16 bits as bfloat16."""
    return np.ascontiguousarray(bits).view(BF16)


def to_float(array):
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(array).astype(np.float64)
