// Scores of 64 heads by eight warps that keep Q in registers, and their softmax: for kernels that include it with HEADS 64.
//
// A warp computes the scores of 32 heads (its *group*) and all keys of a step over a quarter of the dimensions, so shared memory
// is read for no query, and for a key twice. The sums go through shared memory to the warp that weighs them: one has 16 heads and
// half of the keys.
#pragma once
#include "common/f16.cuh"
#include "common/sparse/work.cuh"
#include "sm80/operands.cuh"

constexpr float LAZY = 8.0f;  // P is up to 2^LAZY

constexpr int GROUPS = 2, QUARTERS = 4;
constexpr int TILES = KEYS / 16;  // of 16 heads and 8 keys that a warp weighs
constexpr int P_STRIDE = row_stride(KEYS);

using PartialScores = float4[GROUPS][QUARTERS][QUARTERS][TILES][32];  // for the warp of a group and quarter, from all quarters

__device__ inline float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ inline float quad_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
// Barrier of the 128 threads of a group.
__device__ inline void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// The softmax of a warp's scores. Between steps it keeps little in registers, which the sums need: Shared has partial, p, kept,
// highest, total, top, factor and ring.bias.
template <class Shared> struct QuarterSoftmax {
    // Scores of a step in base 2, and their maxima by row (this lane's part).
    struct StepScores {
        float x[TILES][4];
        float most[2];
    };

    const SparseProblem& problem;
    Shared& shared;
    int lane, g, c, group, quarter;
    int row, half;  // of the scores that it weighs: first head (rows row + g and row + 8 + g), half of the keys
    float top[2];   // of its rows: the subtracted maximum
    bool above;     // whether a score of the step is so far above `top` that its weight may leave the range

    __device__ QuarterSoftmax(const SparseProblem& p, Shared& s) : problem(p), shared(s) {
        int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, group = warp / QUARTERS, quarter = warp % QUARTERS;
        row = 32 * group + 16 * (quarter / 2), half = quarter % 2;
    }

    // Before a tile's first step of keys.
    __device__ void begin(int number) {
        top[0] = top[1] = -infinity();
        kept(number - 1) = make_float4(0.0f, 0.0f, -infinity(), -infinity());
    }

    // Sums of P and maxima of both rows after a step (this lane's part).
    __device__ float4& kept(int number) { return shared.kept[number & 1][threadIdx.x]; }

    // Sums of 16 heads (of the group's m-th) and the n-th 8 keys over this warp's quarter.
    __device__ void give(int m, int n, const float (&y)[4]) {
        shared.partial[group][2 * m + n / TILES][quarter][n % TILES][lane] = make_float4(y[0], y[1], y[2], y[3]);
    }

    // All four sums of this warp's scores; absent keys have -infinity. Sets `unsafe` if one is not finite.
    __device__ StepScores gather(int number, int& unsafe) {
        StepScores s;
        float scale = problem.softmax_scale * LOG2_E;
        float check = 0.0f;  // NaN after a value that is not finite
        s.most[0] = s.most[1] = -infinity();
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            float4 y = shared.partial[group][quarter][0][t][lane];
            float sum[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 1; i < QUARTERS; ++i) {
                y = shared.partial[group][quarter][i][t][lane];
                sum[0] += y.x, sum[1] += y.y, sum[2] += y.z, sum[3] += y.w;
            }
            float2 bias = *reinterpret_cast<const float2*>(&shared.ring.bias[number % STAGES][8 * (half * TILES + t) + 2 * c]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float score = sum[i] * scale;
                check = fmaf(score, 0.0f, check);
                s.x[t][i] = score + (i % 2 ? bias.y : bias.x);
                s.most[i / 2] = fmaxf(s.most[i / 2], s.x[t][i]);
            }
        }
        if (check != 0.0f) unsafe = 1;
        return s;
    }

    // Value subtracted from a row's scores: any finite value while all are -infinity.
    static __device__ float base_of(float top) { return top == -infinity() ? 0.0f : top; }

    // Weights of a step to shared memory.
    __device__ void attend(int number, int& unsafe) {
        StepScores s = gather(number, unsafe);
        float sums[2];
        above = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float base = base_of(top[r]);
            uint8* to = shared.p[number % 2][row + 8 * r + g] + 2 * (8 * half * TILES + 2 * c);
            sums[r] = 0.0f;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                float low = exp2_approx(s.x[t][2 * r] - base), high = exp2_approx(s.x[t][2 * r + 1] - base);
                sums[r] += low + high;
                *reinterpret_cast<uint32*>(to + 16 * t) = pack(f16{}, low, high);
            }
            above |= s.most[r] > top[r] + LAZY;
        }
        float4 before = kept(number - 1);
        kept(number) = make_float4(before.x + sums[0], before.y + sums[1], fmaxf(before.z, s.most[0]), fmaxf(before.w, s.most[1]));
    }

    __device__ bool must_raise() const { return above; }

    __device__ void write_rows(float (&to)[2][HEADS], int r, float value) {
        if (c == 0) to[half][row + 8 * r + g] = value;
    }

    // The rows' maxima, to both warps of a row.
    __device__ void write_step_tops(int number) {
        int unsafe;  // attend has set it
        StepScores s = gather(number, unsafe);
#pragma unroll
        for (int r = 0; r < 2; ++r) write_rows(shared.highest, r, quad_max(s.most[r]));
    }

    // With these maxima: raise `top`, recompute P, and publish the factor of the sums.
    __device__ void raise(int number, int& unsafe) {
        float4& before = kept(number - 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int at = row + 8 * r + g;
            float most = fmaxf(top[r], fmaxf(shared.highest[0][at], shared.highest[1][at]));
            float factor = exp2_approx(top[r] - base_of(most));
            top[r] = most;
            (r ? before.y : before.x) *= factor;
            if (half == 0 && c == 0) shared.factor[at] = factor;
        }
        attend(number, unsafe);
    }

    // After a tile's last step.
    __device__ void end(int last) {
        float4 all = kept(last);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            write_rows(shared.total, r, quad_sum(r ? all.y : all.x));
            write_rows(shared.highest, r, quad_max(r ? all.w : all.z));
            if (half == 0 && c == 0) shared.top[row + 8 * r + g] = top[r];
        }
    }
};
