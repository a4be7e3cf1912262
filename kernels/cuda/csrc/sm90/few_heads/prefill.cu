// Sparse MLA prefill over gathered bfloat16 rows for 32 heads or fewer, on Hopper (sm_90a).
//
// Products of warpgroups have 64 rows whatever is in them, so these are transposed: rows are keys or values, columns the heads.
// A tile is HEADS heads of a query token (work.cuh); keys go 64 at a time, a *block*. A thread block does every so many-th
// tile, one after another, and what binds it is bringing rows: they are copied into a ring of nearly all shared memory that goes
// on across tiles. Three warpgroups:
//
//     scores       S^T = K Q^T and the softmax; P^T in bfloat16; the next tile's Q
//     values       O^T = V^T P^T, a block behind; results
//     producers    copy rows
//
// A tile of which a score, a sum or a result is not finite, or the highest score beyond MAX_PRECISE_SCORE, is marked by
// UNSAFE_BITS (work.cuh) for the exact kernel.
//
// Macros: LAYOUT (DSV4_BF16 or MLA_BF16: 512 or 576 values a row), TILE_HEADS (16 or 32).
#include "sm90/few_heads/producer.cuh"
#include "sm90/few_heads/scores.cuh"
#include "sm90/few_heads/values.cuh"

// The map of q lies at a multiple of 64, as parameters begin 16 bytes behind one and SparseProblem has 368.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_prefill_few_heads(const __grid_constant__ SparseProblem problem, const __grid_constant__ TensorMap q_map) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != READY || reinterpret_cast<uint64>(&q_map) % 64) __trap();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(q_map);
        for (int i = 0; i < SLOTS; ++i) barrier_init(READY + 8 * i, PRODUCERS * WARP_ARRIVALS), barrier_init(FREE + 8 * i, 4 * WARP_ARRIVALS);
        for (int i = 0; i < ROPES; ++i) barrier_init(ROPE_FREE + 8 * i, 4 * WARP_ARRIVALS);
        barrier_init(Q_READY, 1);
        for (int i = 0; i < 2; ++i) {
            barrier_init(WEIGHTS_READY + 8 * i, 4 * WARP_ARRIVALS), barrier_init(WEIGHTS_FREE + 8 * i, 4 * WARP_ARRIVALS);
            barrier_init(TOTALS_READY + 8 * i, 4 * WARP_ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    int role = threadIdx.x / 128;
    if (role == 0) {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        Scores(problem, q_map).run();
    } else if (role == 1) {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        Values(problem).run();
    } else {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        Producer(problem).run();
    }
}
