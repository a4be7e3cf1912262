// Radix select on the remaining digits where many candidates tie, by a CTA or a cluster, until few candidates are left.
// Candidates are listed in shared memory, one per thread (narrow_listed). If they are too many for the list, each
// thread keeps its own ones in registers (narrow); among equal candidates, that function also selects the first
// columns.
//
// Macros: THREADS, BLOCKS, DIGIT_BITS. A chunk is what a warp holds; chunks are in the order of columns.
#pragma once
#include "common/cluster_counts.cuh"

constexpr int CHUNKS = WARPS * BLOCKS;
constexpr int LISTED = 2 * THREADS;  // largest number of listed columns of a CTA

struct Ties {
    uint64 ranges[CHUNKS];  // of each chunk's orders: the largest, and below it the inverted smallest
    int counts[CHUNKS];
};

// The selected columns of a thread, and its tied columns. `rest` of the `here` tied columns of all threads are still to
// be selected.
struct Narrowed {
    uint32 selected, tied;
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
__device__ inline void sync_row() {
#if BLOCKS > 1
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
}

// The largest order and the inverted smallest order of the columns of all threads. With COUNTED, and without a cluster,
// returns a lane's part of the counts of earlier chunks. Called by all threads; synchronises them.
template <bool COUNTED>
__device__ inline int find_range(Counted& counted, Ties& ties, uint32 chunk, uint32& largest, uint32& inverted) {
    const int lane = int(threadIdx.x) % 32;
    largest = __reduce_max_sync(~0u, largest), inverted = __reduce_max_sync(~0u, inverted);
    publish(ties.ranges, chunk, uint64(largest) << 32 | inverted);
#if BLOCKS > 1
    if (threadIdx.x < GROUPS) counted.groups[threadIdx.x] = 0;
#endif
    sync_row();
    int earlier = 0;
    largest = inverted = 0;
#pragma unroll 1
    for (int i = lane; i < CHUNKS; i += 32) {
        uint64 range = ties.ranges[i];
        largest = max(largest, uint32(range >> 32)), inverted = max(inverted, uint32(range));
        if (COUNTED && BLOCKS == 1 && i < int(chunk)) earlier += ties.counts[i];
    }
    largest = __reduce_max_sync(~0u, largest), inverted = __reduce_max_sync(~0u, inverted);
    return earlier;
}
// Bits below a digit of numbers up to `span`. The last bin is not used.
__device__ inline int shift_of(uint32 span) {
    int shift = max(32 - __clz(int(span)) - DIGIT, 0);
    return shift + (span >> shift == BINS - 1);
}
// Clears the bins: find_digit does so, but not the last count of a cluster.
__device__ inline void clear_bins(Scratch& scratch) {
#if BLOCKS > 1
    for (int i = 4 * threadIdx.x; i < BINS; i += 4 * THREADS) *reinterpret_cast<uint4*>(scratch.bins + i) = uint4{0, 0, 0, 0};
    __syncthreads();
#endif
}
// The digit of the rest-th counted order, like find_digit. `before`: the number of `here` in CTAs of lower rank.
__device__ inline void next_digit(Scratch& scratch, Counted& counted, int& before, int rest) {
#if BLOCKS > 1
    const uint32 rank = rank_in_cluster();
    __syncthreads();
    send_groups(counted, scratch.bins);
    sync_row();
    ClusterDigit digit = digit_of_cluster(counted, scratch.bins, rank, rest);
    if (threadIdx.x == 0) scratch.digit = digit.digit, scratch.needed = digit.needed, scratch.here = digit.here, before = digit.earlier;
    __syncthreads();
#else
    find_digit(scratch, rest);
#endif
}

// Narrows the `here` tied columns, of which `rest` are to be selected, until at most `at_most` are left. orders[i], if
// not 0, belongs to bit bit_of(i) of the masks and to read i / 4. Bins are 0, or in a cluster as after the last count.
// Called by all threads, after a barrier. `before`: the number of remaining columns in CTAs of lower rank.
template <int VALUES, class Bit, class Places>
__device__ inline Narrowed narrow(Scratch& scratch, Counted& counted, Ties& ties, int& before, uint32 (&orders)[VALUES], Bit bit_of,
                                  Places places, int rest, int at_most) {
    const uint32 chunk = threadIdx.x / 32 * BLOCKS + rank_in_cluster();
    uint32 selected = 0;
#pragma unroll 1
    for (;;) {
        // 1. Their range.
        uint32 largest = 0, inverted = 0, tied = 0;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (orders[i]) largest = max(largest, orders[i]), inverted = max(inverted, ~orders[i]), tied |= 1u << bit_of(i);
        publish(ties.counts, chunk, int(__reduce_add_sync(~0u, __popc(tied))));
        int earlier = find_range<true>(counted, ties, chunk, largest, inverted);
        const uint32 least = ~inverted, span = largest - least;
        if (!span) {  // equal ones: the first
            int of_read[VALUES / 4];
            places(tied, of_read);
#if BLOCKS > 1  // there are not enough registers to add them earlier
#pragma unroll 1
            for (int i = int(threadIdx.x) % 32; i < int(chunk); i += 32) earlier += ties.counts[i];
#endif
            earlier = __reduce_add_sync(~0u, earlier);
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                if (orders[i] && earlier + of_read[i / 4]++ < rest) selected |= 1u << bit_of(i);
            return {selected, 0, rest, 0};
        }
        // 2. Their next digit.
        const int shift = shift_of(span);
        clear_bins(scratch);
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (orders[i]) atomicAdd(&scratch.bins[(orders[i] - least) >> shift], 1u);
        next_digit(scratch, counted, before, rest);
        const uint32 found = scratch.digit;
        const int here = scratch.here;
        rest = scratch.needed;
        const bool all = here == rest;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            uint32 own = (orders[i] - least) >> shift;
            bool above = own > found || (all && own == found);
            if (orders[i] && above) selected |= 1u << bit_of(i);
            if (above || own < found) orders[i] = 0;
        }
        if (all) return {selected, 0, rest, 0};
        if (here <= at_most) {
            tied = 0;
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                if (orders[i]) tied |= 1u << bit_of(i);
            return {selected, tied, rest, here};
        }
    }
}

struct Listed {
    uint32 orders[LISTED];  // 0: no longer tied
    int columns[LISTED];
    uint16 bits[LISTED];  // in masks of threads: 32 a thread
    int count;
};
constexpr int LISTED_BYTES = 10 * LISTED + 4;

// Like narrow, for the listed columns of this CTA. If span is not 0, their orders are from least to least + span. Sets
// the bits of selected columns in `selected`. Calls `list(order, column)` for the remaining ones; if these are equal,
// and so `here` exceeds `at_most`, it sets their bits in `equal` instead. Called by all threads; ends with a barrier.
template <class List>
__device__ inline Narrowed narrow_listed(Scratch& scratch, Counted& counted, Ties& ties, int& before, Listed& listed, uint32* selected,
                                         uint32* equal, uint32 least, uint32 span, List list, int rest, int at_most) {
    const uint32 chunk = threadIdx.x / 32 * BLOCKS + rank_in_cluster();
    const int count = listed.count;
    int here = at_most + 1;
    auto each = [&](auto visit) {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS)
            if (listed.orders[i]) visit(listed.orders[i], i);
    };
    auto mark = [&](uint32* masks, int i) { atomicOr(&masks[listed.bits[i] / 32], 1u << listed.bits[i] % 32); };
#pragma unroll 1
    for (;; span = 0) {
        if (!span) {
            uint32 largest = 0, inverted = 0;
            each([&](uint32& order, int) { largest = max(largest, order), inverted = max(inverted, ~order); });
            find_range<false>(counted, ties, chunk, largest, inverted);
            least = ~inverted, span = largest - least;
            if (!span) break;  // equal ones
        }
        const int shift = shift_of(span);
        clear_bins(scratch);
        each([&](uint32& order, int) { atomicAdd(&scratch.bins[(order - least) >> shift], 1u); });
        next_digit(scratch, counted, before, rest);
        const uint32 found = scratch.digit;
        here = scratch.here, rest = scratch.needed;
        const bool all = here == rest, last = all || here <= at_most;
        if (all) here = 0;
        each([&](uint32& order, int i) {
            uint32 own = (order - least) >> shift;
            if (own > found || (all && own == found)) mark(selected, i);
            if (own != found) order = 0;
            else if (last && !all) list(order, listed.columns[i]);
        });
        if (last) break;
    }
    if (here > at_most) each([&](uint32, int i) { mark(equal, i); });
    sync_row();
    return {0, 0, rest, here};
}
