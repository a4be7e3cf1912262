// Sparse MLA prefill over gathered bfloat16 rows for few heads, on Hopper (sm_90a): out = softmax(scale Q K^T) V with an optional
// sink, the LSE and max_logits. Products are transposed, and rows are loaded by bulk copies.
//
// With few heads, loads of rows bound a CTA. Each row is copied unswizzled by one instruction, which slows products
// less than other copies. wgmma cannot read such rows from shared memory, so they pass through registers, and products
// are transposed: rows are keys or values, columns are heads. A *tile* is HEADS heads of a query token (work.cuh); its
// keys are processed 64 at a time, a *block*.
//
// Grid: persistent, at most one CTA per SM; CTA i processes tiles i, i + gridDim.x, ...
// Block: 512 threads.
//
//     warps    role       registers  work
//     0..3     scores     128        S^T = K Q^T and softmax, P^T in bfloat16; at a tile's end the factors 1/l
//     4..7     values 0   176        O^T = V^T P^T for values 0..255, one block after the scores; epilogue
//     8..11    values 1   176        the same for values 256..511
//     12..15   producers  32         four rows of every slot a warp, and a quarter of the next tile's Q
//
//     shared memory, KiB       512 values: 16, 32 heads   576 values: 16, 32 heads
//     barriers, softmax state  2          3               2          3
//     weights of 2 blocks      4          8               4          8
//     Q                        16         32              18         36
//     ring of slots: 16 rows   12 x 16.25 11 x 16.25      11 x 18.25 9 x 18.25
//     in all                   217        221.75          224.75     211.25
//
// Limits: one list of keys; q needs a tensor map; 512 values of V. A tile is flagged by UNSAFE_BITS (work.cuh), and
// recomputed before the CTA ends (sm90/flagged_tiles.cuh), if a score, a sum or a result is not finite, or if its highest score exceeds
// MAX_PRECISE_SCORE.
//
// Macros: LAYOUT (DSV4_BF16 or MLA_BF16: 512 or 576 values a row), TILE_HEADS (16 or 32).
#define EXACT_FIRST_THREAD 128  // the values
#include "sm90/flagged_tiles.cuh"
#include "sm90/few_heads/producer.cuh"
#include "sm90/few_heads/scores.cuh"
#include "sm90/few_heads/values.cuh"

static_assert(sizeof(UnitMemory) <= SLOTS * SLOT_BYTES);

// The address of the tensor map is a multiple of 64: parameters begin 16 bytes after a multiple of 64, and
// SparseProblem has 368 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sparse_mla_prefill_few_heads(const __grid_constant__ SparseProblem problem, const __grid_constant__ TensorMap q_map) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != SHARED_START || reinterpret_cast<uint64>(&q_map) % 64) __trap();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(q_map);
        for (int i = 0; i < SLOTS; ++i) rows_ready.init(i, PRODUCERS * WARP_ARRIVALS), rows_free.init(i, 8 * WARP_ARRIVALS);
        for (int i = 0; i < Q_PIECES; ++i) q_ready.init(i, WARP_ARRIVALS), q_free.init(i, 4 * WARP_ARRIVALS);
        for (int i = 0; i < WEIGHT_SLOTS; ++i) weights_ready.init(i, 4 * WARP_ARRIVALS), weights_free.init(i, 8 * WARP_ARRIVALS);
        for (int i = 0; i < 2; ++i) result_ready.init(i, 4 * WARP_ARRIVALS);
        sts32(FLAGGED, 0);
        fence_barrier_init();
    }
    __syncthreads();
    pdl_wait();
    pdl_release();  // no other CTA fits on the SM: CTAs of the next kernel start as these exit
    int role = threadIdx.x / 128;
    if (role == 0) {
        warpgroup_reg_dealloc<SCORES_REGISTERS>();  // no change, but it allows the compiler to use all of them
        Scores(problem).run();
    } else if (role == 3) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        Producer(problem, q_map).run();
    } else {
        warpgroup_reg_alloc<VALUES_REGISTERS>();
        Values(problem, role - 1).run();
        recompute_flagged_tiles(problem, FLAGGED, reinterpret_cast<uint8*>(memory) + (RING_AT - SHARED_START));
    }
}
