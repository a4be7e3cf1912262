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
    uint32 bins[BINS];
    int sums[WARPS];
    int count, digit, needed;
    bool all;
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

// The sum of x over the threads before this one; all threads take part.
__device__ inline int sum_before(Memory& memory, int x, int& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, up_to = sum_to(x);
    if (lane == 31) memory.sums[warp] = up_to;
    __syncthreads();
    int sums = sum_to(lane < WARPS ? memory.sums[lane] : 0);
    total = __shfl_sync(~0u, sums, 31);
    int before = __shfl_sync(~0u, sums, warp ? warp - 1 : 0);
    __syncthreads();
    return up_to - x + (warp ? before : 0);
}

// The k-th largest of numbers, 1 <= k <= how many are not 0; `rest` is how many of those equal to it are
// among the k largest, `all` whether all are.
// `number(i)` is that of entry i < count. All threads take part.
template <class Number>
__device__ inline uint32 kth_largest(Memory& memory, int64 count, int k, int& rest, bool& all, Number number) {
    uint32 prefix = 0;
    rest = k;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bits = pass < 2 ? 11 : 10;
        for (int i = threadIdx.x; i < BINS; i += THREADS) memory.bins[i] = 0;
        __syncthreads();
        for (int64 i = threadIdx.x; i < count; i += THREADS) {
            uint32 x = number(i);
            if (x && (pass == 0 || x >> (shift + bits) == prefix)) atomicAdd(&memory.bins[x >> shift & ((1 << bits) - 1)], 1u);
        }
        __syncthreads();
        // Bins from the largest digit on, in runs of a thread.
        constexpr int RUN = BINS / THREADS;
        int own = 0, total;
#pragma unroll
        for (int i = 0; i < RUN; ++i) own += memory.bins[BINS - 1 - (threadIdx.x * RUN + i)];
        int before = sum_before(memory, own, total);
        if (before < rest && rest <= before + own) {
            int digit = BINS - 1 - threadIdx.x * RUN, here;
            for (;; --digit) {
                here = memory.bins[digit];
                if (before + here >= rest) break;
                before += here;
            }
            memory.digit = digit, memory.needed = rest - before, memory.all = here == rest - before;
        }
        __syncthreads();
        prefix = prefix << bits | uint32(memory.digit), rest = memory.needed, all = memory.all;
        __syncthreads();
    }
    return prefix;
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
    const Entry* buffer = memory.buffer;
    Best best{kth_largest(memory, count, k, rest, all, [=](int64 i) { return buffer[i].order; }), 0};
    if (!all) {
        uint32 order = best.order;
        auto place = [=](int64 i) { return buffer[i].order == order ? ~uint32(buffer[i].column) : 0; };
        best.place = kth_largest(memory, count, rest, unused, all, place);
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
    Best best = best_of(memory, k);
    __syncthreads();
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
        for (int i = threadIdx.x; i < BINS; i += THREADS) words[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += THREADS) {
            Entry entry = memory.buffer[i];
            int64 bit = entry.column - start;
            if (bit >= 0 && bit < BINS * 32 && best.has(entry)) atomicOr(&words[bit / 32], 1u << bit % 32);
        }
        __syncthreads();
        constexpr int RUN = BINS / THREADS;
        int own = 0, total;
#pragma unroll
        for (int i = 0; i < RUN; ++i) own += __popc(words[threadIdx.x * RUN + i]);
        int to = written + sum_before(memory, own, total);
        for (int i = 0; i < RUN; ++i) {
            int word = threadIdx.x * RUN + i;
            for (uint32 bits = words[word]; bits; bits &= bits - 1) indices[to++] = int(start) + word * 32 + __ffs(bits) - 1;
        }
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
    float most[GROUPS];
#pragma unroll
    for (int i = 0; i < SAMPLED; i += VALUES) {
        float x[VALUES];
        load(origin + i * THREADS, x);
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            int group = (i + j) * GROUPS / SAMPLED;
            most[group] = (i + j) * GROUPS % SAMPLED ? fmaxf(most[group], x[j]) : x[j];  // of NaN and another, the other
        }
    }
    uint32* orders = reinterpret_cast<uint32*>(memory.buffer);
    int own = 0, there, unused;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        uint32 order = order_of(most[i]);
        orders[i * THREADS + threadIdx.x] = order, own += order != 0;
    }
    sum_before(memory, own, there);
    bool all;
    uint32 least = there < k ? 1 : kth_largest(memory, GROUPS * THREADS, k, unused, all, [=](int64 i) { return orders[i]; });
    __syncthreads();
    return least - 1;
}

// topk <= CHUNK.
extern "C" __global__ void __launch_bounds__(THREADS)
top_k_per_row(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends,
              const int* lens, int64 lens_stride, int next_n, int per_row, int64 num_keys, int* indices,
              int64 indices_stride, int topk) {
    extern __shared__ uint4 memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    pdl_wait();
    Rows rows{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    int lane = threadIdx.x % 32;
    for (int64 number = blockIdx.x; number < num_rows; number += gridDim.x) {
        const float* row = logits + number * stride;
        int64 begin, end;
        rows.range_of(number, begin, end);
        if (threadIdx.x == 0) shared.count = 0;
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
            __syncthreads();
            int count = shared.count;
            __syncthreads();
            if (count > CAPACITY - CHUNK) threshold = keep_largest(shared, topk);
        }
        write_columns(shared, end - begin, indices + number * indices_stride, topk);
        __syncthreads();
    }
}

// The same for any topk: reads the row from global memory four times or, where equal logits compete, seven.
extern "C" __global__ void __launch_bounds__(THREADS)
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
        int valid = 0, there, rest, unused;
        for (int64 i = threadIdx.x; i < length; i += THREADS) valid += order(i) != 0;
        sum_before(shared, valid, there);
        uint32 threshold = 1, least = 0;
        if (topk && there > topk) {
            bool all;
            threshold = kth_largest(shared, length, topk, rest, all, order);
            auto place = [=](int64 i) { return order_of(row[i]) == threshold ? ~uint32(i) : 0; };
            if (!all) least = kth_largest(shared, length, rest, unused, all, place);
        }
        int written = 0;
        for (int64 first = 0; first < length; first += THREADS) {
            int64 i = first + threadIdx.x;
            uint32 x = i < length ? order(i) : 0;
            bool keep = x > threshold || (x == threshold && ~uint32(i) >= least);
            int total, to = written + sum_before(shared, keep, total);
            if (keep) indices[number * indices_stride + to] = int(i);
            written += total;
        }
        for (int i = written + threadIdx.x; i < topk; i += THREADS) indices[number * indices_stride + i] = -1;
        __syncthreads();
    }
}
