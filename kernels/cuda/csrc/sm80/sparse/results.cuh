// Results of a tile in sm80/sparse: log-sum-exp, the factor of the sums, and whether float16 was too coarse for them.
#pragma once
#include "common/device.cuh"
#include "common/sparse/work.cuh"
#include "sm80/quad_lanes.cuh"

constexpr float MIN_RESULT = 1.0f / 16384.0f;  // below this, float16's steps of 2^-24 are too coarse

// The result of the softmax of a row. Rows without a head have one, too.
struct RowResult {
    float lse2;     // to base 2; -infinity without keys
    float inv_sum;  // 0 without keys
    bool empty;

    __device__ RowResult(float top, float sum) {
        empty = sum == 0.0f;
        lse2 = empty ? -infinity() : top + log2_approx(sum), inv_sum = empty ? 0.0f : reciprocal_fast(sum);
    }

    // Writes the LSE of a head, and returns the factor of its sums.
    __device__ float write(const SparseProblem& problem, const TileCoord& at, int head) const {
        float lse = lse2 * LN_2, factor = inv_sum;
        if (problem.attn_sink && !empty) factor *= reciprocal_fast(1.0f + exp2_approx((problem.attn_sink[head] - lse) * LOG2_E));
        problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] = empty ? infinity() : lse;
        return factor;
    }
};

// Whether the results of a warp are so small, although some V is not zero (`seen`), that float16 was too coarse. o:
// sums of rows g and g + 8 of each 16; `inv_sums`: their factors.
template <int M, int N> __device__ inline bool too_small(const float (&o)[M][N][4], const float* inv_sums, uint32 seen) {
    int g = threadIdx.x % 32 / 4;
    float largest = 0.0f;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float of_row = 0.0f;
#pragma unroll
            for (int j = 0; j < N; ++j) of_row = fmaxf(of_row, fmaxf(fabsf(o[m][j][2 * r]), fabsf(o[m][j][2 * r + 1])));
            largest = fmaxf(largest, of_row * inv_sums[16 * m + 8 * r + g]);
        }
    return __any_sync(~0u, seen) && !__any_sync(~0u, !(largest < MIN_RESULT));
}

// Multiply rows g and g + 8 of each 16 by their factors.
template <int M, int N> __device__ inline void multiply_rows(float (&o)[M][N][4], const float* factors) {
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        float low = factors[16 * m + g], high = factors[16 * m + 8 + g];
#pragma unroll
        for (int j = 0; j < N; ++j) o[m][j][0] *= low, o[m][j][1] *= low, o[m][j][2] *= high, o[m][j][3] *= high;
    }
}

// Flags a tile for the epilogue kernel, which recomputes it.
__device__ inline void leave_to_exact_kernel(const SparseProblem& problem, int tile) {
    if (problem.unsafe) {
        problem.mark(tile);
        return;
    }
    TileCoord at(problem, tile);
    float* max_logits = problem.max_logits + at.b * problem.max_stride_b;
    for (int head = at.first_head; head < min(problem.heads, at.first_head + HEADS); ++head)
        max_logits[head * problem.max_stride_h] = __uint_as_float(UNSAFE_BITS);
}
