// The columns of the largest logits of each row, by ascending index; of equal ones those of the lowest index.
//
// A thread block takes a row after another and reads each once. Copies to shared memory run a ring ahead, also into the
// next row, so that memory is never waited for while something is selected. Each thread reads what it has copied itself.
//
// A row goes in rounds of a ring. Pieces of a round are dealt out so that its first stages are a sample of all of it: the
// k-th largest of the maxima of small groups of the sample is a bound that k columns reach. What reaches the bound goes to
// a buffer. Should the buffer not have room for it, the round is read again, a chunk at a time: a full buffer is reduced to
// its k best, the smallest of which nothing later has to equal, as columns come in order. Where the buffer's order is
// left to chance, what is chosen is not: in the end a bit for each chosen column says which.
//
// Macros: THREADS, ALIGNED (rows start at multiples of 16 bytes, so that they are copied 16 bytes at a time).
#include "common/async_copy.cuh"
#include "common/pdl.cuh"
#include "common/selection.cuh"

constexpr int STAGES = 4, HALVES = 2, CHUNK = 4 * THREADS;
constexpr int STAGE = HALVES * CHUNK, ROUND = STAGES * STAGE;  // columns
constexpr int SAMPLED = 2, GROUPS = SAMPLED * HALVES;          // stages, and groups of a thread: of four columns each
constexpr int CAPACITY = 2 * CHUNK, TEAM = 4;                  // warps whose copies lie one behind another

struct Entry {
    float value;
    int column;  // among the row's that count
};

struct Memory {
    float4 ring[STAGES][HALVES][THREADS];
    Entry buffer[CAPACITY];
    Scratch scratch;
};

// The float of an order that is not 0: of those below -inf's, -inf.
__device__ inline float value_of(uint32 order) {
    if (order < 0x007fffff) order = 0x007fffff;
    return __uint_as_float(order >> 31 ? order ^ 0x80000000 : ~order);
}

struct Row {
    const float* values;  // from a multiple of four columns on
    uint32 skipped, end;  // which of them count

    __device__ int length() const { return int(end - skipped); }
    __device__ int stages_from(uint32 base) const {  // of the round there
        return base < end ? int(min((end - base + STAGE - 1) / STAGE, uint32(STAGES))) : 0;
    }
};

struct Problem {
    const float* logits;
    int64 stride, num_rows;
    Columns columns;

    __device__ Row row_of(int64 number) const {
        if (number >= num_rows) return {logits, 0, 0};
        int begin, end;
        columns.range_of(number, begin, end);
        if (begin == end) return {logits, 0, 0};
        int origin = begin / 4 * 4;
        return {logits + number * stride + origin, uint32(begin - origin), uint32(end - origin)};
    }
};

// Where a round's stage has the four columns of this thread.
__device__ inline uint32 column_of(int stages, int stage, int half) {
    uint32 warp = threadIdx.x / 32;
    return ((warp / TEAM * stages + stage) * HALVES + half) * (TEAM * 128) + threadIdx.x % (TEAM * 32) * 4;
}

// The copies, which go ahead.
struct Copies {
    const Problem& problem;
    Memory& memory;
    int64 number;
    Row row, following;
    uint32 base;
    int stages, stage;

    __device__ Copies(const Problem& problem, Memory& memory)
        : problem(problem), memory(memory), number(blockIdx.x), row(problem.row_of(number)),
          following(problem.row_of(number + gridDim.x)), base(0), stages(row.stages_from(0)), stage(0) {
        skip_empty();
    }
    __device__ void skip_empty() {
        while (!stages && number < problem.num_rows) {
            number += gridDim.x, row = following, following = problem.row_of(number + gridDim.x);
            base = 0, stages = row.stages_from(0);
        }
    }
    // Ask for the next stage, whatever row it is of.
    __device__ void go_on(int slot) {
        if (stages) {
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                uint32 at = base + column_of(stages, stage, half);
                int present = at < row.end ? int(min(row.end - at, 4u)) : 0;
                uint32 target = shared_address(&memory.ring[slot][half][threadIdx.x]);
                if (ALIGNED) {
                    copy_async_part(target, row.values + (present ? at : 0), 4 * present);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        copy_async<4>(target + 4 * i, row.values + (i < present ? at + i : 0), i < present);
                }
            }
            if (++stage == stages) {
                stage = 0, base += ROUND, stages = row.stages_from(base);
                skip_empty();
            }
        }
        copies_commit();
    }
};

// Four columns of a row that count, others NaN.
__device__ inline void mask(const Row& row, uint32 at, float (&x)[4]) {
    if (at >= row.skipped && at + 4 <= row.end) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (at + i < row.skipped || at + i >= row.end) x[i] = __uint_as_float(0x7fc00000);
}

// What this thread has copied of a stage.
__device__ inline void read_copy(const Memory& memory, const Row& row, uint32 base, int stages, int stage, int slot, int half, float (&x)[4]) {
    float4 four = memory.ring[slot][half][threadIdx.x];
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    mask(row, base + column_of(stages, stage, half), x);
}

// What of the buffer is among its k largest, of which it has more than k: numbers above `order`, and those that equal
// it and whose inverted column is at least `place`.
struct Best {
    uint32 order, place;

    __device__ bool has(Entry entry) const {
        uint32 own = order_of(entry.value);
        return own > order || (own == order && ~uint32(entry.column) >= place);
    }
};
__device__ inline Best best_of(Memory& memory, int k) {
    int count = memory.scratch.count, rest, unused;
    bool all;
    auto numbers = [&](auto number) {
        return [=, &memory](auto visit) {
            for (int i = threadIdx.x; i < count; i += THREADS) visit(number(memory.buffer[i]));
        };
    };
    Best best{kth_largest(memory.scratch, k, rest, all, 3, numbers([](Entry entry) { return order_of(entry.value); })), 0};
    if (!all) {
        uint32 order = best.order;
        auto place = [=](Entry entry) { return order_of(entry.value) == order ? ~uint32(entry.column) : 0; };
        best.place = kth_largest(memory.scratch, rest, unused, all, 3, numbers(place));
    }
    return best;
}

// Places in the buffer for `own` entries of this thread; the warp's lanes meet.
__device__ inline int places(Memory& memory, int own) {
    int up_to = sum_to(own);
    int first = threadIdx.x % 32 == 31 ? atomicAdd(&memory.scratch.count, up_to) : 0;
    return __shfl_sync(~0u, first, 31) + up_to - own;
}

// Put the values that are not below the bound in the buffer, as far as it has room; the warp's lanes meet.
template <int COUNT, class ColumnOf>
__device__ inline void put(Memory& memory, const float (&x)[COUNT], float bound, ColumnOf column_of_value) {
    int own = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) own += x[i] >= bound;
    if (!__any_sync(~0u, own)) return;
    int to = places(memory, own);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (x[i] >= bound) {
            if (to < CAPACITY) memory.buffer[to] = {x[i], column_of_value(i)};
            ++to;
        }
}

// Leave the k largest in the buffer, which has more of them, and return the order of the smallest.
__device__ inline uint32 keep_largest(Memory& memory, int k) {
    int count = memory.scratch.count;
    Best best = best_of(memory, k);  // in which all have met
    if (threadIdx.x == 0) memory.scratch.count = 0;
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

// A number that less than k columns of a row are above, or k and more; 0 without enough groups. Its first stages are there.
__device__ inline uint32 first_threshold(Memory& memory, const Row& row, int stages, int slot, int k) {
    uint32 orders[GROUPS] = {};
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        if (i / HALVES >= stages) break;
        float x[4];
        read_copy(memory, row, 0, stages, i / HALVES, (slot + i / HALVES) % STAGES, i % HALVES, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) orders[i] = max(orders[i], order_of(x[j]));
    }
    int unused;
    bool all;
    uint32 bound = kth_largest(memory.scratch, k, unused, all, 1, [&](auto visit) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) visit(orders[i]);
    });
    return bound ? bound - 1 : 0;
}

// A round once more, in order, from global memory: the buffer has `kept` entries of those before, and is never too full.
__device__ inline uint32 read_in_order(Memory& memory, const Row& row, uint32 base, int& kept, uint32 threshold, int k) {
    __syncthreads();  // all know how full it was
    if (threadIdx.x == 0) memory.scratch.count = kept;
    __syncthreads();
    uint32 end = min(row.end, base + ROUND);
    for (uint32 from = base; from < end; from += CHUNK) {
        float x[4];
        uint32 at = from + 4 * threadIdx.x;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = at + i >= row.skipped && at + i < row.end ? row.values[at + i] : __uint_as_float(0x7fc00000);
        put(memory, x, value_of(threshold + 1), [&](int i) { return int(at - row.skipped) + i; });
        // The last to come sees what all have added.
        if (__syncthreads_or(memory.scratch.count > CAPACITY - CHUNK)) threshold = keep_largest(memory, k);
    }
    kept = memory.scratch.count;
    return threshold;
}

// Write the columns of the buffer's best in ascending order, and -1 after them.
__device__ inline void write_columns(Memory& memory, int length, int* indices, int topk) {
    Scratch& scratch = memory.scratch;
    int count = scratch.count, written = 0;
    Best best = count > topk ? best_of(memory, topk) : Best{0, 0};
    uint32* words = scratch.bins;
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
        int to = written + sum_before(scratch, own, total);
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            for (uint32 left = bits[i]; left; left &= left - 1) indices[to++] = int(start) + (first + i) * 32 + __ffs(left) - 1;
        written += total;
        __syncthreads();
    }
    for (int i = written + threadIdx.x; i < topk; i += THREADS) indices[i] = -1;
}

// topk <= CAPACITY - CHUNK.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
top_k_per_row(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends,
              const int* lens, int64 lens_stride, int next_n, int per_row, int num_keys, int* indices,
              int64 indices_stride, int topk) {
    extern __shared__ uint4 memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.scratch.bins[i] = 0;
    pdl_wait();
    Problem problem{logits, stride, num_rows, {starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width}};
    Copies copies(problem, shared);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) copies.go_on(i);
    int slot = 0;
    Row next = problem.row_of(blockIdx.x);
    for (int64 number = blockIdx.x; number < num_rows; number += gridDim.x) {
        Row row = next;
        next = problem.row_of(number + gridDim.x);
        if (threadIdx.x == 0) shared.scratch.count = 0;
        uint32 threshold = 0;
        if (row.length() > topk) {
            copies_wait<STAGES - SAMPLED>();
            threshold = first_threshold(shared, row, row.stages_from(0), slot, topk);
        } else {
            __syncthreads();
        }
        int kept = 0;
        for (uint32 base = 0; base < row.end; base += ROUND) {
            float bound = value_of(threshold + 1);
            int stages = row.stages_from(base);
            for (int stage = 0; stage < stages; ++stage) {
                copies_wait<STAGES - 1>();
                float x[4 * HALVES];
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    float four[4];
                    read_copy(shared, row, base, stages, stage, slot, half, four);
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[4 * half + i] = four[i];
                }
                copies.go_on(slot);
                put(shared, x, bound, [&](int i) { return int(base + column_of(stages, stage, i / 4) - row.skipped) + i % 4; });
                slot = (slot + 1) % STAGES;
            }
            __syncthreads();
            int count = shared.scratch.count;
            if (count > CAPACITY) threshold = read_in_order(shared, row, base, kept, threshold, topk);
            else if (count <= CAPACITY - CHUNK) kept = count;
            else if (base + ROUND < row.end) threshold = keep_largest(shared, topk), kept = topk;
            __syncthreads();  // nobody adds to what somebody has yet to read
        }
        write_columns(shared, row.length(), indices + number * indices_stride, topk);
        __syncthreads();
    }
}
