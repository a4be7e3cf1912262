// Bulk copies of contiguous bytes between global and shared memory (sm_90 and newer), and loads of matrix fragments from shared
// memory.
#pragma once
#include "sm90/hopper.cuh"

// Start a copy of `bytes` for a warp whose lanes have the same arguments. Size and both addresses are multiples of 16. The
// barrier counts the bytes when they have landed.
__device__ inline void warp_copy_bulk(uint32 target, const void* source, uint32 bytes, Barrier barrier) {
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}"
                 ::"r"(own(target)), "l"(source), "r"(bytes), "r"(own(barrier.address)) : "memory");
}

// Start a copy of `bytes` to global memory, by this thread; all are multiples of 16. What a thread has started so far becomes a
// group. Shared memory may be written again when `bulk_stores_read` has returned.
__device__ inline void bulk_store(void* target, uint32 source, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(own(source)), "r"(bytes) : "memory");
}
__device__ inline void bulk_stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all but PENDING groups of this thread have been read from shared memory.
template <int PENDING> __device__ inline void bulk_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Load four 8x8 matrices of 16-bit values from the rows that lanes point to: 8 lanes a matrix.
__device__ inline void ldmatrix4(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(own(address)) : "memory");
}
__device__ inline void ldmatrix4_transposed(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(own(address)) : "memory");
}
