"""Whether a call will be served, by which kernel, and why not: before there are arrays."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np

from ..dispatch import backends
from ..dispatch.rehearsal import ghost, rehearsed
from ..dispatch.values import shown

FILES = (
    "advance", "blocks", "compressor", "dense_attention", "dense_cache", "indexer", "indexer_topk", "indices",
    "norm_rope", "sparse_attention", "sparse_cache",
)  # fmt: skip
OLDEST_DEVICE = 80  # compute capability that the CUDA sources compile for


@dataclass(frozen=True)
class Support:
    """The answer of `supports`; true in a condition if the call is served.

    served   whether the call is taken
    backend  the backend that would run it
    kernels  what it would run, as "sparse_attention.sparse_mla_decode (hopper)"; empty where nothing is to do
    reason   why it is not served: the message of the error that the call would raise; None if it is
    """

    served: bool
    backend: str
    kernels: tuple[str, ...] = ()
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.served

    def __str__(self) -> str:
        if not self.served:
            return f"not served: {self.reason}"
        return f"{self.backend}: {', '.join(self.kernels) or 'nothing to do'}"


def supports(
    op: str | Callable[..., Any], *, backend: str | None = None, device: int | None = None, **arguments: Any
) -> Support:
    """Whether a call of a public operation is served here, by which kernel, and why not. Nothing is run or allocated.

    op         an operation of cumla, or its name
    backend    the backend to ask; None: the default for where the arrays are
    device     number of the CUDA device that the arrays are on, -1: host memory; None: where the backend wants them,
               and without a backend the first CUDA device if there is one that CuPy can use
    arguments  the call's other arguments by name. For an array: (shape, dtype) or anything with `shape` and `dtype`,
               such as an array of any framework or jax.ShapeDtypeStruct; a dtype may be a name as "bfloat16"

    Returns a Support. Shapes and dtypes decide; values are not looked at, and arrays are taken to be contiguous and
    aligned. Raises TypeError for an operation that there is not, and for arguments that it does not have.

        >>> import cumla
        >>> q, cache, indices = ((2, 1, 64, 512), "bfloat16"), ((16, 64, 584), "uint8"), ((2, 1, 128), "int32")
        >>> print(cumla.supports("sparse_mla_decode", q=q, k_cache=cache, indices=indices, device=-1))
        cpu: sparse_attention.sparse_mla_decode
    """
    function = op if callable(op) else _named(op)
    bound = inspect.signature(function).bind_partial(**arguments)
    missing = [
        name for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in bound.arguments
    ]  # fmt: skip
    if missing:
        raise TypeError(f"{', '.join(missing)}: got nothing, which {function.__name__} needs")
    if backend is not None and (not isinstance(backend, str) or backend not in backends.BACKENDS):
        raise ValueError(f"backend: got {shown(backend)}, expected one of {', '.join(backends.BACKENDS)}")
    if device is None:
        on_device = backends.takes_device_arrays(backend) if backend else backends.unavailable("cuda") is None
    else:
        on_device = device >= 0
    name = backend or backends.default(on_device)
    where = max(device or 0, 0) if on_device else -1
    reason = unserved(name, on_device, where)
    if reason is not None:
        return Support(False, name, reason=reason)
    try:
        with rehearsed(where) as rehearsal:
            function(**{key: _without_memory(value) for key, value in arguments.items()}, backend=name)
        asked = [f"{x.file}.{x.function}{_variant(name, x.function, x.arguments, where)}" for x in rehearsal.asked]
    except (TypeError, ValueError) as error:
        return Support(False, name, reason=str(error))
    return Support(True, name, tuple(dict.fromkeys(asked)))


def unserved(backend: str, on_device: bool, device: int) -> str | None:
    """Why a backend serves no call at all for arrays in that place, or None."""
    try:
        backends.choose(backend, on_device)
    except ValueError as error:
        return str(error)
    if not on_device:
        return None
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if device >= count:
        return f"device: got {device}, expected one of the {count} CUDA devices"
    capability = int(cupy.cuda.Device(device).compute_capability)
    if backend == "cuda" and capability < OLDEST_DEVICE:
        return f"device: got compute capability {capability / 10}, expected {OLDEST_DEVICE / 10} or newer"
    return None


def _named(op: Any) -> Callable[..., Any]:
    for file in FILES if isinstance(op, str) and not op.startswith("_") else ():
        function: Any = getattr(importlib.import_module(f".{file}", __package__), op, None)
        if hasattr(function, "__wrapped__"):
            return cast(Callable[..., Any], function)
    raise TypeError(f"op: got {shown(op)}, expected an operation of cumla or its name")


def _without_memory(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (tuple, list)):
        return ghost(tuple(value[0]), _dtype(value[1]))
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        return ghost(tuple(value.shape), _dtype(value.dtype))
    if isinstance(value, (tuple, list)):
        return type(value)(_without_memory(item) for item in value)
    return value


def _dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype of any framework as an array of it is borrowed: 8-bit floats as bytes."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) and not hasattr(ml_dtypes, name) and not str(dtype).startswith("torch."):
        return np.dtype(dtype)
    known = np.dtype(getattr(ml_dtypes, name, name))
    return np.dtype(np.uint8) if name.startswith("float8") else known


def _variant(backend: str, function: str, arguments: tuple[Any, ...], device: int) -> str:
    if backend != "cuda":
        return ""
    from ..kernels.cuda import choice

    return f" ({choice.chosen(function, arguments, device)})"
