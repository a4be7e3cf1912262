"""The description of a device, from which launchers choose kernels; a device's name is not used.

`described` gives launchers the description of a device that need not be here: then nothing asks CuPy or the driver, and
nothing is launched. `assumed` replaces the limits alone, so that tests and benchmarks run the kernels chosen for them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from ...arrays import streams

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


class Device(NamedTuple):
    """All that launchers know of a device.

    Attributes:
        limits: its capability and shared memory
        sms: SMs
        has_clusters: whether the CTAs of a cluster can write to each other's shared memory
        clusters: (size, number that run at a time) of clusters whose CTAs take the shared memory of an SM each; None:
            the driver of the device is asked
    """

    limits: Limits
    sms: int
    has_clusters: bool
    clusters: tuple[tuple[int, int], ...] | None


_described: contextvars.ContextVar[Device | None] = contextvars.ContextVar("described device", default=None)


@contextlib.contextmanager
def described(device: Device) -> Iterator[Device]:
    """A context in which launchers choose kernels for `device`, and describe their launches: nothing is launched.

    Arrays are `DescribedArray`s of kernels/types. `recorded_launches` yields the launches.

    Raises ValueError if the description has no clusters where kernels need them.
    """
    if device.has_clusters and device.clusters is None:
        raise ValueError("clusters: got None, expected the number of clusters that run at a time for each size")
    token = _described.set(device)
    try:
        yield device
    finally:
        _described.reset(token)


def is_described() -> bool:
    """Whether launches are only described."""
    return _described.get() is not None


def device_of(number: int) -> Device:
    """The description of CUDA device `number`."""
    return _described.get() or _of_driver(number)


@functools.cache
def _of_driver(number: int) -> Device:
    return Device(_limits(number), _sms(number), _has_clusters(number), None)


def capture_id() -> int:
    """The id of the CUDA graph that is being captured on CuPy's current stream; 0 if none is."""
    return 0 if is_described() else streams.capture_id()


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


def cached_by_capability(function: Callable[..., T], maxsize: int | None = None) -> Callable[..., T]:
    """Like functools.lru_cache, for each assumed capability and described device; objects that replace unlaunched
    kernels are not cached."""
    cached = functools.lru_cache(maxsize)(lambda device, *args, **keywords: function(*args, **keywords))

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> T:
        if asked.get() is not None:
            return function(*args, **keywords)
        return cached((_assumed.get(), _described.get()), *args, **keywords)

    call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return call


def limits(device: int) -> Limits:
    """The limits of a device."""
    return _assumed.get() or (_described.get() or _of_driver(device)).limits


def _limits(device: int) -> Limits:
    import cupy

    found = cupy.cuda.Device(device)
    shared = (int(found.attributes[f"MaxSharedMemoryPer{x}"]) for x in ("BlockOptin", "Multiprocessor"))
    return Limits(int(found.compute_capability), *shared)


def device_sms(device: int) -> int:
    """SMs of a device."""
    return (_described.get() or _of_driver(device)).sms


def _sms(device: int) -> int:
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
    return device_of(device).has_clusters if found is None else found.capability >= HOPPER


def _has_clusters(device: int) -> bool:
    import cupy

    return bool(cupy.cuda.runtime.deviceGetAttribute(CLUSTER_LAUNCH, device))
