// A *unit*: ROWS heads of a tile, computed within the error bounds for any values by EXACT_THREADS threads: in bfloat16 products
// (common/sparse/exact_mma.cuh), or in float64 (common/sparse/exact.cuh) where those are too coarse.
//
// Macros: LAYOUT, EXTRA_LAYOUT, TILE_HEADS (common/sparse/work.cuh), ALIGNED, FLOAT64_ONLY: compute in float64 alone.
#pragma once
#include "common/sparse/exact.cuh"
#if FLOAT64_ONLY
constexpr int ROWS = 16;  // heads
struct Part {};
struct Wide {};
struct WideAttention {
    int first_head;

    __device__ WideAttention(const SparseProblem&, Wide&, int, int, int first_head) : first_head(first_head) {}
};
#else
#include "common/sparse/exact_mma.cuh"
#endif

constexpr int UNITS = HEADS / ROWS;  // in a tile

union UnitMemory {
    Wide wide;
    ExactShared float64;
};

// Attention of ROWS heads of a tile to blocks first .. last - 1 of its keys.
struct Unit {
    const SparseProblem& problem;
    UnitMemory& memory;
    TileCoord at;
    WideAttention wide;

    __device__ Unit(const SparseProblem& problem, UnitMemory& memory, int tile, int unit)
        : problem(problem), memory(memory), at(problem, tile), wide(problem, memory.wide, at.b, at.s, at.first_head + unit * ROWS) {}

    __device__ bool exists() const { return wide.first_head < problem.heads; }

    __device__ int blocks() const { return blocks_of_tile(problem.segments[0].length(at.b, at.s), problem.segments[1].length(at.b, at.s)); }

    __device__ void attend_in_float64() {
        for (int head = 0; head < ROWS; head += UNIT) ::attend_in_float64(problem, at.b, at.s, wide.first_head + head, memory.float64);
    }

    // Part `part` of `count`. `arrived` counts finished parts and is reset to 0 by the last.
    __device__ void attend(int part, int count, Part* parts, int* arrived) {
        if (!exists()) return;
#if FLOAT64_ONLY
        if (part != 0) return;
#elif __CUDA_ARCH__ >= 800
        int all = blocks();
        wide.attend(all * part / count, all * (part + 1) / count);
        if (count > 1 && !gathered(part, count, parts, arrived)) return;
        if (wide.store()) return;
#endif
        attend_in_float64();
    }

#if !FLOAT64_ONLY
    // Store this part's result. The CTA that arrives last combines all parts and returns true.
    __device__ bool gathered(int part, int count, Part* parts, int* arrived) {
        __shared__ bool is_last;
        wide.leave(parts[part]);
        __threadfence();
        exact_sync();
        if (exact_thread() == 0) is_last = atomicAdd(arrived, 1) == count - 1;
        exact_sync();
        if (!is_last) return false;
        __threadfence();
        wide.gather(parts, count);
        if (exact_thread() == 0) *arrived = 0;
        return true;
    }
#endif
};

// Whether UNSAFE_BITS in max_logits or lse flags a unit of a tile.
__device__ inline bool is_unsafe(const SparseProblem& problem, int tile, int unit) {
    TileCoord at(problem, tile);
    int head = at.first_head + unit * ROWS;
    if (head >= problem.heads) return false;
    return __float_as_uint(problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h]) == UNSAFE_BITS ||
           __float_as_uint(problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h]) == UNSAFE_BITS;
}
