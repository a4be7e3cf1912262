// Selection of the largest of many numbers: orders of floats, a radix selection by a CTA, and the valid columns of a row of
// logits.
//
// Macros: THREADS, DIGIT_BITS.
#pragma once
#include "common/device.cuh"
#include "common/prefix_sum.cuh"

#ifndef DIGIT_BITS
#define DIGIT_BITS 10
#endif

constexpr int WARPS = THREADS / 32;
constexpr int DIGIT = DIGIT_BITS, BINS = 1 << DIGIT;  // bits per digit
[[maybe_unused]] constexpr int PASSES = 4;            // digits of 32 bits
constexpr int RUN = BINS / THREADS;                   // bins per thread

// Columns [first, end) of a row; or the unchecked range that the caller gave.
struct Range {
    int first, end;

    __device__ bool operator!=(const Range& other) const { return first != other.first || end != other.end; }
};

// Addresses of the range of a row's columns that the caller gave.
struct RangeAddresses {
    const int *first, *end;  // may be null
    int subtracted;          // columns to subtract from `end`

    __device__ static int at(const int* from, int otherwise) {
        int x = otherwise;
        // Bypasses the L1 cache: the value may be read before the previous kernel has ended, and again afterwards.
        asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %1, 0;\n@p ld.relaxed.gpu.global.s32 %0, [%1];\n}\n"
                     : "+r"(x)
                     : "l"(from)
                     : "memory");
        return x;
    }
    __device__ Range load() const { return {at(first, 0), at(end, INT32_LIMIT)}; }
};

// The valid columns of each row.
struct Columns {
    const int *starts, *ends, *lens;  // may be null
    int64 lens_stride;
    int next_n;
    bool per_row;  // a length for every one of next_n rows
    int num_keys;  // of compressed rows, or -1
    int width;

    __device__ RangeAddresses addresses_of(int64 row) const {
        if (!lens) return {starts ? starts + row : nullptr, ends ? ends + row : nullptr, 0};
        int64 request = row;
        int j = 0;
        if (next_n > 1) request = row >> 32 ? row / next_n : uint32(row) / next_n, j = int(row - request * next_n);
        return {nullptr, lens + request * lens_stride + (per_row ? j : 0), per_row ? 0 : next_n - 1 - j};
    }
    // The given range, clamped to the row.
    __device__ Range range_of(const RangeAddresses& addresses, Range x) const {
        int keys = num_keys < 0 ? width : num_keys;
        int first = min(max(x.first, 0), keys), end = min(max(max(x.end, 0) - addresses.subtracted, first), keys);
        return num_keys < 0 ? Range{first, end} : Range{0, min(end - first, width)};
    }
    __device__ Range range_of(int64 row) const {
        RangeAddresses addresses = addresses_of(row);
        return range_of(addresses, addresses.load());
    }
};

// Increases with x, from 1 on; 0 for NaN. -0 equals 0.
__device__ inline uint32 order_of(float x) {
    uint32 bits = __float_as_uint(x);
    if (bits == 0x80000000) bits = 0;
    uint32 order = bits ^ (int(bits) < 0 ? 0xffffffff : 0x80000000);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0 : order;
}

constexpr uint32 MINUS_INFINITY = 0x007fffff;  // its order

// Set `bit` in the mask, or return it, if x exceeds (or equals) the other number. Subnormal numbers are not flushed to
// zero, unlike elsewhere (-ftz=true).
__device__ inline void mark_if_above(uint32& mask, float x, float bound, uint32 bit) {
    asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}\n" : "+r"(mask) : "f"(x), "f"(bound), "r"(bit));
}
__device__ inline uint32 bit_if_above(float x, float bound, uint32 bit) {
    uint32 result;
    asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\nselp.u32 %0, %3, 0, p;\n}\n" : "=r"(result) : "f"(x), "f"(bound), "r"(bit));
    return result;
}
__device__ inline void mark_if_equal(uint32& mask, float x, float other, uint32 bit) {
    asm("{\n.reg .pred p;\nsetp.eq.f32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}\n" : "+r"(mask) : "f"(x), "f"(other), "r"(bit));
}

// The float of a non-zero order; -inf for orders below MINUS_INFINITY.
__device__ inline float value_of(uint32 order) {
    order = max(order, MINUS_INFINITY);
    return __uint_as_float(order >> 31 ? order ^ 0x80000000 : ~order);
}

// Shared memory of a selection.
struct Scratch {
    alignas(16) uint32 bins[BINS];  // 0 except while a thread counts
    uint32 most[2 * WARPS];
    int sums[WARPS];
    int digit, needed, here, count;
};
constexpr int SCRATCH_BYTES = 4 * BINS + 12 * WARPS + 16;
static_assert(sizeof(Scratch) == SCRATCH_BYTES);

// The sum of x over the threads before this one. Called by all threads, with a barrier before the next call.
__device__ inline int sum_before(Scratch& scratch, int x, int& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, up_to = sum_to(x);
    if (lane == 31) scratch.sums[warp] = up_to;
    __syncthreads();
    int sum = lane < WARPS ? scratch.sums[lane] : 0;
    total = __reduce_add_sync(~0u, sum);
    return up_to - x + __reduce_add_sync(~0u, lane < warp ? sum : 0);
}

// The value of this rank, in descending order, within the lane's group of GROUP lanes.
template <int GROUP> __device__ inline float largest_of_lanes(float x, int rank) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int size = 2; size <= GROUP; size *= 2)
#pragma unroll
        for (int step = size / 2; step; step /= 2) {
            float other = __shfl_xor_sync(~0u, x, step);
            bool larger_here = ((lane & size % GROUP) == 0) == ((lane & step) == 0);
            x = larger_here ? fmaxf(x, other) : fminf(x, other);
        }
    return __shfl_sync(~0u, x, lane / GROUP * GROUP + rank);
}

// Read and clear a thread's run of bins.
__device__ inline void take(uint32* from, uint32 (&x)[RUN]) {
    if (RUN % 4 == 0) {
#pragma unroll
        for (int i = 0; i < RUN; i += 4) {
            uint4& four = *reinterpret_cast<uint4*>(from + i);
            x[i] = four.x, x[(i + 1) % RUN] = four.y, x[(i + 2) % RUN] = four.z, x[(i + 3) % RUN] = four.w;
            four = uint4{0, 0, 0, 0};
        }
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i) x[i] = from[i], from[i] = 0;
    }
}

// Finds the bin with the rest-th number, counted from the largest digit down. Sets `digit`, `needed` (numbers of the
// bin that are still needed) and `here` (numbers of the bin). Returns the sum of all bins and clears them. Called by
// all threads.
__device__ inline int find_digit(Scratch& scratch, int rest) {
    __syncthreads();
    int first = BINS - (int(threadIdx.x) + 1) * RUN, own = 0, total;  // in runs of a thread
    uint32 counts[RUN];
    take(scratch.bins + first, counts);
#pragma unroll
    for (int i = 0; i < RUN; ++i) own += counts[i];
    int before = sum_before(scratch, own, total);
    if (before < rest && rest <= before + own)
#pragma unroll
        for (int i = RUN - 1; i >= 0; --i) {
            int up_to = before + int(counts[i]);
            if (before < rest && rest <= up_to) scratch.digit = first + i, scratch.needed = rest - before, scratch.here = int(counts[i]);
            before = up_to;
        }
    __syncthreads();
    return total;
}

// The k-th largest of many numbers.
struct Kth {
    uint32 number;  // the largest number that at least k numbers reach
    int rest;       // how many numbers equal to it are among the k largest
    bool all;       // whether all numbers equal to it are
};

// Finds the k-th largest number. `each` calls its argument with every number of a thread; 0 means none, and is the
// result if there are fewer than k. Called by all threads. Makes at most `passes` passes; with fewer than PASSES the
// result may be smaller.
template <class Each> __device__ inline Kth kth_largest(Scratch& scratch, int k, int passes, Each each) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The bins cover the range of the numbers, so that a narrow range uses all bins.
    uint32 largest = 0, inverted = 0;  // inverted: of the smallest
    each([&](uint32 x) {
        if (x) largest = max(largest, x), inverted = max(inverted, ~x);
    });
    largest = __reduce_max_sync(~0u, largest), inverted = __reduce_max_sync(~0u, inverted);
    if (lane == 0) scratch.most[warp] = largest, scratch.most[WARPS + warp] = inverted;
    __syncthreads();
    largest = __reduce_max_sync(~0u, lane < WARPS ? scratch.most[lane] : 0);
    uint32 low = ~__reduce_max_sync(~0u, lane < WARPS ? scratch.most[WARPS + lane] : 0), span = largest - low;
    int rest = k;
#pragma unroll 1
    for (int bits = 32 - __clz(int(span));; --passes) {
        int shift = max(bits - DIGIT, 0);
        each([&](uint32 x) {
            if (x && x - low <= span) atomicAdd(&scratch.bins[(x - low) >> shift], 1u);
        });
        int total = find_digit(scratch, rest);
        if (total < rest) return {0, 0, true};
        low += uint32(scratch.digit) << shift, rest = scratch.needed;
        bool all = scratch.here == rest;
        if (all || !shift || passes == 1) return {low, rest, all};
        span = (1u << shift) - 1, bits = shift;
    }
}
