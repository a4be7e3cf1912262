// Warps that load queries and keys (sm90/indexer/logits.cu).
#pragma once
#include "sm90/indexer/work.cuh"

// Pages are read once: L2 evicts them first, so that logits, which top-k reads next, stay. Logits of two queries are too many
// to stay, and evict_first makes them 2% slower. The policies are those of createpolicy.fractional: L2::evict_normal for two
// queries, L2::evict_first otherwise.
constexpr uint64 POLICY = PASS == 2 && QUERY_GROUPS == 1 ? 0x1000000000000000 : 0x12f0000000000000;

// Like tma_load, with POLICY.
__device__ inline void tma_load_once(uint32 target, const TensorMap& map, int x, int y, int z, uint32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(target), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(POLICY) : "memory");
}
// Start a bulk copy of `bytes` with POLICY. Size and both addresses are multiples of 16. The barrier counts the bytes when they
// have landed.
__device__ inline void bulk_load_once(uint32 target, const void* source, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(POLICY) : "memory");
}

// A warp for each ring, and one for queries; with four rings the first ring's warp also loads queries.
struct Producer {
    const Problem& problem;
    const TensorMap &q_map, &k_map;
    int ring, stage;  // the ring's next stage
    uint32 turns;     // bit 0: parity of the stage; other bits: number of groups loaded. Packed, because registers are few

    // Load `count` queries of an entry from the j-th on. A group without tiles makes the consumers exit.
    __device__ void bring_queries(int entry, int j, int count, int first_key, int tiles) {
        int lane = threadIdx.x % 32, q_stage = turns / 2 % Q_STAGES;
        barrier_wait(Q_FREE + 8 * q_stage, turns / (2 * Q_STAGES) % 2 ^ 1);
        turns += 2;
        uint32 info = INFO_AT + q_stage * sizeof(Info), ready = Q_READY + 8 * q_stage;
        if (lane < QUERIES) {
            int first = 0, end = 0;
            if (lane < count) problem.range_of(entry, j + lane, first, end);
            sts32(info + 8 + 4 * lane, first);
            sts32(info + 8 + 4 * (QUERIES + lane), end);
        }
        int query = (PAGED ? entry * problem.queries : 0) + j;
        __syncwarp();  // all lanes have stored before lane 0 arrives
        if (lane == 0) {
            sts32(info, first_key);
            sts32(info + 4, tiles);
            sts32(info + 8 + 8 * QUERIES, query);
            barrier_arrive_expecting(ready, tiles && !MXFP4 ? QUERIES * Q_BYTES : 0);
        }
        __syncwarp();
        if (MXFP4) {
            int word = lane % 8 / 2 * 8 + lane % 2 * 4 + lane / 8;  // where this lane's four values go
#pragma unroll 4
            for (int row = 0; row < QUERIES * HEADS; ++row) {
                bool present = row / HEADS < count;
                int64 offset = present ? (query + row / HEADS) * problem.q_stride + row % HEADS * DIM : 0;
                uint32 to = Q_AT + q_stage * QUERIES * Q_BYTES + row * DIM + ((word / 4 ^ row % 8) << 4) + word % 4 * 4;
                copy_async<4>(to, problem.q + offset + 4 * lane, present);
            }
        } else if (tiles && lane < QUERIES)
            tma_load(Q_AT + (q_stage * QUERIES + lane) * Q_BYTES, q_map, 0, 0, query + lane, ready);
#pragma unroll 4
        for (int i = lane; i < QUERIES * HEADS; i += 32) {
            bool present = i / HEADS < count;
            const float* from = present ? problem.weights + (query + i / HEADS) * problem.weights_stride + i % HEADS : problem.weights;
            copy_async<4>(WEIGHTS_AT + (q_stage * QUERIES * HEADS + i) * 4, from, present);
        }
        copies_arrive(ready);
    }

    __device__ void next_stage() {
        if ((stage += RINGS) >= RINGS * K_STAGES) stage -= RINGS * K_STAGES, turns ^= 1;
    }

#if PAGED
    // Load this ring's part of each tile from `key` on. Each lane has one box, of several tiles at once, and reads its page from
    // the block table.
    __device__ void bring_tiles(int entry, int key, int tiles) {
        int lane = threadIdx.x % 32, rows_log = __ffs(problem.box_rows) - 1, boxes_log = 6 - rows_log;
        key += ring * RING_KEYS + (lane >> boxes_log) * KEYS + (lane << rows_log) % RING_KEYS;
        for (; tiles > 0; tiles -= 32 >> boxes_log, key += KEYS << 5 - boxes_log) {
            PageRow place = lookup_page_row(problem.table, entry, key, problem.block_size, problem.num_slots);
            uint32 there = __ballot_sync(~0u, place.page >= 0);
#pragma unroll 1
            for (int i = 0; i < min(32 >> boxes_log, tiles); ++i, there = uint64(there) >> (RING_KEYS >> rows_log)) {
                uint32 ready = K_READY + 8 * stage, present = __ballot_sync(~0u, there >> (8 * lane >> rows_log & 31) & 1) & 0xff;
                barrier_wait(K_FREE + 8 * stage, turns % 2 ^ 1);
                if (lane == 0) {
                    sts32(PRESENT_AT + 4 * stage, present);
                    barrier_arrive_expecting(ready, __popc(present) * 8 * (ROW_BYTES + 4));
                }
                __syncwarp();
                if (lane >> boxes_log == i && place.page >= 0) {
                    int row = key % RING_KEYS;
                    const uint8* page = problem.pages + place.page * problem.page_stride;
                    uint32 to = K_AT + stage * K_BYTES + row * ROW_BYTES;
                    if (MXFP4) bulk_load_once(to, page + place.row * ROW_BYTES, problem.box_rows * ROW_BYTES, ready);
                    else tma_load_once(to, k_map, 0, place.row, int(place.page), ready);
                    const uint8* scales = page + int64(problem.block_size) * ROW_BYTES + place.row * 4;
                    bulk_load_once(SCALES_AT + (stage * RING_KEYS + row) * 4, scales, problem.box_rows * 4, ready);
                }
                next_stage();
            }
        }
    }
#else
    __device__ void bring_tiles(int, int key, int tiles) {
        int lane = threadIdx.x % 32;
        for (int tile = 0; tile < tiles; ++tile, key += KEYS) {
            uint32 ready = K_READY + 8 * stage;
            barrier_wait(K_FREE + 8 * stage, turns % 2 ^ 1);
#pragma unroll
            for (int i = lane; i < KEYS; i += 32) {
                bool present = key + i < problem.keys;
                copy_async<4>(SCALES_AT + (stage * KEYS + i) * 4, problem.scales + (present ? key + i : 0), present);
            }
            copies_arrive(ready);
            if (lane == 0) {
                barrier_arrive_expecting(ready, K_BYTES);
                tma_load(K_AT + stage * K_BYTES, k_map, 0, key, 0, ready);
            }
            next_stage();
        }
    }
#endif

    __device__ void run(WorkRange work) {
        Count left = work.count;
        int tiles = work.tiles - work.tile, first = work.first_key + work.tile * KEYS;
        for (int group = work.group; left;) {
            tiles = int(min(Count(tiles), left));
            left -= tiles;
            if (tiles > 0) {
                int j, count, entry = problem.entry_of(group, j, count);
                if (ring == Q_WARP) bring_queries(entry, j, count, first, tiles);
                if (RINGS == 4 || ring < RINGS) bring_tiles(entry, first, tiles);
            }
            if (left) tiles = problem.tiles_of(++group, first);
        }
        if (ring == Q_WARP) bring_queries(0, 0, 0, 0, 0);
        // Top-k starts where a CTA has ended. With packed keys all CTAs end together, so it would start too early.
        if (PAGED) pdl_release();
    }
};
