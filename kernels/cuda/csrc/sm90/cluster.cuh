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

// Store to another CTA, whose barrier counts the bytes that have arrived. Both are addresses in the cluster.
__device__ inline void store_async(uint32 to, uint2 x, uint32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
                 ::"r"(to), "r"(x.x), "r"(x.y), "r"(barrier) : "memory");
}
__device__ inline void store_async(uint32 to, uint4 x, uint32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier) : "memory");
}

// Like barrier_wait; also makes stores of the cluster's other CTAs visible.
__device__ inline void cluster_barrier_wait(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(own(barrier)), "r"(parity) : "memory");
}
