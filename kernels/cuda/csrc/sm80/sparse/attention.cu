// Sparse MLA on every device since sm_80: paged FP8 caches and bfloat16 rows, decode and prefill.
//
// Grid: one CTA per work range (common/sparse/work.cuh), CTAS per SM.
// Block: 256 threads. Warps have no roles: all do each part of a step, below.
// Shared memory: SHARED_BYTES, dynamic: the ring of rows, Q, two slots of P, softmax state (sm80/sparse/scores.cuh).
// Limits: TILE_HEADS and KEYS are multiples of 16; float16's range, see below.
//
// Keys are processed KEYS at a time, a *step*:
//
//     gather    copy raw rows of a later step into a ring of stages                            sm80/sparse/rows.cuh
//     add       O += P V of the previous step: 64 of the 512 values per warp, for all heads
//     score     S = Q K^T: some of the heads and of the keys per warp                          sm80/sparse/scores.cuh
//     softmax   P = 2^(S - top), where `top` is the rows' maximum as of an earlier step
//
// with one barrier per step. Only if a score exceeds `top` by more than LAZY, as in the first step of a tile, the
// maxima are computed, P is recomputed and O rescaled, which takes two more barriers.
//
// K and V are converted in registers from the raw rows. e4m3 becomes float16: the scales are applied to the float32
// products of the scores; V is multiplied by its scale in float16. bfloat16 values enter the scores unchanged, and the
// sums as float16, which is exact except for very large and small values. V4.1's rows, FP8 and FP4, become e4m3 in the
// ring, and bfloat16 times their scale for the scores (FINE_SCALES of sm80/sparse/rows.cuh).
//
// The range of float16 is narrower than the range of caches and queries. A tile outside it, or with a score or a result
// that is not finite, is flagged in `unsafe` for the epilogue kernel, which the launcher runs after this one.
//
// Macros: LAYOUT, EXTRA_LAYOUT, TILE_HEADS (common/sparse/work.cuh), KEYS, STAGES (3 or more) and CTAS, see
// kernels/cuda/sparse/portable.py.
#include "sm80/sparse/scores.cuh"
#include "sm80/sparse/results.cuh"

constexpr int VALUES = V_DIM / WARPS;
static_assert(VALUES == SLICE, "a warp adds one slice");

struct Sums {
    const SparseProblem& problem;
    SparseShared& shared;
    int warp, lane, g, c;
    float o[M_TILES][VALUES / 8][4];
    uint32 seen;  // non-zero after a non-zero V

    __device__ Sums(const SparseProblem& p, SparseShared& s) : problem(p), shared(s) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    }

    __device__ void begin() {
        seen = 0;
#pragma unroll
        for (int i = 0; i < M_TILES * VALUES / 2; ++i) (&o[0][0][0])[i] = 0.0f;
    }

    // Operands b of this warp's values and 8 of 16 keys, two of them at columns 2 c and + 1 from `column` on: column g of
    // product j is value 8 g + j.
    template <bool FP8> __device__ void load_v(uint32 (&b)[VALUES / 8], int stage, int column) {
        const uint8* one = shared.ring.rows[stage][token_of_column(column + 2 * c)];
        const uint8* other = shared.ring.rows[stage][token_of_column(column + 2 * c + 1)];
        if (FP8) {
            int at = SLICE * warp + 8 * g;
            uint2 v = *reinterpret_cast<const uint2*>(one + at), w = *reinterpret_cast<const uint2*>(other + at);
            int scale = FINE_SCALES ? at / FACTOR_TILE : warp / SLICES_PER_SCALE;
            float2 by = shared.ring.scales_at(stage, scale, column + 2 * c);
            uint32 factors = pack(f16{}, by.x, by.y);
            seen |= (v.x | v.y | w.x | w.y) & 0x7f7f7f7f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32 pairs = __byte_perm(i < 2 ? v.x : v.y, i < 2 ? w.x : w.y, i % 2 ? 0x7362 : 0x5140);
                codes_to_f16(pairs, b[2 * i], b[2 * i + 1]);
                b[2 * i] = multiply(b[2 * i], factors), b[2 * i + 1] = multiply(b[2 * i + 1], factors);
            }
        } else {
            int at = BF16_AT + 2 * SLICE * (warp - FP8_SLICES) + 16 * g;
            uint4 v = *reinterpret_cast<const uint4*>(one + at), w = *reinterpret_cast<const uint4*>(other + at);
            uint32 first[4] = {v.x, v.y, v.z, v.w}, second[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                seen |= (first[i] | second[i]) & 0x7fff7fff;
                b[2 * i] = bf16x2_to_f16x2(__byte_perm(first[i], second[i], 0x5410));
                b[2 * i + 1] = bf16x2_to_f16x2(__byte_perm(first[i], second[i], 0x7632));
            }
        }
    }

    template <bool FP8> __device__ void add_products_of_slice(int number) {
#pragma unroll
        for (int column = 0; column < KEYS; column += 16) {
            uint32 low[VALUES / 8], high[VALUES / 8];
            load_v<FP8>(low, number % STAGES, column);
            load_v<FP8>(high, number % STAGES, column + 8);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                uint32 a[4];
                load_matrices(a, shared.p[number % 2][16 * m + lane % 16] + 2 * column + lane / 16 * 16);
#pragma unroll
                for (int j = 0; j < VALUES / 8; ++j) mma(f16{}, o[m][j], a, {low[j], high[j]});
            }
        }
    }

    // O += P V of a step.
    __device__ void add_products(int number) {
        if (warp < FP8_SLICES) add_products_of_slice<(FP8_SLICES > 0)>(number);
        else add_products_of_slice<FP8_SLICES == V_DIM / SLICE>(number);
    }

    __device__ void multiply_by_factor() { multiply_rows(o, shared.factor); }

    // Write the LSE and the factor of O, one thread per head. Called after Scores::end and a barrier.
    __device__ void finish(const Step& step) {
        int row = threadIdx.x;
        if (row >= HEADS) return;
        float sum = 0.0f, most = -infinity();
#pragma unroll
        for (int i = 0; i < WARPS_N; ++i) sum += shared.total[i][row], most = fmaxf(most, shared.highest[i][row]);
        RowResult result(shared.top[row], sum);
        TileCoord at(problem, step.tile);
        int head = at.first_head + row;
        float factor = result.inv_sum;
        if (!step.whole) {
            problem.partial_lse[partial_slot(blockIdx.x, step.from_start) * HEADS + row] = result.lse2;
        } else if (head < problem.heads) {
            factor = result.write(problem, at, head);
            if (MAX_LOGITS && problem.max_logits)
                problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h] = most * LN_2;
        }
        shared.top[row] = result.inv_sum;
        shared.factor[row] = factor;
    }

    // Write the results: each lane values 16 c .. 16 c + 15 of its warp's 64, for heads g and g + 8 of each 16. Called
    // after a barrier.
    __device__ void store(const Step& step) {
        bool bad = too_small(o, shared.top, seen);
        multiply_by_factor();
        TileCoord at(problem, step.tile);
        int value = VALUES * warp + 16 * c;
        bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + value;
        float4* partial =
            reinterpret_cast<float4*>(problem.partial_out) + int64(partial_slot(blockIdx.x, step.from_start)) * (HEADS * V_DIM / 4);
        float check = 0.0f;  // NaN if a value is not finite
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = 16 * m + 8 * r + g, head = at.first_head + row;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float v[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) v[j] = o[m][j][2 * r + e], check = fmaf(v[j], 0.0f, check);
                    if (!step.whole) {
                        float4* to = partial + partial_at(row, value + 8 * e);
                        to[0] = make_float4(v[0], v[1], v[2], v[3]), to[PLANE] = make_float4(v[4], v[5], v[6], v[7]);
                    } else if (head < problem.heads) {
                        *reinterpret_cast<uint4*>(out + head * problem.out_stride_h + 8 * e) =
                            uint4{pack(bf16{}, v[0], v[1]), pack(bf16{}, v[2], v[3]), pack(bf16{}, v[4], v[5]), pack(bf16{}, v[6], v[7])};
                    }
                }
            }
        if (threadIdx.x == 0) {
            int& unsafe = shared.ring.unsafe[step.tile % 2];
            bad |= unsafe != 0, unsafe = 0;
        }
        if (bad || check != 0.0f) leave_to_exact_kernel(problem, step.tile);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) sparse_mla_mma(const __grid_constant__ SparseProblem problem) {
    extern __shared__ uint8 memory[];
    pdl_wait();
    SparseShared& shared = *reinterpret_cast<SparseShared*>(memory);
    RowLoader loader(problem, shared.ring);
    int number = 0;  // of the step to score next
    int tile = loader.step(0).tile;
    if (tile < 0) return;
    Scores scores(problem, shared);
    Sums sums(problem, shared);
    scores.copy_q(tile);
    for (; tile >= 0; tile = loader.step(number).tile) {
        copies_wait<0>();
        scores.convert_q(tile);
        __syncthreads();
        scores.begin();
        sums.begin();
        for (bool first = true;; first = false) {
            bool done = !first && loader.step(number - 1).last;
            if (!done) loader.copy(number + AHEAD);
            else if (loader.step(number).tile >= 0) scores.copy_q(loader.step(number).tile);
            if (!first) sums.add_products(number - 1);
            if (done) break;
            scores.attend(number, tile);
            copies_wait<AHEAD - 1>();
            loader.publish(number + 1);
            if (__syncthreads_or(scores.must_raise())) {
                scores.write_step_tops();
                __syncthreads();
                scores.raise(number);
                __syncthreads();
                sums.multiply_by_factor();
            }
            scores.add_step();
            ++number;
        }
        scores.end();
        __syncthreads();
        sums.finish(loader.step(number - 1));
        __syncthreads();
        sums.store(loader.step(number - 1));
    }
}
