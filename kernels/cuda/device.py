"""Properties of a device, from which launchers choose kernels; a device's name is not used.

`assumed` replaces them with another device's, so that tests and benchmarks run the kernels chosen for that device.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
CLUSTER_LAUNCH = 120  # cudaDevAttrClusterLaunch
HOPPER = 90


class Limits(NamedTuple):
    """Properties of a device.

    Attributes:
        capability: compute capability, 90 for 9.0
        shared_bytes: shared memory that a CTA can have
        sm_shared_bytes: shared memory of an SM
    """

    capability: int
    shared_bytes: int
    sm_shared_bytes: int


# CUDA C++ Programming Guide, technical specifications per compute capability.
LIMITS = {
    capability: Limits(capability, of_block << 10, of_sm << 10)
    for capabilities, of_block, of_sm in (
        ((80, 87), 163, 164), ((86, 89, 120, 121), 99, 100), ((90, 100, 103, 110), 227, 228),
    )
    for capability in capabilities
}  # fmt: skip

_assumed: contextvars.ContextVar[Limits | None] = contextvars.ContextVar("assumed limits", default=None)


@contextlib.contextmanager
def assumed(capability: int) -> Iterator[Limits]:
    """For tests and benchmarks: a context in which every device has this capability, one of LIMITS.

    Launchers choose kernels and sizes for that device and its shared memory. Kernels are compiled for the device that
    runs them, but convert e4m3 as the assumed device does (ASSUMED_ARCH). Calls in the launch cache keep their
    kernels: use the context within `recorded_launches`.

    Raises ValueError for a capability that LIMITS lacks.
    """
    if capability not in LIMITS:
        known = ", ".join(str(x / 10) for x in sorted(LIMITS))
        raise ValueError(f"capability: got {capability / 10}, expected one of {known}")
    token = _assumed.set(LIMITS[capability])
    try:
        yield LIMITS[capability]
    finally:
        _assumed.reset(token)


def assumed_capability() -> int | None:
    """The capability within `assumed`, else None."""
    found = _assumed.get()
    return None if found is None else found.capability


# Within `programs_asked_for` of compile.py: the programs that calls need, which they do not launch.
asked: contextvars.ContextVar[set[Any] | None] = contextvars.ContextVar("asked", default=None)


def cached_by_capability(function: Callable[..., T]) -> Callable[..., T]:
    """Like functools.cache, for each assumed capability; objects that replace unlaunched kernels are not cached."""
    cached = functools.cache(lambda limits, *args, **keywords: function(*args, **keywords))

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> T:
        if asked.get() is not None:
            return function(*args, **keywords)
        return cached(_assumed.get(), *args, **keywords)

    call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return call


def limits(device: int) -> Limits:
    """The limits of a device."""
    return _assumed.get() or _limits(device)


@functools.cache
def _limits(device: int) -> Limits:
    import cupy

    found = cupy.cuda.Device(device)
    shared = (int(found.attributes[f"MaxSharedMemoryPer{x}"]) for x in ("BlockOptin", "Multiprocessor"))
    return Limits(int(found.compute_capability), *shared)


@functools.cache
def device_sms(device: int) -> int:
    """SMs of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def capability(device: int) -> int:
    """Compute capability of a device; 90 is Hopper."""
    return limits(device).capability


def shared_bytes_per_block(device: int) -> int:
    """Shared memory that a CTA may have."""
    return limits(device).shared_bytes


def is_hopper(device: int) -> bool:
    """Whether the device runs kernels of csrc/sm90: their instructions are specific to that architecture."""
    return capability(device) == HOPPER


def has_clusters(device: int) -> bool:
    """Whether the CTAs of a cluster can write to each other's shared memory on the device."""
    found = _assumed.get()
    return _has_clusters(device) if found is None else found.capability >= HOPPER


@functools.cache
def _has_clusters(device: int) -> bool:
    import cupy

    return bool(cupy.cuda.runtime.deviceGetAttribute(CLUSTER_LAUNCH, device))
