// Estimates a bound from the columns that a CTA holds in registers, and selects among columns equal to it
// (common/indexer_topk_bound.cu).
//
// Macros: THREADS, READS (of four columns of a thread), ESTIMATED.
#pragma once
#include "common/row_reads.cuh"
#include "common/selection.cuh"

#if ESTIMATED
constexpr float MARGIN = 1.1f;          // margin of a warp's lane count over its expectation, in std. deviations
constexpr int SHORTEST_SAMPLED = 1024;  // columns

// Estimates, from this warp's columns, an order that slightly more than k of `length` columns exceed; 0 if the warp has
// too few columns. Each lane contributes the maximum of the same number of columns, and the result is the maximum that
// the expected number of lanes should reach. Columns of all reads of the warp count, so that the sample covers the
// whole row. largest[j] is the maximum of column j over the lane's reads of four columns; the last one is the maximum
// of columns 2 and 3.
__device__ inline uint32 estimated_order(const Row& row, const float (&largest)[3], int k) {
    constexpr int STEP = 4 * THREADS;  // columns of all threads' reads
    const int behind = int(row.end) - (int(threadIdx.x) / 32 + 1) * 128;  // number of columns after the warp's first read
    const int reads = behind < 0 ? 0 : min(behind / STEP + 1, READS);
    float fraction = float(k) / float(row.length()), below = 1.0f;
#pragma unroll
    for (int i = 0; i < READS; ++i)
        if (i < reads) below *= 1.0f - fraction;
    float x = largest[0], lanes_of_one = fraction * float(reads);
    if (2.0f * lanes_of_one <= 0.6f) x = fmaxf(x, largest[1]), below *= below;
    if (4.0f * lanes_of_one <= 0.6f) x = fmaxf(x, largest[2]), below *= below;
    float lanes = 32.0f * (1.0f - below);
    int rank = min(int(lanes + MARGIN * sqrtf(lanes * below)) + 1, 32);
    uint32 order = order_of(largest_of_lanes<32>(x == x ? x : -infinity(), rank - 1));
    return reads ? order : 0;
}

// Marks in `bits` the first columns of the row that equal the bound, at most `most` of them. `equal` has a bit for each
// column of this thread: read i has four columns from column + STEP * i on. Returns the number of equal columns, or
// more than `most`. Called by all threads after a barrier; ends with one.
__device__ inline int mark_first(Scratch& scratch, uint32* bits, uint32 equal, int column, int most) {
    constexpr int STEP = 4 * THREADS;
    int found = 0;
#pragma unroll 1
    for (int i = 0; i < READS && found < most; ++i, equal >>= 4, column += STEP) {
        uint32 four = equal & 15;
        int total, left = most - found - sum_before(scratch, __popc(four), total);
        for (; four && left > 0; four &= four - 1, --left) {
            int at = column + __ffs(four) - 1;
            atomicOr(&bits[at / 32], 1u << at % 32);
        }
        found += total;
        __syncthreads();  // all have read the sums
    }
    return found;
}
#endif
