// Shared by the sparse attention kernels: the problem, its division into tiles and blocks, and the work range of each CTA.
//
// A query token and HEADS of its heads are a *tile*; the keys of a tile are processed BLOCK at a time, a *block*. The
// blocks of the first list come before the blocks of the second, and no block has keys of both. Each CTA of a
// persistent kernel has a *work range*: consecutive blocks, which may begin and end inside a tile. A tile in several
// work ranges is a *split tile*; its partial results are combined by common/sparse/combine.cuh.
#pragma once
#include "common/pages.cuh"

#ifndef TILE_HEADS
#define TILE_HEADS 64
#endif
// Formats of the first list's cache and of the second's.
#ifndef EXTRA_LAYOUT
#define EXTRA_LAYOUT LAYOUT
#endif
constexpr int HEADS = TILE_HEADS;
constexpr int BLOCK = 64;
[[maybe_unused]] constexpr int V_DIM = 512;

[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Keys of one cache.
struct Segment {
    uint8* pages;
    int64 page_stride;
    const int* indices;
    int64 indices_stride_b, indices_stride_s;
    const int* lengths;  // or null: all have `topk`
    int64 lengths_stride_b, lengths_stride_s;
    int num_slots, block_size, block_shift;  // block_size is 1 << block_shift, or any size if that is negative
    int topk;

    __device__ int length(int b, int s) const {
        if (lengths == nullptr) return topk;
        return max(0, min(topk, lengths[b * lengths_stride_b + s * lengths_stride_s]));
    }
    // Page of a slot of the cache.
    __device__ int page_of(int slot) const { return block_shift >= 0 ? slot >> block_shift : int(uint32(slot) / uint32(block_size)); }
};

// kernels/cuda/sparse/work.py packs it.
struct SparseProblem {
    const bf16* q;
    int64 q_stride_b, q_stride_s, q_stride_h;
    Segment segments[2];
    const float* attn_sink;  // or null
    bf16* out;
    int64 out_stride_b, out_stride_s, out_stride_h;
    float* lse;
    int64 lse_stride_b, lse_stride_h, lse_stride_s;
    float* max_logits;  // or null; written by kernels that split no tile
    int64 max_stride_b, max_stride_h;
    const int* starts;              // [ranges + 1][2]: tile and block at which each work range begins; or null, see Start and ORDER_AT
    float* partial_out;             // [2 * ranges][HEADS * V_DIM] of split tiles, see partial_slot and partial_at
    float* partial_lse;             // [2 * ranges][HEADS], base 2, -inf without keys
    int* unsafe;                    // [tiles]: why a tile is flagged for the epilogue (see mark), or 0; or null, see UNSAFE_BITS
    int batch, s_q, heads, groups;  // groups of HEADS heads
    int ranges;
    // Without starts: every period_tiles tiles have period_ranges work ranges of range_length units; the first range_rest ranges
    // have one more. A tile has tile_units units: blocks, or 1 if tiles are not split. The splits of one tile (see even) divide
    // its blocks evenly. The inverse is 2^32 / period_ranges, rounded up, or 0 for one range.
    int period_tiles, period_ranges, range_length, range_rest, tile_units;
    uint32 period_inverse;
    float softmax_scale;

    __device__ int tiles() const { return batch * s_q * groups; }

    // Flag a tile for the epilogue kernel, for one of the reasons below. The word before all flags says that there is one.
    __device__ void mark(int tile, int reason = 1) const { atomicOr(unsafe + tile, reason), unsafe[-1] = 1; }

    // Whether every tile has period_ranges splits, each of its own CTA. Each split then derives its blocks from the tile's
    // length, and no plan is needed.
    __device__ bool even() const { return starts == nullptr && period_tiles == 1 && period_ranges > 1; }

    // Whether tiles are numbered head group by head group, as in decode without a plan: CTAs that read the same rows for other
    // heads then run at the same time, and the rows are read from memory once. Otherwise the groups of a token are neighbours.
    __device__ bool by_group() const { return starts == nullptr && max_logits == nullptr; }
};

// Reason for which a tile is flagged: recompute its results, or keep them because all are NaN, even if it is flagged for both.
[[maybe_unused]] constexpr int RECOMPUTE = 1, ALL_NAN = 2;

// Without `unsafe`, a fast kernel flags heads with this value in max_logits or lse: a NaN that no arithmetic gives.
[[maybe_unused]] constexpr uint32 UNSAFE_BITS = 0x7fc0dead;

__device__ inline int blocks_of(int length) { return (length + BLOCK - 1) / BLOCK; }

// Token and first head of a tile.
struct TileCoord {
    int b, s, first_head;

    __device__ TileCoord(int b, int s, int first_head) : b(b), s(s), first_head(first_head) {}

    __device__ TileCoord(const SparseProblem& problem, int tile) {
        int run = problem.by_group() ? problem.batch * problem.s_q : problem.groups, upper = tile / run, lower = tile - upper * run;
        int token = problem.by_group() ? lower : upper, group = problem.by_group() ? upper : lower;
        first_head = group * HEADS;
        b = token / problem.s_q, s = token % problem.s_q;
    }
};

// A tile without keys has one block, so that some CTA writes its result.
__device__ inline int blocks_of_tile(int length0, int length1) { return max(1, blocks_of(length0) + blocks_of(length1)); }

__device__ inline int blocks_of_tile(const SparseProblem& problem, int tile) {
    TileCoord at(problem, tile);
    return blocks_of_tile(problem.segments[0].length(at.b, at.s), problem.segments[1].length(at.b, at.s));
}

// Where a work range begins; range number `ranges` begins where the last one ends.
struct Start {
    int tile, block;

    __device__ Start(const SparseProblem& problem, int range) {
        if (problem.starts) {
            tile = problem.starts[2 * range], block = problem.starts[2 * range + 1];
        } else {
            int group = __umulhi(range, problem.period_inverse), part = range - group * problem.period_ranges;
            uint32 at = part * problem.range_length + min(part, problem.range_rest), ahead = at / problem.tile_units;
            tile = group * problem.period_tiles + ahead, block = at - ahead * problem.tile_units;
        }
    }

    __device__ bool operator==(const Start& other) const { return tile == other.tile && block == other.block; }
};

// The blocks of one tile in a work range.
struct WorkTile {
    int tile;
    int lengths0, lengths1;
    int first, last;  // blocks [first, last) of `blocks`; never empty, but may be beyond the end: keys that are absent
    int blocks;
    bool split;  // also if it has all blocks: the epilogue reads every split

    __device__ bool whole() const { return !split && first == 0 && last == blocks; }
};

// After the starts of MAX_RANGES ranges: the tiles in the order in which the ranges have them, for at most MAX_ORDERED tiles.
[[maybe_unused]] constexpr int MAX_RANGES = 512, ORDER_AT = 2 * (MAX_RANGES + 1), MAX_ORDERED = 1 << 14;
// After these: non-zero if the plan splits any tile.
[[maybe_unused]] constexpr int SPLITS_AT = ORDER_AT + MAX_ORDERED;

// Remainder of a CTA's work range, tile by tile.
struct WorkRange {
    int tile, first, end_tile, end_block;

    __device__ WorkRange(const SparseProblem& problem) {
        if (problem.even()) {
            tile = __umulhi(blockIdx.x, problem.period_inverse), end_tile = tile + 1, end_block = 0;
            first = blockIdx.x - tile * problem.period_ranges;  // the split, until its blocks are known
            return;
        }
        Start start(problem, blockIdx.x), end(problem, blockIdx.x + 1);
        tile = start.tile, first = start.block, end_tile = end.tile, end_block = end.block;
    }

    __device__ bool more() const { return tile < end_tile || (tile == end_tile && first < end_block); }

    // The number of the next tile. Volatile: otherwise some compilers keep more values than there are registers.
    __device__ int number(const SparseProblem& problem) const {
        int found = tile;
        if (problem.starts && problem.tiles() <= MAX_ORDERED)
            asm volatile("ld.global.s32 %0, [%1];" : "=r"(found) : "l"(problem.starts + ORDER_AT + tile));
        return found;
    }

    __device__ bool next(const SparseProblem& problem, WorkTile& work) {
        if (!more()) return false;
        int found = number(problem);
        take(problem, work, found, TileCoord(problem, found));
        return true;
    }

    // The next tile, which must exist, by its number and coordinates.
    __device__ void take(const SparseProblem& problem, WorkTile& work, int number, const TileCoord& at) {
        work.tile = number;
        work.lengths0 = problem.segments[0].length(at.b, at.s);
        work.lengths1 = problem.segments[1].length(at.b, at.s);
        work.blocks = blocks_of_tile(work.lengths0, work.lengths1);
        work.split = problem.even();
        if (work.split) {
            // A tile of fewer blocks than splits leaves some of them a block of absent keys.
            int each = __umulhi(work.blocks, problem.period_inverse), longer = work.blocks - each * problem.period_ranges;
            work.first = first * each + min(first, longer);
            work.last = work.first + max(1, each + (first < longer));
        } else {
            // A stale plan may give empty splits. They get a block, and nothing reads their results.
            work.first = min(first, work.blocks - 1);
            work.last = tile == end_tile ? max(work.first + 1, min(end_block, work.blocks)) : work.blocks;
        }
        ++tile, first = 0;
    }
};

// Slot for a range's partial result of a split tile. A range has at most two: one with the tile's start, one without.
__device__ inline int partial_slot(int range, bool from_start) { return 2 * range + from_start; }

// Where eight values of a head are in a partial result: two float4, PLANE float4 apart, in the order of Hopper's
// accumulators, so that a warp writes and reads whole lines.
[[maybe_unused]] constexpr int PLANE = 32;

__device__ inline int partial_at(int head, int value) {
    int octet = value / 8, line = octet / 8 * (HEADS / 4) + head / 8 * 2 + head % 2;
    return line * 2 * PLANE + octet % 8 * 4 + head / 2 % 4;
}
