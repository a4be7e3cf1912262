// Instructions of Hopper (sm_90a): shared memory, mbarriers, asynchronous copies, registers of a warpgroup.
//
// Shared memory is addressed by its 32-bit address throughout. Matrix operands in shared memory are tiles of
// 64 rows of 128 bytes, 1024-aligned, whose 16-byte chunks are swizzled: chunk c of row r is at
// r * 128 + ((c ^ (r & 7)) << 4).
#pragma once
#include "common/async_copy.cuh"

constexpr int TILE_BYTES = 64 * 128;

// ---- shared memory

// Address of a member of the kernel's struct SharedMemory. Without static shared memory the dynamic part starts at 1024; kernels
// trap otherwise. NVRTC before 13.4 has no __builtin_offsetof; there, as in libcu++, an operator of its front end replaces it.
#define SHARED_START 1024u
[[maybe_unused]] constexpr int MOST_SHARED_BYTES = 227 * 1024;  // of a CTA
#if __has_builtin(__builtin_offsetof)
#define SHARED_AT(member) (SHARED_START + uint32(__builtin_offsetof(SharedMemory, member)))
#else
#define SHARED_AT(member) (SHARED_START + uint32(__INTADDR__(&((SharedMemory*)0)->member)))
#endif

// x, equal in all lanes, such that the compiler knows that it is uniform.
__device__ inline int uniform(uint32 x) { return int(__reduce_max_sync(~0u, x)); }

__device__ inline uint4 lds128(uint32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(own(address)));
    return x;
}
__device__ inline uint2 lds64(uint32 address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(own(address)));
    return x;
}
__device__ inline uint32 lds32(uint32 address) {
    uint32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(own(address)));
    return x;
}
__device__ inline uint32 lds8(uint32 address) {
    uint32 x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(own(address)));
    return x;
}
__device__ inline float2 lds_float2(uint32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(own(address)));
    return x;
}
__device__ inline float lds_float(uint32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(own(address)));
    return x;
}
__device__ inline void sts128(uint32 address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(own(address)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ inline void sts32(uint32 address, uint32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(own(address)), "r"(x) : "memory"); }
__device__ inline void sts16(uint32 address, uint32 x) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(own(address)), "h"(uint16(x)) : "memory"); }
__device__ inline void sts8(uint32 address, uint32 x) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(own(address)), "r"(x) : "memory"); }
__device__ inline void sts_float(uint32 address, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(own(address)), "f"(x) : "memory"); }
__device__ inline void sts_float2(uint32 address, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(own(address)), "f"(x.x), "f"(x.y) : "memory");
}

// Store four 8x8 matrices of 16-bit values, as an accumulator fragment holds them, to the rows that lanes point to.
__device__ inline void stmatrix4(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(own(address)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// The same, stored transposed: rows pointed to receive columns.
__device__ inline void stmatrix4_transposed(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(own(address)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ---- barriers in shared memory

__device__ inline void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(own(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void barrier_arrive(uint32 barrier, int count = 1) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(own(barrier)), "r"(count) : "memory");
}
// Arrive for one thread, and expect `bytes` of asynchronous copies.
__device__ inline void barrier_arrive_expecting(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(own(barrier)), "r"(bytes) : "memory");
}
// Wait until the phase of this parity has completed; on a fresh barrier, the preceding phase (parity 1) has.
// With -DWATCHDOG a wait of more than 2^31 clocks prints its barrier and traps, to find deadlocks.
__device__ inline void barrier_wait(uint32 barrier, uint32 parity) {
#ifdef WATCHDOG
    for (int64 start = clock64();;) {
        uint32 done;
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(own(barrier)), "r"(parity) : "memory");
        if (done) return;
        if (clock64() - start > (int64(1) << 31)) {
            printf("block %d thread %d waits at %u for parity %u\n", blockIdx.x, threadIdx.x, barrier, parity);
            __trap();
        }
    }
#else
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(own(barrier)), "r"(parity) : "memory");
#endif
}
// Arrive for a warp, after all its lanes: one arrival, or with -DEVERY_LANE_ARRIVES one a lane, for racecheck, which attributes
// an arrival only to the lane that makes it.
#ifdef EVERY_LANE_ARRIVES
[[maybe_unused]] constexpr int WARP_ARRIVALS = 32;
__device__ inline void warp_arrive(uint32 barrier) { barrier_arrive(barrier); }
#else
[[maybe_unused]] constexpr int WARP_ARRIVALS = 1;
__device__ inline void warp_arrive(uint32 barrier) {
    __syncwarp();
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xffffffff;\n"
        "@one mbarrier.arrive.shared.b64 _, [%0];\n"
        "}\n" ::"r"(own(barrier)) : "memory");
}
#endif
// Make writes of this thread visible to matrix products and copies that start later (asynchronous proxy).
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- asynchronous copies

// Arrive when all cp.async copies that this thread has started have landed.
__device__ inline void copies_arrive(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(own(barrier)) : "memory");
}

// ---- registers of a warpgroup

template <int REGISTERS> __device__ inline void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> __device__ inline void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
