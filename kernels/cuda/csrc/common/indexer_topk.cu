// The columns of the largest logits of each row, by ascending index; of equal ones those of the lowest index.
//
// A thread block takes a row, CHUNK columns at a time. What is not below a bound goes to a buffer of shared memory. The
// first bound is the k-th largest of the maxima of small groups of the first columns: so many are not below it. When the
// buffer is full, a radix selection over it leaves the k largest, the smallest of which nothing later has to equal, as
// columns come in order. Where the buffer's order is left to chance, what is chosen is not: in the end a bit for each
// chosen column says which.
//
// Macros: THREADS, ALIGNED (rows start at multiples of 16 bytes, so that all but their ends are read 16 bytes at a time).
#include "common/numbers.cuh"
#include "common/pdl.cuh"

constexpr int VALUES = 8, CHUNK = THREADS * VALUES, CAPACITY = 2 * CHUNK, WARPS = THREADS / 32;
constexpr int SAMPLE = 8192, SAMPLED = SAMPLE / THREADS;  // columns, and how many of them a thread has
constexpr int GROUPS = 4;                                 // of a thread's sampled columns, whose maxima count
constexpr int BINS = 2048;  // of a digit of 11 bits; in the end words of a bit a column

struct Entry {
    uint32 order;
    int column;
};

// Which columns there are to choose from.
struct Rows {
    const int *starts, *ends, *lens;  // null without
    int64 lens_stride;
    int next_n;
    bool per_row;     // a length for every row of next_n
    int64 num_keys;   // of compressed rows, or -1
    int width;

    __device__ void range_of(int64 row, int64& first, int64& end) const {
        if (lens) {
            int64 request = row / next_n, j = row % next_n;
            int64 length = per_row ? lens[request * lens_stride + j] : int64(lens[request * lens_stride]) - (next_n - 1 - j);
            first = 0, end = min(max(length, int64(0)), int64(width));
            return;
        }
        int64 keys = num_keys < 0 ? width : num_keys;
        first = starts ? min(max(int64(starts[row]), int64(0)), keys) : 0;
        end = ends ? min(max(int64(ends[row]), first), keys) : keys;
        if (num_keys >= 0) end = min(end - first, int64(width)), first = 0;
    }
};

// Grows as x does, from 1 on; 0 for NaN. -0 equals 0.
__device__ inline uint32 order_of(float x) {
    uint32 bits = __float_as_uint(x);
    if (bits == 0x80000000) bits = 0;
    uint32 order = bits ^ (int(bits) < 0 ? 0xffffffff : 0x80000000);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0 : order;
}

struct Memory {
    Entry buffer[CAPACITY];
    uint32 bins[BINS];  // 0 whenever nobody counts
    uint32 most[2 * WARPS];
    int sums[WARPS];
    int count, digit, needed, here;
};

// The float of an order that is not 0: of those below -inf's, -inf.
__device__ inline float value_of(uint32 order) {
    if (order < 0x007fffff) order = 0x007fffff;
    return __uint_as_float(order >> 31 ? order ^ 0x80000000 : ~order);
}

__device__ inline int sum_to(int x) {  // of the lanes up to this one
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int left = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += left;
    }
    return x;
}

// The sum of x over the threads before this one; all threads take part, and meet once more before the next such sum.
__device__ inline int sum_before(Memory& memory, int x, int& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, up_to = sum_to(x);
    if (lane == 31) memory.sums[warp] = up_to;
    __syncthreads();
    int sums = sum_to(lane < WARPS ? memory.sums[lane] : 0);
    total = __shfl_sync(~0u, sums, 31);
    int before = __shfl_sync(~0u, sums, warp ? warp - 1 : 0);
    return up_to - x + (warp ? before : 0);
}

// A number that k of all numbers are not below, and `all`: whether they are no more than k. If not, `rest` of those that
// equal it are among the k largest. `each` calls what it is given with every number of a thread; 0 is none. There are k
// or more. All threads take part; `passes` of the selection at most, which then may leave more than k.
template <class Each> __device__ inline uint32 kth_largest(Memory& memory, int k, int& rest, bool& all, int passes, Each each) {
    constexpr int RUN = BINS / THREADS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Of numbers in a range, however narrow, as many bins as there are are used.
    uint32 largest = 0, inverted = 0;  // the smallest's
    each([&](uint32 x) {
        if (x) largest = max(largest, x), inverted = max(inverted, ~x);
    });
    largest = __reduce_max_sync(~0u, largest), inverted = __reduce_max_sync(~0u, inverted);
    if (lane == 0) memory.most[warp] = largest, memory.most[WARPS + warp] = inverted;
    __syncthreads();
    largest = __reduce_max_sync(~0u, lane < WARPS ? memory.most[lane] : 0);
    uint32 low = ~__reduce_max_sync(~0u, lane < WARPS ? memory.most[WARPS + lane] : 0), span = largest - low;
    rest = k;
    for (int bits = 32 - __clz(int(span));; --passes) {
        int shift = max(bits - 11, 0);
        each([&](uint32 x) {
            if (x && x - low <= span) atomicAdd(&memory.bins[(x - low) >> shift], 1u);
        });
        __syncthreads();
        // Bins from the largest digit on, in runs of a thread.
        int first = BINS - 1 - threadIdx.x * RUN, own = 0, total;
        int counts[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i) own += counts[i] = memory.bins[first - i], memory.bins[first - i] = 0;
        int before = sum_before(memory, own, total);
        if (before < rest && rest <= before + own) {
            bool found = false;
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                if (!found && before + counts[i] >= rest) {
                    memory.digit = first - i, memory.needed = rest - before, memory.here = counts[i];
                    found = true;
                }
                before += counts[i];
            }
        }
        __syncthreads();
        low += uint32(memory.digit) << shift, rest = memory.needed, all = memory.here == rest;
        if (all || !shift || passes == 1) return low;
        span = (1u << shift) - 1, bits = shift;
    }
}

// What of the buffer is among its k largest, of which it has more than k: numbers above `order`, and those that equal
// it and whose inverted column is at least `place`.
struct Best {
    uint32 order, place;

    __device__ bool has(Entry entry) const { return entry.order > order || (entry.order == order && ~uint32(entry.column) >= place); }
};
__device__ inline Best best_of(Memory& memory, int k) {
    int count = memory.count, rest, unused;
    bool all;
    auto numbers = [&](auto number) {
        return [=, &memory](auto visit) {
            for (int i = threadIdx.x; i < count; i += THREADS) visit(number(memory.buffer[i]));
        };
    };
    Best best{kth_largest(memory, k, rest, all, 3, numbers([](Entry entry) { return entry.order; })), 0};
    if (!all) {
        uint32 order = best.order;
        auto place = [=](Entry entry) { return entry.order == order ? ~uint32(entry.column) : 0; };
        best.place = kth_largest(memory, rest, unused, all, 3, numbers(place));
    }
    return best;
}

// Places in the buffer for `own` entries of this thread; the warp's lanes meet.
__device__ inline int places(Memory& memory, int own) {
    int up_to = sum_to(own);
    int first = threadIdx.x % 32 == 31 ? atomicAdd(&memory.count, up_to) : 0;
    return __shfl_sync(~0u, first, 31) + up_to - own;
}

// Leave the k largest in the buffer, which has more of them, and return the smallest.
__device__ inline uint32 keep_largest(Memory& memory, int k) {
    int count = memory.count;
    Best best = best_of(memory, k);  // in which all have met
    if (threadIdx.x == 0) memory.count = 0;
    for (int first = 0; first < count; first += THREADS) {
        int i = first + threadIdx.x;
        Entry entry = i < count ? memory.buffer[i] : Entry{0, 0};
        __syncthreads();  // what is written over has been read
        bool keep = i < count && best.has(entry);
        int to = places(memory, keep);
        if (keep) memory.buffer[to] = entry;
    }
    __syncthreads();
    return best.order;
}

// Write the columns of the buffer's best in ascending order, and -1 after them.
__device__ inline void write_columns(Memory& memory, int64 length, int* indices, int topk) {
    int count = memory.count, written = 0;
    Best best = count > topk ? best_of(memory, topk) : Best{0, 0};
    uint32* words = memory.bins;
    for (int64 start = 0; start < length && written < min(count, topk); start += BINS * 32) {
        for (int i = threadIdx.x; i < count; i += THREADS) {
            Entry entry = memory.buffer[i];
            int64 bit = entry.column - start;
            if (bit >= 0 && bit < BINS * 32 && best.has(entry)) atomicOr(&words[bit / 32], 1u << bit % 32);
        }
        __syncthreads();
        constexpr int RUN = BINS / THREADS;
        int first = threadIdx.x * RUN, own = 0, total;
        uint32 bits[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i) bits[i] = words[first + i], words[first + i] = 0, own += __popc(bits[i]);
        int to = written + sum_before(memory, own, total);
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            for (uint32 left = bits[i]; left; left &= left - 1) indices[to++] = int(start) + (first + i) * 32 + __ffs(left) - 1;
        written += total;
        __syncthreads();
    }
    for (int i = written + threadIdx.x; i < topk; i += THREADS) indices[i] = -1;
}

// Columns [at, at + 4) of a row that count from `begin` to before `end`, the others NaN.
__device__ inline void load4(const float* row, int64 at, int64 begin, int64 end, float (&x)[4]) {
    if (ALIGNED && at >= begin && at + 4 <= end) {
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(row + at));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = at + i >= begin && at + i < end ? row[at + i] : __uint_as_float(0x7fc00000);
}

// A number that is less than the k-th largest of a row, from the maxima of groups of its first columns; 0 without so many
// groups. All threads take part.
template <class Load> __device__ inline uint32 first_threshold(Memory& memory, Load load, int64 origin, int k) {
    if (k > GROUPS * THREADS) return 0;
    uint32 orders[GROUPS] = {};
#pragma unroll
    for (int i = 0; i < SAMPLED; i += VALUES) {
        float x[VALUES];
        load(origin + i * THREADS, x);
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            uint32& group = orders[(i + j) * GROUPS / SAMPLED];
            group = max(group, order_of(x[j]));
        }
    }
    int own = 0, there, unused;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) own += orders[i] != 0;
    sum_before(memory, own, there);
    if (there < k) return 0;
    bool all;
    auto each = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) visit(orders[i]);
    };
    return kth_largest(memory, k, unused, all, 1, each) - 1;
}

// topk <= CHUNK.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
top_k_per_row(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends,
              const int* lens, int64 lens_stride, int next_n, int per_row, int64 num_keys, int* indices,
              int64 indices_stride, int topk) {
    extern __shared__ uint4 memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    pdl_wait();
    Rows rows{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    for (int64 number = blockIdx.x; number < num_rows; number += gridDim.x) {
        const float* row = logits + number * stride;
        int64 begin, end;
        rows.range_of(number, begin, end);
        if (threadIdx.x == 0) shared.count = 0;
        for (int i = threadIdx.x; i < BINS; i += THREADS) shared.bins[i] = 0;
        __syncthreads();
        int64 origin = begin / 4 * 4;
        auto load = [&](int64 from, float (&x)[VALUES]) {
#pragma unroll
            for (int part = 0; part < VALUES / 4; ++part) {
                float four[4];
                load4(row, from + 4 * (part * THREADS + int(threadIdx.x)), begin, end, four);
#pragma unroll
                for (int i = 0; i < 4; ++i) x[4 * part + i] = four[i];
            }
        };
        uint32 threshold = end - begin > topk ? first_threshold(shared, load, origin, topk) : 0;
        float x[VALUES], next[VALUES];
        load(origin, next);
        for (int64 from = origin; from < end; from += CHUNK) {
            float bound = value_of(threshold + 1);
            bool any = false;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) x[i] = next[i], any |= x[i] >= bound;
            if (from + CHUNK < end) load(from + CHUNK, next);
            if (__any_sync(~0u, any)) {
                int own = 0;
#pragma unroll
                for (int i = 0; i < VALUES; ++i) own += order_of(x[i]) > threshold;
                int to = places(shared, own);
#pragma unroll
                for (int i = 0; i < VALUES; ++i) {
                    uint32 order = order_of(x[i]);
                    if (order > threshold)
                        shared.buffer[to++] = {order, int(from - begin) + 4 * (i / 4 * THREADS + int(threadIdx.x)) + i % 4};
                }
            }
            // The last to come sees what all have added.
            if (__syncthreads_or(shared.count > CAPACITY - CHUNK)) threshold = keep_largest(shared, topk);
        }
        write_columns(shared, end - begin, indices + number * indices_stride, topk);
        __syncthreads();
    }
}

// The same for any topk: reads the row from global memory four times or, where equal logits compete, seven.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
top_k_per_row_wide(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends,
                   const int* lens, int64 lens_stride, int next_n, int per_row, int64 num_keys, int* indices,
                   int64 indices_stride, int topk) {
    extern __shared__ uint4 memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    pdl_wait();
    Rows rows{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    for (int64 number = blockIdx.x; number < num_rows; number += gridDim.x) {
        int64 begin, end;
        rows.range_of(number, begin, end);
        const float* row = logits + number * stride + begin;
        int64 length = end - begin;
        auto order = [=](int64 i) { return order_of(row[i]); };
        auto numbers = [=](auto number) {
            return [=](auto visit) {
                for (int64 i = threadIdx.x; i < length; i += THREADS) visit(number(i));
            };
        };
        for (int i = threadIdx.x; i < BINS; i += THREADS) shared.bins[i] = 0;
        int valid = 0, there, rest, unused;
        for (int64 i = threadIdx.x; i < length; i += THREADS) valid += order(i) != 0;
        sum_before(shared, valid, there);
        uint32 threshold = 1, least = 0;
        if (topk && there > topk) {
            bool all;
            threshold = kth_largest(shared, topk, rest, all, 3, numbers(order));
            auto place = [=](int64 i) { return order_of(row[i]) == threshold ? ~uint32(i) : 0; };
            if (!all) least = kth_largest(shared, rest, unused, all, 3, numbers(place));
        }
        __syncthreads();
        int written = 0;
        for (int64 first = 0; first < length; first += THREADS) {
            int64 i = first + threadIdx.x;
            uint32 x = i < length ? order(i) : 0;
            bool keep = x > threshold || (x == threshold && ~uint32(i) >= least);
            int total, to = written + sum_before(shared, keep, total);
            if (keep) indices[number * indices_stride + to] = int(i);
            written += total;
            __syncthreads();
        }
        for (int i = written + threadIdx.x; i < topk; i += THREADS) indices[number * indices_stride + i] = -1;
        __syncthreads();
    }
}
