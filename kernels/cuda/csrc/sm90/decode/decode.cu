// Sparse MLA decode over paged caches, on Hopper (sm_90a): out = softmax(scale Q K^T) V with an optional sink, and the LSE.
//
// A *tile* is a query token and TILE_HEADS of its heads; its keys are processed 64 at a time, a *block* (common/sparse/work.cuh).
//
// Grid: one CTA per work range, at most one per SM. PARTS > 1: one cluster of PARTS CTAs per tile. Its CTAs split the tile's
// keys, and each combines the results of some heads from lines that the others send to its shared memory.
// Block: 512 threads.
//
//     warps    role           registers  work
//     0..3     QK-softmax     120        S^T = K Q^T with K converted in registers from the raw rows; softmax; P in float16.
//                                        Between tiles: copies Q to shared memory and converts it to float16
//     4..7     PV 0           176        O^T = V^T P^T for values 0..255, with V converted in registers from the raw rows
//     8..11    PV 1           176        the same for values 256..511
//     12, 13   row producers  40         each copies half of every block's raw rows into the ring (cp.async)
//     14       scale warp     40         converts scales to float16 factors; writes -inf as the bias of absent tokens.
//                                        Caches of bfloat16 rows: warps 12 to 14 each copy a third of the tiles, with
//                                        56 registers a thread, and QK-softmax has fewer registers
//     15       scheduler      40         publishes the next tile; computes the factors that scale accumulators by 1/l
//
//     shared memory (TILE_HEADS 64)  DSV4_FP8  V32_FP8
//     Q, slices of 64 values         64 KiB    72 KiB   with PARTS > 1 reused for other CTAs' lines where they fit
//     P, 2 slots                     16 KiB    16 KiB
//     RoPE of raw rows, 3 slots      24 KiB    24 KiB
//     raw rows, 3 slots              84 KiB    96 KiB
//     factors                        2,688 B   3,072 B
//     bias, softmax state, scheduled tiles, barriers: 5,872 B. In all 201,072 B and 221,936 B (decode/memory.cuh)
//
// K and V are the same bytes. Both the QK-softmax and the PV warpgroups convert them in registers, which is cheap in
// float16: one conversion instruction and one multiplication for two values. The last 64 values of a row (RoPE) are
// bfloat16 and enter the scores unconverted.
//
// Each 16 tokens are permuted so that neither the QK-softmax nor the PV warpgroups have bank conflicts when they read
// raw rows: token t is row permuted(t) of S^T and of P^T.
//
// Limits: float16 has a narrower range than a cache and q. A tile outside that range (scales outside [MIN_SCALE,
// MAX_SCALE], large or very small q, RoPE values of V that float16 cannot represent, a result that is not finite) is
// flagged in `unsafe` for the epilogue kernel, which the launcher runs after this one. A float32 scale is rounded to
// float16.
//
// Macros: LAYOUT, EXTRA_LAYOUT (formats.py lists the formats), TILE_HEADS (64, 32, 16), PARTS (1 to 6).
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
        if (uint32(__cvta_generic_to_shared(memory)) != own(SHARED_START)) __trap();
        raw_full.init(ROW_ARRIVALS + WARP_ARRIVALS);  // and the scale warp
        if (EXPANDS) raw_landed.init(32 * ROW_PRODUCERS);
        raw_empty.init((8 + 4 / FREED_PARTS) * WARP_ARRIVALS);  // both PV, part of QK-softmax
        for (int i = 0; i < P_SLOTS; ++i) p_full.init(i, 4 * WARP_ARRIVALS), p_empty.init(i, 8 * WARP_ARRIVALS);
        scheduled_full.init(1);
        for (int i = 0; i < 2; ++i) sums_full.init(i, 4 * WARP_ARRIVALS), inv_sum_full.init(i, WARP_ARRIVALS);
        if (PARTS > 1) {
            log_sums_full.init(1), parts_full.init(1);
            log_sums_full.arrive_expecting(PARTS * HEADS * 4);
            parts_full.arrive_expecting((PARTS - 1) * lines_of(blockIdx.x % PARTS) * LINE_BYTES);
        }
        fence_barrier_init();
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
        if (BF16_ROWS && warp < ROW_PRODUCERS) TileProducer(problem, warp).run();
        else if (warp < ROW_PRODUCERS) RowProducer(problem, warp).run();
        else if (!BF16_ROWS && warp == ROW_PRODUCERS) ScaleProducer(problem).run();
        else TileScheduler(problem).run();
    } else {
        warpgroup_reg_alloc<PV_REGISTERS>();
        Pv(problem, role - 1).run();
    }
}
