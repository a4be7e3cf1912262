"""What a device is: the numbers that launchers choose by."""

from __future__ import annotations

import functools


@functools.cache
def device_sms(device: int) -> int:
    """Multiprocessors of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@functools.cache
def capability(device: int) -> int:
    """Its compute capability: 90 is Hopper's."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


def is_hopper(device: int) -> bool:
    """Whether kernels of csrc/sm90 run on it: their instructions are of that architecture alone."""
    return capability(device) == 90
