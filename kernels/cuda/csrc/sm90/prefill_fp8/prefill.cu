// Sparse MLA prefill over gathered e4m3 rows, on Hopper (sm_90a): out = softmax(scale Q K^T) V with an optional sink, the LSE and
// max_logits. Q is bfloat16, and converted here; products are of e4m3 values.
//
// A *tile* is 64 heads of a query token (work.cuh); its keys are processed 64 at a time, a *block*. Row k has a scale
// 2^e_k (prefill_fp8_rows.cu), and each row of Q its own scale. Scores are S = scale_h 2^e_k Q8 K8^T. An FP8 product sums
// over keys, so the weights contain the scale of V: P = exp2(S + e_k - reference), rounded to e4m3. The softmax divides
// by the sum of the unrounded P 2^-e_k.
//
// Grid: persistent, at most one CTA per SM; CTA i processes tiles i, i + gridDim.x, ...
// Block: 512 threads.
//
//     warps    role         registers  work
//     0..3     consumer 0   208        S and softmax of every other block; values 0..255 of the result, of all blocks
//     4..7     consumer 1   208        the same for the other blocks; values 256..511
//     8, 9     copiers      48         half of each block's rows
//     10, 11   converters   48         the next tile's Q
//     12..15   transposers  48         V^T: half of the keys, for one of the consumers
//
//     shared memory, KiB
//     barriers, scales, softmax state    6
//     Q, 2 tiles                        64
//     K, 3 blocks                       96
//     V^T, 3 halves of a block          48
//     weights, 2 blocks                  8
//     in all                           222
//
// A consumer scores its own block first, and then adds the other consumer's block, for which it needs the reference of
// that block. So the softmax of one consumer overlaps the products of the other consumer.
//
// Limits: one list of keys; 512 values a row. A tile is flagged by UNSAFE_BITS (work.cuh) for the exact kernel if a score, a sum or a
// result is not finite (which NaN scales ensure for rows and queries out of range), or if its highest score exceeds MAX_PRECISE_SCORE.
//
// Macros: LAYOUT (DSV4_BF16, the format of rows that are recomputed).
#include "sm90/prefill_fp8/producer.cuh"
#include "sm90/prefill_fp8/queries.cuh"
#include "sm90/prefill_fp8/consumer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sparse_mla_prefill_fp8(const __grid_constant__ SparseProblem problem, const uint32* row_scales) {  // pages of `problem`: e4m3 rows
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != SHARED_START) __trap();
    if (threadIdx.x == 0) {
        for (int i = 0; i < K_SLOTS; ++i) landed.init(i, 32 * COPIERS), k_free.init(i, (4 + TRANSPOSERS) * WARP_ARRIVALS);
        for (int i = 0; i < 2 * VALUE_SLOTS; ++i)
            values_ready.init(i, TRANSPOSERS / 2 * WARP_ARRIVALS), values_free.init(i, 4 * WARP_ARRIVALS);
        for (int i = 0; i < 2; ++i) {
            q_ready.init(i, CONVERTERS * WARP_ARRIVALS), q_free.init(i, 8 * WARP_ARRIVALS);
            weights_ready.init(i, 4 * WARP_ARRIVALS);
        }
        for (int i = 0; i < 4; ++i) totals_ready.init(i, 4 * WARP_ARRIVALS);
        fence_barrier_init();
    }
    pdl_wait();
    TileWalk first(problem);
    if (first.more()) convert_first_q(problem, first.tile);
    fence_proxy_async();
    __syncthreads();
    int group = threadIdx.x / 128;  // consumers come first
    if (group >= 2) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        int warp = uniform(threadIdx.x / 32 - 8), lane = threadIdx.x % 32;
        if (warp < COPIERS) Copier{problem, row_scales, warp, lane}.run();
        else if (warp < COPIERS + CONVERTERS) Converter{problem, warp - COPIERS, lane}.run();
        else Transposer{problem, (warp - COPIERS - CONVERTERS) / 2, warp % 2, lane}.run();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        if (group == 0) Consumer<0>(problem).run();
        else Consumer<1>(problem).run();
    }
}
