// Indexer logits of FP8 or MXFP4 keys for FP8 queries of 64, 32 or 16 heads, on Hopper (sm_90a):
// logits = scale * sum of weights * relu(q . k).
//
// QUERIES queries are a *group*; their keys are processed KEYS at a time, a *tile*.
//
// Grid: persistent, one CTA per SM. The tiles of all groups form one sequence, and each CTA has an equal work range of
// it, for any lengths of groups. Block: 640 threads.
//
//     warps     role       registers       work
//     0..15     consumers  104 or 112     each warpgroup multiplies 64 keys by HEADS * PASS heads
//     16..19    producers  56 or 32       the first RINGS warps load keys, a ring each; warp Q_WARP loads queries
//
//     QUERY_GROUPS 1    256 keys, 64 for each warpgroup, and all queries
//     QUERY_GROUPS 2    128 keys, and half of the queries for each pair of warpgroups: half the keys read for each product
//     QUERY_GROUPS 4    64 keys, and a quarter of the queries for each warpgroup: a quarter of the keys
//
//     shared memory        bytes
//     barriers, Info       1,024
//     weights              2 stages * QUERIES * HEADS * 4
//     scales               K_STAGES * KEYS * 4; then padded to a multiple of 1,024
//     Q                    2 stages * QUERIES * HEADS * 128
//     K                    K_STAGES * KEYS * 128, MXFP4 64
//
// For packed keys one warp loads whole tiles. Pages arrive irregularly, and warpgroups that wait for the same tile
// would all multiply at the same time and then all reduce at the same time. So with PAGED every 64 keys have their own
// warp and ring.
//
// In a product, keys are rows and heads of queries are columns, so that a thread sums most heads of its keys itself,
// and only four lanes are reduced.
//
// Barriers. One lane arrives for its warp, after all lanes.
//
//     barrier         arrivals of a phase                            waits                    guards
//     q_ready[stage]  33: the lanes of the query warp, when their    all consumers            Q, weights and Info of a group
//                     copies have landed; lane 0 again; Q's bytes
//     q_free[stage]   16: warps of the consumers                     the query warp           the same until the last tile is scored
//     k_ready[stage]  PAGED 1: lane 0 of the ring's warp, and bytes  consumers of the ring's  keys, scales and (PAGED) PRESENT of a
//                     of rows and scales; else and CANDIDATES 33:    keys: 16 / RINGS warps   tile, or of 64 keys of it
//                     its lanes, when scales have landed, lane 0
//                     again, keys' bytes
//     k_free[stage]   16 / RINGS: warps that waited                  the ring's warp          the same until they were multiplied
//
// No named barriers, except __syncthreads while the work range is computed.
//
// Limits: heads of 128 values; box_rows of pages is 8, 16, 32 or 64.
//
// Macros: HEADS (64, 32, or 16 with e4m3 keys), PAGED (a paged cache, or packed keys), MXFP4 (keys of a paged cache, or e4m3 ones),
// PASS (queries of a product: 1 or 2, of 16 and 32 heads and e4m3 keys up to 4), PASSES (products of a warpgroup's keys; MXFP4 only), QUERY_GROUPS (1, 2 or 4),
// MAXIMA (whether the largest of each 8 logits is written, too; pages only), CANDIDATES (keys are candidate blocks of 8 positions of
// pages, of each query others: a group is one query, a box one block).
#include "sm90/indexer/mxfp4.cuh"
#include "sm90/indexer/producer.cuh"

#if !MXFP4
// Consumers of e4m3 keys.
__device__ inline void consume(const Problem& problem) {
    int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int key_group = warpgroup % KEY_GROUPS, query_group = warpgroup / KEY_GROUPS, c = lane % 4;
    // After the reduction over lanes, this lane has one key of one query; with more than two queries, another one 8 further.
    int own_query = query_group * PASS + (PASS > 2 ? min(c, PASS - 1) : PASS == 2 ? c & 1 : 0);
    int own_key = 64 * key_group + 16 * warp + lane / 4 + 8 * (PASS > 2 ? 0 : PASS == 2 ? c >> 1 : c & 1);
    int in_stage = own_key % RING_KEYS;
    bool stores = PASS == 1 ? c < 2 : PASS == 3 ? c < 3 : true;
    int stage = key_group % RINGS;
    uint32 parity = 0;
    for (uint32 q_count = 0;; ++q_count) {
        int q_stage = q_count % Q_STAGES;
        q_ready[q_stage].wait(q_count / Q_STAGES % 2);
        uint32 info = INFO_AT + q_stage * sizeof(Info);
        int key = int(lds32(info)) + own_key, tiles = __shfl_sync(~0u, int(lds32(info + 4)), 0);
        if (!tiles) return;
        int first = lds32(info + 8 + 4 * own_query), end = lds32(info + 8 + 4 * (QUERIES + own_query));
        int64 row = int(lds32(info + 8 + 8 * QUERIES)) + own_query;
        float* logits = problem.logits + row * problem.logits_stride - (problem.compressed_width ? first : 0);
        float weights[PASS][HEADS / 4];
#pragma unroll
        for (int query = 0; query < PASS; ++query)
#pragma unroll
            for (int n = 0; n < HEADS / 8; ++n) {
                uint32 at = WEIGHTS_AT + ((q_stage * QUERIES + query_group * PASS + query) * HEADS + 8 * n + 2 * c) * 4;
                float2 pair = lds_float2(at);
                weights[query][2 * n] = pair.x, weights[query][2 * n + 1] = pair.y;
            }
        uint64 q_tile = tile_descriptor(Q_AT + (q_stage * QUERIES + query_group * PASS) * Q_BYTES);
#pragma unroll 1
        for (; tiles; --tiles, key += KEYS) {
            k_ready[stage].wait(parity);
            uint64 k_tile = tile_descriptor(K_AT + stage * K_BYTES + (PAGED ? 0 : key_group * TILE_BYTES));
            float x[PRODUCTS][COLUMNS];
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j) pin(x[j]);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j) {
                uint64 own = q_tile + j * (PASS / PRODUCTS * Q_BYTES / 16);
#pragma unroll
                for (int step = 0; step < DIM / 32; ++step) wgmma_rows(e4m3{}, x[j], k_tile + 2 * step, own + 2 * step, step > 0);
                wgmma_commit();
            }
            float scale, low, high, score;
            bool present, seen;
            auto read_scale = [&](int in_stage) {
                scale = lds_float(SCALES_AT + (stage * RING_KEYS + in_stage) * 4);
                present = !PAGED || lds32(PRESENT_AT + 4 * stage) >> in_stage / 8 & 1;
                seen = is_seen(stage, in_stage);
            };
            auto store = [&](int key) {
                score = present ? score * 0.5f * scale : -infinity();  // sums are doubled
                if (CANDIDATES && !seen) score = problem.fill;
                if (stores && key >= first && key < end) logits[key] = score;
                store_maximum(problem, row, key, end, score, stores);
            };
            if (!PAGED && PASS <= 2) read_scale(in_stage);  // with PAGED, there are not enough registers
            wgmma_wait<PRODUCTS - 1>();
            pin(x[0]);
            if constexpr (PASS > 2) {
                float other_scale, sums[2][4] = {};  // [key g or g + 8][query]
                bool other_present;
                read_scale(in_stage + 8);
                other_scale = scale, other_present = present;
                read_scale(in_stage);
                if (PRODUCTS == 1) k_free[stage].arrive_warp();
#pragma unroll
                for (int query = 0; query < PASS; ++query) {
                    if (PRODUCTS == 2 && query == PASS / 2) {
                        wgmma_wait<0>();
                        pin(x[PRODUCTS - 1]);
                        k_free[stage].arrive_warp();
                    }
                    int of_product = PASS / PRODUCTS;
                    sum_heads(x[query / of_product], HEADS / 2 * (query % of_product), weights[query], sums[0][query], sums[1][query]);
                }
                score = sum_of_four(sums[0], c);
                store(key);
                score = sum_of_four(sums[1], c), scale = other_scale, present = other_present;
                store(key + 8);
            } else {
                if (PRODUCTS == 2) {
                    sum_heads(x[0], 0, weights[0], low, high);
                    wgmma_wait<0>();
                    pin(x[PRODUCTS - 1]);
                }
                if (PAGED) read_scale(in_stage);
                k_free[stage].arrive_warp();
                if (PRODUCTS == 1) sum_heads(x[0], 0, weights[0], low, high);
                if (PASS == 2) {
                    float other_low, other_high;
                    sum_heads(x[PRODUCTS - 1], HEADS / 2 * (PASS - PRODUCTS), weights[PASS - 1], other_low, other_high);
                    bool odd = c & 1;
                    float sent_low = __shfl_xor_sync(~0u, odd ? low : other_low, 1);
                    float sent_high = __shfl_xor_sync(~0u, odd ? high : other_high, 1);
                    low = (odd ? other_low : low) + sent_low, high = (odd ? other_high : high) + sent_high;
                    score = (c & 2 ? high : low) + __shfl_xor_sync(~0u, c & 2 ? low : high, 2);
                } else {
                    score = (c & 1 ? high : low) + __shfl_xor_sync(~0u, c & 1 ? low : high, 1);
                    score += __shfl_xor_sync(~0u, score, 2);
                }
                store(key);
            }
            if ((stage += RINGS) >= RINGS * K_STAGES) stage -= RINGS * K_STAGES, parity ^= 1;
        }
        q_free[q_stage].arrive_warp();
    }
}

#endif

// 48 bytes precede the first map: the address of a tensor map is a multiple of 64, and parameters begin 16 bytes after one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    indexer_logits_sm90(const float* weights, int64 weights_stride, const int* starts, const int* ends, int64 lens_stride, int per_query,
                        int queries, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const float* scales,
                        int keys, int compressed_width, const int* block_table, int64 table_stride, int table_rows, int table_columns,
                        const uint8* pages, int64 page_stride, int64 num_slots, int block_size, int box_rows, float* logits,
                        int64 logits_stride, const uint8* q, int64 q_stride, float* maxima, int64 maxima_stride, int blocks,
                        const int* candidates, int64 candidates_stride, float fill) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != BARRIERS_AT || reinterpret_cast<uint64>(&q_map) % 64) __trap();
    if (threadIdx.x == 0) {
        if (!MXFP4) prefetch_tensor_map(q_map), prefetch_tensor_map(k_map);
        for (int i = 0; i < Q_STAGES; ++i) q_ready.init(i, 33), q_free.init(i, CONSUMERS / 32 * WARP_ARRIVALS);
        for (int i = 0; i < RINGS * K_STAGES; ++i) {
            k_ready.init(i, PAGED && !CANDIDATES ? 1 : 33);  // every lane arrives (arrive_after_copies)
            k_free.init(i, CONSUMERS / 32 / RINGS * WARP_ARRIVALS);
        }
        fence_barrier_init();
    }
    if (PAGED) __syncthreads();  // the barriers are initialised
    pdl_wait();
    Problem problem{weights,
                    weights_stride,
                    queries,
                    starts,
                    ends,
                    lens_stride,
                    per_query,
                    keys,
                    compressed_width,
                    {block_table, table_stride, table_rows, table_columns},
                    pages,
                    page_stride,
                    num_slots,
                    block_size,
                    box_rows,
                    logits,
                    logits_stride,
                    scales,
                    q,
                    q_stride,
                    maxima,
                    maxima_stride,
                    blocks,
                    candidates,
                    candidates_stride,
                    fill};
    clear_other_maxima(problem);
    const bool is_small = PAGED && QUERIES <= 2 && problem.groups() <= 32;
    WorkRange work;
    if (!is_small) work = work_range_of(problem);  // synchronises all threads
    if (threadIdx.x >= CONSUMERS) {
        if (is_small) work = work_range_of_warp(problem);
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        int ring = (threadIdx.x - CONSUMERS) / 32;
        if (ring <= max(RINGS - 1, Q_WARP)) Producer{problem, q_map, k_map, ring, 0}.run(work, is_small);
    } else {
        // A consumer warp, which would only wait, loads the first queries, so that the keys of the first ring do not
        // wait for them.
        if (is_small && threadIdx.x / 32 == 15) Producer{problem, q_map, k_map, 0, 0}.load_first_queries(work_range_of_warp(problem));
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(problem);
    }
}
