// Sizes, shared memory, the problem and the work range of a CTA of the index logits (sm90/indexer/logits.cu).
#pragma once
#define ALIGNED 1
#include "common/pages.cuh"
#include "common/device.cuh"
#include "common/prefix_sum.cuh"
#include "sm90/hopper.cuh"

constexpr int DIM = 128, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS, THREADS = 640;
static_assert(THREADS == CONSUMERS + 128, "and a warpgroup of producers");
constexpr int QUERIES = PASS * PASSES * QUERY_GROUPS, KEY_GROUPS = WARPGROUPS / QUERY_GROUPS, KEYS = 64 * KEY_GROUPS;
constexpr bool WIDE = HEADS * PASS > 64;  // products of more than 64 columns
constexpr bool FEW_REGISTERS = WIDE || MXFP4 && PASSES > 1;  // for producers
constexpr int PRODUCER_REGISTERS = FEW_REGISTERS ? 32 : 56, CONSUMER_REGISTERS = FEW_REGISTERS ? 112 : 104;
// Three stages of pages keep 13 MB in flight, enough for the full memory bandwidth. With more stages, more pages are
// requested at the start, and the first tile arrives late.
constexpr bool FEW_STAGES = HEADS == 64 && QUERY_GROUPS == 1 && MXFP4 == 0 && CANDIDATES == 0;
constexpr int Q_STAGES = 2, K_STAGES = FEW_STAGES ? 3 : QUERY_GROUPS >= 2 ? 8 : WIDE ? 5 : 6;
constexpr int Q_BYTES = HEADS * DIM, ROW_BYTES = MXFP4 ? DIM / 2 : DIM;
// Cost of a group in addition to its tiles, in tiles: reading queries and weights, starting and ending products.
// Without it the CTA with the short groups at the beginning of a prompt would end long after the others.
constexpr int GROUP_COST = PAGED ? 0 : 2;
constexpr int RINGS = PAGED ? KEY_GROUPS : 1, RING_KEYS = KEYS / RINGS;  // a ring has K_STAGES stages, loaded by one warp
constexpr int Q_WARP = RINGS < 4 ? RINGS : 0;  // the warp that loads queries
// Where tiles arrive no faster than they are needed, the first half of 128 columns is reduced while the second half is
// multiplied. Elsewhere one product of all queries reads less shared memory.
constexpr int PRODUCTS = PAGED && QUERY_GROUPS == 1 && HEADS * PASS == 128 ? 2 : 1;
constexpr int COLUMNS = HEADS / 2 * PASS / PRODUCTS;  // in a thread's registers
static_assert(HEADS * PASS <= 128 && Q_BYTES % 1024 == 0);

// A group of the work range, as consumers read it.
struct Info {
    int first_key, tiles;              // tiles 0: no more groups
    int first[QUERIES], end[QUERIES];  // keys that each query sees
    int row;                           // of the first query
    int padding;
};

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 BARRIERS_AT = 1024;
constexpr Barriers<Q_STAGES> q_ready{BARRIERS_AT}, q_free{q_ready.end()};
constexpr Barriers<RINGS * K_STAGES> k_ready{q_free.end()}, k_free{k_ready.end()};  // [K_STAGES][RINGS], as all of keys
constexpr uint32 PRESENT_AT = k_free.end();  // for each stage: a bit for each eight of its rows; bit 8 if a row is not seen
constexpr uint32 SEEN_AT =
    PRESENT_AT + 4 * RINGS * K_STAGES;  // CANDIDATES: four bits for each eight rows of a stage: the number of rows that are seen
constexpr uint32 INFO_AT = SEEN_AT + (CANDIDATES ? 4 * RINGS * K_STAGES : 0);  // of each Q stage
constexpr uint32 SUMS_AT = INFO_AT + Q_STAGES * sizeof(Info);  // of each warp, while the work range is computed; then the range itself
constexpr uint32 WEIGHTS_AT = 2048;  // [Q_STAGES][QUERIES][HEADS]
constexpr uint32 SCALES_AT = WEIGHTS_AT + Q_STAGES * QUERIES * HEADS * 4;  // [K_STAGES][KEYS]
constexpr uint32 Q_AT = (SCALES_AT + K_STAGES * KEYS * 4 + 1023) / 1024 * 1024;
constexpr uint32 K_AT = Q_AT + Q_STAGES * QUERIES * Q_BYTES;
constexpr uint32 K_BYTES = RING_KEYS * ROW_BYTES;
[[maybe_unused]] constexpr uint32 SHARED_BYTES = K_AT + K_STAGES * KEYS * ROW_BYTES - BARRIERS_AT;
static_assert(MXFP4 ? PAGED && QUERY_GROUPS == 1 && !WIDE && PASS <= 2 : PASSES == 1);
static_assert(!CANDIDATES || PAGED && !MAXIMA && QUERIES == 1);
static_assert(SUMS_AT + 8 * (THREADS / 32) + 20 <= WEIGHTS_AT);

// A number of tiles of several groups. With PAGED it is below 2^31, because each tile except the last one of a group
// writes at least 256 logits. Otherwise the span of a group also has keys between the ranges of its queries, for which
// compressed rows have no logits.
#if PAGED
using Count = int;
using Unsigned = uint32;
#else
using Count = int64;
using Unsigned = uint64;
#endif

// Index of the weight of a head among the weights of its query. MXFP4: the weights of a lane are contiguous.
__device__ inline int weight_at(int head) { return MXFP4 ? head % 8 / 2 * (HEADS / 4) + head / 8 * 2 + head % 2 : head; }

struct Problem {
    const float* weights;
    int64 weights_stride;
    int queries;               // in all; PAGED: per entry of the block table
    const int *starts, *ends;  // PAGED: lengths, and null
    int64 lens_stride;         // between entries; 0, like per_query, for packed keys
    int per_query;             // whether every query has a length of its own
    int keys;                  // number of keys; PAGED: width of logits
    int compressed_width;      // width of compressed rows of logits, else 0
    BlockTable table;
    const uint8* pages;
    int64 page_stride, num_slots;
    int block_size, box_rows;
    float* logits;
    int64 logits_stride;
    const float* scales;
    const uint8* q;  // as q_map
    int64 q_stride;
    float* maxima;  // MAXIMA: of each 8 logits of a row, as candidate_maxima computes them (common/candidates.cu)
    int64 maxima_stride;
    int blocks;             // of a row of maxima
    const int* candidates;  // CANDIDATES: blocks of each query; `keys` counts their positions
    int64 candidates_stride;
    float fill;  // logit of a position that its query does not see

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
    // PAGED: number of positions that a query of an entry sees.
    __device__ int64 length_of(int entry, int j) const {
        return per_query ? starts[entry * lens_stride + j] : int64(starts[entry * lens_stride]) - (queries - 1 - j);
    }
    // Keys that a query of an entry sees; CANDIDATES: all of its logits.
    __device__ void range_of(int entry, int j, int& first, int& end) const {
        if (CANDIDATES) {
            first = 0, end = keys;
        } else if (PAGED) {
            first = 0, end = int(min(max(length_of(entry, j), int64(0)), int64(keys)));
        } else {
            first = min(max(starts[j], 0), keys), end = min(max(ends[j], first), keys);
            if (compressed_width) end = int(min(int64(end), int64(first) + compressed_width));
        }
    }
    // Number of tiles of a group, its first key and the one after its last: the span of the keys of all its queries.
    __device__ int tiles_of(int group, int& first, int& end) const {
        int j, count, entry = entry_of(group, j, count);
        end = 0;
        first = PAGED ? 0 : INT32_LIMIT;
#pragma unroll
        for (int i = 0; i < QUERIES; ++i) {
            int from = 0, to = 0;
            if (i < count) range_of(entry, j + i, from, to);
            if (to > from) first = min(first, from), end = max(end, to);
        }
        return end > first ? int((int64(end) - first + KEYS - 1) / KEYS) : 0;
    }
    __device__ static Count cost_of(int tiles) { return tiles ? Count(tiles) + GROUP_COST : 0; }
};

// Store to and load from shared memory.
__device__ inline void store_shared(uint32 at, int x) { sts32(at, x); }
__device__ inline void store_shared(uint32 at, int64 x) { sts32(at, uint32(x)), sts32(at + 4, uint32(x >> 32)); }
__device__ inline void load_shared(uint32 at, int& x) { x = lds32(at); }
__device__ inline void load_shared(uint32 at, int64& x) { x = int64(uint64(lds32(at + 4)) << 32 | lds32(at)); }

__device__ inline int sum_of_warp(int x) { return __reduce_add_sync(~0u, x); }
__device__ inline int64 sum_of_warp(int64 x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

// The work range of a CTA: `cost` units of work. The range begins `skipped` units after the start of group `group`, which
// has `tiles` tiles of the keys [first_key, end). A group's own cost (GROUP_COST) comes before its tiles.
struct WorkRange {
    int group, skipped, tiles, first_key, end;
    Count cost;
};
// This CTA's part of `total`: returns where it begins, and sets its cost.
__device__ inline Count part_of(Count total, Count& cost) {
    Count even = Unsigned(total) / gridDim.x, larger = total - even * gridDim.x, block = blockIdx.x;
    cost = even + (block < larger);
    return block * even + min(block, larger);
}

// The work range, found by a single warp, for at most 32 groups.
__device__ inline WorkRange work_range_of_warp(const Problem& problem) {
    int lane = threadIdx.x % 32, first_key = 0, end = 0, tiles = lane < problem.groups() ? problem.tiles_of(lane, first_key, end) : 0;
    Count own = problem.cost_of(tiles), up_to = sum_to(own), cost, first = part_of(__shfl_sync(~0u, up_to, 31), cost);
    int group = max(__ffs(__ballot_sync(~0u, up_to > first)) - 1, 0);
    auto of_group = [&](auto x) { return __shfl_sync(~0u, x, group); };
    return {group, int(first - of_group(up_to - own)), of_group(tiles), of_group(first_key), of_group(end), cost};
}

// Called by all threads of the CTA.
__device__ inline WorkRange work_range_of(const Problem& problem) {
    int groups = problem.groups(), run = groups <= THREADS ? 1 : (groups + THREADS - 1) / THREADS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = min(int(threadIdx.x) * run, groups);
    int behind = min(begin + run, groups), first_key = 0, end = 0;
    Count own = 0;
    for (int group = begin; group < behind; ++group) own += problem.cost_of(problem.tiles_of(group, first_key, end));
    Count up_to = sum_to(own), sum = 0;
    if (lane == 31) store_shared(SUMS_AT + sizeof(Count) * warp, up_to);
    __syncthreads();
    if (lane < THREADS / 32) load_shared(SUMS_AT + sizeof(Count) * lane, sum);
    Count total = sum_of_warp(sum), before = up_to - own + sum_of_warp(lane < warp ? sum : Count(0));
    Count count, first = part_of(total, count);
    constexpr uint32 FOUND_AT = SUMS_AT + sizeof(Count) * (THREADS / 32);
    if (count && before <= first && first < before + own) {
        int group = begin, tiles = int(own) - GROUP_COST;  // of one group, or found below
        Count skipped = first - before;
        for (; run > 1; ++group) {
            tiles = problem.tiles_of(group, first_key, end);
            if (skipped < problem.cost_of(tiles)) break;
            skipped -= problem.cost_of(tiles);
        }
        sts32(FOUND_AT, group), sts32(FOUND_AT + 4, int(skipped)), sts32(FOUND_AT + 8, tiles), sts32(FOUND_AT + 12, first_key);
        sts32(FOUND_AT + 16, end);
    }
    __syncthreads();
    auto found = [](int i) { return int(lds32(FOUND_AT + 4 * i)); };
    return {found(0), found(1), found(2), found(3), found(4), count};
}
