"""JAX arrays: checks that they have memory, and returns results on the device of a call's first array.

JAX is used only if the caller has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

INT32 = np.iinfo(np.int32)


class Framework(str):
    """The name "jax" with the host device of an array, on which results are put.

    Attributes:
        device: one of JAX's CPU devices
        committed: whether JAX must not move the array to another device
    """

    __slots__ = ("committed", "device")
    device: Any
    committed: bool


def framework_of(array: Any) -> str:
    """ "jax"; for an array in host memory with its device."""
    devices = array.sharding.device_set
    device = next(iter(devices))
    if len(devices) != 1 or device.platform != "cpu":
        return "jax"
    framework = Framework("jax")
    framework.device, framework.committed = device, array.committed
    return framework


def check(array: Any, name: str) -> None:
    """Raise TypeError for an array of keys, and ValueError for an array that was deleted."""
    jax = sys.modules["jax"]
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: got dtype {array.dtype}, expected numbers, such as a key's from jax.random.key_data")
    if not isinstance(array, jax.core.Tracer) and array.is_deleted():
        raise ValueError(f"{name}: got a JAX array that was deleted, as jax.jit does with arrays donated to it")


def fits_64_bits() -> bool:
    """Whether JAX has 64-bit types here."""
    return bool(sys.modules["jax"].dtypes.canonicalize_dtype(np.int64) == np.int64)


def give(native: Any, framework: str) -> Any:
    """A NumPy or CuPy array as a JAX array over the same memory, in host memory on the framework's device.

    Without jax_enable_x64, 64-bit integers (slots and positions) are copied to 32 bits. Values out of range become the
    nearest 32-bit value, and so never another valid slot.
    """
    jax = sys.modules["jax"]
    if native.dtype == np.int64 and not fits_64_bits():
        native = native.clip(INT32.min, INT32.max).astype(np.int32)
    if not isinstance(native, np.ndarray):
        return jax.dlpack.from_dlpack(native)
    # The arrays share memory: `dlpack.empty` aligns it as XLA requires.
    if not isinstance(framework, Framework):
        return jax.device_put(native)
    if framework.committed:
        return jax.device_put(native, framework.device)
    with jax.default_device(framework.device):
        return jax.device_put(native)
