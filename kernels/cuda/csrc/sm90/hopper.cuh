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

// With -DEVERY_LANE_ARRIVES every lane arrives for a warp instead of one, for racecheck, which attributes an arrival only to the lane
// that makes it.
#ifdef EVERY_LANE_ARRIVES
[[maybe_unused]] constexpr int WARP_ARRIVALS = 32;
#else
[[maybe_unused]] constexpr int WARP_ARRIVALS = 1;
#endif

__device__ inline void barrier_init(uint32 address, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(own(address)), "r"(arrivals) : "memory");
}

// An mbarrier. Copies that signal it have arrived when they have landed.
struct Barrier {
    uint32 address;

    // The same barrier where shared addresses begin at `window`.
    __device__ Barrier in(uint32 window) const { return {window + address}; }

    __device__ void init(int arrivals) const { barrier_init(address, arrivals); }
    __device__ void arrive(int count = 1) const {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(own(address)), "r"(count) : "memory");
    }
    // Arrive for one thread, and expect `bytes` of asynchronous copies.
    __device__ void arrive_expecting(uint32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(own(address)), "r"(bytes) : "memory");
    }
    // Arrive when all cp.async copies that this thread has started have landed.
    __device__ void arrive_after_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(own(address)) : "memory");
    }
    // Arrive for a warp, after all its lanes: WARP_ARRIVALS.
    __device__ void arrive_warp() const {
#ifdef EVERY_LANE_ARRIVES
        arrive();
#else
        __syncwarp();
        asm volatile(
            "{\n"
            ".reg .pred one;\n"
            "elect.sync _|one, 0xffffffff;\n"
            "@one mbarrier.arrive.shared.b64 _, [%0];\n"
            "}\n" ::"r"(own(address)) : "memory");
#endif
    }
    // The same, and expect `bytes` of asynchronous copies. All lanes have the same arguments.
    __device__ void arrive_warp_expecting(uint32 bytes) const {
#ifdef EVERY_LANE_ARRIVES
        if (threadIdx.x % 32) return arrive();
        arrive_expecting(bytes);
#else
        __syncwarp();
        asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n}"
                     ::"r"(own(address)), "r"(bytes) : "memory");
#endif
    }
    // Wait until the phase of this parity has completed; on a fresh barrier, the preceding phase (parity 1) has.
    // With -DWATCHDOG a wait of more than 2^31 clocks prints its barrier and traps, to find deadlocks.
    __device__ void wait(uint32 parity) const {
#ifdef WATCHDOG
        for (int64 start = clock64();;) {
            uint32 done;
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done) : "r"(own(address)), "r"(parity) : "memory");
            if (done) return;
            if (clock64() - start > (int64(1) << 31)) {
                printf("block %d thread %d waits at %u for parity %u\n", blockIdx.x, threadIdx.x, address, parity);
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
            "}\n" ::"r"(own(address)), "r"(parity) : "memory");
#endif
    }
    // Like wait; also makes stores of the cluster's other CTAs visible.
    __device__ void wait_for_cluster(uint32 parity) const {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}\n" ::"r"(own(address)), "r"(parity) : "memory");
    }
};

// Make initialised barriers visible to copies and to the cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Neighbouring barriers: COUNT, or COUNT rows of COLUMNS. An index is an int or a uint32.
template <class Index> struct BarrierRow {
    uint32 address;
    Index first;
    template <class I> __device__ constexpr Barrier operator[](I i) const { return {address + 8 * (first + i)}; }
};
template <int COUNT, int COLUMNS = 0> struct Barriers {
    uint32 address;
    template <class Index> __device__ constexpr auto operator[](Index i) const {
        if constexpr (COLUMNS > 0) return BarrierRow<Index>{address, COLUMNS * i};
        else return Barrier{address + 8 * i};
    }
    __device__ void init(int i, int arrivals) const { barrier_init(address + 8 * i, arrivals); }
    __device__ void init(int arrivals) const {
        for (int i = 0; i < COUNT * (COLUMNS > 0 ? COLUMNS : 1); ++i) init(i, arrivals);
    }
    __device__ constexpr uint32 end() const { return address + 8 * COUNT * (COLUMNS > 0 ? COLUMNS : 1); }
};

// A position in a ring of SLOTS slots, and the parity of its current phase.
template <int SLOTS> struct PipelineState {
    uint32 slot = 0, phase = 0;

    __device__ void advance() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
    __device__ void advance(uint32 by) {
        slot += by;
        if (slot >= SLOTS) slot -= SLOTS, phase ^= 1;
    }
};

// Make writes of this thread visible to matrix products and copies that start later (asynchronous proxy).
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers of a warpgroup

template <int REGISTERS> __device__ inline void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> __device__ inline void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
