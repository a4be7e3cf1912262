"""What a device is: the numbers that launchers choose by."""

from __future__ import annotations

import functools

CLUSTER_LAUNCH = 120  # cudaDevAttrClusterLaunch


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


@functools.cache
def has_clusters(device: int) -> bool:
    """Whether thread blocks of a cluster can write into one another's shared memory there."""
    import cupy

    return bool(cupy.cuda.runtime.deviceGetAttribute(CLUSTER_LAUNCH, device))
