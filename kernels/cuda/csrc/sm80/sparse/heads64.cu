// Sparse MLA of more than 32 heads on every device since sm_80: paged caches of all fast formats and gathered rows.
//
// Grid: one CTA per work range (common/sparse/work.cuh), one per SM at a time.
// Block: 384 threads: eight warps of sums, which also copy, and four of scores.
// Shared memory: SHARED_BYTES, dynamic: the ring of rows, two slots of P, a part of Q, softmax state.
// Limits: 64 heads a tile, float16's range, see below.
//
// Keys are processed KEYS at a time, a *step*:
//
//     list     find the rows of later steps                                   scores   sm80/sparse/heads64_steps.cuh
//     copy     rows to a ring of stages, by cp.async                          sums     sm80/sparse/heads64_rows.cuh
//     score    S = Q K^T of 16 heads per warp, Q in registers                 scores   sm80/sparse/heads64_scores.cuh
//     softmax  P = 2^(S - top), where `top` is the maximum as of some step    scores
//     add      O += P V: 64 of the 512 values per warp, for all heads         sums
//
// Scores run up to LEAD steps ahead of the sums, so that each scheduler has a warp of scores and two of sums with
// different work. A score that exceeds `top` by more than LAZY raises it, and the sums are rescaled before that step.
//
// P and V are multiplied as float16, which is more exact than bfloat16 except for very large and small values. A tile that leaves
// float16's range, or has a score or a result that is not finite, is flagged for the epilogue kernel (UNSAFE_BITS).
//
// Macros: LAYOUT, EXTRA_LAYOUT, KEYS, STAGES (3 or 4) and Q_REGISTERS (of a thread that hold queries), see kernels/cuda/sparse/portable.py.
#include "sm80/sparse/heads64_rows.cuh"
#include "sm80/sparse/heads64_scores.cuh"

constexpr int M_TILES = HEADS / 16;

struct Sums {
    const SparseProblem& problem;
    Heads64Shared& shared;
    float o[M_TILES][VALUES / 8][4];

    __device__ Sums(const SparseProblem& p, Heads64Shared& s) : problem(p), shared(s) {}

    __device__ void begin() {
#pragma unroll
        for (int i = 0; i < M_TILES * VALUES / 2; ++i) (&o[0][0][0])[i] = 0.0f;
    }

    // Rescale the sums of heads whose `top` this step has raised.
    __device__ void rescale(uint32 number) {
        int slot = number % WEIGHED_SLOTS;
        uint32 raised = *reinterpret_cast<const uint32*>(shared.raised[slot]);
        if (raised == 0) return;
        rescale_sums(o, raised, shared.factor[slot], sum_thread() % 32 / 4);
    }

    // O += P V of a step, V in float16 or bfloat16. Returns whether a bfloat16 value is not zero.
    template <bool FLOAT16> __device__ bool add_products(uint32 number) {
        uint32 seen = 0;
        int thread = sum_thread(), at = thread % 16, half = thread % 32 / 16;
        const uint8* p = shared.p[number % WEIGHED_SLOTS][at] + 16 * half;
        uint32 v = shared_address(shared.ring.rows[number % STAGES][at]) + PLACE * (thread / 32) + place_in_row(at, 16 * half);
#pragma unroll(FLOAT16 || LAYOUT::quantized_dim == 0 ? KEYS / 16 : 1)
        for (int k = 0; k < KEYS / 16; ++k) {
            uint32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) load_matrices(a[m], p + 16 * m * P_STRIDE + 32 * k);
#pragma unroll
            for (int j = 0; j < VALUES / 16; ++j) {
                uint32 b[4];
                load_transposed(b, (v ^ 32 * j) + 16 * k * ROW_STRIDE);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!FLOAT16) seen |= b[i], b[i] = bf16x2_to_f16x2(b[i]);
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    multiply_add(f16{}, o[m][2 * j], a[m], b[0], b[1]);
                    multiply_add(f16{}, o[m][2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
        return seen & 0x7fff7fff;
    }

    // Partial results of a split tile.
    __device__ void store_partial(const RangeTile& of) {
        int thread = sum_thread(), g = thread % 32 / 4, c = thread % 4;
        int first = partial_at(g, VALUES * (thread / 32)) + c / 2 * PLANE;  // other values are at the distances of partial_at
        float* partial =
            problem.partial_out + int64(partial_slot(blockIdx.x, of.work.first == 0)) * (HEADS * V_DIM) + 4 * first + c % 2 * 2;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int j = 0; j < VALUES / 8; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float* to = partial + 4 * partial_at(16 * m + 8 * r, 8 * j);
                    *reinterpret_cast<float2*>(to) = float2{o[m][j][2 * r], o[m][j][2 * r + 1]};
                }
    }

    // Results of a whole tile, 16 bytes a lane.
    __device__ void store_whole(const RangeTile& of) {
        int thread = sum_thread(), g = thread % 32 / 4, c = thread % 4;
        bf16* out = of.out + g * problem.out_stride_h + VALUES * (thread / 32) + 8 * c;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                bool here = 16 * m + 8 * r + g < of.heads;
#pragma unroll
                for (int j = 0; j < VALUES / 8; j += 4) {
                    uint32 words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) words[i] = pack(bf16{}, o[m][j + i][2 * r], o[m][j + i][2 * r + 1]);
                    transpose_quad(words, c);
                    if (here) *reinterpret_cast<uint4*>(out + 8 * j) = uint4{words[0], words[1], words[2], words[3]};
                }
                out += 8 * problem.out_stride_h;
            }
    }

    // Store a tile that the scores have finished.
    __device__ void store(int place, RowLoader& loader) {
        int thread = sum_thread(), lane = thread % 32, warp = thread / 32, parity = place % 2;
        const RangeTile& of = shared.ring.tile(place);
        __syncwarp();
        bool bad = too_small(o, shared.inv_sum[parity], shared.ring.has_value[parity][warp]) || shared.ring.is_unsafe[parity][warp];
        multiply_rows(o, shared.result_factor[parity]);
        if (lane < SCORE_WARPS) bad |= shared.unsafe[parity][lane] != 0;
        float check = 0.0f;  // NaN if a value is not finite
#pragma unroll
        for (int i = 0; i < M_TILES * VALUES / 2; ++i) check = fmaf((&o[0][0][0])[i], 0.0f, check);
        if (of.work.whole()) store_whole(of);
        else store_partial(of);
        bad |= check != 0.0f;
        if (bad) leave_to_exact_kernel(problem, of.work.tile);
        loader.forget(parity);
    }

    __device__ void run() {
        __syncthreads();
        RowLoader loader(shared.ring);
        for (int i = 0; i < AHEAD; ++i) loader.copy(i);
        copies_wait<AHEAD - LEAD>();
        __syncthreads();
        for (int i = 0; i < LEAD; ++i) shared.ring.barriers.arrive_arrived(i);
        for (uint32 number = 0;; ++number) {
            bool end = shared.ring.step(number).kind() == NONE, weighed = false;
            if (!end) {
                loader.copy(number + AHEAD);
                weighed = shared.ring.barriers.is_weighed(number);
                loader.publish(number + LEAD);
            }
            bool has_keys = shared.ring.step(number).has_keys();
            // A tile is stored after the copies of the next tile's queries and first keys have started, so that scores
            // do not wait for it.
            if (end || (has_keys && shared.ring.step(number - 1).kind() == QUERIES)) {
                if (number > Q_STEPS) store(shared.ring.step(number).place_before(), loader);
                if (end) return;
                begin();
            }
            if (!weighed) shared.ring.barriers.wait_weighed(number);
            if (has_keys) {
                rescale(number);
                if (LAYOUT::quantized_dim && VALUES * (sum_thread() / 32) < LAYOUT::quantized_dim) add_products<true>(number);
                else if (LAYOUT::quantized_dim < V_DIM && add_products<false>(number))
                    loader.find(shared.ring.step(number).parity(), true, false);
            }
            asm volatile("" : "+r"(number));  // its remainders are recomputed, so that they take no registers during the products
            shared.ring.barriers.arrive_summed(number);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_mla_mma_64(const __grid_constant__ SparseProblem problem) {
    extern __shared__ uint8 memory[];
    pdl_wait();
    Heads64Shared& shared = *reinterpret_cast<Heads64Shared*>(memory);
    if (threadIdx.x < 32) shared.ring.list_first(problem);
    __syncthreads();
    if (threadIdx.x < SUMS_FROM) Scores(problem, shared).run();
    else Sums(problem, shared).run();
}
