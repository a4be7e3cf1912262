// Weighted sums over heads, and maxima of logits (sm90/indexer/logits.cu).
#pragma once
#include "sm90/indexer/work.cuh"

// Whether the query sees a row of a stage.
__device__ inline bool is_seen(int stage, int row) { return !CANDIDATES || row % 8 < int(lds32(SEEN_AT + 4 * stage) >> row / 8 * 4 & 15); }

// Store the largest of the 8 logits of the lanes with the same c, as far as they are before `end`, to the maxima of a
// row.
__device__ inline void store_maximum(const Problem& problem, int64 row, int key, int end, float score, bool stores) {
#if MAXIMA
    float best = key < end ? score : -infinity();
#pragma unroll
    for (int by = 4; by < 32; by *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, by));  // ignores NaN
    if (threadIdx.x % 32 < 4 && stores && key < end) {
        best = best > -infinity() ? fminf(best, __uint_as_float(0x7f7fffff)) : __uint_as_float(0x7fc00000);
        problem.maxima[row * problem.maxima_stride + key / 8] = key / 8 == (end - 1) / 8 ? infinity() : best;
    }
#endif
}

// Store NaN for blocks beyond the end of rows.
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

// Twice the weighted sums over the HEADS / 4 heads of a thread, for its keys g and g + 8 and the query whose products
// begin at x[first].
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

// Sum over the four lanes of value c.
__device__ inline float sum_of_four(const float (&x)[4], int c) {
    bool odd = c & 1, upper = c & 2;
    float low = (odd ? x[1] : x[0]) + __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    float high = (odd ? x[3] : x[2]) + __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
}
