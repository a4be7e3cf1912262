// Work division of dense MLA decode (sm90/dense/decode/decode.cu, sm80/dense/decode.cu). common/dense/plan.cu computes
// it from the lengths, once for all layers of a step.
//
// Keys are counted in blocks of BLOCK. The *cost* of a query token is TOKEN_COST plus the blocks of its keys. The
// sequence of the costs of all tokens is divided into ranges of equal cost, one for each CTA (of each group of heads).
// A token that a boundary divides has a *part* in each of the ranges; common/dense_decode_merge.cu combines them. No
// token is divided where whole tokens fill the device equally well, or without a division.
//
// `division[i]` has the bounds of range i: token and block where it begins, token and block where it ends. The entries of `parts`
// follow the entries of all ranges. Entry i of `parts` is {token, range of its first part, number of its parts}. It describes token i,
// or, if there are more tokens than ranges, the token that is divided at the end of range i (0 parts: no token is). The first part of a
// token is row 2 * range + 1 of the partial results; its part in a later range is row 2 * range.
//
// Decodes read the lengths again. If the division was computed for other lengths, tokens still have the same parts: the
// last part of a token takes all further blocks, and parts beyond its end are empty.
//
// Limit: all costs together are below 2^31.
#pragma once
#include "common/latent.cuh"

constexpr int BLOCK = 64;
constexpr int TOKEN_COST = 6;  // in blocks: the start of a token, and storing its result
constexpr int MIN_RANGE = 2;   // smallest number of blocks of a range
constexpr int MIN_PART = 2;    // smallest number of blocks on either side of a boundary

__device__ inline int blocks_of(int keys) { return keys / BLOCK + (keys % BLOCK > 0); }

struct DenseTokens {
    const int* lens;
    int s_q, count;           // of all requests
    int columns, block_size;  // of the block table; columns: pages of a row
    int causal;

    // Keys that a token sees.
    __device__ int keys(int token) const {
        int query = token % s_q;
        int keys = max(lens[token / s_q], 0) - (causal ? s_q - 1 - query : 0);
        return int(min(int64(max(keys, 0)), int64(columns) * block_size));
    }
    __device__ int blocks(int token) const { return blocks_of(keys(token)); }
};

// A position in the sequence of the blocks of all tokens.
struct DenseBoundary { int token, block; };

// The work range of a CTA.
struct DenseWork {
    DenseBoundary begin, end;
    int parts;  // of the token that `end` divides

    __device__ int last_token() const { return end.token - (end.block == 0); }
    __device__ int first_block(int token) const { return token == begin.token ? begin.block : 0; }
    __device__ int last_block(int token, int blocks) const { return token == end.token ? min(end.block, blocks) : blocks; }
    // How many of a token's `blocks` blocks are in this range.
    __device__ int blocks_here(int token, int blocks) const { return max(0, last_block(token, blocks) - first_block(token)); }
    // Row of the partial results, or -1 if the whole token is in this range.
    __device__ int part(int token, int range) const { return first_block(token) ? 2 * range : token == end.token ? 2 * range + 1 : -1; }
    // Whether the first part of a token is in this range.
    __device__ bool begins_part() const { return end.block && first_block(end.token) == 0; }
};

// The boundary at `cost`, which lies within `token`, whose costs begin at `start`.
__device__ inline DenseBoundary boundary_within(int token, int start, int blocks, int cost) {
    int block = cost - start - TOKEN_COST;
    if (block < MIN_PART) block = 0;
    else if (block > blocks - MIN_PART) block = blocks;
    return cost > start && block == blocks ? DenseBoundary{token + 1, 0} : DenseBoundary{token, block};
}

// The work of CTA `range` of `ranges` if no token is divided.
__device__ inline DenseWork whole_tokens(int tokens, int ranges, int range) {
    int each = (tokens + ranges - 1) / ranges;
    return {{min(tokens, range * each), 0}, {min(tokens, (range + 1) * each), 0}, 1};
}

// The same from a division; null: no token is divided. `parts` is not read.
__device__ inline DenseWork planned_work(const uint4* division, int tokens, int ranges, int range) {
    if (!division) return whole_tokens(tokens, ranges, range);
    uint4 x = division[range];
    return {{int(x.x), int(x.y)}, {int(x.z), int(x.w)}, 1};
}

// Divide by the lengths. Called by a warp, whose lanes get the same result.
__device__ inline DenseWork divide_work(const DenseTokens& tokens, int ranges, int range) {
    int lane = threadIdx.x % 32, longest = 0, total = 0;
    for (int token = lane; token < tokens.count; token += 32) {
        int cost = TOKEN_COST + tokens.blocks(token);
        total += cost, longest = max(longest, cost);
    }
    total = __reduce_add_sync(~0u, total), longest = int(__reduce_max_sync(~0u, uint32(longest)));
    int whole = (tokens.count + ranges - 1) / ranges;  // number of tokens of a CTA if none is divided
    int length = max((total - 1) / ranges + 1, MIN_RANGE);
    if (32 * int64(whole) * longest <= 33 * int64(length + TOKEN_COST + MIN_PART)) return whole_tokens(tokens.count, ranges, range);

    DenseWork work{{tokens.count, 0}, {tokens.count, 0}, 1};
    int begin = min(range * int64(length), int64(total)), end = min(begin + int64(length), int64(total)), before = 0;
    for (int first = 0; first < tokens.count && before <= end; first += 32) {
        int token = first + lane, blocks = token < tokens.count ? tokens.blocks(token) : 0;
        int cost = token < tokens.count ? TOKEN_COST + blocks : 0;
        int up_to = cost;
        for (int step = 1; step < 32; step *= 2) {
            int left = __shfl_up_sync(~0u, up_to, step);
            if (lane >= step) up_to += left;
        }
        int start = before + up_to - cost;
        before += __shfl_sync(~0u, up_to, 31);
        uint32 begins = __ballot_sync(~0u, begin >= start && begin < start + cost);
        uint32 ends = __ballot_sync(~0u, end >= start && end < start + cost);
        DenseBoundary here = boundary_within(token, start, blocks, begin);
        if (begins) work.begin = {__shfl_sync(~0u, here.token, __ffs(begins) - 1), __shfl_sync(~0u, here.block, __ffs(begins) - 1)};
        here = boundary_within(token, start, blocks, end);
        if (ends) {
            int lowest = start + TOKEN_COST + MIN_PART, highest = start + TOKEN_COST + blocks - MIN_PART;
            int boundaries = highest / length - (lowest - 1) / length, owner = __ffs(ends) - 1;
            work.end = {__shfl_sync(~0u, here.token, owner), __shfl_sync(~0u, here.block, owner)};
            work.parts = 1 + __shfl_sync(~0u, boundaries, owner);
        }
    }
    return work;
}

// Write the number of parts of tokens, for the kernel that combines them. Called by a warp.
__device__ inline void publish_parts(const DenseWork& work, int tokens, int ranges, int range, uint4* parts) {
    int lane = threadIdx.x % 32, divided = work.begins_part() ? work.parts : 0;
    if (tokens > ranges) {
        if (lane == 0) parts[range] = {uint32(work.end.token), uint32(range), uint32(divided), 0};
        return;
    }
    for (int token = work.begin.token + (work.begin.block > 0) + lane; token <= work.last_token(); token += 32)
        parts[token] = {uint32(token), uint32(range), uint32(token == work.end.token ? divided : 0), 0};
}
