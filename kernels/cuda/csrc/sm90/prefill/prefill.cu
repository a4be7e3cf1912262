// Sparse MLA prefill over gathered bfloat16 rows, on Hopper (sm_90a).
//
// A tile is 64 heads of a query token (work.cuh); keys go 64 at a time, a *block*. A thread block does every so many-th
// tile, one after another, and loads a tile's Q and first keys while the last of the tile before are added up. Three
// warpgroups:
//
//     producer     copies rows into two buffers in turn, piece after piece, and Q; a warp a quarter of the rows
//     consumer 0    S = Q K^T and the softmax of every other block; values 0..255 of the result, of all blocks
//     consumer 1    the same of the others; values 256..511
//
// A consumer multiplies its own weights out of registers, and the other's out of shared memory. Both add up the blocks in
// order, so that each goes on from the other's running maximum, and a *piece* of a buffer is filled again as soon as it
// has been used (sm90/prefill/memory.cuh). Weights are bfloat16, as the rows are.
//
// A tile of which a score, a sum or a result is not finite, or the highest score beyond MAX_PRECISE_SCORE, is marked by
// UNSAFE_BITS (work.cuh) for the exact kernel.
//
// Macros: LAYOUT (DSV4_BF16 or MLA_BF16: 512 or 576 values a row).
#include "sm90/prefill/producer.cuh"
#include "sm90/prefill/consumer.cuh"

// The map of q is without an address where there is none. It lies at a multiple of 64, as parameters begin 16 bytes behind
// one and SparseProblem has 368.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_prefill(const __grid_constant__ SparseProblem problem, const __grid_constant__ TensorMap q_map) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != READY || reinterpret_cast<uint64>(&q_map) % 64) __trap();
    if (threadIdx.x == 0 && q_map.start) prefetch_tensor_map(q_map);
    int group = threadIdx.x / 128;  // consumers come first
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * PIECES; ++i)
            barrier_init(READY + 8 * i, PRODUCERS * WARP_ARRIVALS), barrier_init(FREE + 8 * i, 4 * WARP_ARRIVALS);
        for (int i = 0; i < PIECES; ++i)
            barrier_init(Q_READY + 8 * i, q_map.start ? WARP_ARRIVALS : PRODUCERS * WARP_ARRIVALS), barrier_init(Q_FREE + 8 * i, 8 * WARP_ARRIVALS);
        for (int i = 0; i < 2; ++i) barrier_init(WEIGHTS_READY + 8 * i, 4 * WARP_ARRIVALS);
        for (int i = 0; i < 4; ++i) barrier_init(TOTALS_READY + 8 * i, 4 * WARP_ARRIVALS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    if (group >= 2) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        Producer(problem, q_map).run();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        if (group == 0) Consumer<0>(problem).run();
        else Consumer<1>(problem).run();
    }
}
