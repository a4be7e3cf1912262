// Scores and weights of sm80/dense/decode.cu: S = Q K^T and P = 2^(S - top), a step at a time.
//
// A warp has 16 heads and all keys of a step, so maximum and sum of a row stay in the warp. Its queries stay in
// registers for the whole token, except the operands of the last MEMORY_K products, which are in shared memory in the
// order of lanes.
#pragma once
#include "sm80/dense/rows.cuh"

constexpr int K_STEPS = LATENT_DIM / 16, REGISTER_K = Q_REGISTERS / 4, MEMORY_K = K_STEPS - REGISTER_K;  // products along the dimensions
constexpr int P_STRIDE = row_stride(KEYS);
constexpr int SPLITS = 32 / KEYS;  // chains of products for the same scores: four chains hide a product's latency
static_assert(HEADS / SCORE_WARPS == 16 && MEMORY_K > 0, "unsupported dimensions");

struct DenseShared {
    RowRing ring;
    alignas(16) uint8 p[WEIGHED_SLOTS][HEADS][P_STRIDE];  // VALUE
    uint4 q[SCORE_WARPS][MEMORY_K][32];
    float factor[WEIGHED_SLOTS][HEADS];                   // of the sums before a step, where
    alignas(4) uint8 raised[WEIGHED_SLOTS][SCORE_WARPS];  // this is not 0
    float result_factor[HEADS];                           // at a token's end
};
constexpr int SHARED_BYTES = to_16(RING_BYTES + WEIGHED_SLOTS * HEADS * P_STRIDE + 512 * SCORE_WARPS * MEMORY_K + 4 * (3 * HEADS + 2));
static_assert(sizeof(DenseShared) == SHARED_BYTES);

struct Scores {
    const DecodeProblem& problem;
    DenseShared& shared;
    int warp, lane, g, c;
    uint32 q[REGISTER_K][4];
    float x[KEYS / 8][4];    // scores of a step in base 2
    float top[2], total[2];  // of both rows: subtracted maximum, sum of P (this lane's part)

    __device__ Scores(const DecodeProblem& p, DenseShared& s) : problem(p), shared(s) {
        warp = threadIdx.x / 32 - SUM_WARPS, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    }

    // Step `number`, the token's `part`th, has heads KEYS * part and following.
    __device__ void load_q(int number, int part) {
        int first = 16 * warp - KEYS * part;
        if (first < 0 || first >= KEYS) return;
        const uint8* row = a_row(shared.ring.rows[number % STAGES][0], ROW_STRIDE, first, 0);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            if (k < REGISTER_K) {
                load_matrices(q[k], row + 32 * k);
            } else {
                uint32 a[4];
                load_matrices(a, row + 32 * k);
                shared.q[warp][k - REGISTER_K][lane] = uint4{a[0], a[1], a[2], a[3]};
            }
        }
    }

    // Before a token's first step of keys.
    __device__ void begin() {
        top[0] = top[1] = -infinity();
        total[0] = total[1] = 0.0f;
    }

    __device__ void score(int number) {
        float y[SPLITS][KEYS / 8][4] = {};
        const uint8* rows = b_row(shared.ring.rows[number % STAGES][0], ROW_STRIDE, 0, 0);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            uint32 a[4];
            if (k < REGISTER_K) {
                for (int i = 0; i < 4; ++i) a[i] = q[k][i];
            } else {
                uint4 v = shared.q[warp][k - REGISTER_K][lane];
                a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                uint32 b[4];
                load_matrices(b, rows + 16 * n * ROW_STRIDE + 32 * k);
                multiply_add(VALUE{}, y[k % SPLITS][2 * n], a, b[0], b[1]);
                multiply_add(VALUE{}, y[k % SPLITS][2 * n + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = (SPLITS == 1 ? y[0][n][i] : y[0][n][i] + y[SPLITS - 1][n][i]) * problem.scale_log2;
        uint32 present = shared.ring.present[number % STAGES];
        if (present == ALL_PRESENT) return;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(present >> (8 * n + 2 * c + i % 2) & 1)) x[n][i] = -infinity();
    }

    // Write the weights of a step to shared memory. Raises `top` first if a weight might leave the range of float16.
    __device__ void softmax(int number) {
        int slot = number % WEIGHED_SLOTS;
        bool above = false;
        float step_most[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            find_largest(step_most[r], x, r);
            above |= step_most[r] - top[r] > LAZY;  // false while both are -infinity
        }
        bool raise = __any_sync(~0u, above);
        if (raise) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float factor = raise_row(top[r], total[r], step_most[r]);
                if (c == 0) shared.factor[slot][16 * warp + 8 * r + g] = factor;
            }
        }
        if (lane == 0) shared.raised[slot][warp] = raise;
#pragma unroll
        for (int r = 0; r < 2; ++r) store_weights<VALUE>(shared.p[slot][16 * warp + 8 * r + g] + 4 * c, x, r, top[r], total[r]);
    }

    // Write the LSE and the factors of the sums, after the last step of a token.
    __device__ void finish(const RingToken& of) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = quad_sum(total[r]);
            if (c != 0) continue;
            int row = 16 * warp + 8 * r + g, head = problem.first_head() + row;
            bool empty = top[r] == -infinity() && sum == 0.0f;  // a row of NaN is not empty
            float log_sum = (top[r] + log2f(sum)) * LN_2;
            shared.result_factor[row] = empty ? 0.0f : problem.value_scale / sum;
            if (head >= problem.heads) continue;
            if (of.part >= 0) {
                problem.partial_lse[int64(of.part) * problem.heads + head] = empty ? -infinity() : log_sum;
            } else {
                int query = of.token - of.request * problem.tokens.s_q;
                problem.lse[of.request * problem.lse_stride_b + head * problem.lse_stride_h + query * problem.lse_stride_s] =
                    empty ? infinity() : log_sum;
            }
        }
    }

    __device__ void run() {
        int number = 0;
        for (int current = 0;; ++current) {
            for (int part = 0; part < Q_STEPS; ++part, ++number) {
                shared.ring.barriers.wait_arrived(number);
                if (shared.ring.token(current).token < 0) return;
                load_q(number, part);
                if (number >= WEIGHED_SLOTS) shared.ring.barriers.wait_summed(number - WEIGHED_SLOTS);
                shared.ring.barriers.arrive_weighed(number);
            }
            begin();
            for (int end = shared.ring.token(current).end; number < end; ++number) {
                shared.ring.barriers.wait_arrived(number);
                score(number);
                shared.ring.barriers.wait_summed(number - WEIGHED_SLOTS);
                softmax(number);
                if (number + 1 == end) {
                    finish(shared.ring.token(current));
                    if (threadIdx.x == 32 * SUM_WARPS) shared.ring.list(problem, current + 2);
                }
                shared.ring.barriers.arrive_weighed(number);
            }
        }
    }
};
