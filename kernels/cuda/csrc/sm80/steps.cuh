// Shared by sm80/dense/decode.cu and sm80/sparse/heads64.cu, in which warps of the sums (they also copy) and warps of
// the scores process keys in steps and synchronise at barriers.
#pragma once
#include "sm80/operands.cuh"
#include "sm80/quad_lanes.cuh"

constexpr int SUM_WARPS = 8, SCORE_WARPS = 4, THREADS = 32 * (SUM_WARPS + SCORE_WARPS);
constexpr int ARRIVED_SLOTS = 4, WEIGHED_SLOTS = 2;

// ---- barriers

// An mbarrier at which the warps of a role arrive. Unlike at a named barrier, a warp may run ahead of the other warps of
// its role while one of them lists a step or expands rows. A step or a round is an int or a uint32.
struct StepBarrier {
    uint64 state;

    __device__ void init(int warps) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(warps) : "memory");
    }
    // By all lanes of a warp.
    __device__ void arrive() {
        __syncwarp();
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        if (thread % 32 == 0)
            asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(&state)) : "memory");
    }
    // Wait until all warps have arrived for the `round`th time, counted from 0.
    template <class Round> __device__ void wait(Round round) {
        asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
                         shared_address(&state)),
                     "r"(round & 1)
                     : "memory");
    }
    // Whether all warps have arrived. The latency is long: ask before other work.
    template <class Round> __device__ bool passed(Round round) const {
        uint32 answer;
        asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                     : "=r"(answer)
                     : "r"(shared_address(&state)), "r"(round & 1)
                     : "memory");
        return answer;
    }
};

// The barriers between sums and scores. `arrived`: the rows of a step have arrived. `weighed`: its weights are written,
// and the scores have read its rows. `summed`: its weights have been read. A slot is reused only after all waiting
// warps have passed it.
struct StepBarriers {
    StepBarrier arrived[ARRIVED_SLOTS], weighed[WEIGHED_SLOTS], summed[WEIGHED_SLOTS];

    // By one thread.
    __device__ void init() {
        for (int i = 0; i < ARRIVED_SLOTS; ++i) arrived[i].init(SUM_WARPS);
        for (int i = 0; i < WEIGHED_SLOTS; ++i) weighed[i].init(SCORE_WARPS), summed[i].init(SUM_WARPS);
    }
    template <class Step> __device__ void arrive_arrived(Step step) { arrived[step % ARRIVED_SLOTS].arrive(); }
    template <class Step> __device__ void arrive_weighed(Step step) { weighed[step % WEIGHED_SLOTS].arrive(); }
    template <class Step> __device__ void arrive_summed(Step step) { summed[step % WEIGHED_SLOTS].arrive(); }
    template <class Step> __device__ void wait_arrived(Step step) { arrived[step % ARRIVED_SLOTS].wait(step / ARRIVED_SLOTS); }
    template <class Step> __device__ void wait_weighed(Step step) { weighed[step % WEIGHED_SLOTS].wait(step / WEIGHED_SLOTS); }
    template <class Step> __device__ void wait_summed(Step step) { summed[step % WEIGHED_SLOTS].wait(step / WEIGHED_SLOTS); }
    template <class Step> __device__ bool has_arrived(Step step) const {
        return arrived[step % ARRIVED_SLOTS].passed(step / ARRIVED_SLOTS);
    }
    template <class Step> __device__ bool is_weighed(Step step) const { return weighed[step % WEIGHED_SLOTS].passed(step / WEIGHED_SLOTS); }
    template <class Step> __device__ bool is_summed(Step step) const { return summed[step % WEIGHED_SLOTS].passed(step / WEIGHED_SLOTS); }
};
constexpr int BARRIER_BYTES = 8 * (ARRIVED_SLOTS + 2 * WEIGHED_SLOTS);

// ---- scores and weights: lane 4 g + c of a warp has rows g and g + 8

constexpr float LAZY = 8.0f;  // P is up to 2^LAZY

// The value that is subtracted from the scores of a row: `top`, or any finite value while all scores are -infinity.
__device__ inline float base_of(float top) { return top == -infinity() ? 0.0f : top; }

// Set `largest` to this lane's part of the maximum of row r.
template <int N> __device__ inline void find_largest(float& largest, const float (&x)[N][4], int r) {
    largest = -infinity();
#pragma unroll
    for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
}

// Raise `top` of a row to the maximum of a step, and rescale the sum of its weights. Returns the factor of earlier sums.
__device__ inline float raise_row(float& top, float& total, float largest) {
    float next = fmaxf(top, quad_max(largest)), factor = exp2_approx(top - base_of(next));
    top = next;
    total *= factor;
    return factor;
}

// Write the weights of row r of a step, as T, to this lane's bytes of P.
template <class T, int N> __device__ inline void store_weights(uint8* to, const float (&x)[N][4], int r, float top, float& total) {
    float base = base_of(top);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float low = exp2_approx(x[n][2 * r] - base), high = exp2_approx(x[n][2 * r + 1] - base);
        total += low + high;
        *reinterpret_cast<uint32*>(to + 16 * n) = pack(T{}, low, high);
    }
}

// ---- sums

// Rescale the sums of heads whose `top` a step has raised: a byte of `raised` for each 16 heads.
template <int M, int N> __device__ inline void rescale_sums(float (&o)[M][N][4], uint32 raised, const float* factors, int g) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        if (!(raised >> 8 * m & 1)) continue;
        float low = factors[16 * m + g], high = factors[16 * m + 8 + g];
#pragma unroll
        for (int j = 0; j < N; ++j) o[m][j][0] *= low, o[m][j][1] *= low, o[m][j][2] *= high, o[m][j][3] *= high;
    }
}
