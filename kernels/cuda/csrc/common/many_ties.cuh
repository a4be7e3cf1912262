// The k-th among many columns whose upper digits are equal, held in registers by a CTA or a cluster: further digits of their range,
// until few are left; of equal ones the first by their place.
//
// Macros: THREADS, BLOCKS, DIGIT_BITS. A chunk is what a warp holds; chunks are in the order of columns.
#pragma once
#include "common/cluster_counts.cuh"

constexpr int CHUNKS = WARPS * BLOCKS;

struct Ties {
    uint64 ranges[CHUNKS];  // of each chunk's orders: the largest, and below it the inverted smallest
    int counts[CHUNKS];
};

// What is chosen of a thread's columns, and which of the others the `rest` are to be chosen from, `here` in all.
struct Narrowed {
    uint32 chosen, tied;
    int rest, here;
};

// Publishes x to all CTAs at this chunk's place.
template <class T> __device__ inline void publish(T* places, uint32 chunk, T x) {
    const int lane = int(threadIdx.x) % 32;
#if BLOCKS > 1
    if (lane < BLOCKS) send(places[chunk], lane, x);
#else
    if (lane == 0) places[chunk] = x;
#endif
}
__device__ inline void meet() {
#if BLOCKS > 1
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
}

// Narrows the `here` columns of which `rest` are to be chosen, until at most `few` are left. orders[i], if not 0, belongs to bit
// bit_of(i) of the masks, and is of the read i / 4. Bins are 0, or of a cluster those that were counted last. Called by all threads,
// after a barrier. `before`: how many of those left are in CTAs of lower rank.
template <int VALUES, class Bit, class Places>
__device__ inline Narrowed narrow(Scratch& scratch, Counted& counted, Ties& ties, int& before, uint32 (&orders)[VALUES], Bit bit_of,
                                  Places places, int rest, int few) {
    const uint32 rank = rank_in_cluster(), chunk = threadIdx.x / 32 * BLOCKS + rank;
    const int tid = int(threadIdx.x), lane = tid % 32;
    uint32 chosen = 0;
#pragma unroll 1
    for (;;) {
        // 1. Their range.
        uint32 largest = 0, inverted = 0, tied = 0;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (orders[i]) largest = max(largest, orders[i]), inverted = max(inverted, ~orders[i]), tied |= 1u << bit_of(i);
        largest = __reduce_max_sync(~0u, largest), inverted = __reduce_max_sync(~0u, inverted);
        publish(ties.ranges, chunk, uint64(largest) << 32 | inverted);
        publish(ties.counts, chunk, int(__reduce_add_sync(~0u, __popc(tied))));
#if BLOCKS > 1
        if (tid < GROUPS) counted.groups[tid] = 0;
#endif
        meet();
        int earlier = 0;
        largest = inverted = 0;
#pragma unroll 1
        for (int i = lane; i < CHUNKS; i += 32) {
            uint64 range = ties.ranges[i];
            largest = max(largest, uint32(range >> 32)), inverted = max(inverted, uint32(range));
            if (i < int(chunk)) earlier += ties.counts[i];
        }
        largest = __reduce_max_sync(~0u, largest), inverted = __reduce_max_sync(~0u, inverted);
        const uint32 least = ~inverted, span = largest - least;
        if (!span) {  // equal ones: the first
            int of_read[VALUES / 4];
            places(tied, of_read);
            earlier = __reduce_add_sync(~0u, earlier);
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                if (orders[i] && earlier + of_read[i / 4]++ < rest) chosen |= 1u << bit_of(i);
            return {chosen, 0, rest, 0};
        }
        // 2. Their next digit. The last bin is not used.
        int shift = max(32 - __clz(int(span)) - DIGIT, 0);
        if (span >> shift == BINS - 1) ++shift;
#if BLOCKS > 1
        for (int i = 4 * tid; i < BINS; i += 4 * THREADS) *reinterpret_cast<uint4*>(scratch.bins + i) = uint4{0, 0, 0, 0};
        __syncthreads();
#endif
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (orders[i]) atomicAdd(&scratch.bins[(orders[i] - least) >> shift], 1u);
#if BLOCKS > 1
        __syncthreads();
        send_groups(counted, scratch.bins);
        meet();
        ClusterDigit digit = digit_of_cluster(counted, scratch.bins, rank, rest);
        if (tid == 0)
            scratch.digit = digit.digit, scratch.needed = digit.needed, scratch.here = digit.here, before = digit.earlier;
        __syncthreads();
#else
        find_digit(scratch, rest);
#endif
        const uint32 found = scratch.digit;
        const int here = scratch.here;
        rest = scratch.needed;
        const bool all = here == rest;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            uint32 own = (orders[i] - least) >> shift;
            bool above = own > found || (all && own == found);
            if (orders[i] && above) chosen |= 1u << bit_of(i);
            if (above || own < found) orders[i] = 0;
        }
        if (all) return {chosen, 0, rest, 0};
        if (here <= few) {
            tied = 0;
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                if (orders[i]) tied |= 1u << bit_of(i);
            return {chosen, tied, rest, here};
        }
    }
}
