// Sparse MLA over paged FP8 caches on Hopper (sm_90a): one thread block an SM, four warpgroups.
//
// A query token and 64 of its heads (or 32 or 16, of few queries) are a *tile* of work; the keys of a tile are taken 64 at a
// time, a *block*.
//
//     QK-softmax  S^T = K Q^T: converts K in registers straight from the raw rows; the softmax; P in float16. Between
//                 tiles, Q to shared memory and to float16
//     PV 0        O^T = V^T P^T for values 0..255: converts V in registers straight from the raw rows
//     PV 1        the same for values 256..511
//     producers   two warps: copy raw rows into a ring (cp.async)
//     scales      one warp: turns scales into float16 factors, and tells which tokens are absent
//     scheduler   one warp: says which tiles there are to do, and what makes a tile's sums results
//
// K and V are the same bytes, converted twice, both times in registers: cheap in float16 (one conversion instruction
// and one multiplication for two values). The last 64 values of a row (RoPE) are bfloat16 and enter the scores as they are.
//
// Within 16 tokens the order is permuted so that reads of neither the QK-softmax nor the PV warpgroups conflict among raw rows:
// token t stands at permuted(t) among the rows of S^T and of P^T.
//
// Float16 has a narrower range than what a cache and q may hold. A tile that leaves it (scales outside
// [MIN_SCALE, MAX_SCALE], large or very small q, a result that is not finite) is marked in `unsafe` for the
// exact kernel, which the launcher runs after this one. RoPE values of V that are larger are taken for the largest that there is, which
// it amends. A float32 scale is rounded to float16.
//
// Where PARTS is more than 1, as many thread blocks, a cluster, share the keys of a tile and put its result together: each
// that of some of its heads, from what the others send to its shared memory.
//
// Macros: LAYOUT (DSV4_FP8 or V32_FP8), TILE_HEADS (64, 32, 16), PARTS (1 to 6).
#if PARTS > 1
#define IN_CLUSTER
#define CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER
#endif

#include "sm90/decode/tile_scheduler.cuh"
#include "sm90/decode/producer.cuh"
#include "sm90/decode/pv.cuh"
#include "sm90/decode/qk_softmax.cuh"

extern "C" CLUSTER __global__ void __launch_bounds__(THREADS, 1) sparse_mla_decode(const __grid_constant__ SparseProblem problem) {
    extern __shared__ uint8 memory[];
    if (threadIdx.x == 0) {
        if (uint32(__cvta_generic_to_shared(memory)) != own(1024)) __trap();
        for (int i = 0; i < RING; ++i) barrier_init(RAW_FULL + 8 * i, 32 * ROW_PRODUCERS + WARP_ARRIVALS);  // and the scales' producer
        for (int i = 0; i < 2 * RING; ++i) barrier_init(RAW_EMPTY + 8 * i, 10 * WARP_ARRIVALS);  // who mix, and who score this half
        for (int i = 0; i < P_SLOTS; ++i) barrier_init(P_FULL + 8 * i, 4 * WARP_ARRIVALS), barrier_init(P_EMPTY + 8 * i, 8 * WARP_ARRIVALS);
        for (int i = 0; i < SCHEDULED_TILES; ++i) barrier_init(SCHEDULED_FULL + 8 * i, 1);
        for (int i = 0; i < 2; ++i) barrier_init(SUMS_FULL + 8 * i, 4 * WARP_ARRIVALS), barrier_init(SHARE_FULL + 8 * i, WARP_ARRIVALS);
        if (PARTS > 1) {
            barrier_init(LOG_SUMS_FULL, 1), barrier_init(PARTS_FULL, 1);
            barrier_arrive_expecting(LOG_SUMS_FULL, PARTS * HEADS * 4);
            barrier_arrive_expecting(PARTS_FULL, (PARTS - 1) * lines_of(blockIdx.x % PARTS) * LINE_BYTES);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (PARTS > 1) cluster_arrive();
    int role = threadIdx.x / 128;
    if (role == 0) {
        warpgroup_reg_dealloc<QK_REGISTERS>();
        QkSoftmax(problem).run();
    } else if (role == 3) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32 % 4;
        if (warp < ROW_PRODUCERS) RowProducer(problem, warp).run();
        else if (warp == ROW_PRODUCERS) ScaleProducer(problem).run();
        else TileScheduler(problem).run();
    } else {
        warpgroup_reg_alloc<PV_REGISTERS>();
        Pv(problem, role - 1).run();
    }
}
