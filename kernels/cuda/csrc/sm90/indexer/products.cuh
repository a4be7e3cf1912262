// Products of keys and heads of queries, and their weighted sums (sm90/indexer/logits.cu).
#pragma once
#include "sm90/indexer/work.cuh"

#define FLOATS48(x) \
    FLOATS32(x), FLOATS16((x + 32))
#define REGISTERS48 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47} "

// x (64 keys x HEADS * PASS heads) = k q^T: 32 values along both.
__device__ inline void multiply(float (&x)[16], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 " REGISTERS16 ", %16, %17, p, 1, 1;\n}\n"
                 : FLOATS16(x) : "l"(k), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[48], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 " REGISTERS48 ", %48, %49, p, 1, 1;\n}\n"
                 : FLOATS48(x) : "l"(k), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[32], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGISTERS32 ", %32, %33, p, 1, 1;\n}\n"
                 : FLOATS32(x) : "l"(k), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[64], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " REGISTERS64 ", %64, %65, p, 1, 1;\n}\n"
                 : FLOATS64(x) : "l"(k), "l"(q), "r"(add));
}

// The same with e5m2 keys in registers.
__device__ inline void multiply(float (&x)[16], const uint32 (&a)[4], uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e4m3 " REGISTERS16 ", {%16, %17, %18, %19}, %20, p, 1, 1;\n}\n"
                 : FLOATS16(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[32], const uint32 (&a)[4], uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3 " REGISTERS32 ", {%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
                 : FLOATS32(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[48], const uint32 (&a)[4], uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k32.f32.e5m2.e4m3 " REGISTERS48 ", {%48, %49, %50, %51}, %52, p, 1, 1;\n}\n"
                 : FLOATS48(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[64], const uint32 (&a)[4], uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 " REGISTERS64 ", {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
                 : FLOATS64(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(q), "r"(add));
}

// Whether the query sees a row of a stage.
__device__ inline bool is_seen(int stage, int row) {
    return !CANDIDATES || row % 8 < int(lds32(SEEN_AT + 4 * stage) >> row / 8 * 4 & 15);
}

// The largest of 8 logits that the lanes with one c have, those before `end`, to the maxima of a row.
__device__ inline void store_maximum(const Problem& problem, int64 row, int key, int end, float score, bool stores) {
#if MAXIMA
    float best = key < end ? score : -infinity();
#pragma unroll
    for (int by = 4; by < 32; by *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, by));  // which leaves NaN out
    if (threadIdx.x % 32 < 4 && stores && key < end) {
        best = best > -infinity() ? fminf(best, __uint_as_float(0x7f7fffff)) : __uint_as_float(0x7fc00000);
        problem.maxima[row * problem.maxima_stride + key / 8] = key / 8 == (end - 1) / 8 ? infinity() : best;
    }
#endif
}

// NaN for blocks that rows do not have.
__device__ inline void clear_other_maxima(const Problem& problem) {
#if MAXIMA
    for (int64 row = blockIdx.x; row < int64(problem.table.rows) * problem.queries; row += gridDim.x) {
        int entry = row / problem.queries, first, end;
        problem.range_of(entry, row - int64(entry) * problem.queries, first, end);
        for (int i = (end + 7) / 8 + threadIdx.x; i < problem.blocks; i += THREADS)
            problem.maxima[row * problem.maxima_stride + i] = __uint_as_float(0x7fc00000);
    }
#endif
}

// Twice the weighted sums over a thread's HEADS / 4 heads for its keys g and g + 8, for the query whose products begin at x[first].
__device__ inline void sum_heads(const float (&x)[COLUMNS], int first, const float (&weights)[HEADS / 4], float& low, float& high) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = twice_relu(x[first + i]) * weights[i % 2];
#pragma unroll
    for (int n = 1; n < HEADS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(twice_relu(x[first + 4 * n + i]), weights[2 * n + i % 2], sums[i]);
    low = sums[0] + sums[1], high = sums[2] + sums[3];
}

// Sum c of four sums, added up over four lanes.
__device__ inline float sum_of_four(const float (&x)[4], int c) {
    bool odd = c & 1, upper = c & 2;
    float low = (odd ? x[1] : x[0]) + __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    float high = (odd ? x[3] : x[2]) + __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
}
