// Scores and weights of sm80/sparse/heads64.cu: S = Q K^T and P = 2^(S - top), a step at a time.
//
// A warp has 16 heads and all keys of a step, so maximum and sum of a row stay in the warp. Its queries stay in
// registers for the whole tile, except the operands of the last MEMORY_K products, which are in shared memory in the
// order of lanes. Queries are float16 where keys are quantised. Operands of keys are loaded LOADED_AHEAD products
// ahead, which hides the latency of shared memory.
#pragma once
#include "sm80/sparse/heads64_steps.cuh"
#include "sm80/sparse/results.cuh"

constexpr int K_STEPS = LAYOUT::head_dim / 16, REGISTER_K = Q_REGISTERS / 4,
              MEMORY_K = K_STEPS - REGISTER_K;     // products along the dimensions
constexpr int F16_K = LAYOUT::quantized_dim / 16;  // in float16; the others are in bfloat16
constexpr uint32 MAX_Q = 0x4580, MIN_Q = 0x3a80;   // bfloat16 bits of 2^12 and 2^-10; outside, float16 may be too coarse for Q or K
constexpr int P_STRIDE = row_stride(KEYS);
constexpr int SPLITS = 32 / KEYS;  // chains of products for the same scores: four chains hide a product's latency
constexpr int LOADED_AHEAD = 1;
static_assert(LAYOUT::head_dim % 16 == 0 && MEMORY_K > 0, "unsupported dimensions");

struct Heads64Shared {
    StepRing ring;
    alignas(16) uint8 p[WEIGHED_SLOTS][HEADS][P_STRIDE];  // float16
    uint4 q[SCORE_WARPS][MEMORY_K][32];
    float factor[WEIGHED_SLOTS][HEADS];                   // of the sums before a step, where
    alignas(4) uint8 raised[WEIGHED_SLOTS][SCORE_WARPS];  // this is not 0
    float inv_sum[2][HEADS], result_factor[2][HEADS];     // at a tile's end, for tiles at even and odd places
    uint8 unsafe[2][SCORE_WARPS];
};
constexpr int SHARED_BYTES = to_16(RING_BYTES + WEIGHED_SLOTS * HEADS * P_STRIDE + 512 * SCORE_WARPS * MEMORY_K +
                                   4 * ((4 + WEIGHED_SLOTS) * HEADS + 2 + WEIGHED_SLOTS));
static_assert(sizeof(Heads64Shared) == SHARED_BYTES);

struct Scores {
    const SparseProblem& problem;
    Heads64Shared& shared;
    uint32 q[REGISTER_K][4];
    float x[KEYS / 8][4];             // scores of a step in base 2
    float top[2], total[2], most[2];  // of both rows: subtracted maximum, sum of P, highest score (the last two: this lane's part)
    float check;                      // not 0 if a score is not finite, or if float16 is too coarse for Q

    __device__ Scores(const SparseProblem& p, Heads64Shared& s) : problem(p), shared(s) {}

    static __device__ int warp_index() { return thread_index() / 32; }

    // Step `number`, the tile's `part`th, has heads KEYS * part and following.
    __device__ void load_q(uint32 number, int part) {
        int warp = warp_index(), lane = thread_index() % 32, first = 16 * warp - KEYS * part;
        if (first < 0 || first >= KEYS) return;
        uint32 row = shared_address(shared.ring.rows[number % STAGES][first + lane % 16]) + place_in_row(lane, lane / 16 * 16);
        uint32 largest[2] = {};  // magnitude of Q in both rows, as bfloat16 bits (this lane's part)
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            uint32 a[4];
            load_matrices(a, (row ^ 32 * (k % 4)) + 128 * (k / 4));
            if (k < F16_K) {
#pragma unroll
                for (int i = 0; i < 4; ++i) largest[i % 2] = __vmaxu2(largest[i % 2], a[i] & 0x7fff7fff), a[i] = bf16x2_to_f16x2(a[i]);
            }
            if (k < REGISTER_K) {
#pragma unroll
                for (int i = 0; i < 4; ++i) q[k < REGISTER_K ? k : 0][i] = a[i];
            } else {
                shared.q[warp][k - REGISTER_K][lane] = uint4{a[0], a[1], a[2], a[3]};
            }
        }
        check = beyond_f16(largest) ? infinity() : 0.0f;
    }

    // Whether float16 is too coarse for a row of Q. Zero is exact.
    static __device__ bool beyond_f16(const uint32 (&largest)[2]) {
        bool found = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32 most = max(largest[r] & 0xffff, largest[r] >> 16);
            most = max(most, __shfl_xor_sync(~0u, most, 1)), most = max(most, __shfl_xor_sync(~0u, most, 2));
            found |= most > MAX_Q || (most && most < MIN_Q);
        }
        return F16_K > 0 && found;
    }

    // Before a tile's first step of keys.
    __device__ void begin() {
        top[0] = top[1] = most[0] = most[1] = -infinity();
        total[0] = total[1] = 0.0f;
    }

    // Operands of product k of all keys.
    static __device__ void load_keys(uint32 (&b)[KEYS / 16][4], uint32 rows, int k) {
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) load_matrices(b[n], (rows ^ 32 * (k % 4)) + 128 * (k / 4) + 16 * n * ROW_STRIDE);
    }

    __device__ void score(uint32 number) {
        int warp = warp_index(), lane = thread_index() % 32;
        float y[SPLITS][KEYS / 8][4] = {};
        uint32 rows = shared_address(shared.ring.rows[number % STAGES][lane / 16 * 8 + lane % 8]) + place_in_row(lane, lane / 8 % 2 * 16);
        uint32 b[LOADED_AHEAD + 1][KEYS / 16][4];
#pragma unroll
        for (int k = 0; k < LOADED_AHEAD; ++k) load_keys(b[k], rows, k);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            if (k + LOADED_AHEAD < K_STEPS) load_keys(b[(k + LOADED_AHEAD) % (LOADED_AHEAD + 1)], rows, k + LOADED_AHEAD);
            uint32 a[4];
            if (k < REGISTER_K) {
                for (int i = 0; i < 4; ++i) a[i] = q[k][i];
            } else {
                uint4 v = shared.q[warp][k - REGISTER_K][lane];
                a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                const uint32(&of)[4] = b[k % (LOADED_AHEAD + 1)][n];
                if (k < F16_K) {
                    multiply_add(f16{}, y[k % SPLITS][2 * n], a, of[0], of[1]);
                    multiply_add(f16{}, y[k % SPLITS][2 * n + 1], a, of[2], of[3]);
                } else {
                    multiply_add(bf16{}, y[k % SPLITS][2 * n], a, of[0], of[1]);
                    multiply_add(bf16{}, y[k % SPLITS][2 * n + 1], a, of[2], of[3]);
                }
            }
        }
        float scale = problem.softmax_scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = y[0][n][i];
#pragma unroll
                for (int split = 1; split < SPLITS; ++split) sum += y[split][n][i];
                x[n][i] = sum * scale;
                check = fmaf(x[n][i], 0.0f, check);
            }
        uint32 present = shared.ring.step(number).present;
        if (present == ALL_PRESENT) return;
        int c = thread_index() % 4;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(present >> (8 * n + 2 * c + i % 2) & 1)) x[n][i] = -infinity();
    }

    // Write the weights of a step to shared memory. Raises `top` first if a weight might leave the range of float16.
    __device__ void softmax(uint32 number) {
        int slot = number % WEIGHED_SLOTS, warp = warp_index(), lane = thread_index() % 32, g = lane / 4, c = lane % 4;
        bool above = false;
        float step_most[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            find_largest(step_most[r], x, r);
            most[r] = fmaxf(most[r], step_most[r]);
            above |= step_most[r] > top[r] + LAZY;
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
        for (int r = 0; r < 2; ++r) store_weights<f16>(shared.p[slot][16 * warp + 8 * r + g] + 4 * c, x, r, top[r], total[r]);
    }

    // Write LSE, maximum and the factors of the sums, after the last step of a tile.
    __device__ void finish(int place) {
        const RangeTile& of = shared.ring.tile(place);
        TileCoord at(problem, of.work.tile);
        int warp = warp_index(), lane = thread_index() % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = quad_sum(total[r]), highest = quad_max(most[r]);
            if (c != 0) continue;
            int row = 16 * warp + 8 * r + g, head = at.first_head + row;
            RowResult result(top[r], sum);
            shared.inv_sum[place % 2][row] = result.inv_sum;
            shared.result_factor[place % 2][row] = result.inv_sum;
            if (!of.work.whole()) {
                problem.partial_lse[partial_slot(blockIdx.x, of.work.first == 0) * HEADS + row] = result.lse2;
            } else if (head < problem.heads) {
                shared.result_factor[place % 2][row] = result.write(problem, at, head);
                if (problem.max_logits) problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h] = highest * LN_2;
            }
        }
        bool unsafe = __any_sync(~0u, check != 0.0f);
        if (lane == 0) shared.unsafe[place % 2][warp] = unsafe;
    }

    __device__ void run() {
        Lister lister(problem, shared.ring, warp_index());
        copies_wait<0>();
        if (warp_index() <= AHEAD) lister.list(warp_index());
        __syncthreads();
        copies_wait<0>();
        __syncthreads();
        for (uint32 number = 0;;) {
            for (int part = 0; part < Q_STEPS; ++part, ++number) {
                shared.ring.barriers.wait_arrived(number);
                if (shared.ring.step(number).kind() == NONE) return;
                load_q(number, part);
                list(lister, number, number < WEIGHED_SLOTS);
                shared.ring.barriers.arrive_weighed(number);
            }
            begin();
            bool here = false;
            for (bool last = false; !last; ++number) {
                if (!here) shared.ring.barriers.wait_arrived(number);
                bool summed = shared.ring.barriers.is_summed(number - WEIGHED_SLOTS);
                score(number);
                list(lister, number, summed);
                here = shared.ring.barriers.has_arrived(number + 1);
                softmax(number);
                last = shared.ring.step(number).last();
                if (last) finish(shared.ring.step(number).tile());
                shared.ring.barriers.arrive_weighed(number);
            }
            if (threadIdx.x == 0) shared.ring.list(problem, shared.ring.step(number - 1).tile() + TILES_AHEAD);
        }
    }

    // List a later step, after the sums have left the step whose slot of weights this step takes (`summed`: they
    // already have).
    __device__ void list(Lister& lister, uint32 number, bool summed) {
        if (!summed) shared.ring.barriers.wait_summed(number - WEIGHED_SLOTS);
        copies_wait<0>();  // copies of scales that were listed at an earlier step
        if ((number + 1 + AHEAD) % SCORE_WARPS == warp_index()) lister.list(number + 1 + AHEAD);
    }
};
