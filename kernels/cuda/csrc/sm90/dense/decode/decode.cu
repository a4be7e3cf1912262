// Dense MLA decode over a paged cache of 16-bit rows, on Hopper (sm_90a): out = softmax(scale Q K^T) V, and the LSE.
// Query tokens whose keys are divided among CTAs give partial results for common/dense_decode_merge.cu.
//
// Keys are processed 64 at a time, a *block*.
//
// Grid: (ranges * groups of 64 heads). Each group of heads has `ranges` CTAs, which share the blocks of all query tokens equally
// even if the requests' lengths differ (common/dense/work.cuh describes `division`). A CTA processes its tokens one after another.
// Block: 384 threads.
//
//     warps    role        registers  work
//     0..3     producer    64         copies rows into two buffers alternately
//     4..7     consumer 0  216        S = Q K^T and softmax of even blocks; values 0..255 of the result, of all blocks
//     8..11    consumer 1  216        the same for odd blocks; values 256..511
//
//     shared memory             KiB
//     barriers, softmax state   3
//     Q                         72
//     K, 2 buffers              144
//     weights of one block      8
//     in all                    227
//
// A consumer reads its own weights from registers, and the other consumer's weights from shared memory. Both consumers
// add the blocks in order and continue from the same running maximum. Loads from global memory take longest, so each
// *piece* of a buffer is refilled as soon as its products have ended. A consumer first adds the other consumer's block
// and then scores most of its own block, because the keys of its own block arrive later. Pieces in the order of their use:
//
//     0  RoPE      freed by the consumer that scores the block
//     1  values 0..127 (consumer 0)      2  values 256..383 (consumer 1)
//     3  values 128..255 (consumer 0)    4  values 384..511 (consumer 1)
//
// A page consists of boxes of `box_rows` neighbouring rows. One thread copies a box, 64 values at a time (TMA). Blocks with
// absent rows (a request's last block, missing pages) and pages without boxes (box_rows 0) are copied row by row.
//
// PAIRED, for an even number of groups of heads: two CTAs that read the same keys form a cluster, which places them
// close to each other. The two CTAs exchange nothing. Reading the same keys close together takes less power, and power
// limits the speed of long batches.
//
// Limits: rows of 576 values (512 + RoPE); rows, pages and q aligned to 16 bytes.
//
// Macros: VALUE (bf16 or f16), PAIRED (0 or 1).
#include "sm90/dense/decode/work.cuh"
#include "sm90/dense/decode/producer.cuh"
#include "sm90/dense/decode/consumer.cuh"

#if PAIRED
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif
// 48 bytes precede the map: the address of a tensor map is a multiple of 64, and parameters begin 16 bytes after one.
extern "C" CLUSTER __global__ void __launch_bounds__(THREADS, 1)
    mla_decode_sm90(const VALUE* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int s_q, int heads, int block_size, int box_rows,
                    const __grid_constant__ TensorMap map, const uint8* pages, int64 page_stride, int64 num_slots, const int* block_table,
                    int64 table_stride, int columns, int requests, const int* lens, int causal, int ranges, float softmax_scale, VALUE* out,
                    int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b, int64 lse_stride_h,
                    int64 lse_stride_s, float* partial_out, float* partial_lse, const uint4* division) {
    extern __shared__ uint4 memory[];
    uint32 window = shared_window();
    if (uint32(__cvta_generic_to_shared(memory)) != window + BARRIERS_AT || reinterpret_cast<uint64>(&map) % 64) __trap();
    if (threadIdx.x == 0 && box_rows) prefetch_tensor_map(map);
    pdl_wait();
    int groups = (heads + HEADS - 1) / HEADS, role = threadIdx.x / 128, range = blockIdx.x / groups;
    DenseTokens tokens{lens, s_q, requests * s_q, columns, block_size, causal};
    if (threadIdx.x == 0) {
        for (int buffer = 0; buffer < 2; ++buffer)
            for (int i = 0; i < PIECES; ++i)
                k_ready[buffer][i].in(window).init(PRODUCERS), k_free[buffer][i].in(window).init(4 * WARP_ARRIVALS);
        for (int i = 0; i < 2; ++i) weights_ready[i].in(window).init(4 * WARP_ARRIVALS), totals_ready[i].in(window).init(4 * WARP_ARRIVALS);
        q_ready.in(window).init(8 * WARP_ARRIVALS);
        fence_barrier_init();
    }
    if (threadIdx.x == 32) store_work(window, planned_work(division, tokens.count, ranges, range));
    __syncthreads();

    if (role == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        LatentCache cache{pages, page_stride, num_slots, block_size, {block_table, table_stride, requests, columns}};
        DenseWork work = load_work(window);
        uint32 used[2] = {};  // blocks so far in each buffer
        for (int token = work.begin.token; token <= work.last_token(); ++token) {
            int keys = tokens.keys(token), blocks = work.blocks_here(token, blocks_of(keys));
            int first_block = work.first_block(token), end = int(min(int64(keys), int64(first_block + blocks) * KEYS));
            RowProducer producer{cache, map, box_rows, token / s_q, first_block, end, window};
            PageRow box = producer.box(0);
            for (int i = 0; i < blocks; ++i) {
                uint32 parity = ((i % 2 ? used[1] : used[0]) + i / 2) % 2 ^ 1;
                PageRow next = producer.box(i + 1);
                if (!producer.is_whole(box)) producer.copy_rows(i % 2, i, parity);
                else if (threadIdx.x < 32) producer.copy_boxes(i % 2, box, parity);
                box = next;
            }
            used[0] += (blocks + 1) / 2, used[1] += blocks / 2;
        }
        return;
    }

    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    DenseProblem problem{q,
                         q_stride_b,
                         q_stride_s,
                         q_stride_h,
                         s_q,
                         heads,
                         softmax_scale * LOG2_E,
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
    if (role == 1) consume<0>(problem, tokens);
    else consume<1>(problem, tokens);
}
