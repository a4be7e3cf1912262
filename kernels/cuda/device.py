"""Properties of a device by which launchers choose kernels."""

import functools

CLUSTER_LAUNCH = 120  # cudaDevAttrClusterLaunch


@functools.cache
def device_sms(device: int) -> int:
    """Multiprocessors of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@functools.cache
def capability(device: int) -> int:
    """Compute capability of a device; 90 is Hopper."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


def is_hopper(device: int) -> bool:
    """Whether the device runs kernels of csrc/sm90: their instructions are specific to that architecture."""
    return capability(device) == 90


@functools.cache
def shared_bytes_per_block(device: int) -> int:
    """Shared memory that a CTA may have."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


@functools.cache
def has_clusters(device: int) -> bool:
    """Whether the CTAs of a cluster can write to each other's shared memory on the device."""
    import cupy

    return bool(cupy.cuda.runtime.deviceGetAttribute(CLUSTER_LAUNCH, device))
