// Gathered bfloat16 rows of a CTA's tiles, block by block: iterators for sm90/prefill/ and sm90/few_heads/, and how the producers
// of sm90/prefill/ look up rows.
#pragma once
#include "common/sparse/work.cuh"
#include "sm90/hopper.cuh"

// Number of keys of a tile, 0 after the last tile. A CTA processes every gridDim.x-th tile, so that the head groups of
// one token run at the same time and share its rows in L2.
__device__ inline int length_of_tile(const SparseProblem& problem, int tile) {
    return tile < problem.tiles() ? problem.segments[0].length(tile / problem.groups, 0) : 0;
}

// Iterates over the CTA's tiles that have keys. Lengths are loaded a tile ahead.
struct TileWalk {
    const SparseProblem& problem;
    int tile, length, next_length;

    __device__ explicit TileWalk(const SparseProblem& p) : problem(p), tile(blockIdx.x) {
        length = length_of_tile(problem, tile), next_length = length_of_tile(problem, tile + gridDim.x);
        skip_empty();
    }
    __device__ bool more() const { return tile < problem.tiles(); }
    __device__ void advance() { step(), skip_empty(); }

    __device__ void step() {
        tile += gridDim.x, length = next_length;
        next_length = length_of_tile(problem, tile + gridDim.x);
    }
    __device__ void skip_empty() {
        while (more() && length <= 0) step();
    }
};

// Iterates over the blocks of these tiles.
struct BlockWalk : TileWalk {
    int block = 0;

    __device__ explicit BlockWalk(const SparseProblem& p) : TileWalk(p) {}
    __device__ void advance() {
        if (++block * BLOCK >= length) block = 0, TileWalk::advance();
    }
};

// Store the results of a tile without keys, by 256 threads: each half is a warpgroup. ROLLED: the loop is not unrolled.
template <bool ROLLED> __device__ inline void store_nothing(const SparseProblem& problem, int tile, int half) {
    TileCoord at(problem, tile);
    int thread = threadIdx.x % 128 + 128 * half, heads = min(HEADS, problem.heads - at.first_head);
    auto store_zeros = [&](int i) {
        int head = at.first_head + i / (V_DIM / 8);
        store16(problem.out + at.b * problem.out_stride_b + head * problem.out_stride_h + i % (V_DIM / 8) * 8, {});
    };
    if constexpr (ROLLED)
#pragma unroll 1
        for (int i = thread; i < heads * (V_DIM / 8); i += 256) store_zeros(i);
    else
        for (int i = thread; i < heads * (V_DIM / 8); i += 256) store_zeros(i);
    if (thread < heads) {
        int head = at.first_head + thread;
        problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h] = infinity();
        problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h] = -infinity();
    }
}

// Array rows for rows `lane` and `lane` + 32 of a block of 64; negative if absent.
struct LaneRows {
    int low, high;

    // The array row of row `first` + lane / 8: four rows, 8 lanes each.
    __device__ int at(int first, int lane) const { return __shfl_sync(~0u, first < 32 ? low : high, (first + lane / 8) % 32); }
};

// Indices of a block, or -1 after the end of the list. Loads within the list do not wait for its length.
__device__ inline LaneRows listed_rows(const BlockWalk& walk, int lane) {
    const Segment& list = walk.problem.segments[0];
    const int* indices = list.indices + walk.tile / walk.problem.groups * list.indices_stride_b;
    int at = walk.block * BLOCK + lane;
    int low = at < list.topk ? indices[at] : -1, high = at + 32 < list.topk ? indices[at + 32] : -1;
    return {at < walk.length ? low : -1, at + 32 < walk.length ? high : -1};
}
__device__ inline LaneRows present_rows(const Segment& list, LaneRows listed) {
    uint32 rows = list.num_slots;
    return {uint32(listed.low) < rows ? listed.low : -1, uint32(listed.high) < rows ? listed.high : -1};
}

// Source addresses of a lane's 16 of each row's first 128 bytes: four rows at a time, 8 lanes each, from row `first` of
// 64 on. Absent rows must not be read.
template <int STEPS> struct RowSources {
    const uint8* at[STEPS];
    bool here[STEPS];

    __device__ RowSources(const uint8* array, int64 stride, LaneRows rows, int first, int lane) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            int row = rows.at(first + 4 * i, lane);
            here[i] = row >= 0;
            at[i] = array + (row < 0 ? 0 : row * stride) + lane % 8 * 16;
        }
    }
};
