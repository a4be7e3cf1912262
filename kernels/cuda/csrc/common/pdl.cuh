// Programmatic dependent launch (sm_90 and later): a kernel launched with it starts while the one ahead of it in the
// stream still runs, so that what a launch costs is hidden.
#pragma once

// To be called by every thread before it touches memory: waits until the kernel ahead has ended and its writes can be
// seen. Does nothing in an ordinary launch. The next kernel is let in when this one's blocks have ended, or all have called
// pdl_release: at the start of kernels that move rows, that costs 0.6 us from a few hundred rows on (NOTES.md).
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel in, as far as this thread block goes. What it writes is seen only behind pdl_wait, whenever this is called.
__device__ inline void pdl_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
