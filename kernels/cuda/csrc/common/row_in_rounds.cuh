// Reads a part of a row that does not fit in the registers of a CTA of common/indexer_topk_bound.cu: first all lines,
// of which it keeps only the maxima, then once more the lines whose maximum reaches a bound.
//
// Macros: THREADS, BLOCKS, READS, ROUNDS, ALIGNED.
#pragma once
#include "common/row_reads.cuh"
#include "common/selection.cuh"

constexpr int VALUES = 4 * READS;
constexpr int LINE = 32, LANES = LINE / 4, LINES = THREADS / LANES;  // columns of a line, lanes that read it, lines at a time
constexpr int WORDS = VALUES * THREADS * ROUNDS / 32;                // bitmap of the columns of a CTA's part
constexpr int CAPACITY = 8192;                                       // candidates of a CTA

// Reserves places among the candidates for `own` of this thread. Called by all lanes of the warp.
__device__ inline int places(Scratch& scratch, int lane, int own) {
    int up_to = sum_to(own);
    int to = lane == 31 ? atomicAdd(&scratch.count, up_to) : 0;
    return __shfl_sync(~0u, to, 31) + up_to - own;
}

#if ROUNDS > 1
static_assert(READS == LANES, "a lane keeps the largest number of one of eight lines");

// In a round each group of 8 lanes reads 8 lines, and each lane stores the maximum of one of them.
constexpr uint32 STRIDE = LINES * BLOCKS * LINE;  // from a lane's line of a round to its next one
__device__ inline uint32 line_of(int round, int read, uint32 rank) {
    return ((round * READS + read) * LINES + threadIdx.x / LANES) * BLOCKS * LINE + rank * LINE;
}

// The maximum of this thread's columns; writes the order of each line's maximum to `bits`, for read_candidates.
__device__ inline float read_in_rounds(uint32* bits, const Row& row, uint32 rank) {
    const int tid = int(threadIdx.x), lane = tid % LANES;
    float largest = __uint_as_float(0x7fc00000);
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
        uint32 first = line_of(round, 0, rank) + lane * 4;
        if (!__any_sync(~0u, first < row.end)) break;
        float x[VALUES], most[READS];
        if (first >= row.skipped && int(row.end - first) >= int((READS - 1) * STRIDE) + 4) {
#pragma unroll
            for (int i = 0; i < READS; ++i) read4(row.values + first + i * STRIDE, x + 4 * i);
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) x[i] = __uint_as_float(0x7fc00000);
            auto left = [&](int i) { return int(row.end - first) - int(i * STRIDE); };
            auto has_four = [&](int i) { return left(i) >= 4 && (i || first >= row.skipped); };
#pragma unroll
            for (int i = 0; i < READS; ++i) read4(row.values + first + i * STRIDE, has_four(i), x + 4 * i);
#pragma unroll
            for (int i = 0; i < READS; ++i)
                if (!has_four(i) && left(i) > 0) read_at_end(row, first + i * STRIDE, x + 4 * i);
        }
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            most[i] = fmaxf(fmaxf(x[4 * i], x[4 * i + 1]), fmaxf(x[4 * i + 2], x[4 * i + 3]));
            largest = fmaxf(largest, most[i]);
        }
        // Butterfly reduction: three times, half of the lines go to the other half of the lanes. Each lane ends with one line.
#pragma unroll
        for (int step = LANES / 2; step; step /= 2)
#pragma unroll
            for (int i = 0; i < step; ++i) {
                bool upper = lane & step;
                float other = __shfl_xor_sync(~0u, upper ? most[i] : most[i + step], step);
                most[i] = fmaxf(upper ? most[i + step] : most[i], other);
            }
        bits[round * THREADS + tid] = order_of(most[0]);
    }
    return largest;
}

// Writes the positions of columns that reach the bound to `keys`, and clears `bits`. A warp reads its own lines.
__device__ inline void read_candidates(Scratch& scratch, uint32* bits, uint64* keys, const Row& row, uint32 rank, uint32 least) {
    constexpr int AT_ONCE = 4, TEAMS = 32 / LANES;  // lines that eight lanes have in flight, and such groups of lanes in a warp
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    const float bound = value_of(least);
    // The first columns of lines overwrite orders that have been read.
    auto word = [&](int i) -> uint32& { return bits[i / 32 * THREADS + warp * 32 + i % 32]; };
    int count = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        uint32 order = word(round * 32 + lane);
        bool again = order && order >= least;
        uint32 votes = __ballot_sync(~0u, again);
        if (again) word(count + __popc(votes & ((1u << lane) - 1))) = line_of(round, lane % LANES, rank);
        count += __popc(votes);
        __syncwarp();
    }
#pragma unroll 1
    for (int first = lane / LANES; __any_sync(~0u, first < count); first += AT_ONCE * TEAMS) {
        float x[4 * AT_ONCE];
        uint32 at[AT_ONCE], mask = 0;
#pragma unroll
        for (int i = 0; i < 4 * AT_ONCE; ++i) x[i] = __uint_as_float(0x7fc00000);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int line = first + i * TEAMS;
            at[i] = line < count ? word(line) + lane % LANES * 4 : row.end;
            read4(row.values + at[i], at[i] >= row.skipped && int(row.end - at[i]) >= 4, x + 4 * i);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (at[i] < row.skipped || int(row.end - at[i]) < 4) read_at_end(row, at[i], x + 4 * i);
#pragma unroll
        for (int i = 0; i < 4 * AT_ONCE; ++i)
            if (x[i] >= bound) mask |= 1u << i;
        if (!__any_sync(~0u, mask)) continue;
        int to = places(scratch, lane, __popc(mask));
        for (; mask; mask &= mask - 1, ++to) {
            int i = __ffs(mask) - 1;
            if (to < CAPACITY) keys[to] = word(first + i / 4 * TEAMS) + lane % LANES * 4 + i % 4;
        }
    }
    __syncwarp();
    for (int round = 0; round < ROUNDS; ++round) word(round * 32 + lane) = 0;
}
#endif
