"""Arguments of operations under jax.jit as JAX's arrays; each error names the argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..arrays import dlpack, jax_arrays

USER_DEFINED = 2  # np.dtype.isbuiltin of ml_dtypes' types


def array_of(name: str, value: Any) -> Any:
    """`value` as a JAX array or tracer. Other arrays are copied, because a call may run after it has returned.

    Args:
        value: an array of any framework, a sequence of numbers, or an object with `__array__` or `__jax_array__`

    Raises TypeError for anything but an array of numbers, ValueError for an array without memory, and OverflowError for
    values that need more than 32 bits without jax_enable_x64.
    """
    if isinstance(value, jax.Array):
        jax_arrays.check(value, name)
        return value
    if isinstance(value, (jax.core.Tracer, getattr(jax, "Ref", ()))):
        raise TypeError(f"{name}: got a Ref, expected an array: ref[...] reads it")
    if hasattr(value, "__jax_array__"):
        return array_of(name, value.__jax_array__())
    if isinstance(value, (list, tuple)) and any(isinstance(x, jax.Array) for x in jax.tree.leaves(value)):
        return _named(name, jnp.asarray, value)
    if isinstance(value, (list, tuple)) or (hasattr(value, "__array__") and not hasattr(value, "__dlpack__")):
        value = _named(name, np.asarray, value)
    native = dlpack.borrow(value, name)
    if isinstance(value, np.ndarray):
        return _named(name, _copied, np.asarray(value))  # not `native`, where 8-bit floats are bytes
    if isinstance(native, np.ndarray):
        kind = str(getattr(value, "dtype", "")).rpartition(".")[2]
        return _named(name, _copied, native.view(getattr(ml_dtypes, kind)) if kind.startswith("float8_") else native)
    if native.dtype.itemsize == 8 and not jax_arrays.fits_64_bits():
        raise TypeError(f"{name}: got dtype {native.dtype} on a device, expected 32 bits as jax_enable_x64 is off")
    return _named(name, _copied_on_device, value)


def _copied(array: np.ndarray) -> Any:
    """A copy of an array in host memory, in JAX's dtype for the array's dtype."""
    dtype = array.dtype
    if dtype.kind not in "biufc" and dtype.isbuiltin != USER_DEFINED:
        raise TypeError(f"got dtype {dtype}")
    wanted = jax.dtypes.canonicalize_dtype(dtype)
    with np.errstate(over="ignore"):
        converted = array.astype(wanted, copy=False)
    if wanted.itemsize < dtype.itemsize:
        lost = converted != array if dtype.kind in "iu" else np.isinf(converted) & np.isfinite(array)
        if lost.any():
            raise OverflowError(f"got {array[lost].flat[0]}, which {wanted} does not have, and jax_enable_x64 is off")
    # JAX may read an array's memory after jax.numpy.array has returned, or share it: give JAX memory of its own.
    copy = dlpack.empty(converted.shape, converted.dtype, converted)
    copy[...] = converted
    return jax.device_put(copy)


def _copied_on_device(value: Any) -> Any:
    return jnp.array(jax.dlpack.from_dlpack(value), copy=True)


def _named(name: str, function: Callable[[Any], Any], value: Any) -> Any:
    """function(value), with the argument's name in its errors."""
    try:
        return function(value)
    except OverflowError as error:
        raise OverflowError(f"{name}: {error}") from None
    except (TypeError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}, expected an array of numbers") from None


def check_devices(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for arrays on different devices that JAX must not move."""
    concrete = {name: x for name, x in arrays.items() if not isinstance(x, jax.core.Tracer)}
    placed = {name: x.sharding.device_set for name, x in concrete.items() if x.committed}
    first = next(iter(placed), None)
    for name, devices in placed.items():
        if first is not None and devices != placed[first]:
            got, expected = (sorted(map(str, x)) for x in (devices, placed[first]))
            raise ValueError(
                f"{name}: got an array on {', '.join(got)}, expected it on {', '.join(expected)} as {first}"
            )


def varying_as(inputs: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """Results that vary over the same axes of jax.shard_map as the inputs, as check_vma requires."""
    axes = frozenset().union(*map(_axes, inputs))
    return tuple(_varying(x, axes) for x in results)


def _axes(x: Any) -> frozenset[Any]:
    """The axes of jax.shard_map over which an array varies."""
    kind: Any = getattr(x.aval, "mat", None)  # of JAX 0.10
    return frozenset(getattr(x.aval, "vma", ()) if kind is None else kind.varying)


def _varying(x: Any, axes: frozenset[Any]) -> Any:
    missing = tuple(sorted(axes - _axes(x)))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)
