// Warpgroup matrix products (wgmma).
//
// A product has 64 rows and 8 to 128 columns. Operands are tiles in shared memory, given by their descriptors, or a fragment in
// registers. The sums of a thread are x: lane 4 g + c of warp w has rows 16 w + g + 8 r, column 8 j + 2 c + e in
// element 4 j + 2 r + e.
#pragma once
#include "sm90/hopper.cuh"

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

// Operands of the statements: x comes first, in %0 and the following.
#define SUMS_8(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SUMS_16(x, i) SUMS_8(x, i), SUMS_8(x, i + 4)
#define SUMS_32(x, i) SUMS_16(x, i), SUMS_16(x, i + 8)
#define SUMS_64(x, i) SUMS_32(x, i), SUMS_32(x, i + 16)
#define SUMS_96(x, i) SUMS_64(x, i), SUMS_32(x, i + 32)
#define SUMS_128(x, i) SUMS_64(x, i), SUMS_64(x, i + 32)
#define REGISTERS_8 "%0, %1, %2, %3"
#define REGISTERS_16 REGISTERS_8 ", %4, %5, %6, %7"
#define REGISTERS_32 REGISTERS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_64 REGISTERS_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_96 REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_128 REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// x = a b (+ x, if `add`) with a in shared memory, or in registers. o1 to o6: the operands after x. The last arguments are PTX's:
// factors of a and b, and for values of 16 bits whether each is transposed.
#define WGMMA_OF_TILES(name, a_type, b_type, columns, depth, o1, o2, o3, ...) \
    __device__ inline void name(a_type, float (&x)[columns / 2], uint64 a, uint64 b, int add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o3 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k" #depth ".f32." #a_type "." #b_type \
                     " {" REGISTERS_##columns "}, %" #o1 ", %" #o2 ", p, " #__VA_ARGS__ ";\n}\n" \
                     : SUMS_##columns(x, 0) : "l"(a), "l"(b), "r"(add)); \
    }
#define WGMMA_OF_REGISTERS(name, a_type, b_type, columns, depth, o1, o2, o3, o4, o5, o6, ...) \
    __device__ inline void name(a_type, float (&x)[columns / 2], const uint32 (&a)[4], uint64 b, int add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o6 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k" #depth ".f32." #a_type "." #b_type \
                     " {" REGISTERS_##columns "}, {%" #o1 ", %" #o2 ", %" #o3 ", %" #o4 "}, %" #o5 ", p, " #__VA_ARGS__ ";\n}\n" \
                     : SUMS_##columns(x, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }
// wgmma_rows: b is a tile of `columns` rows, 32 bytes of each (K-major). wgmma_columns: b is 16 rows of tiles of 64 columns
// (MN-major). A tile of a is 64 rows, 32 bytes of each. b of e5m2 values is e4m3.
#define WGMMA_OF_TYPE(type, columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TILES(wgmma_rows, type, type, columns, 16, o1, o2, o3, 1, 1, 0, 0) \
    WGMMA_OF_TILES(wgmma_columns, type, type, columns, 16, o1, o2, o3, 1, 1, 0, 1) \
    WGMMA_OF_REGISTERS(wgmma_rows, type, type, columns, 16, o1, o2, o3, o4, o5, o6, 1, 1, 0) \
    WGMMA_OF_REGISTERS(wgmma_columns, type, type, columns, 16, o1, o2, o3, o4, o5, o6, 1, 1, 1)
#define WGMMA(columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TYPE(bf16, columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TYPE(f16, columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TILES(wgmma_rows, e4m3, e4m3, columns, 32, o1, o2, o3, 1, 1) \
    WGMMA_OF_REGISTERS(wgmma_rows, e4m3, e4m3, columns, 32, o1, o2, o3, o4, o5, o6, 1, 1) \
    WGMMA_OF_REGISTERS(wgmma_rows, e5m2, e4m3, columns, 32, o1, o2, o3, o4, o5, o6, 1, 1)

struct e4m3 {};
struct e5m2 {};
WGMMA(8, 4, 5, 6, 7, 8, 9)
WGMMA(16, 8, 9, 10, 11, 12, 13)
WGMMA(32, 16, 17, 18, 19, 20, 21)
WGMMA(64, 32, 33, 34, 35, 36, 37)
WGMMA(96, 48, 49, 50, 51, 52, 53)
WGMMA(128, 64, 65, 66, 67, 68, 69)

// ---- threads of a warpgroup

// Synchronise the threads of a warpgroup by named barrier `id`, 1 to 15.
__device__ inline void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
// Whether x holds for any thread of a warpgroup.
__device__ inline bool warpgroup_any(int id, bool x) {
    uint32 y;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(y) : "r"(uint32(x)), "r"(id) : "memory");
    return y;
}

// Transpose words among four lanes: lane c gets word c of each.
__device__ inline void transpose_words(uint32 (&words)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 &a = words[step == 1 ? 2 * i : i], &b = words[step == 1 ? 2 * i + 1 : i + 2];
            uint32 got = __shfl_xor_sync(~0u, upper ? a : b, step);
            a = upper ? got : a, b = upper ? b : got;
        }
    }
}
