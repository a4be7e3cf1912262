// CTAs of a cluster: cluster barrier, addresses in another CTA's shared memory, and asynchronous stores that count at a barrier
// there.
#pragma once
#include "sm90/hopper.cuh"

// All threads of a cluster arrive; threads that depend on the others' writes wait until all have arrived.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in the cluster of `address` in the shared memory of CTA `rank`.
__device__ inline uint32 cluster_address(uint32 address, int rank) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ inline Barrier cluster_barrier(Barrier barrier, int rank) { return {cluster_address(barrier.address, rank)}; }

// Store to another CTA, whose barrier counts the bytes that have arrived. Both are addresses in the cluster.
__device__ inline void store_async(uint32 to, uint2 x, Barrier barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
                 ::"r"(to), "r"(x.x), "r"(x.y), "r"(barrier.address) : "memory");
}
__device__ inline void store_async(uint32 to, uint4 x, Barrier barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier.address) : "memory");
}
