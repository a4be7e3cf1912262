// Sparse MLA prefill on every device since sm_80: whole tiles of 64 heads over gathered rows of 16-bit values.
//
// Grid: one CTA per work range (common/sparse/work.cuh), one per SM at a time.
// Block: 384 threads: eight warps of sums, which also copy, and four of scores.
// Shared memory: SHARED_BYTES, dynamic: the ring of rows, two slots of P, a part of Q, softmax state.
// Limits: 64 heads a tile, float16's range, see below.
//
// Keys are processed KEYS at a time, a *step*:
//
//     copy     rows to a ring of stages, by cp.async                          sums     sm80/sparse/prefill_rows.cuh
//     score    S = Q K^T of 16 heads per warp, Q in registers                 scores   sm80/sparse/prefill_scores.cuh
//     weigh    P = 2^(S - top), where `top` is the maximum as of some step    scores
//     mix      O += P V: 64 of the 512 values per warp, for all heads         sums
//
// Scores run up to LEAD steps ahead of the sums, so that each scheduler has a warp of scores and two of sums with different work. A score that
// exceeds `top` by more than LAZY raises it, and the sums are rescaled before that step.
//
// P and V are multiplied as float16, which is more exact than bfloat16 except for very large and small values. A tile that leaves
// float16's range, or has a score or a result that is not finite, is flagged for the epilogue kernel (UNSAFE_BITS).
//
// Macros: LAYOUT, KEYS, STAGES (3 or more) and Q_REGISTERS (of a thread that hold queries), see kernels/cuda/sparse/portable.py.
#include "sm80/sparse/prefill_scores.cuh"

constexpr int M_TILES = HEADS / 16, VALUES = V_DIM / SUM_WARPS;

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

struct Sums {
    const SparseProblem& problem;
    PrefillShared& shared;
    float o[M_TILES][VALUES / 8][4];
    uint32 seen;  // non-zero after a non-zero V

    __device__ Sums(const SparseProblem& p, PrefillShared& s) : problem(p), shared(s) {}

    __device__ void begin() {
        seen = 0;
#pragma unroll
        for (int i = 0; i < M_TILES * VALUES / 2; ++i) (&o[0][0][0])[i] = 0.0f;
    }

    // Rescale the sums of heads whose `top` this step has raised.
    __device__ void rescale(int number) {
        int slot = number % WEIGHED_SLOTS;
        uint32 raised = *reinterpret_cast<const uint32*>(shared.raised[slot]);
        if (raised == 0) return;
        int g = thread_index() % 32 / 4;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            if (!(raised >> 8 * m & 1)) continue;
            float low = shared.factor[slot][16 * m + g], high = shared.factor[slot][16 * m + 8 + g];
#pragma unroll
            for (int j = 0; j < VALUES / 8; ++j) o[m][j][0] *= low, o[m][j][1] *= low, o[m][j][2] *= high, o[m][j][3] *= high;
        }
    }

    // O += P V of a step.
    __device__ void mix(int number) {
        int thread = thread_index(), at = thread % 16, half = thread % 32 / 16;
        const uint8* p = shared.p[number % WEIGHED_SLOTS][at] + 16 * half;
        const uint8* v = shared.ring.rows[number % STAGES][at] + 2 * VALUES * (thread / 32) + 16 * half;
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            uint32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) load_matrices(a[m], p + 16 * m * P_STRIDE + 32 * k);
#pragma unroll
            for (int j = 0; j < VALUES / 16; ++j) {
                uint32 b[4];
                load_transposed(b, v + 16 * k * ROW_STRIDE + 32 * j);
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

    // Results, 16 bytes a lane. After the scores have finished the tile.
    __device__ void store(int tile) {
        int thread = thread_index(), lane = thread % 32, g = lane / 4, c = lane % 4;
        bool bad = too_small(o, shared.inv_sum, seen);
        multiply_rows(o, shared.result_factor);
        TileCoord at(problem, tile);
        bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + VALUES * (thread / 32) + 8 * c;
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
        if (lane < SCORE_WARPS) bad |= shared.unsafe[lane] != 0;
        if (bad || check != 0.0f) leave_to_exact_kernel(problem, tile);
    }

    __device__ void run() {
        RowLoader loader(problem, shared.ring);
        for (int number = 0; loader.tile().tile >= 0; loader.next_tile()) {
            loader.list_ahead();
            begin();
            for (; number < loader.tile().end; ++number) {
                loader.advance(number);
                barrier_sync<THREADS>(WEIGHED + number % WEIGHED_SLOTS);
                if (number >= loader.tile().first_keys) {
                    rescale(number);
                    mix(number);
                }
                barrier_arrive<THREADS>(SUMMED + number % WEIGHED_SLOTS);
            }
            store(loader.tile().tile);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_mla_prefill_mma(const __grid_constant__ SparseProblem problem) {
    extern __shared__ uint8 memory[];
    pdl_wait();
    PrefillShared& shared = *reinterpret_cast<PrefillShared*>(memory);
    if (threadIdx.x == 0) RowLoader::list_first(problem, shared.ring);
    __syncthreads();
    if (threadIdx.x < 32 * SUM_WARPS) Sums(problem, shared).run();
    else Scores(problem, shared).run();
}
