// What the sparse attention kernels share: the problem, its cut into tiles and blocks, and who does which.
//
// A query token and HEADS of its heads are a *tile* of work; the keys of a tile are taken BLOCK at a time, a
// *block*. The blocks of the first list come before those of the second, and none has keys of both. Each thread
// block of a persistent kernel has a *share*: a run of blocks, which may begin and end inside a tile. A tile that
// is cut in this way leaves partial results that common/sparse/combine.cuh puts together.
#pragma once
#include "common/pages.cuh"

#ifndef TILE_HEADS
#define TILE_HEADS 64
#endif
constexpr int HEADS = TILE_HEADS;
constexpr int BLOCK = 64;
[[maybe_unused]] constexpr int V_DIM = 512;

[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Keys of one cache.
struct List {
    uint8* pages;
    int64 page_stride;
    const int* indices;
    int64 indices_stride_b, indices_stride_s;
    const int* lengths;  // or null: all `topk`
    int64 lengths_stride_b, lengths_stride_s;
    int num_slots, block_size, block_shift;  // block_size is 1 << block_shift, or any where that is negative
    int topk;

    __device__ int length(int b, int s) const {
        if (lengths == nullptr) return topk;
        return max(0, min(topk, lengths[b * lengths_stride_b + s * lengths_stride_s]));
    }
};

// As packed by kernels/cuda/sparse/problem.py.
struct SparseProblem {
    const bf16* q;
    int64 q_stride_b, q_stride_s, q_stride_h;
    List lists[2];
    const float* attn_sink;  // or null
    bf16* out;
    int64 out_stride_b, out_stride_s, out_stride_h;
    float* lse;
    int64 lse_stride_b, lse_stride_h, lse_stride_s;
    float* max_logits;  // or null; written by kernels of which no tile is cut
    int64 max_stride_b, max_stride_h;
    const int* starts;   // [shares + 1][2]: tile and block at which each share begins; or null, see Start and ORDER_AT
    float* partial_out;  // [2 * shares][HEADS * V_DIM] of cut tiles, see partial_slot and partial_at
    float* partial_lse;  // [2 * shares][HEADS], base 2, -inf without keys
    int* unsafe;         // [tiles]: what is to be done about a tile behind a fast kernel (see mark); or null, see UNSAFE_BITS
    int batch, s_q, heads, groups;  // groups of HEADS heads
    int shares;
    // Without starts: every cut_tiles tiles have cut_shares shares of cut_length units, the first cut_rest of one more. A
    // tile has cut_units units: blocks, or 1 where tiles stay whole. Splits of one tile (see even) take equal runs of the
    // blocks that it has. The inverse is 2^32 / cut_shares, rounded up, or 0 where there is one share.
    int cut_tiles, cut_shares, cut_length, cut_rest, cut_units;
    uint32 cut_inverse;
    float softmax_scale;

    __device__ int tiles() const { return batch * s_q * groups; }

    // Leave a tile to the exact kernel, for one of the reasons below. The word before all marks says that there is one.
    __device__ void mark(int tile, int reason = 1) const { atomicOr(unsafe + tile, reason), unsafe[-1] = 1; }

    // Whether every tile has cut_shares splits, each of its own thread block. Lengths then say how many blocks a split has,
    // and nothing has to be planned.
    __device__ bool even() const { return starts == nullptr && cut_tiles == 1 && cut_shares > 1; }

    // Whether tiles are numbered group of heads by group of heads, as decode without a plan has them: thread blocks that read
    // the same rows for other heads do so at the same time then, and memory is asked for them once. Otherwise the groups of
    // a token are neighbours.
    __device__ bool by_group() const { return starts == nullptr && max_logits == nullptr; }
};

// Why a tile is marked: it must be done again; some of its RoPE values are larger than float16 has and were taken for the largest that it
// has, which can be amended; one is NaN, so that all its results are, whatever else.
[[maybe_unused]] constexpr int AGAIN = 1, LARGE_ROPE = 2, ALL_NAN = 4;

// Without `unsafe`, what a fast kernel writes to max_logits or to lse of such heads: a NaN that no arithmetic gives.
[[maybe_unused]] constexpr uint32 UNSAFE_BITS = 0x7fc0dead;

__device__ inline int blocks_of(int length) { return (length + BLOCK - 1) / BLOCK; }

// Where a tile's token and heads are.
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

// A tile without keys has a block too, or nobody would write its result.
__device__ inline int blocks_of_tile(int length0, int length1) { return max(1, blocks_of(length0) + blocks_of(length1)); }

__device__ inline int blocks_of_tile(const SparseProblem& problem, int tile) {
    TileCoord at(problem, tile);
    return blocks_of_tile(problem.lists[0].length(at.b, at.s), problem.lists[1].length(at.b, at.s));
}

// Where a share begins; share `shares` begins where the last one ends.
struct Start {
    int tile, block;

    __device__ Start(const SparseProblem& problem, int share) {
        if (problem.starts) {
            tile = problem.starts[2 * share], block = problem.starts[2 * share + 1];
        } else {
            int group = __umulhi(share, problem.cut_inverse), part = share - group * problem.cut_shares;
            uint32 at = part * problem.cut_length + min(part, problem.cut_rest), ahead = at / problem.cut_units;
            tile = group * problem.cut_tiles + ahead, block = at - ahead * problem.cut_units;
        }
    }

    __device__ bool operator==(const Start& other) const { return tile == other.tile && block == other.block; }
};

// One tile's part of a share.
struct Work {
    int tile;
    int lengths0, lengths1;
    int first, last;  // blocks [first, last) of `blocks`; never empty, but may lie behind them: keys that are absent
    int blocks;
    bool split;       // even if it has all blocks: the combine kernel reads every split

    __device__ bool whole() const { return !split && first == 0 && last == blocks; }
};

// Behind the starts of MAX_SHARES shares: the tiles in the order in which shares have them, if they are MOST_DEALT at most.
// As in kernels/cuda/sparse/division.py.
[[maybe_unused]] constexpr int MAX_SHARES = 512, ORDER_AT = 2 * (MAX_SHARES + 1), MOST_DEALT = 1 << 14;
// Behind these, not 0 if the plan splits any tile.
[[maybe_unused]] constexpr int SPLITS_AT = ORDER_AT + MOST_DEALT;

// What is left of a thread block's share, tile after tile.
struct SparseShare {
    int tile, first, end_tile, end_block;

    __device__ SparseShare(const SparseProblem& problem) {
        if (problem.even()) {
            tile = __umulhi(blockIdx.x, problem.cut_inverse), end_tile = tile + 1, end_block = 0;
            first = blockIdx.x - tile * problem.cut_shares;  // the split, until its blocks are known
            return;
        }
        Start start(problem, blockIdx.x), end(problem, blockIdx.x + 1);
        tile = start.tile, first = start.block, end_tile = end.tile, end_block = end.block;
    }

    __device__ bool more() const { return tile < end_tile || (tile == end_tile && first < end_block); }

    __device__ bool next(const SparseProblem& problem, Work& work) {
        if (!more()) return false;
        work.tile = tile;
        // Volatile, or some compilers make more of it than there are registers for.
        if (problem.starts && problem.tiles() <= MOST_DEALT)
            asm volatile("ld.global.s32 %0, [%1];" : "=r"(work.tile) : "l"(problem.starts + ORDER_AT + tile));
        TileCoord at(problem, work.tile);
        work.lengths0 = problem.lists[0].length(at.b, at.s);
        work.lengths1 = problem.lists[1].length(at.b, at.s);
        work.blocks = blocks_of_tile(work.lengths0, work.lengths1);
        work.split = problem.even();
        if (work.split) {
            // A tile of fewer blocks than splits leaves some of them a block of absent keys.
            int each = work.blocks / problem.cut_shares, longer = work.blocks - each * problem.cut_shares;
            work.first = first * each + min(first, longer);
            work.last = work.first + max(1, each + (first < longer));
        } else {
            // A plan made for other lengths may give splits beyond the end. They are never empty, and nothing reads them.
            work.first = min(first, work.blocks - 1);
            work.last = tile == end_tile ? max(work.first + 1, min(end_block, work.blocks)) : work.blocks;
        }
        ++tile, first = 0;
        return true;
    }
};

// Where a share's part of a cut tile goes: it has at most two, one from a tile's start and one from further in.
__device__ inline int partial_slot(int share, bool from_start) { return 2 * share + from_start; }

// Where eight values of a head are in a part, as the first of two float4 with PLANE of them between: in the order of
// Hopper's accumulators, so that a warp writes and reads whole lines.
[[maybe_unused]] constexpr int PLANE = 32;

__device__ inline int partial_at(int head, int value) {
    int octet = value / 8, line = octet / 8 * (HEADS / 4) + head / 8 * 2 + head % 2;
    return line * 2 * PLANE + octet % 8 * 4 + head / 2 % 4;
}
