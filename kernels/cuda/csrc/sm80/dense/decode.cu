// Decode over a paged cache of dense MLA rows, with mma.sync (sm_80 and later): out = softmax(scale Q K^T) V, and the
// LSE. Query tokens whose keys are divided among CTAs give partial results for common/dense_decode_merge.cu.
//
// Grid: (ranges * groups of 64 heads): the blocks of all query tokens are divided evenly among `ranges` CTAs of each
// group, for any lengths (common/dense/work.cuh describes `division`). A CTA processes its tokens one after another.
// Block: 384 threads: eight warps of sums, which also copy, and four of scores. Shared memory: SHARED_BYTES, dynamic:
// the ring of rows, two slots of P, a part of Q, softmax state.
//
// Keys are processed KEYS at a time, a *step*:
//
//     copy     rows to a ring of stages, by cp.async                          sums     rows.cuh
//     score    S = Q K^T of 16 heads per warp, Q in registers                 scores   scores.cuh
//     softmax  P = 2^(S - top), where `top` is the maximum as of some step    scores
//     add      O += P V: 64 of the 512 values per warp, for all heads         sums
//
// Scores run up to LEAD steps ahead of the sums, so that each scheduler has a warp of scores and two of sums with
// different work. A score that exceeds `top` by more than LAZY raises it, and the sums are rescaled before that step.
//
// Rows of e4m3 are expanded in the ring, which is exact; their scale multiplies the softmax scale and the result.
//
// Macros: VALUE (bf16 or f16), CACHE (VALUE or e4m3), ALIGNED (rows, pages, q and out are at multiples of 16 bytes),
// WHOLE_STEPS (1 if a page has whole steps), KEYS, STAGES and Q_REGISTERS (of a thread that hold queries), see
// kernels/cuda/dense_attention.py.
#include "sm80/dense/scores.cuh"

constexpr int M_TILES = HEADS / 16;

struct Sums {
    const DecodeProblem& problem;
    DenseShared& shared;
    float o[M_TILES][VALUES / 8][4];

    __device__ Sums(const DecodeProblem& p, DenseShared& s) : problem(p), shared(s) {}

    __device__ void begin() {
#pragma unroll
        for (int i = 0; i < M_TILES * VALUES / 2; ++i) (&o[0][0][0])[i] = 0.0f;
    }

    // Rescale the sums of heads whose `top` this step has raised.
    __device__ void rescale(int number) {
        int slot = number % WEIGHED_SLOTS;
        uint32 raised = *reinterpret_cast<const uint32*>(shared.raised[slot]);
        if (raised == 0) return;
        rescale_sums(o, raised, shared.factor[slot], thread_index() % 32 / 4);
    }

    // O += P V of a step.
    __device__ void add_products(int number) {
        int thread = thread_index(), at = thread % 16, half = thread % 32 / 16;
        const uint8* p = shared.p[number % WEIGHED_SLOTS][at] + 16 * half;
        const uint8* v = shared.ring.rows[number % STAGES][at] + PLACE * (thread / 32) + 16 * half;
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
                for (int m = 0; m < M_TILES; ++m) {
                    multiply_add(VALUE{}, o[m][2 * j], a[m], b[0], b[1]);
                    multiply_add(VALUE{}, o[m][2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Store sums times their factors, after the scores have finished the token.
    __device__ void store(const RingToken& of) {
        int thread = thread_index(), g = thread % 32 / 4, c = thread % 4, first = VALUES * (thread / 32);
        int query = of.token - of.request * problem.tokens.s_q;
        VALUE* out = problem.out + of.request * problem.out_stride_b + query * problem.out_stride_s + first + 8 * c;
        float* partial = problem.partial_out + int64(of.part) * problem.heads * LATENT_V + first + 2 * c;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = 16 * m + 8 * r + g, head = problem.first_head() + row;
                float factor = shared.result_factor[row];
                if (of.part >= 0) {
                    if (head >= problem.heads) continue;
#pragma unroll
                    for (int j = 0; j < VALUES / 8; ++j)
                        store_pair(partial + int64(head) * LATENT_V + 8 * j, o[m][j][2 * r] * factor, o[m][j][2 * r + 1] * factor);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < VALUES / 8; j += 4) {
                    uint32 words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) words[i] = pack(VALUE{}, o[m][j + i][2 * r] * factor, o[m][j + i][2 * r + 1] * factor);
                    transpose_quad(words, c);
                    if (head < problem.heads) store16(out + head * problem.out_stride_h + 8 * j, {words[0], words[1], words[2], words[3]});
                }
            }
    }

    __device__ void run() {
        RowLoader loader(problem, shared.ring);
        for (int number = 0; loader.token().token >= 0; ++loader.current) {
            begin();
            for (; number < loader.token().end; ++number) {
                loader.advance(number);
                shared.ring.barriers.wait_weighed(number);
                if (number >= loader.token().first_keys) {
                    rescale(number);
                    add_products(number);
                }
                asm volatile("" : "+r"(number));  // its remainders are recomputed, so that they take no registers during the products
                shared.ring.barriers.arrive_summed(number);
            }
            store(loader.token());
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_decode(const VALUE* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int s_q, int heads, const uint8* pages,
               int64 page_stride, int64 num_slots, int block_size, const int* block_table, int64 table_stride, int columns, int requests,
               const int* lens, int causal, int ranges, float softmax_scale, const float* scale, float scale_value, VALUE* out,
               int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b, int64 lse_stride_h,
               int64 lse_stride_s, float* partial_out, float* partial_lse, const uint4* division) {
    extern __shared__ uint4 memory[];
    DenseShared& shared = *reinterpret_cast<DenseShared*>(memory);
    pdl_wait();
    DenseTokens tokens{lens, s_q, requests * s_q, columns, block_size, causal};
    if (scale) scale_value = *scale;
    DecodeProblem problem{q,
                          q_stride_b,
                          q_stride_s,
                          q_stride_h,
                          heads,
                          {pages, page_stride, num_slots, block_size, {block_table, table_stride, requests, columns}},
                          tokens,
                          softmax_scale * scale_value * LOG2_E,
                          scale_value,
                          out,
                          out_stride_b,
                          out_stride_s,
                          out_stride_h,
                          lse,
                          lse_stride_b,
                          lse_stride_h,
                          lse_stride_s,
                          partial_out,
                          partial_lse};
    if (threadIdx.x == 0) {
        shared.ring.work = planned_work(division, tokens.count, ranges, problem.range());
        shared.ring.list(problem, 0), shared.ring.list(problem, 1);
        shared.ring.barriers.init();
    }
    __syncthreads();
    if (threadIdx.x < 32 * SUM_WARPS) Sums(problem, shared).run();
    else Scores(problem, shared).run();
}
