// Indexer logits of FP8 keys for FP8 queries of 64 or 32 heads, on Hopper (sm_90a): logits = scale * sum of weights * relu(q . k).
//
// QUERIES queries are a *group*; their keys are processed KEYS at a time, a *tile*.
//
// Grid: persistent, one CTA per SM. The tiles of all groups form one sequence, and each CTA has an equal work range of it,
// however long the groups are.
// Block: 640 threads.
//
//     warps     role       registers       work
//     0..15     consumers  104, WIDE 112  each warpgroup multiplies 64 keys by HEADS * PASS heads
//     16..19    producers  56, WIDE 32    the first RINGS warps load keys, a ring each; warp Q_WARP loads queries
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
//     K                    K_STAGES * KEYS * 128
//
// For packed keys one warp loads whole tiles. Pages arrive as memory delivers them, and warpgroups that wait for the same tile
// would all multiply at the same time and then all reduce at the same time. So with PAGED every 64 keys have a warp and a ring of
// their own.
//
// In a product keys are rows and heads of queries are columns, so that a thread sums most of the heads of its keys by itself,
// and only four lanes are reduced.
//
// Barriers. One lane arrives for its warp, after all lanes.
//
//     barrier          arrivals of a phase                             waits                          guards
//     Q_READY[stage]   33: the lanes of the query warp, when their     all consumers                  Q, weights and Info of a group
//                      copies have landed; lane 0 again; Q's bytes
//     Q_FREE[stage]    16: warps of the consumers                      the query warp                 the same until the last tile is scored
//     K_READY[stage]   PAGED 1: lane 0 of the ring's warp, and bytes   consumers of the ring's keys:  keys, scales and (PAGED) PRESENT of a
//                      of rows and scales; else 33: its lanes, when    16 / RINGS warps               tile, or of 64 keys of it
//                      scales have landed, lane 0 again, keys' bytes
//     K_FREE[stage]    16 / RINGS: warps that waited                   the ring's warp                the same until they were multiplied
//
// No named barrier except that of __syncthreads, while the work range is computed.
//
// Limits: heads of 128 values; box_rows of pages is 8, 16, 32 or 64.
//
// Macros: HEADS (32 or 64), PAGED (a paged cache, or packed keys), PASS (queries of a warpgroup: 1 or 2, of 32 heads up to 4),
// QUERY_GROUPS (1, 2 or 4).
#define ALIGNED 1
#include "common/pages.cuh"
#include "common/pdl.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int DIM = 128, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int QUERIES = PASS * QUERY_GROUPS, KEY_GROUPS = WARPGROUPS / QUERY_GROUPS, KEYS = 64 * KEY_GROUPS;
constexpr bool WIDE = HEADS * PASS > 64;  // products of more than 64 columns
constexpr int PRODUCER_REGISTERS = WIDE ? 32 : 56, CONSUMER_REGISTERS = WIDE ? 112 : 104;
constexpr int Q_STAGES = 2, K_STAGES = QUERY_GROUPS >= 2 ? 8 : WIDE ? 5 : 6;
constexpr int Q_BYTES = HEADS * DIM;
constexpr int RINGS = PAGED ? KEY_GROUPS : 1, RING_KEYS = KEYS / RINGS;  // a ring has K_STAGES stages, loaded by one warp
constexpr int Q_WARP = RINGS < 4 ? RINGS : 0;  // the warp that loads queries
// Where tiles arrive no faster than they are needed, the first of two queries of 64 heads is reduced while the second is
// multiplied. Elsewhere one product of all queries reads less shared memory.
constexpr int PRODUCTS = PAGED && QUERY_GROUPS == 1 && HEADS == 64 ? PASS : 1;
constexpr int COLUMNS = HEADS / 2 * PASS / PRODUCTS;  // in a thread's registers
static_assert(HEADS * PASS <= 128 && Q_BYTES % 1024 == 0);

// A group of the work range, as consumers read it.
struct Info {
    int first_key, tiles;           // tiles 0: no more groups
    int first[QUERIES], end[QUERIES];  // keys that each query sees
    int row;                        // of the first query
    int padding;
};

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 BARRIERS_AT = 1024;
constexpr uint32 Q_READY = BARRIERS_AT, Q_FREE = Q_READY + 8 * Q_STAGES;
constexpr uint32 K_READY = Q_FREE + 8 * Q_STAGES, K_FREE = K_READY + 8 * RINGS * K_STAGES;  // [K_STAGES][RINGS], as all of keys
constexpr uint32 PRESENT_AT = K_FREE + 8 * RINGS * K_STAGES;   // of each stage: a bit for each eight of its rows
constexpr uint32 INFO_AT = PRESENT_AT + 4 * RINGS * K_STAGES;  // of each Q stage
constexpr uint32 SUMS_AT = INFO_AT + Q_STAGES * sizeof(Info);  // of each warp, while the work range is computed; then the range
constexpr uint32 WEIGHTS_AT = 2048;                            // [Q_STAGES][QUERIES][HEADS]
constexpr uint32 SCALES_AT = WEIGHTS_AT + Q_STAGES * QUERIES * HEADS * 4;  // [K_STAGES][KEYS]
constexpr uint32 Q_AT = (SCALES_AT + K_STAGES * KEYS * 4 + 1023) / 1024 * 1024;
constexpr uint32 K_AT = Q_AT + Q_STAGES * QUERIES * Q_BYTES;
constexpr uint32 K_BYTES = RING_KEYS * DIM;
static_assert(SUMS_AT + 8 * (THREADS / 32) + 16 <= WEIGHTS_AT);

struct Problem {
    const float* weights;
    int64 weights_stride;
    int queries;  // in all; PAGED: per entry of the block table
    const int *starts, *ends;  // PAGED: lengths, and null
    int64 lens_stride;         // between entries; 0, like per_query, for packed keys
    int per_query;             // whether every query has a length of its own
    int keys;                  // number of keys; PAGED: width of logits
    int compressed_width;                  // width of compressed rows of logits, else 0
    BlockTable table;
    const uint8* pages;
    int64 page_stride, num_slots;
    int block_size, box_rows;
    float* logits;
    int64 logits_stride;
    const float* scales;

    __device__ int groups_of_entry() const { return (queries + QUERIES - 1) / QUERIES; }
    __device__ int groups() const { return PAGED ? table.rows * groups_of_entry() : groups_of_entry(); }
    // The entry of a group, its first query within the entry, and its number of queries.
    __device__ int entry_of(int group, int& first, int& count) const {
        int entry = 0;
        if (PAGED && queries <= QUERIES) entry = group, first = 0;  // the common case, without a division
        else {
            if (PAGED) entry = group / groups_of_entry();
            first = (group - entry * groups_of_entry()) * QUERIES;
        }
        count = min(queries - first, QUERIES);
        return entry;
    }
    // Keys that a query of an entry sees.
    __device__ void range_of(int entry, int j, int& first, int& end) const {
        if (PAGED) {
            int64 length = per_query ? starts[entry * lens_stride + j] : int64(starts[entry * lens_stride]) - (queries - 1 - j);
            first = 0, end = int(min(max(length, int64(0)), int64(keys)));
        } else {
            first = min(max(starts[j], 0), keys), end = min(max(ends[j], first), keys);
            if (compressed_width) end = int(min(int64(end), int64(first) + compressed_width));
        }
    }
    // Number of tiles of a group, and its first key: the span of the keys of all its queries.
    __device__ int tiles_of(int group, int& first) const {
        int j, count, entry = entry_of(group, j, count), end = 0;
        first = PAGED ? 0 : INT32_LIMIT;
#pragma unroll
        for (int i = 0; i < QUERIES; ++i) {
            int from = 0, to = 0;
            if (i < count) range_of(entry, j + i, from, to);
            if (to > from) first = min(first, from), end = max(end, to);
        }
        return end > first ? int((int64(end) - first + KEYS - 1) / KEYS) : 0;
    }
};

// A number of tiles of several groups. With PAGED it is below 2^31, because each tile except a group's last writes at least 256
// logits. Otherwise a group's span also has keys between its queries' ranges, for which compressed rows have no logits.
#if PAGED
using Count = int;
using Unsigned = uint32;
#else
using Count = int64;
using Unsigned = uint64;
#endif

// Store to and load from shared memory.
__device__ inline void put(uint32 at, int x) { sts32(at, x); }
__device__ inline void put(uint32 at, int64 x) { sts32(at, uint32(x)), sts32(at + 4, uint32(x >> 32)); }
__device__ inline void get(uint32 at, int& x) { x = lds32(at); }
__device__ inline void get(uint32 at, int64& x) { x = int64(uint64(lds32(at + 4)) << 32 | lds32(at)); }

__device__ inline int sum_of_warp(int x) { return __reduce_add_sync(~0u, x); }
__device__ inline int64 sum_of_warp(int64 x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

// The work range of a CTA: `count` tiles from tile `tile` of group `group` on, which has `tiles` tiles from key `first_key` on.
struct WorkRange {
    int group, tile, tiles, first_key;
    Count count;
};

// Called by all threads of the CTA.
__device__ inline WorkRange work_range_of(const Problem& problem) {
    int groups = problem.groups(), run = groups <= THREADS ? 1 : (groups + THREADS - 1) / THREADS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = min(int(threadIdx.x) * run, groups);
    int end = min(begin + run, groups), first_key = 0;
    Count own = 0;
    for (int group = begin; group < end; ++group) own += problem.tiles_of(group, first_key);
    auto sum_to = [&](Count x) {  // inclusive prefix sum over the lanes
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            Count left = __shfl_up_sync(~0u, x, step);
            if (lane >= step) x += left;
        }
        return x;
    };
    Count up_to = sum_to(own), sum = 0;
    if (lane == 31) put(SUMS_AT + sizeof(Count) * warp, up_to);
    __syncthreads();
    if (lane < THREADS / 32) get(SUMS_AT + sizeof(Count) * lane, sum);
    Count total = sum_of_warp(sum), before = up_to - own + sum_of_warp(lane < warp ? sum : Count(0));
    Count even = Unsigned(total) / gridDim.x, larger = total - even * gridDim.x, block = blockIdx.x;
    Count first = block * even + min(block, larger), count = even + (block < larger);
    constexpr uint32 FOUND_AT = SUMS_AT + sizeof(Count) * (THREADS / 32);
    if (count && before <= first && first < before + own) {
        int group = begin, tiles = int(own);  // of one group, or found below
        Count tile = first - before;
        for (; run > 1; ++group) {
            tiles = problem.tiles_of(group, first_key);
            if (tile < tiles) break;
            tile -= tiles;
        }
        sts32(FOUND_AT, group), sts32(FOUND_AT + 4, int(tile)), sts32(FOUND_AT + 8, tiles), sts32(FOUND_AT + 12, first_key);
    }
    __syncthreads();
    return {int(lds32(FOUND_AT)), int(lds32(FOUND_AT + 4)), int(lds32(FOUND_AT + 8)), int(lds32(FOUND_AT + 12)), count};
}

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
            barrier_arrive_expecting(ready, tiles ? QUERIES * Q_BYTES : 0);
        }
        __syncwarp();
        if (tiles && lane < QUERIES)
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
                    barrier_arrive_expecting(ready, __popc(present) * 8 * (DIM + 4));
                }
                __syncwarp();
                if (lane >> boxes_log == i && place.page >= 0) {
                    int row = key % RING_KEYS;
                    tma_load_once(K_AT + stage * K_BYTES + row * DIM, k_map, 0, place.row, int(place.page), ready);
                    const uint8* scales = problem.pages + place.page * problem.page_stride + INDEXER_FP8::scale_start +
                        int64(problem.block_size) * INDEXER_FP8::scale_start_per_token + place.row * INDEXER_FP8::scale_stride;
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

#define FLOATS48(x) \
    FLOATS32(x), FLOATS16((x + 32))
#define REGISTERS48 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47} "

// x (64 keys x HEADS * PASS heads) = k q^T: 32 values along both.
__device__ inline void multiply(float (&x)[16], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 " REGISTERS16 ", %16, %17, p, 1, 1;\n}\n"
                 : FLOATS16(x) : "l"(k), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[48], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 " REGISTERS48 ", %48, %49, p, 1, 1;\n}\n"
                 : FLOATS48(x) : "l"(k), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[32], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGISTERS32 ", %32, %33, p, 1, 1;\n}\n"
                 : FLOATS32(x) : "l"(k), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[64], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " REGISTERS64 ", %64, %65, p, 1, 1;\n}\n"
                 : FLOATS64(x) : "l"(k), "l"(q), "r"(add));
}

// The weighted sums over a thread's HEADS / 4 heads for its keys g and g + 8, for the query whose products begin at x[first].
__device__ inline void sum_heads(const float (&x)[COLUMNS], int first, const float (&weights)[HEADS / 4], float& low, float& high) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = relu(x[first + i]) * weights[i % 2];
#pragma unroll
    for (int n = 1; n < HEADS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(relu(x[first + 4 * n + i]), weights[2 * n + i % 2], sums[i]);
    low = sums[0] + sums[1], high = sums[2] + sums[3];
}

// Lane c's query of the sums of four queries, added up over four lanes.
__device__ inline float sum_of_query(const float (&x)[4], int c) {
    bool odd = c & 1, upper = c & 2;
    float low = (odd ? x[1] : x[0]) + __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    float high = (odd ? x[3] : x[2]) + __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
}

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
        barrier_wait(Q_READY + 8 * q_stage, q_count / Q_STAGES % 2);
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
            barrier_wait(K_READY + 8 * stage, parity);
            uint64 k_tile = tile_descriptor(K_AT + stage * K_BYTES + (PAGED ? 0 : key_group * TILE_BYTES));
            float x[PRODUCTS][COLUMNS];
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j) pin(x[j]);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j) {
                uint64 own = q_tile + j * (Q_BYTES / 16);
#pragma unroll
                for (int step = 0; step < DIM / 32; ++step) multiply(x[j], k_tile + 2 * step, own + 2 * step, step > 0);
                wgmma_commit();
            }
            float scale, low, high, score;
            bool present;
            auto read_scale = [&](int in_stage) {
                scale = lds_float(SCALES_AT + (stage * RING_KEYS + in_stage) * 4);
                present = !PAGED || lds32(PRESENT_AT + 4 * stage) >> in_stage / 8 & 1;
            };
            auto store = [&](int key) {
                score = present ? score * scale : -infinity();
                if (stores && key >= first && key < end) logits[key] = score;
            };
            if (!PAGED && PASS <= 2) read_scale(in_stage);  // with PAGED, registers are too few
            wgmma_wait<PRODUCTS - 1>();
            pin(x[0]);
            if constexpr (PASS > 2) {
                float other_scale, sums[2][4] = {};  // [key g or g + 8][query]
                bool other_present;
                read_scale(in_stage + 8);
                other_scale = scale, other_present = present;
                read_scale(in_stage);
                warp_arrive(K_FREE + 8 * stage);
#pragma unroll
                for (int query = 0; query < PASS; ++query)
                    sum_heads(x[0], HEADS / 2 * query, weights[query], sums[0][query], sums[1][query]);
                score = sum_of_query(sums[0], c);
                store(key);
                score = sum_of_query(sums[1], c), scale = other_scale, present = other_present;
                store(key + 8);
            } else {
                if (PRODUCTS == 2) {
                    sum_heads(x[0], 0, weights[0], low, high);
                    wgmma_wait<0>();
                    pin(x[PRODUCTS - 1]);
                }
                if (PAGED) read_scale(in_stage);
                warp_arrive(K_FREE + 8 * stage);
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
        warp_arrive(Q_FREE + 8 * q_stage);
    }
}

// 48 bytes precede the first map: the address of a tensor map is a multiple of 64, and parameters begin 16 bytes after one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
indexer_logits_sm90(const float* weights, int64 weights_stride, const int* starts, const int* ends, int64 lens_stride,
                    int per_query, int queries, const __grid_constant__ TensorMap q_map,
                    const __grid_constant__ TensorMap k_map, const float* scales, int keys, int compressed_width,
                    const int* block_table, int64 table_stride, int table_rows, int table_columns, const uint8* pages,
                    int64 page_stride, int64 num_slots, int block_size, int box_rows, float* logits,
                    int64 logits_stride) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != BARRIERS_AT || reinterpret_cast<uint64>(&q_map) % 64) __trap();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(q_map), prefetch_tensor_map(k_map);
        for (int i = 0; i < Q_STAGES; ++i) barrier_init(Q_READY + 8 * i, 33), barrier_init(Q_FREE + 8 * i, CONSUMERS / 32 * WARP_ARRIVALS);
        for (int i = 0; i < RINGS * K_STAGES; ++i) {
            barrier_init(K_READY + 8 * i, PAGED ? 1 : 33);  // copies_arrive: every lane
            barrier_init(K_FREE + 8 * i, CONSUMERS / 32 / RINGS * WARP_ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    pdl_wait();
    Problem problem{weights, weights_stride, queries, starts, ends, lens_stride, per_query, keys, compressed_width,
                    {block_table, table_stride, table_rows, table_columns}, pages, page_stride, num_slots, block_size,
                    box_rows, logits, logits_stride, scales};
    WorkRange work = work_range_of(problem);  // synchronises all threads
    if (threadIdx.x >= CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        int ring = (threadIdx.x - CONSUMERS) / 32;
        if (ring <= max(RINGS - 1, Q_WARP)) Producer{problem, q_map, k_map, ring, ring, 0}.run(work);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(problem);
    }
}
