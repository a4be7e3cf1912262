// Sparse MLA on every device since sm_80: paged FP8 caches and bfloat16 rows, decode and prefill.
//
// A thread block takes its share of the blocks of keys (decode.cuh), KEYS keys a *step*. All warps work together:
//
//     gather    rows of a later step on their way into a ring, as they are in the cache        attention_mma_rows.cuh
//     mix       O += P V of the step before: a warp 64 of the 512 values, for all heads
//     score     S = Q K^T: a warp some of the heads and of the keys
//     weigh     P = 2^(S - top), where `top` is the rows' maximum as of some step before
//
// with one barrier a step. Only where a score exceeds `top` by more than LAZY (as in a tile's first step) the
// maxima are found, P is made again and O rescaled, at the price of two more.
//
// K and V are converted in registers straight from the raw rows, e4m3 to float16: the scores in units of the
// scales, which are applied to the float32 products, V times its scale in float16. RoPE's values enter the scores
// as bfloat16, as everything does where rows are bfloat16.
//
// Float16 has a narrower range than caches and queries may hold. A tile that leaves it, or has a score or a result
// that is not finite, is marked in `unsafe` for the exact kernel, which the launcher runs after this one.
//
// Macros: LAYOUT, TILE_HEADS (decode.cuh), KEYS, STAGES (3 or more), CTAS (thread blocks a multiprocessor).
#include "attention_mma_rows.cuh"

constexpr float LAZY = 8.0f;                       // P is up to 2^LAZY
constexpr uint32 MAX_F16 = 0x477f, MIN_Q = 0x3a80;  // bfloat16 bits: just below 65536, and 2^-10
constexpr bool MAX_LOGITS = FP8_SLICES == 0;        // prefill has bfloat16 rows
constexpr float NAN_UNLESS_FINITE = 0.0f;           // times a finite number adds nothing

constexpr int M_TILES = HEADS / 16;
constexpr int VALUES = V_DIM / WARPS;
// The scores of a step, WARPS_M by WARPS_N warps of M by N products of 16 heads and 8 keys; other warps have none.
constexpr int WARPS_M = M_TILES < 2 ? 1 : 2;
constexpr int WARPS_N = KEYS / 8 < WARPS / WARPS_M ? KEYS / 8 : WARPS / WARPS_M;
constexpr int M = M_TILES / WARPS_M, N = KEYS / 8 / WARPS_N;
static_assert(VALUES == SLICE, "a warp mixes one slice");
static_assert(HEADS % 16 == 0 && KEYS % 16 == 0 && BLOCK % KEYS == 0 && STAGES >= 3, "");

constexpr int Q_CHUNKS = LAYOUT::head_dim / 8;
// Rows of Q and P are a little longer, so that neighbours lie in other banks.
constexpr int Q_STRIDE = 2 * LAYOUT::head_dim + (FP8_SLICES ? 16 : 64);
constexpr int P_STRIDE = 2 * KEYS + 16;

// attention_mma.py has the size of this.
struct Shared {
    Ring ring;
    alignas(16) uint8 q[HEADS][Q_STRIDE];
    alignas(16) uint8 p[2][HEADS][P_STRIDE];
    float highest[WARPS_N][HEADS], total[WARPS_N][HEADS];
    float top[HEADS];
    float factor[HEADS];  // what O is multiplied by
};

template <bool> struct Choose { using type = bf16; };
template <> struct Choose<true> { using type = f16; };
using Weight = Choose<(FP8_SLICES > 0)>::type;

struct Attention {
    const Problem& problem;
    Shared& shared;
    int warp, g, c;
    bool scores;             // whether this warp has any
    int first_row, first_n;  // of its scores: head and key
    float scale;             // to base 2
    float x[M][N][4];        // scores in base 2
    float top[M][2], total[M][2];      // of its rows: what is subtracted, sum of P (this lane's part)
    float step_top[M][2], sums[M][2];  // of a step's scores: maximum and sum (this lane's part)
    float highest[M][2];               // maximum of all, where that is wanted

    __device__ Attention(const Problem& p, Shared& s) : problem(p), shared(s) {
        int lane = threadIdx.x % 32;
        warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
        scores = WARPS_M * WARPS_N == WARPS || warp < WARPS_M * WARPS_N;
        first_row = warp % WARPS_M * (16 * M), first_n = warp / WARPS_M * (8 * N);
        scale = problem.softmax_scale * LOG2_E;
    }

    // ---- Q

    // A warp a head. Start copying.
    __device__ void copy_q(int tile) {
        TilePlace at(problem, tile);
        const bf16* q = problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s;
        for (int row = warp; row < HEADS; row += WARPS) {
            bool here = at.first_head + row < problem.heads;
            const bf16* from = q + (here ? at.first_head + row : 0) * problem.q_stride_h;
            for (int chunk = threadIdx.x % 32; chunk < Q_CHUNKS; chunk += 32)
                copy_async<16>(shared.q[row] + 16 * chunk, from + 8 * chunk, here);
        }
        copies_commit();
    }

    // Q has arrived; all that meets e4m3 becomes float16. Each thread has the chunks that it copied.
    __device__ void convert_q(int tile) {
        for (int row = warp; row < (FP8_SLICES ? HEADS : 0); row += WARPS) {
            uint32 largest = 0;
            for (int chunk = threadIdx.x % 32; chunk < FP8_SLICES * (SLICE / 8); chunk += 32) {
                uint4& words = *reinterpret_cast<uint4*>(shared.q[row] + 16 * chunk);
                largest = __vmaxu2(largest, largest_of_8(words));
                words = bf16x8_to_f16x8(words);
            }
            largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
            // Zero is exact; what is small otherwise would lose its last bits.
            if (largest > MAX_F16 || (largest && largest < MIN_Q)) problem.unsafe[tile] = 1;
        }
    }

    // ---- scores

    // Two operands a of 16 heads: for 16 bytes of each row, products with 2 words of a column at a time.
    __device__ void load_q(uint32 (&a)[2][4], int m, int byte) {
        const uint8* row = shared.q[first_row + 16 * m + g] + byte;
        uint4 low = *reinterpret_cast<const uint4*>(row);
        uint4 high = *reinterpret_cast<const uint4*>(row + 8 * Q_STRIDE);
        a[0][0] = low.x, a[0][1] = high.x, a[0][2] = low.y, a[0][3] = high.y;
        a[1][0] = low.z, a[1][1] = high.z, a[1][2] = low.w, a[1][3] = high.w;
    }

    __device__ void score(int number, int tile) {
        int stage = number % STAGES;
        const uint8* rows[N];
#pragma unroll
        for (int n = 0; n < N; ++n) rows[n] = shared.ring.rows[stage][token_at_place(first_n + 8 * n + g)];
#pragma unroll
        for (int i = 0; i < M * N * 4; ++i) (&x[0][0][0])[i] = 0.0f;
        float check = 0.0f;  // NaN after a number that is not finite
        uint32 nan = 0;
        // Of a slice of bfloat16 lane c has values 8 c .. 8 c + 7 and those 32 further.
#pragma unroll
        for (int slice = FP8_SLICES; slice < SLICES; ++slice) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int byte = 64 * half + 16 * c;
                uint4 k[N];
#pragma unroll
                for (int n = 0; n < N; ++n)
                    k[n] = *reinterpret_cast<const uint4*>(rows[n] + BF16_AT + 2 * SLICE * (slice - FP8_SLICES) + byte);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    uint32 a[2][4];
                    load_q(a, m, 2 * SLICE * slice + byte);
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        uint32 b[2][2] = {{k[n].x, k[n].y}, {k[n].z, k[n].w}};
                        mma(bf16{}, x[m][n], a[0], b[0]);
                        mma(bf16{}, x[m][n], a[1], b[1]);
                    }
                }
            }
        }
        // Of a slice of e4m3 it has values 16 c .. 16 c + 15.
#pragma unroll (M * N < 4 && CTAS == 1 ? NUM_SCALES + 1 : 1)  // otherwise registers would not do
        for (int i = 0; i < NUM_SCALES; ++i) {
            float part[M][N][4] = {};
#pragma unroll
            for (int slice = i * SLICES_PER_SCALE; slice < (i + 1) * SLICES_PER_SCALE; ++slice) {
                uint4 k[N];
#pragma unroll
                for (int n = 0; n < N; ++n) k[n] = *reinterpret_cast<const uint4*>(rows[n] + SLICE * slice + 16 * c);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32 b[N][2][2];
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        uint32 first = half ? k[n].z : k[n].x, second = half ? k[n].w : k[n].y;
                        codes_to_f16(first, b[n][0][0], b[n][0][1]);
                        codes_to_f16(second, b[n][1][0], b[n][1][1]);
                        nan |= has_nan(first) | has_nan(second);
                    }
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        uint32 a[2][4];
                        load_q(a, m, 2 * SLICE * slice + 32 * c + 16 * half);
#pragma unroll
                        for (int n = 0; n < N; ++n) {
                            mma(f16{}, part[m][n], a[0], b[n][0]);
                            mma(f16{}, part[m][n], a[1], b[n][1]);
                        }
                    }
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
                    check = fmaf(y, NAN_UNLESS_FINITE, check);
                    x[m][n][i] = y + (i % 2 ? bias.y : bias.x);
                    step_top[m][i / 2] = fmaxf(step_top[m][i / 2], x[m][n][i]);
                }
            }
        }
        if (check != 0.0f || nan) problem.unsafe[tile] = 1;
    }

    // ---- the softmax

    __device__ void begin() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) top[m][r] = highest[m][r] = -infinity(), total[m][r] = 0.0f;
    }

    // What is subtracted from a row's scores: anything, while it has none.
    static __device__ float base_of(float top) { return top == -infinity() ? 0.0f : top; }

    // P to shared memory.
    __device__ void weigh(int number) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float base = base_of(top[m][r]);
                uint8* row = shared.p[number % 2][first_row + 16 * m + 8 * r + g];
                sums[m][r] = 0.0f;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float low = exp2_fast(x[m][n][2 * r] - base), high = exp2_fast(x[m][n][2 * r + 1] - base);
                    sums[m][r] += low + high;
                    *reinterpret_cast<uint32*>(row + 2 * (first_n + 8 * n + 2 * c)) = pack(Weight{}, low, high);
                }
            }
        }
    }

    // Scores and weights of a step.
    __device__ void attend(int number, int tile) {
        if (!scores) return;
        score(number, tile);
        weigh(number);
    }

    __device__ bool must_raise() const {
        bool raise = false;
#pragma unroll
        for (int m = 0; m < M; ++m) raise |= step_top[m][0] > top[m][0] + LAZY || step_top[m][1] > top[m][1] + LAZY;
        return scores && raise;
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

    static __device__ float quad_max(float v) {
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
    }
    static __device__ float quad_sum(float v) {
        v += __shfl_xor_sync(~0u, v, 1);
        return v + __shfl_xor_sync(~0u, v, 2);
    }

    // Find the maxima, make P again and rescale what has been summed up. All warps, after a barrier.
    __device__ void raise(int number, float (&o)[M_TILES][VALUES / 8][4]) {
        if (scores) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float most = quad_max(step_top[m][r]);
                    if (c == 0) shared.highest[warp / WARPS_M][first_row + 16 * m + 8 * r + g] = most;
                }
        }
        __syncthreads();
        if (scores) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    int row = first_row + 16 * m + 8 * r + g;
                    float most = top[m][r];
#pragma unroll
                    for (int i = 0; i < WARPS_N; ++i) most = fmaxf(most, shared.highest[i][row]);
                    float factor = exp2_fast(top[m][r] - base_of(most));
                    top[m][r] = most;
                    total[m][r] *= factor;
                    if (warp / WARPS_M == 0 && c == 0) shared.factor[row] = factor;
                }
            weigh(number);
        }
        __syncthreads();
        multiply_by_factor(o);
    }

    __device__ void multiply_by_factor(float (&o)[M_TILES][VALUES / 8][4]) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            float low = shared.factor[16 * m + g], high = shared.factor[16 * m + 8 + g];
#pragma unroll
            for (int j = 0; j < VALUES / 8; ++j) o[m][j][0] *= low, o[m][j][1] *= low, o[m][j][2] *= high, o[m][j][3] *= high;
        }
    }

    // ---- the weighted sum

    // Of 16 keys, operands b of this warp's values: of product j column g is value 8 g + j.
    __device__ void load_v(uint32 (&b)[VALUES / 8][2], int stage, int first) {
        const uint8* rows[2] = {shared.ring.rows[stage][first + token_at_place(2 * c)],
                                shared.ring.rows[stage][first + token_at_place(2 * c + 1)]};
        if (warp < FP8_SLICES) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // 8 keys further are 8 places further
                int at = 8 * h * ROW_STRIDE + SLICE * warp + 8 * g;
                uint2 one = *reinterpret_cast<const uint2*>(rows[0] + at), other = *reinterpret_cast<const uint2*>(rows[1] + at);
                float2 by = shared.ring.scales_at(stage, warp / SLICES_PER_SCALE, first + 8 * h + 2 * c);
                uint32 factors = pack(f16{}, by.x, by.y);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32 low, high;
                    codes_to_f16(__byte_perm(i < 2 ? one.x : one.y, i < 2 ? other.x : other.y, i % 2 ? 0x7362 : 0x5140), low, high);
                    b[2 * i][h] = multiply(low, factors), b[2 * i + 1][h] = multiply(high, factors);
                }
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int at = 8 * h * ROW_STRIDE + BF16_AT + 2 * SLICE * (warp - FP8_SLICES) + 16 * g;
                uint4 one = *reinterpret_cast<const uint4*>(rows[0] + at), other = *reinterpret_cast<const uint4*>(rows[1] + at);
                uint32 pairs[4][2] = {{one.x, other.x}, {one.y, other.y}, {one.z, other.z}, {one.w, other.w}};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32 low = __byte_perm(pairs[i][0], pairs[i][1], 0x5410), high = __byte_perm(pairs[i][0], pairs[i][1], 0x7632);
                    b[2 * i][h] = FP8_SLICES ? bf16x2_to_f16x2(low) : low, b[2 * i + 1][h] = FP8_SLICES ? bf16x2_to_f16x2(high) : high;
                }
            }
        }
    }

    __device__ void mix(float (&o)[M_TILES][VALUES / 8][4], int number) {
        int lane = threadIdx.x % 32, stage = number % STAGES;
#pragma unroll
        for (int first = 0; first < KEYS; first += 16) {
            uint32 b[VALUES / 8][2];
            load_v(b, stage, first);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                uint32 a[4];
                load_matrices(a, shared.p[number % 2][16 * m + lane % 16] + 2 * first + lane / 16 * 16);
#pragma unroll
                for (int j = 0; j < VALUES / 8; ++j) mma(Weight{}, o[m][j], a, b[j]);
            }
        }
    }

    // ---- results

    // A tile's last step has been weighed.
    __device__ void end() {
        if (!scores) return;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = first_row + 16 * m + 8 * r + g;
                float most = quad_max(highest[m][r]), sum = quad_sum(total[m][r]);
                if (c == 0) {
                    shared.highest[warp / WARPS_M][row] = most, shared.total[warp / WARPS_M][row] = sum;
                    if (warp / WARPS_M == 0) shared.top[row] = top[m][r];
                }
            }
    }

    // One thread a head: the logarithm of the sum, and what O is multiplied by. After a barrier.
    __device__ void finish(const Step& step) {
        int row = threadIdx.x;
        if (row >= HEADS) return;
        float sum = 0.0f, most = -infinity();
#pragma unroll
        for (int i = 0; i < WARPS_N; ++i) sum += shared.total[i][row], most = fmaxf(most, shared.highest[i][row]);
        bool empty = sum == 0.0f;
        float lse2 = shared.top[row] + log2_fast(sum), factor = reciprocal_fast(sum);
        TilePlace at(problem, step.tile);
        int head = at.first_head + row;
        if (!step.whole) {
            problem.partial_lse[partial_slot(blockIdx.x, step.from_start) * HEADS + row] = empty ? -infinity() : lse2;
        } else if (head < problem.heads) {
            float lse = lse2 * LN_2;
            if (problem.attn_sink) factor *= reciprocal_fast(1.0f + exp2_fast((problem.attn_sink[head] - lse) * LOG2_E));
            problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
                empty ? infinity() : lse;
            if (problem.max_logits)
                problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h] = most * LN_2;
        }
        shared.factor[row] = empty ? 0.0f : factor;
    }

    // A lane has values 16 c .. 16 c + 15 of its warp's 64, of heads g and g + 8 of each 16. After a barrier.
    __device__ void store(const Step& step, float (&o)[M_TILES][VALUES / 8][4]) {
        multiply_by_factor(o);
        TilePlace at(problem, step.tile);
        bool whole = step.whole;
        int value = VALUES * warp + 16 * c;
        bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + value;
        float* partial = problem.partial_out + int64(partial_slot(blockIdx.x, step.from_start)) * HEADS * V_DIM + value;
        float worst = 0.0f;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = 16 * m + 8 * r + g, head = at.first_head + row;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float v[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) v[j] = o[m][j][2 * r + e], worst = fmaf(v[j], NAN_UNLESS_FINITE, worst);
                    if (!whole) {
                        float4* to = reinterpret_cast<float4*>(partial + row * V_DIM + 8 * e);
                        to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
                    } else if (head < problem.heads) {
                        *reinterpret_cast<uint4*>(out + head * problem.out_stride_h + 8 * e) =
                            uint4{pack(bf16{}, v[0], v[1]), pack(bf16{}, v[2], v[3]), pack(bf16{}, v[4], v[5]),
                                  pack(bf16{}, v[6], v[7])};
                    }
                }
            }
        if (worst != 0.0f) problem.unsafe[step.tile] = 1;  // NaN
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) sparse_mla_mma(const __grid_constant__ Problem problem) {
    extern __shared__ uint8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Gatherer gatherer(problem, shared.ring);
    int number = 0;  // of the step to score next
    int tile = gatherer.step(0).tile;
    if (tile < 0) return;
    Attention attention(problem, shared);
    attention.copy_q(tile);
    float o[M_TILES][VALUES / 8][4];
    for (; tile >= 0; tile = gatherer.step(number).tile) {
        copies_wait<0>();
        attention.convert_q(tile);
        __syncthreads();
        attention.begin();
#pragma unroll
        for (int i = 0; i < M_TILES * VALUES / 2; ++i) (&o[0][0][0])[i] = 0.0f;
        for (bool first = true;; first = false) {
            bool done = !first && gatherer.step(number - 1).last;
            if (!done) gatherer.copy(number + AHEAD);
            else if (gatherer.step(number).tile >= 0) attention.copy_q(gatherer.step(number).tile);
            if (!first) attention.mix(o, number - 1);
            if (done) break;
            attention.attend(number, tile);
            copies_wait<AHEAD - 1>();
            gatherer.publish(number + 1);
            if (__syncthreads_or(attention.must_raise())) attention.raise(number, o);
            attention.add_step();
            ++number;
        }
        attention.end();
        __syncthreads();
        const Step& step = gatherer.step(number - 1);
        attention.finish(step);
        __syncthreads();
        attention.store(step, o);
    }
}
