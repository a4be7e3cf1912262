// Scores and weights of sm80/sparse/attention.cu: S = Q K^T and P = 2^(S - top), a step at a time.
//
// Q is stored in shared memory in the order of K's bytes: an operand lane reads 16 bytes of a key at a time, so in each
// 64 values (a slice) the 4-byte words that meet in a product are adjacent, see `convert_q`. Q is converted to float16
// for e4m3 keys, and stays bfloat16 for bfloat16 keys. Scales multiply the products of a slice; with FINE_SCALES they
// multiply K, which is exact in bfloat16, and Q stays bfloat16.
#pragma once
#include "sm80/sparse/results.cuh"
#include "sm80/sparse/rows.cuh"

constexpr float LAZY = 8.0f;                        // P is up to 2^LAZY
constexpr uint32 MAX_F16 = 0x477f, MIN_Q = 0x3a80;  // bfloat16 bits: just below 65536, and 2^-10
constexpr bool MAX_LOGITS = FP8_SLICES == 0;        // prefill has bfloat16 rows

// The scores of a step: WARPS_M by WARPS_N warps compute M by N products of 16 heads and 8 keys; other warps compute none.
constexpr int M_TILES = HEADS / 16;
constexpr int WARPS_M = M_TILES < 2 ? 1 : 2;
constexpr int WARPS_N = KEYS / 8 < WARPS / WARPS_M ? KEYS / 8 : WARPS / WARPS_M;
constexpr int M = M_TILES / WARPS_M, N = KEYS / 8 / WARPS_N;
static_assert(HEADS % 16 == 0 && KEYS % 16 == 0 && BLOCK % KEYS == 0 && STAGES >= 3, "unsupported tile sizes");

// Loops over scales are unrolled where registers allow it.
constexpr int UNROLLED_SCALES = M * N < 4 && (CTAS == 1 || SLICES_PER_SCALE == 1) ? 8 : 1;

constexpr int Q_CHUNKS = LAYOUT::head_dim / 8;  // of 16 bytes
// Rows of Q and P are padded by 16 bytes, so that neighbours are in other banks.
constexpr int Q_STRIDE = 2 * LAYOUT::head_dim + 16;
constexpr int P_STRIDE = 2 * KEYS + 16;

struct SparseShared {
    RowRing ring;
    alignas(16) uint8 q[HEADS][Q_STRIDE];
    alignas(16) uint8 p[2][HEADS][P_STRIDE];  // float16
    float highest[WARPS_N][HEADS], total[WARPS_N][HEADS];
    float top[HEADS];
    float factor[HEADS];  // factor of the sums
};
constexpr int SHARED_BYTES = to_16(RING_BYTES + HEADS * Q_STRIDE + 2 * HEADS * P_STRIDE + 4 * HEADS * (2 * WARPS_N + 2));
static_assert(sizeof(SparseShared) == SHARED_BYTES);

struct Scores {
    const SparseProblem& problem;
    SparseShared& shared;
    int lane, g, c;
    bool none;                         // this warp computes no scores
    int column;                        // of the other warps
    int first_row, first_n;            // head and key of the first score
    float scale;                       // to base 2
    float x[M][N][4];                  // scores in base 2
    float top[M][2], total[M][2];      // of its rows: subtracted maximum, sum of P (this lane's part)
    float step_top[M][2], sums[M][2];  // of a step's scores: maximum and sum (this lane's part)
    float highest[M][2];               // maximum of all, if MAX_LOGITS

    __device__ Scores(const SparseProblem& p, SparseShared& s) : problem(p), shared(s) {
        int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        none = WARPS_M * WARPS_N < WARPS && warp >= WARPS_M * WARPS_N;
        column = warp / WARPS_M;
        first_row = warp % WARPS_M * (16 * M), first_n = column * (8 * N);
        scale = problem.softmax_scale * LOG2_E;
    }

    // ---- Q, a warp per head

    // Start copying.
    __device__ void copy_q(int tile) {
        TileCoord at(problem, tile);
        const bf16* q = problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s;
        for (int row = threadIdx.x / 32; row < HEADS; row += WARPS) {
            bool here = at.first_head + row < problem.heads;
            const bf16* from = q + (here ? at.first_head + row : 0) * problem.q_stride_h;
            for (int chunk = lane; chunk < Q_CHUNKS; chunk += 32) copy_async<16>(shared.q[row] + 16 * chunk, from + 8 * chunk, here);
        }
        copies_commit();
    }

    // Reorder and convert Q, which has arrived. A chunk of 4 words becomes a column of 4 chunks: a lane has 16 values
    // of e4m3 (two chunks of Q), or 8 of bfloat16.
    __device__ void convert_q(int tile) {
        for (int row = threadIdx.x / 32; row < HEADS; row += WARPS) {
            constexpr int ROUNDS = (Q_CHUNKS + 31) / 32;
            uint4 words[ROUNDS];
            uint32 largest = 0;
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                int chunk = lane + 32 * i;
                if (chunk < Q_CHUNKS) words[i] = *reinterpret_cast<const uint4*>(shared.q[row] + 16 * chunk);
                if (FINE_SCALES || chunk >= 8 * FP8_SLICES) continue;
                largest = __vmaxu2(largest, largest_of_8(words[i]));
                words[i] = bf16x8_to_f16x8(words[i]);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                int chunk = lane + 32 * i, slice = chunk / 8, of_slice = chunk % 8;
                bool fp8 = slice < FP8_SLICES;
                int target = fp8 ? of_slice % 2 : of_slice / 4, word = fp8 ? of_slice / 2 : of_slice % 4;
                uint32* to = reinterpret_cast<uint32*>(shared.q[row] + 128 * slice + 64 * target) + word;
                if (chunk < Q_CHUNKS) to[0] = words[i].x, to[4] = words[i].y, to[8] = words[i].z, to[12] = words[i].w;
            }
            if (FP8_SLICES == 0 || FINE_SCALES) continue;
            largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
            // Zero is exact; other small values would lose their last bits.
            if (largest > MAX_F16 || (largest && largest < MIN_Q)) shared.ring.unsafe[tile % 2] = 1;
        }
    }

    // ---- scores

    // x[m][n] += products `k` (of 4) of a slice. Neighbouring products are independent.
    template <class Value> __device__ void multiply_q(float (&x)[M][N][4], const uint32 (&b)[N][2], int slice, int k) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            uint32 a[4];
            load_matrices(a, shared.q[first_row + 16 * m + lane % 16] + 128 * slice + 32 * k + lane / 16 * 16);
#pragma unroll
            for (int n = 0; n < N; ++n) mma(Value{}, x[m][n], a, b[n]);
        }
    }

    // Scores of rows that RowLoader::expand has expanded.
    __device__ void score_expanded(int number, int tile) {
        int stage = number % STAGES;
#pragma unroll
        for (int i = 0; i < M * N * 4; ++i) (&x[0][0][0])[i] = 0.0f;
#pragma unroll 2
        for (int slice = 0; slice < SLICES; ++slice) {
            uint4 k[N];
            uint32 factors[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                int column = first_n + 8 * n + g, at = SLICE * slice + 16 * c;
                k[n] = *reinterpret_cast<const uint4*>(shared.ring.rows[stage][token_of_column(column)] + at);
                float factor = shared.ring.scales[stage][at / FACTOR_TILE][column] * (CODE_TO_BF16 / CODE_UNIT);
                factors[n] = pack(bf16{}, factor, factor);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32 b[N][2];
#pragma unroll
                for (int n = 0; n < N; ++n)
                    codes_to_scaled_bf16(j == 0 ? k[n].x : j == 1 ? k[n].y : j == 2 ? k[n].z : k[n].w, factors[n], b[n][0], b[n][1]);
                multiply_q<bf16>(x, b, slice, j);
            }
        }
        scale_scores(stage, tile, false);
    }

    __device__ void score(int number, int tile) {
        int stage = number % STAGES;
        const uint8* rows[N];
#pragma unroll
        for (int n = 0; n < N; ++n) rows[n] = shared.ring.rows[stage][token_of_column(first_n + 8 * n + g)];
#pragma unroll
        for (int i = 0; i < M * N * 4; ++i) (&x[0][0][0])[i] = 0.0f;
#pragma unroll
        for (int slice = FP8_SLICES; slice < SLICES; ++slice) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 k[N];
                uint32 b[2][N][2];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    k[n] = *reinterpret_cast<const uint4*>(rows[n] + BF16_AT + 2 * SLICE * (slice - FP8_SLICES) + 64 * half + 16 * c);
                    b[0][n][0] = k[n].x, b[0][n][1] = k[n].y, b[1][n][0] = k[n].z, b[1][n][1] = k[n].w;
                }
                multiply_q<bf16>(x, b[0], slice, 2 * half);
                multiply_q<bf16>(x, b[1], slice, 2 * half + 1);
            }
        }
        uint32 nan = 0;
#pragma unroll(UNROLLED_SCALES)
        for (int i = 0; i < NUM_SCALES; ++i) {
            float part[M][N][4] = {};
#pragma unroll
            for (int slice = i * SLICES_PER_SCALE; slice < (i + 1) * SLICES_PER_SCALE; ++slice) {
                uint4 k[N];
#pragma unroll
                for (int n = 0; n < N; ++n) k[n] = *reinterpret_cast<const uint4*>(rows[n] + SLICE * slice + 16 * c);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    uint32 b[N][2];
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        uint32 codes = j == 0 ? k[n].x : j == 1 ? k[n].y : j == 2 ? k[n].z : k[n].w;
                        codes_to_f16(codes, b[n][0], b[n][1]);
                        nan |= has_nan(codes);
                    }
                    multiply_q<f16>(part, b, slice, j);
                }
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float2 by = shared.ring.scales_at(stage, i, first_n + 8 * n + 2 * c);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    x[m][n][0] += part[m][n][0] * by.x, x[m][n][1] += part[m][n][1] * by.y;
                    x[m][n][2] += part[m][n][2] * by.x, x[m][n][3] += part[m][n][3] * by.y;
                }
            }
        }
        scale_scores(stage, tile, nan);
    }

    // To base 2, absent keys to -infinity.
    __device__ void scale_scores(int stage, int tile, bool nan) {
        float check = 0.0f;  // NaN if a value is not finite
#pragma unroll
        for (int m = 0; m < M; ++m) step_top[m][0] = step_top[m][1] = -infinity();
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float2 bias = shared.ring.bias_at(stage, first_n + 8 * n + 2 * c);
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float y = x[m][n][i] * scale;
                    check = fmaf(y, 0.0f, check);
                    x[m][n][i] = y + (i % 2 ? bias.y : bias.x);
                    step_top[m][i / 2] = fmaxf(step_top[m][i / 2], x[m][n][i]);
                }
            }
        }
        if (check != 0.0f || nan) shared.ring.unsafe[tile % 2] = 1;
    }

    // ---- the softmax

    __device__ void begin() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) top[m][r] = highest[m][r] = -infinity(), total[m][r] = 0.0f;
    }

    // The value that is subtracted from the scores of a row: `top`, or any finite value while all scores are -infinity.
    static __device__ float base_of(float top) { return top == -infinity() ? 0.0f : top; }

    // Write P to shared memory.
    __device__ void softmax(int number) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float base = base_of(top[m][r]);
                uint8* row = shared.p[number % 2][first_row + 16 * m + 8 * r + g];
                sums[m][r] = 0.0f;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float low = exp2_approx(x[m][n][2 * r] - base), high = exp2_approx(x[m][n][2 * r + 1] - base);
                    sums[m][r] += low + high;
                    *reinterpret_cast<uint32*>(row + 2 * (first_n + 8 * n + 2 * c)) = pack(f16{}, low, high);
                }
            }
        }
    }

    // Scores and weights of a step.
    __device__ void attend(int number, int tile) {
        if (none) return;
        if constexpr (FINE_SCALES) score_expanded(number, tile);
        else score(number, tile);
        softmax(number);
    }

    // Whether a score is so far above `top` that its weight may leave the range.
    __device__ bool must_raise() const {
        bool raise = false;
#pragma unroll
        for (int m = 0; m < M; ++m) raise |= step_top[m][0] > top[m][0] + LAZY || step_top[m][1] > top[m][1] + LAZY;
        return !none && raise;
    }

    __device__ void write_rows(float (&to)[WARPS_N][HEADS], int m, int r, float value) {
        if (c == 0) to[column][first_row + 16 * m + 8 * r + g] = value;
    }

    // Publish the maxima of rows to all warps of a row.
    __device__ void write_step_tops() {
        if (none) return;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) write_rows(shared.highest, m, r, quad_max(step_top[m][r]));
    }

    // Raise `top` to these maxima, recompute P, and publish the factor of the sums.
    __device__ void raise(int number) {
        if (none) return;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = first_row + 16 * m + 8 * r + g;
                float most = top[m][r];
#pragma unroll
                for (int i = 0; i < WARPS_N; ++i) most = fmaxf(most, shared.highest[i][row]);
                float factor = exp2_approx(top[m][r] - base_of(most));
                top[m][r] = most;
                total[m][r] *= factor;
                if (column == 0 && c == 0) shared.factor[row] = factor;
            }
        softmax(number);
    }

    __device__ void add_step() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                total[m][r] += sums[m][r];
                if (MAX_LOGITS) highest[m][r] = fmaxf(highest[m][r], step_top[m][r]);
            }
    }

    // Publish the sums and maxima, after the last step of a tile.
    __device__ void end() {
        if (none) return;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                write_rows(shared.total, m, r, quad_sum(total[m][r]));
                if (MAX_LOGITS) write_rows(shared.highest, m, r, quad_max(highest[m][r]));
                if (column == 0 && c == 0) shared.top[first_row + 16 * m + 8 * r + g] = top[m][r];
            }
    }
};
