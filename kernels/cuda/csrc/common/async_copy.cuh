// Asynchronous copies from global to shared memory (cp.async, sm_80 and newer).
#pragma once
#include "common/numbers.cuh"

// The least multiple of 16 that is not less.
constexpr int to_16(int bytes) { return (bytes + 15) / 16 * 16; }

// In a cluster a CTA's own shared memory begins at its rank << 24, which constant addresses do not include. For kernels that
// define IN_CLUSTER.
__device__ inline uint32 own(uint32 address) {
#ifdef IN_CLUSTER
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    address += rank << 24;
#endif
    return address;
}

__device__ inline uint32 shared_address(const void* pointer) { return uint32(__cvta_generic_to_shared(pointer)); }

// 16 bytes to shared memory: the first `size` come from global memory, the others are zeros. Bypasses the L1 cache, which
// has no use for them.
__device__ inline void copy_async_part(uint32 target, const void* source, int size) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(own(target)), "l"(source), "r"(size) : "memory");
}
// BYTES (4, 8 or 16) from global to shared memory; zeros, and no access, where `present` is false.
template <int BYTES> __device__ inline void copy_async(uint32 target, const void* source, bool present) {
    int size = present ? BYTES : 0;
    if (BYTES == 16)
        copy_async_part(target, source, size);
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(own(target)), "l"(source), "n"(BYTES), "r"(size) : "memory");
}
template <int BYTES> __device__ inline void copy_async(void* target, const void* source, bool present) {
    copy_async<BYTES>(shared_address(target), source, present);
}
// Prefetch this byte's line to L2.
__device__ inline void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until all but the last PENDING groups of this thread's copies have arrived.
template <int PENDING> __device__ inline void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
