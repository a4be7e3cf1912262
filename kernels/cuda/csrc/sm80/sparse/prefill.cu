// Sparse MLA prefill on every device since sm_80: whole tiles of 64 heads over gathered rows of 16-bit values.
//
// Grid: one CTA per work range (common/sparse/work.cuh), one per SM at a time.
// Block: 256 threads. Warps have no roles: all do each part of a step, below.
// Shared memory: SHARED_BYTES, dynamic: the ring of rows, partial scores, two slots of P, softmax state.
// Limits: 64 heads a tile, float16's range, see below.
//
// Keys are processed KEYS at a time, a *step*. A warp keeps a part of Q in registers for the whole tile: 32 heads and a quarter of
// the dimensions, so shared memory is not read for Q, and a key's values only twice, once for each 32 heads:
//
//     score    S of 32 heads and all keys over a quarter of the dimensions; three quarters of these sums go to other warps
//     weigh    P = 2^(S - top) of 16 heads and half of the keys, where `top` is the rows' maximum as of an earlier step
//     mix      O += P V of the previous step: 64 of the 512 values per warp, for all heads
//
// The four warps that share 32 heads meet after `score`; all warps meet at the step's end. Only if a score exceeds `top` by more than LAZY (as in a tile's first step)
// are the maxima computed, P recomputed and O rescaled, which takes two more barriers.
//
// P and V are multiplied as float16, which is more exact than bfloat16 except for very large and small values. A tile that leaves
// float16's range, or has a score or a result that is not finite, is flagged for the epilogue kernel (UNSAFE_BITS).
//
// Macros: LAYOUT, KEYS, STAGES (3 or more) and SHARED_BYTES, see kernels/cuda/sparse/portable.py.
#include "sm80/sparse/prefill_rows.cuh"
#include "sm80/sparse/quarters.cuh"

constexpr float MIN_RESULT = 1.0f / 16384.0f;  // below this, float16's steps of 2^-24 are too coarse

constexpr int K_STEPS = LAYOUT::head_dim / QUARTERS / 16;  // products along a quarter of the dimensions
constexpr int V_STEPS = V_DIM / QUARTERS / 16;             // of them in the values; the others in what follows
static_assert(LAYOUT::head_dim % (16 * QUARTERS) == 0 && K_STEPS - V_STEPS <= 1, "unsupported dimensions");
constexpr int M_TILES = HEADS / 16, VALUES = V_DIM / WARPS;

struct PrefillShared {
    RowRing ring;
    PartialScores partial;
    alignas(16) uint8 p[2][HEADS][P_STRIDE];                    // float16
    float highest[2][HEADS], total[2][HEADS];                   // by half of the keys
    float4 kept[2][THREADS];                                    // see QuarterSoftmax::kept
    float top[HEADS];
    float factor[HEADS];  // of the sums
    int unsafe;
};
static_assert(sizeof(PrefillShared) <= SHARED_BYTES, "prefill_shared_bytes of kernels/cuda/sparse/portable.py differs");

// A transpose among the four lanes of a quad: x[i] of lane c becomes x[c] of lane i.
__device__ inline void transpose_quad(uint32 (&x)[4], int c) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            uint32 got = __shfl_xor_sync(~0u, c & bit ? x[i] : x[i | bit], bit);
            if (c & bit) x[i] = got;
            else x[i | bit] = got;
        }
}

struct Scores : QuarterSoftmax<PrefillShared> {
    uint32 q[2][K_STEPS][4];  // operands of 2 x 16 heads

    using QuarterSoftmax::QuarterSoftmax;

    // First dimension of a product along this warp's quarter.
    __device__ int dimension(int k) const {
        return k < V_STEPS ? V_DIM / QUARTERS * quarter + 16 * k : V_DIM + 16 * quarter;
    }

    // Step `number`, the tile's `part`th, has heads KEYS * part and following.
    __device__ void load_q(int number, int part) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            int first = 32 * group + 16 * m;
            if (first / KEYS != part) continue;
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k)
                load_matrices(q[m][k], a_row(shared.ring.rows[number % STAGES][0], ROW_STRIDE, first % KEYS, dimension(k)));
        }
    }

    // Sums over this warp's dimensions, to the warps that weigh the scores. (No register could hold its own until then.)
    __device__ void score(int number) {
        const uint8* rows = shared.ring.rows[number % STAGES][0];
#pragma unroll 1
        for (int n = 0; n < KEYS / 16; ++n) {
            float y[2][2][4] = {};
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                uint32 b[4];
                load_matrices(b, b_row(rows, ROW_STRIDE, 16 * n, dimension(k)));
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply_add(bf16{}, y[m][0], q[m][k], b[0], b[1]);
                    multiply_add(bf16{}, y[m][1], q[m][k], b[2], b[3]);
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) give(m, 2 * n + j, y[m][j]);
        }
    }
};

struct Sums {
    const SparseProblem& problem;
    PrefillShared& shared;
    int warp, lane, g, c;
    float o[M_TILES][VALUES / 8][4];
    uint32 seen;  // non-zero after a non-zero V

    __device__ Sums(const SparseProblem& p, PrefillShared& s) : problem(p), shared(s) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    }

    __device__ void begin() {
        seen = 0;
#pragma unroll
        for (int i = 0; i < M_TILES * VALUES / 2; ++i) (&o[0][0][0])[i] = 0.0f;
    }

    // O += P V of a step.
    __device__ void mix(int number) {
        const uint8* rows = shared.ring.rows[number % STAGES][0];
#pragma unroll 1
        for (int k = 0; k < KEYS / 16; ++k) {
            uint32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) load_matrices(a[m], a_row(shared.p[number % 2][0], P_STRIDE, 16 * m, 16 * k));
#pragma unroll
            for (int j = 0; j < VALUES / 16; ++j) {
                uint32 b[4];
                load_transposed(b, a_row(rows, ROW_STRIDE, 16 * k, VALUES * warp + 16 * j));
#pragma unroll
                for (int i = 0; i < 4; ++i) seen |= b[i] & 0x7fff7fff, b[i] = bf16x2_to_f16x2(b[i]);
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    multiply_add(f16{}, o[m][2 * j], a[m], b[0], b[1]);
                    multiply_add(f16{}, o[m][2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    __device__ void multiply_by_factor() {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            float low = shared.factor[16 * m + g], high = shared.factor[16 * m + 8 + g];
#pragma unroll
            for (int j = 0; j < VALUES / 8; ++j) o[m][j][0] *= low, o[m][j][1] *= low, o[m][j][2] *= high, o[m][j][3] *= high;
        }
    }

    // One thread per head: LSE, maximum, and the factor of O. After Scores::end and a barrier.
    __device__ void finish(int tile) {
        int row = threadIdx.x;
        if (row >= HEADS) return;
        float sum = shared.total[0][row] + shared.total[1][row], most = fmaxf(shared.highest[0][row], shared.highest[1][row]);
        bool empty = sum == 0.0f;
        float lse = (shared.top[row] + log2_approx(sum)) * LN_2, inv_sum = empty ? 0.0f : reciprocal_fast(sum), factor = inv_sum;
        TileCoord at(problem, tile);
        int head = at.first_head + row;
        if (head < problem.heads) {
            if (problem.attn_sink) factor *= reciprocal_fast(1.0f + exp2_approx((problem.attn_sink[head] - lse) * LOG2_E));
            problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
                empty ? infinity() : lse;
            problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h] = most * LN_2;
        }
        shared.top[row] = inv_sum;
        shared.factor[row] = empty ? 0.0f : factor;
    }

    // Whether the results are so small, though V is not zero, that float16 was too coarse.
    __device__ bool too_small() {
        float largest = 0.0f;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float of_row = 0.0f;
#pragma unroll
                for (int j = 0; j < VALUES / 8; ++j) of_row = fmaxf(of_row, fmaxf(fabsf(o[m][j][2 * r]), fabsf(o[m][j][2 * r + 1])));
                largest = fmaxf(largest, of_row * shared.top[16 * m + 8 * r + g]);
            }
        return __any_sync(~0u, seen) && !__any_sync(~0u, !(largest < MIN_RESULT));
    }

    // Results, 16 bytes a lane. After a barrier.
    __device__ void store(int tile) {
        bool bad = too_small();
        multiply_by_factor();
        TileCoord at(problem, tile);
        bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + VALUES * warp + 8 * c;
        float check = 0.0f;  // NaN after a value that is not finite
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int head = at.first_head + 16 * m + 8 * r + g;
#pragma unroll
                for (int j = 0; j < VALUES / 8; j += 4) {
                    uint32 words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float low = o[m][j + i][2 * r], high = o[m][j + i][2 * r + 1];
                        check = fmaf(low, 0.0f, fmaf(high, 0.0f, check));
                        words[i] = pack(bf16{}, low, high);
                    }
                    transpose_quad(words, c);
                    if (head < problem.heads)
                        *reinterpret_cast<uint4*>(out + head * problem.out_stride_h + 8 * j) = uint4{words[0], words[1], words[2], words[3]};
                }
            }
        if (threadIdx.x == 0) bad |= shared.unsafe != 0, shared.unsafe = 0;
        if (bad || check != 0.0f) leave_to_exact_kernel(at);
    }

    __device__ void leave_to_exact_kernel(const TileCoord& at) {
        float* max_logits = problem.max_logits + at.b * problem.max_stride_b;
        for (int head = at.first_head; head < min(problem.heads, at.first_head + HEADS); ++head)
            max_logits[head * problem.max_stride_h] = __uint_as_float(UNSAFE_BITS);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_mla_prefill_mma(const __grid_constant__ SparseProblem problem) {
    extern __shared__ uint8 memory[];
    pdl_wait();
    PrefillShared& shared = *reinterpret_cast<PrefillShared*>(memory);
    if (threadIdx.x == 0) shared.unsafe = 0;
    RowLoader loader(problem, shared.ring);
    Scores scores(problem, shared);
    Sums sums(problem, shared);
    __syncthreads();
    loader.copy(AHEAD);
    for (int number = 0; shared.ring.tile().tile >= 0;) {
        loader.list_ahead();
        for (int part = 0; part < Q_STEPS; ++part, ++number) {
            if (part > 0) loader.copy(number + AHEAD);
            scores.load_q(number, part);
            loader.wait();
            __syncthreads();
        }
        scores.begin(number);
        sums.begin();
        for (; number < shared.ring.tile().end; ++number) {
            loader.copy(number + AHEAD);
            scores.score(number);
            group_sync(scores.group);
            if (number > shared.ring.tile().first_keys) sums.mix(number - 1);
            scores.attend(number, shared.unsafe);
            loader.wait();
            if (__syncthreads_or(scores.must_raise())) {
                scores.write_step_tops(number);
                __syncthreads();
                scores.raise(number, shared.unsafe);
                __syncthreads();
                sums.multiply_by_factor();
            }
        }
        loader.copy(number + AHEAD);  // before the next tile's first step
        sums.mix(number - 1);
        scores.end(number - 1);
        int tile = shared.ring.tile().tile;
        __syncthreads();
        if (threadIdx.x == 0) ++shared.ring.current;
        sums.finish(tile);
        __syncthreads();
        sums.store(tile);
    }
}
