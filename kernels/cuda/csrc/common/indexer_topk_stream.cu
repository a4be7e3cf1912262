// Top-k columns of each row of logits, ascending; among equal logits the lowest columns.
//
// Grid: a CTA per row, strided.
// Block: THREADS threads.
// Shared memory: a buffer of 20 entries per thread, 8 bytes each, and bins; dynamic.
// Limits: topk <= CAPACITY - CHUNK = 16 * THREADS.
//
// A CTA usually reads its row once. Lines of the row are assigned to groups of lanes such that the first reads sample
// all of it. From the sample a bound is estimated that slightly more than k columns exceed; the other columns are
// rejected by one comparison. If fewer than k columns exceed it, as where most scores are 0, the first columns equal to
// it complete the selection. If these are not enough, or if more columns exceed it than the buffer holds, the row is
// read again, in order, a chunk at a time: a full buffer is reduced to its k best, and later columns must exceed the
// smallest of them, because equal ones have higher indices. The order in the buffer is not deterministic, but the
// selection is: at the end a bitmap marks the selected columns.
//
// Instructions bound the kernel: 1,000 per warp take 8 us for a row of 1,024 threads. So few warps process a row, and
// work that occurs once per row (sums over the block, bins) uses no more warps than necessary.
//
// With ToSlots, the slots of the selected columns are written at the same places in another array. A row with an absent
// page is read several times instead, because columns without a slot must be omitted.
//
// Macros: THREADS, ALIGNED (rows start at multiples of 16 bytes, so that they are read 16 bytes at a time), OUTPUT.
#include "common/select_by_reading.cuh"
#include "common/device.cuh"
#include "common/row_reads.cuh"
#include "common/selection.cuh"

constexpr int BATCH = 8, VALUES = 4 * BATCH;  // reads of four columns in flight per thread; their columns
constexpr int LINE = 32, LANES = LINE / 4;    // columns of a line, and the lanes that read it
constexpr int CHUNK = 4 * THREADS, CAPACITY = 20 * THREADS;
constexpr float MARGIN = 1.1f;  // margin of the lane count of a warp over its expectation, in standard deviations
constexpr int BLOCKS = THREADS == 256 ? 3 : 1;  // CTAs per SM
constexpr bool AHEAD = THREADS == 512;  // whether to load a batch while the previous one is processed

struct Memory {
    uint32 orders[CAPACITY];
    int columns[CAPACITY];  // relative to the row's first valid column
    Scratch scratch;
};
constexpr int SHARED_BYTES = 8 * CAPACITY + SCRATCH_BYTES;
static_assert(sizeof(Memory) == SHARED_BYTES);

// A thread's part of a row: four columns of each of `lines` consecutive lines.
struct Part {
    uint32 first;
    int lines;
    bool inside;  // whether all of its columns are valid

    __device__ explicit Part(const Row& row) {
        lines = int((row.end + CHUNK - 1) / CHUNK);
        first = threadIdx.x / LANES * lines * LINE + threadIdx.x % LANES * 4;
        inside = first >= row.skipped && first + (lines - 1) * LINE + 4 <= row.end;
    }
    // The columns of lines [line, line + BATCH), NaN for invalid ones.
    __device__ void read(const Row& row, int line, float (&x)[VALUES]) const {
        uint32 at = first + line * LINE;
        const float* from = row.values + at;
        if (inside && line + BATCH <= lines) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) read4(from + i * LINE, x + 4 * i);
            return;
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) x[i] = __uint_as_float(0x7fc00000);
        if (inside) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) read4(from + i * LINE, line + i < lines, x + 4 * i);
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                int column = i / 4 * LINE + i % 4;
                if (line + i / 4 < lines && row.has(at + column)) x[i] = from[column];
            }
        }
    }
};

// The k-th largest of the buffer's first `count` orders; or, if `only` is not 0, of the inverted columns of entries with that
// order. Not inlined: short rows wait for instruction fetches.
__device__ __noinline__ Kth kth_of_buffer(Memory& memory, int count, int k, uint32 only, int passes) {
    return kth_largest(memory.scratch, k, passes, [&](auto visit) {
#pragma unroll 2
        for (int i = threadIdx.x; i < count; i += THREADS) {
            uint32 x = memory.orders[i];
            if (only) x = x == only ? ~uint32(memory.columns[i]) : 0;
            visit(x);
        }
    });
}

// The k largest of a buffer with more than k entries: orders above `order`, and those equal to it whose inverted column is at
// least `place`.
struct Best {
    uint32 order, place;

    __device__ bool has(uint32 own, int column) const { return own > order || (own == order && ~uint32(column) >= place); }
};
__device__ inline Best best_of(Memory& memory, int k) {
    int count = memory.scratch.count;
    Kth kth = kth_of_buffer(memory, count, k, 0, PASSES);
    return {kth.number, kth.all ? 0 : kth_of_buffer(memory, count, kth.rest, kth.number, PASSES).number};
}

// Reserve places in the buffer for `own` entries of this thread. Called by all lanes of the warp.
__device__ inline int places(Memory& memory, int own) {
    int up_to = sum_to(own);
    int first = threadIdx.x % 32 == 31 ? atomicAdd(&memory.scratch.count, up_to) : 0;
    return __shfl_sync(~0u, first, 31) + up_to - own;
}

// Reduce the buffer, which has more than k entries, to the k largest, and return the order of the smallest.
__device__ __noinline__ uint32 keep_largest(Memory& memory, int k) {
    int count = memory.scratch.count;
    Best best = best_of(memory, k);  // all threads synchronise in it
    if (threadIdx.x == 0) memory.scratch.count = 0;
    for (int first = 0; first < count; first += THREADS) {
        int i = first + threadIdx.x, column = i < count ? memory.columns[i] : 0;
        uint32 order = i < count ? memory.orders[i] : 0;
        __syncthreads();  // all threads have read the entries that are overwritten next
        bool keep = i < count && best.has(order, column);
        int to = places(memory, keep);
        if (keep) memory.orders[to] = order, memory.columns[to] = column;
    }
    __syncthreads();
    return best.order;
}

// Estimates an order that slightly more than k columns of the row exceed. Each lane has the maximum of its first columns,
// and each warp publishes the maximum that the expected number of its lanes should reach. The result is the second
// smallest published value, or the smallest if there are few warps. Warps with columns beyond the end of the row have no
// sample and publish nothing.
__device__ inline uint32 estimated_threshold(Memory& memory, const Part& part, int length, const float (&x)[VALUES], int k) {
    float fraction = float(k) / float(length), below = 1.0f - fraction;  // fraction of lanes all of whose columns are below
    float largest = x[0];
    int columns = 1, most = 4 * min(part.lines, BATCH), lane = threadIdx.x % 32;
    for (; 2 * columns <= most && float(2 * columns) * fraction <= 0.6f; columns *= 2) below *= below;
    const bool wider[] = {columns > 1, columns > 2, columns > 4, columns > 8, columns > 16};
#pragma unroll
    for (int i = 1; i < VALUES; ++i)
        if (wider[i < 2 ? 0 : i < 4 ? 1 : i < 8 ? 2 : i < 16 ? 3 : 4]) largest = fmaxf(largest, x[i]);
    float lanes = 32.0f * (1.0f - below);
    int rank = min(int(lanes + MARGIN * sqrtf(lanes * below)) + 1, 32);
    uint32 order = order_of(largest_of_lanes<32>(largest == largest ? largest : -infinity(), rank - 1));
    bool sampled = __all_sync(~0u, part.inside);
    if (lane == 0) memory.scratch.most[threadIdx.x / 32] = sampled ? ~order : 0;
    __syncthreads();
    uint32 inverted = lane < WARPS ? memory.scratch.most[lane] : 0, smallest = __reduce_max_sync(~0u, inverted);
    bool drop = __popc(__ballot_sync(~0u, inverted != 0)) > WARPS * 3 / 4;
    if (drop && lane == __ffs(__ballot_sync(~0u, inverted == smallest)) - 1) inverted = 0;
    inverted = __reduce_max_sync(~0u, inverted);
    return inverted ? ~inverted : MINUS_INFINITY;
}

// Write columns above the threshold to the buffer, as far as they fit; their orders are written later.
__device__ inline void add_columns(Memory& memory, const Row& row, uint32 at, const float (&x)[VALUES], float bound) {
    uint32 mask = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) mask |= bit_if_above(x[i], bound, 1u << i);
    if (!__any_sync(~0u, mask)) return;
    int to = places(memory, __popc(mask));
    for (; mask; mask &= mask - 1, ++to) {
        int bit = __ffs(mask) - 1;
        if (to < CAPACITY) memory.columns[to] = int(at - row.skipped) + bit / 4 * LINE + bit % 4;
    }
}

// Complete the k columns: the buffer has the columns above `order`, the first columns equal to it follow. Returns false
// if these are not enough, or do not seem to be: an order that many columns share is the bound of several warps.
__device__ __noinline__ bool add_equal(Memory& memory, const Row& row, int k, uint32 order) {
    const int lane = int(threadIdx.x) % 32;
    const uint32 sharing = __ballot_sync(~0u, lane < WARPS && memory.scratch.most[min(lane, WARPS - 1)] == ~order);
    if (order > MINUS_INFINITY && __popc(sharing) < 2) return false;
    __syncthreads();  // all have read the count
    int count = memory.scratch.count;
    for (uint32 from = 0; from < row.end && count < k; from += CHUNK) {
        const uint32 at = from + 4 * threadIdx.x, nan = 0x7fc00000;
        float x[4] = {__uint_as_float(nan), __uint_as_float(nan), __uint_as_float(nan), __uint_as_float(nan)};
        const bool inside = at >= row.skipped && at + 4 <= row.end;
        read4(row.values + at, inside, x);
        if (!inside) read_at_end(row, at, x);
        uint32 mask = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) mask |= uint32(order_of(x[i]) == order) << i;
        int total, to = count + sum_before(memory.scratch, __popc(mask), total);
        for (; mask && to < k; mask &= mask - 1) memory.columns[to++] = int(at - row.skipped) + __ffs(mask) - 1;
        count += total;
        __syncthreads();  // all have read the sums
    }
    if (threadIdx.x == 0) memory.scratch.count = min(count, k);
    __syncthreads();
    return count >= k;
}

// Read the whole row in order: the buffer never overflows.
__device__ __noinline__ void read_in_order(Memory& memory, const Row& row, int k) {
    __syncthreads();  // all have read the old count
    if (threadIdx.x == 0) memory.scratch.count = 0;
    __syncthreads();
    uint32 threshold = 0;
    for (uint32 from = 0; from < row.end; from += CHUNK) {
        uint32 at = from + 4 * threadIdx.x, orders[4];
        int own = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            orders[i] = row.has(at + i) ? order_of(row.values[at + i]) : 0;
            own += orders[i] > threshold;
        }
        int to = places(memory, own);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (orders[i] > threshold) memory.orders[to] = orders[i], memory.columns[to++] = int(at - row.skipped) + i;
        // The barrier makes all additions visible.
        if (__syncthreads_or(memory.scratch.count > CAPACITY - CHUNK)) threshold = keep_largest(memory, k);
    }
}

// Write the columns of the best entries of the buffer in ascending order, and -1 after them.
template <class Out> __device__ inline void write_selected(Memory& memory, int length, const Out& out, int topk) {
    Scratch& scratch = memory.scratch;
    int count = scratch.count, written = 0;
    bool counts = out.counts();
    Best best = count > topk ? best_of(memory, topk) : Best{0, 0};
    uint32* words = scratch.bins;
    // A thread writes 2^log consecutive columns: fewer for short rows, so that all threads write some.
    int log = min(32 - __clz(max(length - 1, 0) / THREADS), 31 - __clz(32 * RUN));
    for (int64 start = 0; start < length && written < min(count, topk); start += BINS * 32) {
#pragma unroll 2
        for (int i = threadIdx.x; i < count; i += THREADS) {
            int column = memory.columns[i];
            int64 from_start = column - start;
            uint32 at = uint32(from_start), within = at & ((1u << log) - 1);
            if (from_start >= 0 && from_start < BINS * 32 && (count <= topk || best.has(memory.orders[i], column)))
                atomicOr(&words[(at >> log) * RUN + within / 32], 1u << within % 32);
        }
        __syncthreads();
        int first = threadIdx.x * RUN, own = 0, total;
        uint32 bits[RUN];
        take(words + first, bits);
#pragma unroll
        for (int i = 0; i < RUN; ++i) own += __popc(bits[i]);
        int own_first = int(start) + (int(threadIdx.x) << log);
        auto writer = out.writer(own_first, own);
        int to = written + sum_before(scratch, own, total);
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            for (uint32 left = bits[i]; left; left &= left - 1) writer.write(to++, own_first + i * 32 + __ffs(left) - 1);
        written += total;
        __syncthreads();
    }
    for (int i = written + threadIdx.x; i < topk; i += THREADS) out.clear(i);
    if (threadIdx.x == 0) out.write_length(written, counts);
}

// Rarely called; not inlined, to save registers elsewhere.
template <class Out>
__device__ __noinline__ void read_several_times(Scratch& scratch, const Row& row, Out out, int topk) {
    select_by_reading(scratch, row.values + row.skipped, row.length(), out, topk);
}

// topk <= CAPACITY - CHUNK.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    top_k_per_row(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends, const int* lens,
                  int64 lens_stride, int next_n, int per_row, int num_keys, OUTPUT output, int topk) {
    extern __shared__ uint4 memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.scratch.bins[i] = 0;
    pdl_wait();
    Columns columns{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    for (int64 number = blockIdx.x; number < num_rows; number += gridDim.x) {
        Row row = row_of(logits + number * stride, columns.range_of(number));
        if (threadIdx.x == 0) shared.scratch.count = 0;
        Part part(row);
        float x[VALUES];
        part.read(row, 0, x);
        bool lacks = output.of_row(number, next_n).lacks_page(row.length(), threadIdx.x, THREADS);
        if (!OUTPUT::MAPPED) {
            __syncthreads();  // bins and count
        } else if (__syncthreads_or(lacks)) {
            read_several_times(shared.scratch, row, output.of_row(number, next_n), topk);
            continue;
        }
        uint32 threshold = row.length() > topk ? estimated_threshold(shared, part, row.length(), x, topk) : MINUS_INFINITY;
        float bound = value_of(threshold);
        for (int line = 0; line < part.lines;) {
            float next[VALUES];
            int following = line + BATCH;
            if (AHEAD && following < part.lines) part.read(row, following, next);
            add_columns(shared, row, part.first + line * LINE, x, bound);
            line = following;
            if (!AHEAD && line < part.lines) part.read(row, line, x);
            if (AHEAD)
#pragma unroll
                for (int i = 0; i < VALUES; ++i) x[i] = next[i];
        }
        __syncthreads();
        int count = shared.scratch.count;
        if (count > CAPACITY) {
            read_in_order(shared, row, topk);
        } else if (count < topk) {
            if (count < row.length() && !add_equal(shared, row, topk, threshold) && threshold > MINUS_INFINITY)
                read_in_order(shared, row, topk);
        } else if (count > topk) {
#pragma unroll 4
            for (int i = threadIdx.x; i < count; i += THREADS)  // including this thread
                shared.orders[i] = order_of(row.values[shared.columns[i] + row.skipped]);
        }
        write_selected(shared, row.length(), output.of_row(number, next_n), topk);
        __syncthreads();
    }
}
