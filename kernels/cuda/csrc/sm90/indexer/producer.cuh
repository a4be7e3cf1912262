// Warps that load queries and keys (sm90/indexer/logits.cu).
#pragma once
#include "sm90/indexer/work.cuh"

// Pages are read once: L2 evicts them first, so that logits, which top-k reads next, stay. Exceptions: logits of two
// queries do not fit in L2, and evict_first makes this case 2% slower; candidates of neighbouring tokens are read
// again. The policies are created by createpolicy.fractional: L2::evict_normal for the exceptions, else
// L2::evict_first.
constexpr uint64 POLICY = CANDIDATES || PASS == 2 && QUERY_GROUPS == 1 ? 0x1000000000000000 : 0x12f0000000000000;

// Like tma_load, with POLICY.
__device__ inline void tma_load_once(uint32 target, const TensorMap& map, int x, int y, int z, Barrier barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address), "l"(POLICY)
        : "memory");
}
// Start a bulk copy of `bytes` with POLICY. Size and both addresses are multiples of 16. The barrier counts the bytes when they
// have landed.
__device__ inline void bulk_load_once(uint32 target, const void* source, uint32 bytes, Barrier barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier.address), "l"(POLICY)
                 : "memory");
}

// A warp for each ring, and one for queries; with four rings the first ring's warp also loads queries.
struct Producer {
    const Problem& problem;
    const TensorMap &q_map, &k_map;
    int stage;     // the ring's next one
    uint32 turns;  // bit 0: parity of the stage; other bits: number of groups loaded. Packed to save registers

    // This warp's ring; RINGS for a warp that loads queries only.
    __device__ int ring() const { return RINGS == 4 ? stage % RINGS : (threadIdx.x - CONSUMERS) / 32; }

    // Load `count` queries of an entry from the j-th on. Consumers exit at a group without tiles.
    __device__ void load_queries(int entry, int j, int count, int first_key, int tiles) {
        int lane = threadIdx.x % 32, q_stage = turns / 2 % Q_STAGES;
        q_free[q_stage].wait(turns / (2 * Q_STAGES) % 2 ^ 1);
        turns += 2;
        uint32 info = INFO_AT + q_stage * sizeof(Info);
        Barrier ready = q_ready[q_stage];
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
            ready.arrive_expecting(tiles && !MXFP4 ? QUERIES * Q_BYTES : 0);
        }
        __syncwarp();
        if (MXFP4) {
            int word = lane % 8 / 2 * 8 + lane % 2 * 4 + lane / 8;  // position of this lane's four values
            uint32 to = Q_AT + q_stage * QUERIES * Q_BYTES + word % 4 * 4;
#pragma unroll 1
            for (int i = 0; i < QUERIES; ++i) {
                const uint8* from = problem.q + (i < count ? (query + i) * problem.q_stride : 0) + 4 * lane;
#pragma unroll(FEW_REGISTERS ? 1 : 8)
                for (int head = 0; head < HEADS; ++head, to += DIM)
                    copy_async<4>(to + ((word / 4 ^ head % 8) << 4), from + (i < count ? head * DIM : 0), i < count);
            }
        } else if (tiles && lane < QUERIES) tma_load(Q_AT + (q_stage * QUERIES + lane) * Q_BYTES, q_map, 0, 0, query + lane, ready);
#pragma unroll(MXFP4&& FEW_REGISTERS ? 1 : QUERIES * HEADS > 128 ? 2 : 4)
        for (int i = lane; i < QUERIES * HEADS; i += 32) {
            bool present = i / HEADS < count;
            const float* from = present ? problem.weights + (query + i / HEADS) * problem.weights_stride + i % HEADS : problem.weights;
            copy_async<4>(WEIGHTS_AT + (q_stage * QUERIES * HEADS + i - i % HEADS + weight_at(i % HEADS)) * 4, from, present);
        }
        ready.arrive_after_copies();
    }

    __device__ void next_stage() {
        if ((stage += RINGS) >= RINGS * K_STAGES) stage -= RINGS * K_STAGES, turns ^= 1;
    }

#if PAGED
    // Load this ring's part of each tile from `key` on. Each lane has one box; the warp has the boxes of several tiles
    // at once. A lane reads the page of its box from the block table. CANDIDATES: a box is a candidate block, which is
    // read one round of tiles ahead.
    __device__ void load_tiles(int group, int key, int tiles, int end) {
        // Boxes after the last key of a group are not loaded, except with six queries, where producers have no register
        // for the end.
        constexpr bool LOADS_WHOLE_TILES = MXFP4 && PASSES > 2;
        int lane = threadIdx.x % 32, boxes_log = 7 - __ffs(problem.box_rows);  // boxes of 64 rows
        key += ring() * RING_KEYS + (lane >> boxes_log) * KEYS + (64 * lane >> boxes_log) % RING_KEYS;
        int candidate = CANDIDATES ? candidate_at(group, key) : 0;
        for (; tiles; key += KEYS << 5 - boxes_log) {
            int j, count, entry = problem.entry_of(group, j, count), position = LOADS_WHOLE_TILES || key < end ? key : -1, seen = 0,
                          next = 0;
            if (CANDIDATES) {
                next = candidate_at(group, key + (KEYS << 5 - boxes_log));
                int64 length = min(problem.length_of(entry, j), problem.table.covered(problem.block_size));
                if (candidate >= 0) seen = int(min(max(length - int64(candidate) * 8, int64(0)), int64(8)));
                position = seen ? candidate * 8 : -1;
            }
            PageRow place = lookup_page_row(problem.table, entry, position, problem.block_size, problem.num_slots);
            int page = int(place.page);
#pragma unroll 1
            for (int i = 0; i < 32 >> boxes_log && tiles; ++i, --tiles) {
                Barrier ready = k_ready[stage];
                uint32 box = (i << boxes_log) + (lane % 8 << boxes_log) / 8;  // of this lane's 8 rows
                uint32 present = __ballot_sync(~0u, __shfl_sync(~0u, page, box) >= 0) & 0xff, rows = 0;
                if (CANDIDATES) rows = __reduce_add_sync(~0u, lane / 8 == i ? int(uint32(seen) << 4 * (lane % 8)) : 0);
                k_free[stage].wait(turns % 2 ^ 1);
                if (lane == 0) {
                    sts32(PRESENT_AT + 4 * stage, present | (CANDIDATES && rows != 0x88888888) << 8);
                    if (CANDIDATES) sts32(SEEN_AT + 4 * stage, rows);
                    ready.arrive_expecting(__popc(present) * 8 * (ROW_BYTES + (CANDIDATES ? 0 : 4)));
                }
                __syncwarp();
                if (CANDIDATES) load_scales(i, page, place.row, ready);
                if (lane >> boxes_log == i && page >= 0) {
                    int row = key % RING_KEYS;
                    const uint8* from = problem.pages + page * problem.page_stride;
                    uint32 to = K_AT + stage * K_BYTES + row * ROW_BYTES;
                    if (MXFP4) bulk_load_once(to, from + place.row * ROW_BYTES, problem.box_rows * ROW_BYTES, ready);
                    else tma_load_once(to, k_map, 0, place.row, page, ready);
                    const uint8* scales = from + int64(problem.block_size) * ROW_BYTES + place.row * 4;
                    if (!CANDIDATES) bulk_load_once(SCALES_AT + (stage * RING_KEYS + row) * 4, scales, problem.box_rows * 4, ready);
                }
                next_stage();
            }
            candidate = next;
        }
    }
    // Copy the scales of the boxes of tile i, 32 bytes each, by two lanes for each box; lanes 8 i and following have
    // the pages and rows of the boxes. Bulk copies of so few bytes would take as long as the copies of the rows.
    __device__ void load_scales(int i, int page, int row, Barrier ready) {
        int lane = threadIdx.x % 32, from = 8 * i + lane / 2 % 8;
        page = __shfl_sync(~0u, page, from), row = __shfl_sync(~0u, row, from);
        if (lane < 16 && page >= 0) {
            const uint8* scales = problem.pages + page * problem.page_stride + int64(problem.block_size) * ROW_BYTES + row * 4;
            copy_async<16>(SCALES_AT + stage * RING_KEYS * 4 + 16 * lane, scales + lane % 2 * 16, true);
        }
        ready.arrive_after_copies();
    }
    // The candidate block at a column of a group, which is one query.
    __device__ int candidate_at(int group, int column) const {
        return column < problem.keys ? problem.candidates[group * problem.candidates_stride + column / 8] : -1;
    }
#else
    __device__ void load_tiles(int, int key, int tiles, int) {
        int lane = threadIdx.x % 32;
        for (int tile = 0; tile < tiles; ++tile, key += KEYS) {
            Barrier ready = k_ready[stage];
            k_free[stage].wait(turns % 2 ^ 1);
#pragma unroll
            for (int i = lane; i < KEYS; i += 32) {
                bool present = key + i < problem.keys;
                copy_async<4>(SCALES_AT + (stage * KEYS + i) * 4, problem.scales + (present ? key + i : 0), present);
            }
            ready.arrive_after_copies();
            if (lane == 0) {
                ready.arrive_expecting(K_BYTES);
                tma_load(K_AT + stage * K_BYTES, k_map, 0, key, 0, ready);
            }
            next_stage();
        }
    }
#endif

    // Load the queries of the first group of the range; `run` loads the others.
    __device__ void load_first_queries(const WorkRange& work) {
        int tiles = work.cost ? int(min(Count(work.tiles - work.skipped), work.cost)) : 0;
        int j, count, entry = problem.entry_of(work.group, j, count);
        load_queries(entry, j, tiles ? count : 0, work.first_key + work.skipped * KEYS, tiles);
    }

    // first_loaded: whether another warp loads the queries of the first group.
    __device__ void run(WorkRange work, bool first_loaded) {
        // Another CTA may have a part of the first group: a part of its own cost, or of its tiles.
        Count left = work.cost - max(GROUP_COST - work.skipped, 0);
        int tile = max(work.skipped - GROUP_COST, 0), tiles = work.tiles - tile, first = work.first_key + tile * KEYS, end = work.end;
        for (int group = work.group;;) {
            bool none = left <= 0;
            tiles = none ? 0 : int(min(Count(tiles), left));
            left -= tiles;
            if (tiles > 0 || none) {
                int j, count, entry = problem.entry_of(group, j, count);
                if (ring() == Q_WARP && first_loaded) turns += 2;
                else if (ring() == Q_WARP) load_queries(entry, j, none ? 0 : count, first, tiles);
                first_loaded = false;
                if (none) break;
                if (RINGS == 4 || ring() < RINGS) load_tiles(group, first, tiles, end);
            }
            tiles = left > 0 ? problem.tiles_of(++group, first, end) : 0;
            if (tiles) left -= GROUP_COST;
        }
        // Top-k starts where a CTA has ended. With packed keys all CTAs end together, so it would start too early.
        if (PAGED) pdl_release();
    }
};
