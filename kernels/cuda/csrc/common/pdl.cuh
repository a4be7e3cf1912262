// Programmatic dependent launch (sm_90 and later): a kernel launched with it starts while the previous kernel of the stream
// still runs, which hides its launch latency.
#pragma once

// Every thread calls this before it accesses memory: waits until the previous kernel has ended and its writes are visible.
// Does nothing in an ordinary launch. The next kernel starts when this one's CTAs have ended, or all have called pdl_release:
// at the start of kernels that move rows, that costs 0.6 us from a few hundred rows on (docs/kernels/launches.md).
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// This CTA lets the next kernel start. That kernel sees this one's writes only after its pdl_wait, wherever this is called.
__device__ inline void pdl_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
