// Top-k columns of each row of logits, ascending; among equal logits the lowest columns. For rows that fit in the
// registers of a CTA, or of a cluster of BLOCKS CTAs.
//
// Grid: BLOCKS CTAs per row. Block: THREADS threads. Shared memory: bins and a list of keys; dynamic.
// Limits: rows of up to BLOCKS * THREADS * 4 * READS columns; any topk.
//
// 1. A warp reads a chunk of consecutive columns, READS times four a lane, all at once. The upper bits of a column as float16 are
//    counted in bins. The k-th largest column is in the first bin from the top at which the sum of counts reaches k.
// 2. Columns of higher bins are selected. A few columns of this bin are compared with one another. If there are many, further digits
//    of their values are counted until few are left, and equal columns are selected in the order of their places (ties.cuh).
// 3. The place of a selected column is a sum of counts over lanes, one byte each, and over chunks.
//
// The order of float16 is the order of float32, although not strictly: infinities and larger numbers share a bin. So
// bins are correct for any values, and small for values of usual magnitudes.
//
// With ToSlots, the slots of the selected columns are written at the same places in another array. A row is read again
// from global memory instead if it has an absent page, because columns without a slot must be omitted, or if its range
// differs from the range that was read before the previous kernel had ended.
//
// Macros: THREADS, BLOCKS, READS (of four columns: 2, 4 or 8), ALIGNED (rows start at multiples of 16 bytes), OUTPUT.
#define DIGIT_BITS (BLOCKS > 1 ? 13 : 12)
#include "common/select_by_reading.cuh"
#include "common/cluster_counts.cuh"
#include "common/ties.cuh"
#include "common/device.cuh"
#include "common/row_reads.cuh"
#include "common/selection.cuh"

constexpr int VALUES = 4 * READS;
constexpr int STEP = 128, CHUNK = 32 * VALUES;   // columns of a warp's read, and of all of its reads
constexpr bool LISTS = READS > 2 || BLOCKS > 1;  // with few columns per thread a list is not faster
constexpr int RANKED = BLOCKS > 1 ? 512 : 256;   // keys that are compared each with each
constexpr uint32 MINUS_INFINITIES = 0xfc00fc00;  // as two float16

// The selection: columns of at least `high`, and the `rest` largest of the `here` other columns of at least `low`. The
// bounds are pairs of equal float16 numbers. rest is 0 if every column is selected.
struct Bounds {
    uint32 low, high;
    int rest, here;
};

struct Memory {
    Scratch scratch;
    alignas(16) Bounds bounds;
    uint64 last_keys[RANKED];
    Counted counted;
    Ties ties;
    int of_chunk[CHUNKS];  // selected columns
    int last_count, last_before, most_tied;
    uint32 failures;
    uint32 selected[THREADS];  // of each thread's tied columns
    uint32 equal[THREADS];     // of each thread's columns, if all that are listed are equal
    Listed listed;
};
constexpr int COUNTED_BYTES = BLOCKS > 1 ? 4 * (BINS / 128) + 512 * BLOCKS : 16;
constexpr int OF_THREADS = 8 * THREADS + 16 * CHUNKS;
constexpr int SHARED_BYTES = (SCRATCH_BYTES + 16 + 8 * RANKED + COUNTED_BYTES + OF_THREADS + LISTED_BYTES + 64 + 15) / 16 * 16;
static_assert(sizeof(Memory) <= SHARED_BYTES);

// Column i of a thread's reads is bit_of(i) of its masks: in the order of columns, the first half of its reads in the lower
// half of the word. Columns i < VALUES / 2 and i + VALUES / 2 are a pair.
__device__ constexpr int bit_of(int i) { return i < VALUES / 2 ? i : 16 + i - VALUES / 2; }

// All bits of each half of x that is at least the same half of `bound`, as float16; 0 for NaN.
__device__ inline uint32 at_least(uint32 x, uint32 bound) {
    uint32 mask;
    asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(bound));
    return mask;
}
// Two float16 as unsigned numbers of 16 bits that increase with them; -0 equals 0, NaN is the largest.
__device__ inline uint32 orders_of_pair(uint32 pair) {
    uint32 x, negative;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(pair), "r"(0));
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(x));
    return x ^ (negative & 0x7fff7fff) ^ 0x80008000;
}
// The smallest float16 of a digit, twice; NaN if the digit has none.
__device__ inline uint32 bound_of(int digit) {
    uint32 order = uint32(digit) << (16 - DIGIT);
    uint32 x = order >> 15 ? order ^ 0x8000 : order ^ 0xffff;
    if (order < 0x8000 && x > 0xfc00) x = 0xfc00;  // the digit of -inf
    return x * 0x10001;
}
__device__ inline Bounds bounds_of(int digit, int rest, int here) {
    uint32 low = bound_of(digit);
    return here == rest ? Bounds{low, low, rest, 0} : Bounds{low, bound_of(digit + 1), rest, here};
}

// Writes the bounds of the k largest to shared memory, from the counts of all bins except the last one, which has NaN.
// Does not write them if there are fewer than k. Called by all threads after a barrier; a barrier must follow before
// the bounds are read.
#if BLOCKS > 1
__device__ inline void find_bounds(Memory& shared, uint32 rank, int k) {
    ClusterDigit found = digit_of_cluster(shared.counted, shared.scratch.bins, rank, k);
    if (threadIdx.x == 0 && found.digit >= 0)
        shared.bounds = bounds_of(found.digit, found.needed, found.here), shared.last_before = found.earlier, shared.most_tied = found.most;
}
#else
__device__ inline void find_bounds(Memory& shared, uint32, int k) {
    Scratch& scratch = shared.scratch;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, first = BINS - (int(threadIdx.x) + 1) * RUN;
    uint32 counts[RUN];
    take(scratch.bins + first, counts);
    if (threadIdx.x == 0) counts[RUN - 1] = 0;
    int own = 0;
#pragma unroll
    for (int i = 0; i < RUN; ++i) own += int(counts[i]);
    int of_warp = __reduce_add_sync(~0u, own);
    if (lane == 0) scratch.sums[warp] = of_warp;
    __syncthreads();
    int rest = k - __reduce_add_sync(~0u, lane < warp ? scratch.sums[lane] : 0);
    if (rest <= 0 || rest > of_warp) return;  // it is in another warp's bins
    int before = sum_to(own) - own, digit = -1, needed = 0, here = 0;
#pragma unroll
    for (int i = RUN - 1; i >= 0; --i) {
        int up_to = before + int(counts[i]);
        if (before < rest && rest <= up_to) digit = first + i, needed = rest - before, here = int(counts[i]);
        before = up_to;
    }
    if (digit >= 0) shared.bounds = bounds_of(digit, needed, here), shared.most_tied = here;
}
#endif

// For each read of a thread, the number of marked columns of the warp before this lane; returns the number of marked
// columns of the warp.
__device__ inline int lane_places(uint32 mask, int (&before)[READS]) {
    uint32 pairs = mask - (mask >> 1 & 0x55555555), fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333);
    int total = 0;
#pragma unroll
    for (int half = 0; half < READS; half += 4) {
        // The counts of up to four reads, in a byte each: no sum of 32 exceeds 128.
        uint32 own = READS == 8 ? (half ? fours >> 16 : fours & 0xffff) : fours;
        if (READS == 8) own = (own | own << 8) & 0x00ff00ff;
        if (READS > 2) own = (own | own << 4) & 0x0f0f0f0f;
        uint32 up_to = sum_to(int(own)), all = __shfl_sync(~0u, up_to, 31), earlier = up_to - own;
#pragma unroll
        for (int i = half; i < min(half + 4, READS); ++i) {
            int shift = READS == 2 ? 16 * i : 8 * (i - half);
            before[i] = total + int(earlier >> shift & 0xff);
            total += int(all >> shift & 0xff);
        }
    }
    return total;
}

// Add a tied column to the lists of all CTAs.
__device__ inline void list(Memory& shared, uint32 order, int column) {
    uint64 key = uint64(order) << 32 | ~uint32(column);
    int to = shared.last_before + atomicAdd(&shared.last_count, 1);
#if BLOCKS > 1
    for (int r = 0; r < BLOCKS; ++r) send(shared.last_keys[to], r, key);
#else
    shared.last_keys[to] = key;
#endif
}

// Select the `rest` largest of the `here` listed columns: adds them to the counts of chunks, and to `selected`.
__device__ inline void compare_listed(Memory& shared, int rest, int here, uint32 skipped) {
    const int tid = int(threadIdx.x), lane = tid % 32;
    auto select = [&](uint64 key) {
        uint32 at = ~uint32(key) + skipped, its_chunk = at / CHUNK;
        atomicAdd(&shared.of_chunk[its_chunk], 1);
        uint32 thread = its_chunk / BLOCKS * 32 + at % STEP / 4, i = at % CHUNK / STEP * 4 + at % 4;
        if (its_chunk % BLOCKS == rank_in_cluster()) atomicOr(&shared.selected[thread], 1u << bit_of(i));
    };
    constexpr int LANES = 8;  // of a key, if there are many keys or in clusters; else a warp
    if (BLOCKS == 1 && here <= WARPS) {
        const int e = tid / 32;
        if (e < here) {
            uint64 key = shared.last_keys[e];
            int above = 0;
#pragma unroll 1
            for (int i = lane; i < here; i += 32) above += shared.last_keys[i] > key;
            above = __reduce_add_sync(~0u, above);
            if (lane == 0 && above < rest) select(key);
        }
    } else {
#pragma unroll 1
        for (int e = tid / LANES; e - lane / LANES < here; e += THREADS / LANES) {
            uint64 key = shared.last_keys[min(e, here - 1)];
            int above = 0;
#pragma unroll 4
            for (int i = lane % LANES; i < here; i += LANES) above += shared.last_keys[i] > key;
#pragma unroll
            for (int step = LANES / 2; step; step /= 2) above += __shfl_xor_sync(~0u, above, step);
            if (lane % LANES == 0 && e < here && above < rest) select(key);
        }
    }
}

// Narrows the tied columns of this CTA by a list. If all remaining ones are equal, they are in shared.equal, and more
// than RANKED.
__device__ inline Narrowed narrow_list(Memory& shared, const float* row, uint32 tied, int rest, int column) {
    // Orders in a bin of usual magnitudes are known, except for the rounding to float16; other bins have any.
    auto usual = [](uint32 x) { return (x & 0x7c00) - 0x400 < 0x7800; };
    const uint32 low = shared.bounds.low & 0xffff, high = shared.bounds.high & 0xffff;
    uint32 least = order_of(to_float(f16{uint16(low)})) - 0x1000, span = order_of(to_float(f16{uint16(high)})) - least;
    if (!usual(low) || !usual(high) || (low ^ high) >> 15) span = 0;
#if BLOCKS > 1
    if (threadIdx.x < GROUPS) shared.counted.groups[threadIdx.x] = 0;
    cluster_arrive();  // has read the others' bins
#endif
    shared.equal[threadIdx.x] = 0;
    const int own = __popc(tied), up_to = sum_to(own);
    const int first = threadIdx.x % 32 == 31 ? atomicAdd(&shared.listed.count, up_to) : 0;
    int to = __shfl_sync(~0u, first, 31) + up_to - own;
#pragma unroll 1
    for (uint32 marked = tied; marked; marked &= marked - 1) {
        int bit = __ffs(marked) - 1, i = bit < 16 ? bit : bit - 16 + VALUES / 2;
        shared.listed.columns[to] = column + i / 4 * STEP + i % 4, shared.listed.bits[to++] = threadIdx.x * 32 + bit;
    }
#if BLOCKS > 1
    cluster_wait();
#endif
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < shared.listed.count; i += THREADS)
        shared.listed.orders[i] = order_of(read_again(row + shared.listed.columns[i]));
    return narrow_listed(
        shared.scratch, shared.counted, shared.ties, shared.last_before, shared.listed, shared.selected, shared.equal, least, span,
        [&](uint32 order, int column) { list(shared, order, column); }, rest, RANKED);
}

// Narrows many tied columns and lists the remaining ones; `tied` of the result is 0 if the warp has none. Rarely called
// and not inlined, like the next function. It reads the columns of this thread again.
__device__ __noinline__ Narrowed narrow_ties(Memory& shared, const float* own_columns, uint32 tied, int column) {
    uint32 selected = 0;
    int rest = shared.bounds.rest;
    if (LISTS && shared.most_tied <= LISTED) {
        Narrowed left = narrow_list(shared, own_columns - column, tied, rest, column);
        selected = shared.selected[threadIdx.x];
        if (left.here <= RANKED) return {selected, uint32(left.here), left.rest, left.here};
        tied = shared.equal[threadIdx.x], rest = left.rest;
    }
    uint32 orders[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) orders[i] = tied >> bit_of(i) & 1 ? order_of(own_columns[i / 4 * STEP + i % 4]) : 0;
    Narrowed left = narrow(shared.scratch, shared.counted, shared.ties, shared.last_before, orders, bit_of, lane_places, rest, RANKED);
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (left.tied >> bit_of(i) & 1) list(shared, orders[i], column + i / 4 * STEP + i % 4);
    left.selected |= selected;
    return left;
}

template <class Out>
__device__ __noinline__ void read_row_again(Scratch& scratch, const float* row, int length, Out out, int topk) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) scratch.bins[i] = 0;
    __syncthreads();
    select_by_reading(scratch, row, length, out, topk);
}

extern "C" CLUSTER __global__ void __launch_bounds__(THREADS)
    top_k_in_registers(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends, const int* lens,
                       int64 lens_stride, int next_n, int per_row, int num_keys, OUTPUT output, int topk) {
    extern __shared__ uint4 memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    Scratch& scratch = shared.scratch;
    const int tid = int(threadIdx.x), lane = tid % 32, warp = tid / 32;
    const uint32 rank = rank_in_cluster(), chunk = warp * BLOCKS + rank;
    const int64 number = blockIdx.x / BLOCKS;
    const Columns columns{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    // The row's range is read early, when the previous kernel may still be writing it, and again while columns are loaded.
    const RangeAddresses addresses = columns.addresses_of(number);
    const Range early = addresses.load();
#pragma unroll
    for (int i = 0; i < BINS; i += 4 * THREADS) *reinterpret_cast<uint4*>(scratch.bins + i + 4 * tid) = uint4{0, 0, 0, 0};
    shared.selected[tid] = 0;
    if (tid == 0) shared.bounds = {MINUS_INFINITIES, MINUS_INFINITIES, 0, 0}, shared.last_count = shared.last_before = 0;
    if (tid == 0) shared.listed.count = 0;
#if BLOCKS > 1
    if (tid < GROUPS) shared.counted.groups[tid] = 0;
    if (tid == 0) shared.failures = 0;
    cluster_arrive();
#endif
    __syncthreads();
    const Row row = row_of(logits + number * stride, columns.range_of(addresses, early));
    pdl_wait();

    // 1. The columns, and the bin of the k-th.
    const uint32 first = chunk * CHUNK + lane * 4;
    const int left = int(row.end - first);
    auto has_four = [&](int i) { return left >= i * STEP + 4 && (i || first >= row.skipped); };
    float x[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = __uint_as_float(0x7fc00000);
#pragma unroll
    for (int i = 0; i < READS; ++i) read4(row.values + first + i * STEP, has_four(i), x + 4 * i);
    const bool changed = addresses.load() != early;
    const int pages_read = tid * BLOCKS + int(rank);  // pages to check, distributed over the threads of the cluster
    const bool lacks = output.of_row(number, next_n).lacks_page(row.length(), pages_read, THREADS * BLOCKS);
    if (tid == 0) scratch.count = output.of_row(number, next_n).counts();  // saves a register
#pragma unroll
    for (int i = 0; i < READS; ++i)
        if (!has_four(i) && left > i * STEP) read_at_end(row, first + i * STEP, x + 4 * i);
    pdl_release();
    uint32 pairs[VALUES / 2];
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i) pairs[i] = pack(f16{}, x[i], x[i + VALUES / 2]);
    const bool selects = row.length() > topk;
    if (selects && int(chunk) * CHUNK < int(row.end)) {  // NaN, and columns beyond the row, are in the last bin
#pragma unroll
        for (int i = 0; i < VALUES / 2; ++i) {
            uint32 orders = orders_of_pair(pairs[i]);
            atomicAdd(&scratch.bins[(orders & 0xffff) >> (16 - DIGIT)], 1u);
            atomicAdd(&scratch.bins[orders >> (32 - DIGIT)], 1u);
        }
    }
    bool failed = __syncthreads_or(changed | lacks);
#if BLOCKS > 1
    cluster_wait();  // all CTAs have started
    if (selects) send_groups(shared.counted, scratch.bins);
    if (failed && tid < BLOCKS) add_remote(shared.failures, tid, 1);
    cluster_arrive();
    cluster_wait();
    failed = shared.failures;
#endif
    Bounds bounds{MINUS_INFINITIES, MINUS_INFINITIES, 0, 0};
    if (selects && !failed) {
        find_bounds(shared, rank, topk);
        __syncthreads();
        bounds = shared.bounds;
    }
    if (failed) {
#if BLOCKS > 1
        cluster_arrive();  // all have read this CTA's bins
        cluster_wait();
        if (rank) return;
#endif
        Range range = columns.range_of(number);
        read_row_again(scratch, logits + number * stride + range.first, range.end - range.first, output.of_row(number, next_n), topk);
        return;
    }

    // 2. The selected columns.
    uint32 mask = 0, tied = 0;
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i) {
        mask |= at_least(pairs[i], bounds.high) & 0x10001 << i;
        tied |= at_least(pairs[i], bounds.low) & 0x10001 << i;
    }
    tied &= ~mask;
    const int column = int(first - row.skipped);  // of the first read
    bool open;
    if (bounds.here > RANKED) {
        Narrowed left = narrow_ties(shared, row.values + first, tied, column);
        open = __any_sync(~0u, left.tied);
        mask |= left.selected, bounds.rest = left.rest, bounds.here = left.here;
    } else {
        open = __any_sync(~0u, tied);
#pragma unroll 1
        for (uint32 marked = tied; marked; marked &= marked - 1) {
            int bit = __ffs(marked) - 1;
            float value = x[0];
#pragma unroll
            for (int i = 1; i < VALUES; ++i)
                if (bit == bit_of(i)) value = x[i];
            int i = bit < 16 ? bit : bit - 16 + VALUES / 2;
            list(shared, order_of(value), column + i / 4 * STEP + i % 4);
        }
    }
    int before[READS];
    const int of_warp = open ? int(__reduce_add_sync(~0u, __popc(mask))) : lane_places(mask, before);
#if BLOCKS > 1
    if (lane < BLOCKS) send(shared.of_chunk[chunk], lane, of_warp);
    cluster_arrive();
    cluster_wait();
#else
    if (lane == 0) shared.of_chunk[chunk] = of_warp;
    __syncthreads();
#endif
    if (bounds.here) {
        compare_listed(shared, bounds.rest, bounds.here, row.skipped);
        __syncthreads();
    }
    if (open) {
        mask |= shared.selected[tid];
        lane_places(mask, before);
    }

    // 3. Their places.
    const auto out = output.of_row(number, next_n);
    auto of_read = [&](int i) { return mask >> bit_of(4 * i) & 15; };
    decltype(out.writer(0, false)) writers[READS];
#pragma unroll
    for (int i = 0; i < READS; ++i) writers[i] = out.writer(max(column + i * STEP, 0), of_read(i));
    int earlier = 0, total = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; i += 32) {
        int found = i + lane < CHUNKS ? shared.of_chunk[i + lane] : 0;
        total += found;
        if (i + lane < int(chunk)) earlier += found;
    }
    earlier = __reduce_add_sync(~0u, earlier);
#pragma unroll
    for (int i = 0; i < READS; ++i) {
        uint32 to = earlier + before[i];
#pragma unroll 1
        for (uint32 four = of_read(i); four; four &= four - 1) writers[i].write(to++, column + i * STEP + __ffs(four) - 1);
    }
    if (rank == 0) {
        total = bounds.rest ? topk : int(__reduce_add_sync(~0u, total));
#pragma unroll 1
        for (int i = total + tid; i < topk; i += THREADS) out.clear(i);
        if (tid == 0) out.write_length(total, scratch.count);
    }
}
