"""Arrays surrounded by guarded memory."""

import math

import numpy as np

SENTINEL = 0xA5
MARGIN = 4096


class Guarded:
    """A copy of `array` with any strides and alignment, between margins and gaps that are filled with a sentinel.

    Args:
        array: the array in the memory of the lab's backend
        gaps: bytes after each element of the leading axes, innermost axis first; missing ones are 0
        offset: bytes from a 256-byte boundary to the start
    """

    def __init__(self, lab, array, gaps=(), offset=0):
        self.lab = lab
        strides, extent = [], array.itemsize
        for axis in range(array.ndim - 1, -1, -1):
            strides.append(extent)
            gap = gaps[len(strides) - 1] if len(strides) - 1 < len(gaps) else 0
            extent = extent * array.shape[axis] + (gap if axis else 0)
        self.shape, self.dtype, self.strides = array.shape, array.dtype, tuple(reversed(strides))
        size = 2 * MARGIN + offset + extent
        block = np.full(size + 256, SENTINEL, np.uint8)
        raw = block[-block.ctypes.data % 256 :][:size]  # aligned, as device memory is
        self._start = MARGIN + offset
        self.host = self.view_of(raw)
        self.host[...] = array
        self._raw = lab.put(raw.copy()) if lab.on_device else raw
        self.array = self.view_of(self._raw)

    def view_of(self, raw):
        if isinstance(raw, np.ndarray):
            return np.ndarray(self.shape, self.dtype, raw.data, self._start, self.strides)
        return type(raw)(self.shape, self.dtype, raw.data + self._start, self.strides)

    def get(self):
        """The current contents of the array, on the host."""
        return self.view_of(self.lab.get(self._raw))

    def everything(self):
        """All bytes, margins and gaps included, on the host; a copy."""
        return np.array(self.lab.get(self._raw))

    def assert_margins(self):
        """Check that only the array's elements were written."""
        owned = np.zeros(len(self._raw), np.bool_)
        itemsize = self.dtype.itemsize
        first_bytes = np.ndarray(self.shape, np.bool_, owned.data, self._start, self.strides)
        first_bytes[...] = True
        for i in range(1, itemsize):
            np.ndarray(self.shape, np.bool_, owned.data, self._start + i, self.strides)[...] = True
        assert owned.sum() == math.prod(self.shape) * itemsize
        touched = np.flatnonzero((self.everything() != SENTINEL) & ~owned)
        assert not touched.size, f"bytes {touched[:8] - self._start} from the start were written"
