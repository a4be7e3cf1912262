// Programmatic dependent launch (sm_90 and later): a kernel launched with it starts while the one ahead of it in the
// stream still runs, so that what a launch costs is hidden.
#pragma once

// To be called by every thread before it touches memory: lets the next kernel start as soon as there is room, and
// waits until the one ahead has ended and its writes can be seen. Does nothing in an ordinary launch.
__device__ inline void overlap_with_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
