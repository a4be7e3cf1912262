"""Predicts from shapes and dtypes whether a call is served, by which kernels, or why not."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np

from ..dispatch import backends
from ..dispatch.dry_run import Asked, DryRun, dry_running, fake_array
from ..dispatch.values import shown

Capability = str | int | float | tuple[int, int]  # "8.6", 86, 8.6, "sm_86" or, as torch gives it, (8, 6)
OLDEST_DEVICE = 80  # compute capability that the CUDA sources compile for


@dataclass(frozen=True)
class Support:
    """The answer of `supports`; true in a condition if the call is served.

    Attributes:
        served: whether the call is served
        backend: the backend that would run the call
        kernels: the kernels that it would run, as "sparse_attention.sparse_mla_decode (hopper)"; empty without work
        reason: the message of the error that the call would raise; None if it is served
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
    op: str | Callable[..., Any],
    *,
    backend: str | None = None,
    device: int | None = None,
    capability: Capability | None = None,
    **arguments: Any,
) -> Support:
    """Whether a call of a public operation is served here, by which kernels, or why not. Runs and allocates nothing.

    Args:
        op: an operation of cumla, or its name
        backend: the backend to ask; None: the default for the arrays' device
        device: number of the CUDA device that the arrays are on, -1: host memory; None: where the backend needs arrays,
            and without a backend the first CUDA device if there is one that CuPy can use
        capability: "8.6", 86, "sm_86" or (8, 6): in place of `device`, any CUDA device of this compute capability,
            present or not
        arguments: the call's other arguments by name. For an array: (shape, dtype) or anything with `shape` and
            `dtype`, such as an array of any framework or jax.ShapeDtypeStruct; a dtype may be a name as "bfloat16"

    Returns a Support. Only shapes and dtypes are examined; arrays are assumed to be contiguous and aligned. Raises
    TypeError for an unknown operation and for arguments that it lacks; ValueError for an unknown capability.

        >>> import cumla
        >>> q, cache, indices = ((2, 1, 64, 512), "bfloat16"), ((16, 64, 584), "uint8"), ((2, 1, 128), "int32")
        >>> print(cumla.supports("sparse_mla_decode", q=q, k_cache=cache, indices=indices, device=-1))
        cpu: sparse_attention.sparse_mla_decode
    """
    function = op if callable(op) else _named(op)
    try:
        bound = inspect.signature(function).bind_partial(**arguments)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None
    missing = [
        name for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in bound.arguments
    ]  # fmt: skip
    if missing:
        raise TypeError(f"{', '.join(missing)}: missing, required by {function.__name__}")
    if backend is not None and (not isinstance(backend, str) or backend not in backends.BACKENDS):
        raise ValueError(f"backend: got {shown(backend)}, expected one of {', '.join(backends.BACKENDS)}")
    if capability is not None:
        if backend not in (None, "cuda"):
            raise ValueError(f"backend: got {shown(backend)}, expected 'cuda' for a capability")
        with assumed_capability(capability):
            return _asked(function, arguments, "cuda", None, 0)
    if device is None:
        on_device = backends.takes_device_arrays(backend) if backend else backends.unavailable("cuda") is None
    else:
        on_device = device >= 0
    name = backend or backends.default(on_device)
    where = max(device or 0, 0) if on_device else -1
    reason = unserved(name, on_device, where)
    if reason is not None:
        return Support(False, name, reason=reason)
    return _asked(function, arguments, name, name, where)


def _asked(
    function: Callable[..., Any], arguments: dict[str, Any], name: str, backend: str | None, where: int
) -> Support:
    """The answer by a dry run; `backend` is the call's argument, `name` the backend that takes the call."""
    try:
        with dry_running(where) as dry_run:
            function(**{key: _without_memory(value) for key, value in arguments.items()}, backend=backend)
        return Support(True, name, kernels_asked(dry_run, name, where))
    except (TypeError, ValueError) as error:
        return Support(False, name, reason=str(error))


def kernels_asked(dry_run: DryRun, backend: str, device: int) -> tuple[str, ...]:
    """The kernels that a dry run has asked for, as in `Support`, each once."""
    asked = (f"{x.file}.{x.function}{_variant(backend, x, device)}" for x in dry_run.asked)
    return tuple(dict.fromkeys(asked))


@contextlib.contextmanager
def assumed_capability(capability: Capability) -> Iterator[Any]:
    """A context in which every device has this compute capability, as for `supports`; yields its Limits.

    Raises ValueError for an unknown capability.
    """
    from ..kernels.cuda import device

    known = {shown_capability(number): number for number in sorted(device.LIMITS)}
    text = ".".join(map(str, capability)) if isinstance(capability, tuple) else str(capability)
    asked = text.removeprefix("sm_").rstrip("af")
    found = [known[x] for x in known if asked in (x, x.replace(".", ""), x.removesuffix(".0"))]
    if not found:
        raise ValueError(f"capability: got {shown(capability)}, expected one of {', '.join(known)}")
    with device.assumed(found[0]) as limits:
        yield limits


def shown_capability(number: int) -> str:
    """ "8.6" for 86."""
    return f"{number // 10}.{number % 10}"


def unserved(backend: str, on_device: bool, device: int) -> str | None:
    """Why a backend serves no call for arrays on that device, or None if it does."""
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
    named = isinstance(op, str) and not op.startswith("_")
    for file in pkgutil.iter_modules([os.path.dirname(__file__)]) if named else ():
        function: Any = getattr(importlib.import_module(f".{file.name}", __package__), op, None)
        if hasattr(function, "__wrapped__"):
            return cast(Callable[..., Any], function)
    raise TypeError(f"op: got {shown(op)}, expected an operation of cumla or its name")


def _without_memory(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (tuple, list)):
        return fake_array(tuple(value[0]), _dtype(value[1]))
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        return fake_array(tuple(value.shape), _dtype(value.dtype))
    if isinstance(value, (tuple, list)):
        items = [_without_memory(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype of a name, or of a framework's dtype."""
    if isinstance(dtype, str) or str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
        dtype = getattr(ml_dtypes, name, name)
    return np.dtype(dtype)


def _variant(backend: str, asked: Asked, device: int) -> str:
    """The kernel variant that a launcher selects, in parentheses; launchers without variants are portable."""
    if backend != "cuda":
        return ""
    answers: dict[str, Callable[..., str]] = getattr(backends.kernels(backend, asked.file), "KERNEL_FOR", {})
    kernel_for = answers.get(asked.function)
    return f" ({'portable' if kernel_for is None else kernel_for(*asked.arguments, device)})"
