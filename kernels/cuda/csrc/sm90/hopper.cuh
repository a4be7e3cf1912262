// Instructions of Hopper (sm_90a): mbarriers, asynchronous copies, warpgroup matrix products (wgmma).
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

// ---- matrix products of a warpgroup

template <int REGISTERS> __device__ inline void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> __device__ inline void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Keeps the compiler from moving accesses of these registers across this point.
template <int N> __device__ inline void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Descriptor of a swizzled tile whose rows run along the reduced dimension; + 2 advances by 16 values.
__device__ inline uint64 tile_descriptor(uint32 address) {
    return (uint64(0x40000040) << 32) | (1u << 16) | (address >> 4);
}

// Descriptor of tiles that are read transposed: rows are the reduced dimension; 64 values of the result are a tile's width,
// and the next 64 are in the next tile. + 128 advances by 16 rows.
__device__ inline uint64 transposed_descriptor(uint32 address) {
    return (uint64(0x40000040) << 32) | (uint32(TILE_BYTES >> 4) << 16) | (address >> 4);
}

#define FLOATS32(x) \
    "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]), \
    "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]), \
    "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]), \
    "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31])
#define FLOATS64(x) \
    "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]), \
    "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]), \
    "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]), \
    "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]), \
    "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]), \
    "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]), \
    "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]), \
    "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63])
#define REGISTERS32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31} "
#define REGISTERS64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, " \
    "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63} "

// x (64 x 64) = a b^T (+ x): both operands are tiles in shared memory, 16 values along their rows.
__device__ inline void wgmma_f16(float (&x)[32], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " REGISTERS32 ", %32, %33, p, 1, 1, 0, 0;\n}\n"
                 : FLOATS32(x) : "l"(a), "l"(b), "r"(add));
}
__device__ inline void wgmma_bf16(float (&x)[32], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGISTERS32 ", %32, %33, p, 1, 1, 0, 0;\n}\n"
                 : FLOATS32(x) : "l"(a), "l"(b), "r"(add));
}
// The same with the first operand as a fragment in registers.
__device__ inline void wgmma_f16(float (&x)[32], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " REGISTERS32 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
                 : FLOATS32(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ inline void wgmma_bf16(float (&x)[32], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGISTERS32 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
                 : FLOATS32(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
