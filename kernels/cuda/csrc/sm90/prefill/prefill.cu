// Sparse MLA prefill over gathered bfloat16 rows, on Hopper (sm_90a): out = softmax(scale Q K^T) V with an optional sink, the
// LSE and max_logits.
//
// A *tile* is 64 heads of a query token (work.cuh); its keys are processed 64 at a time, a *block*.
//
// Grid: persistent, at most one CTA per SM; CTA i processes tiles i, i + gridDim.x, ... A tile's Q and first keys are loaded
// while the last blocks of the previous tile are added up.
// Block: 384 threads.
//
//     warps    role        registers  work
//     0..3     consumer 0  216        S = Q K^T and softmax of every other block; values 0..255 of the result, of all blocks
//     4..7     consumer 1  216        the same for the other blocks; values 256..511
//     8..11    producers   72         copy rows into two buffers alternately, piece by piece, a quarter of the rows a warp; Q
//
//     shared memory             DSV4_BF16  MLA_BF16
//     barriers, softmax state   3 KiB      3 KiB
//     Q                         64 KiB     72 KiB
//     K, 2 buffers              128 KiB    144 KiB
//     weights of one block      8 KiB      8 KiB
//     in all                    203 KiB    227 KiB
//
// A consumer reads its own weights from registers, and the other consumer's weights from shared memory. Both consumers
// add the blocks in order and continue from the same running maximum. A *piece* of a buffer is refilled as soon as its
// products have ended (sm90/prefill/memory.cuh). Weights are bfloat16, like the rows.
//
// Limits: one list of keys; 512 values of V. A tile is flagged by UNSAFE_BITS (work.cuh), and recomputed before the CTA ends
// (sm90/flagged_tiles.cuh), if a score, a sum or a result is not finite, or if its highest score exceeds MAX_PRECISE_SCORE.
//
// Macros: LAYOUT (DSV4_BF16 or MLA_BF16: 512 or 576 values a row); TRACE (sm90/prefill/trace.cuh).
#include "sm90/prefill/producer.cuh"
#include "sm90/prefill/consumer.cuh"
#include "sm90/flagged_tiles.cuh"

static_assert(sizeof(UnitMemory) <= sizeof(SharedMemory::q));

// A tensor map with a null address means that q has no map. The address of the map is a multiple of 64: parameters
// begin 16 bytes after a multiple of 64, and SparseProblem has 368 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sparse_mla_prefill(const __grid_constant__ SparseProblem problem, const __grid_constant__ TensorMap q_map) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != SHARED_START || reinterpret_cast<uint64>(&q_map) % 64) __trap();
    if (threadIdx.x == 0 && q_map.start) prefetch_tensor_map(q_map);
    int group = threadIdx.x / 128;  // consumers come first
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * PIECES; ++i) k_ready.init(i, PRODUCERS * WARP_ARRIVALS), k_free.init(i, 4 * WARP_ARRIVALS);
        for (int i = 0; i < PIECES; ++i)
            q_ready.init(i, q_map.start ? WARP_ARRIVALS : PRODUCERS * WARP_ARRIVALS), q_free.init(i, 8 * WARP_ARRIVALS);
        for (int i = 0; i < 2; ++i) weights_ready.init(i, 4 * WARP_ARRIVALS);
        sts32(FLAGGED, 0);
        for (int i = 0; i < 4; ++i) totals_ready.init(i, 4 * WARP_ARRIVALS);
        fence_barrier_init();
    }
    __syncthreads();
    pdl_wait();
    pdl_release();  // no other CTA fits on the SM: CTAs of the next kernel start as these exit
    if (group >= 2) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        Producer(problem, q_map).run();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        if (group == 0) Consumer<0>(problem).run();
        else Consumer<1>(problem).run();
        // Measured: the function call is 1% faster with 512 values and 1.5% slower with 576.
        if (HAS_ROPE) recompute_flagged_tiles(problem, FLAGGED, reinterpret_cast<SharedMemory*>(memory)->q);
        else call_recompute_flagged_tiles(problem, FLAGGED, reinterpret_cast<SharedMemory*>(memory)->q);
    }
}
