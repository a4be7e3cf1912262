// Sparse MLA prefill over gathered bfloat16 rows for few heads, on Hopper (sm_90a): products transposed, rows by bulk copies.
//
// Few heads leave a thread block to wait for rows, which are copied as they lie, by one instruction each: that disturbs
// products less than other copies do. Rows are no operands of products then, so they go through registers, and products are
// transposed: rows are keys or values, columns heads. A tile is HEADS heads of a query token (work.cuh); keys go 64 at a time, a
// *block*. A thread block does every so many-th tile, one after another. Four warpgroups:
//
//     scores       S^T = K Q^T and the softmax, P^T in bfloat16; at a tile's end what makes sums results
//     values 0, 1  O^T = V^T P^T of 256 values each, a block behind; results
//     producers    a warp every fourth four rows of a block, and a quarter of the next tile's Q
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
        for (int i = 0; i < SLOTS; ++i)
            barrier_init(READY + 8 * i, PRODUCERS * WARP_ARRIVALS), barrier_init(FREE + 8 * i, 8 * WARP_ARRIVALS);
        for (int i = 0; i < Q_PIECES; ++i)
            barrier_init(Q_READY + 8 * i, WARP_ARRIVALS), barrier_init(Q_FREE + 8 * i, 4 * WARP_ARRIVALS);
        for (int i = 0; i < WEIGHT_SLOTS; ++i)
            barrier_init(WEIGHTS_READY + 8 * i, 4 * WARP_ARRIVALS), barrier_init(WEIGHTS_FREE + 8 * i, 8 * WARP_ARRIVALS);
        for (int i = 0; i < 2; ++i) barrier_init(RESULT_READY + 8 * i, 4 * WARP_ARRIVALS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    int role = threadIdx.x / 128;
    if (role == 0) {
        warpgroup_reg_dealloc<SCORES_REGISTERS>();  // which it has; the compiler uses them all if it is told
        Scores(problem).run();
    } else if (role == 3) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        Producer(problem, q_map).run();
    } else {
        warpgroup_reg_alloc<VALUES_REGISTERS>();
        Values(problem, role - 1).run();
    }
}
