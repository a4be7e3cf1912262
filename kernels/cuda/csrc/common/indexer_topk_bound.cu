// Top-k columns of each row of logits, ascending, for few rows: a cluster of BLOCKS CTAs processes a row. Each CTA
// holds its part in registers, and rejects most columns by a bound.
//
// Grid: one cluster of BLOCKS CTAs per row.
// Block: THREADS threads.
// Shared memory: 64 KiB of candidates, 10 KiB per CTA of the cluster for exchange, a bitmap and bins; dynamic.
// Limits: rows of up to BLOCKS * THREADS * 4 * READS * ROUNDS columns; cta_limit(topk) <= THREADS.
//
// 1. Each group of lanes (GROUP) with columns publishes the n-th largest of its lanes' maxima as a bound, where n times the
//    number of these groups is at least k. Columns below the smallest bound are rejected by one comparison.
// 2. The others are counted in bins by their upper digits, until the k-th is in a bin with few others.
// 3. If BLOCKS > 1, each CTA does so for its fraction of k and a few more. Columns are distributed over CTAs in short lines, so
//    that a CTA's part is a sample of the row. Each CTA sends its candidates to all CTAs of the cluster, which continue
//    identically: if the k-th of all candidates exceeds everything that each CTA left out, it is the row's k-th.
// 4. A CTA writes the selected columns in its 1/BLOCKS of the row, from a bitmap.
// One CTA reads the row again from global memory if more columns pass the bounds than fit, if a CTA omitted too many,
// or if the range of the row differs from the range that was read before the previous kernel had ended.
//
// A key is a value's order and, below it, its inverted column: no two keys are equal.
//
// Rows with more columns than registers hold are read in ROUNDS that store only the maximum of each line; lines that
// reach the bound are read a second time, from L2.
//
// With ToSlots, the slots of the selected columns are written at the same places in another array. A row with an absent
// page is also read again, because columns without a slot must be omitted.
//
// With ESTIMATED, step 1 estimates the bound from a sample, as indexer_topk_stream.cu does: fewer columns pass, k may exceed the
// number of threads, and fewer threads suffice. If fewer than k columns exceed it, as where most scores are 0, the
// first columns equal to it complete the selection; if these are not enough, all columns become candidates.
//
// Macros: THREADS, BLOCKS, READS (of four columns that a thread has in flight, or holds), ROUNDS (of such reads; 1 for rows
// held in registers), ALIGNED (rows start at multiples of 16 bytes), OUTPUT, ESTIMATED (0, or 1 with one block and round).
#ifndef ESTIMATED
#define ESTIMATED 0
#endif
#define DIGIT_BITS 12  // finds the k-th in one pass where the bound is low and orders span many binades; 10 bits take two
#include "common/select_by_reading.cuh"
#include "common/estimated_bound.cuh"
#include "common/device.cuh"
#include "common/row_in_rounds.cuh"
#include "common/row_reads.cuh"
#include "common/selection.cuh"

static_assert(BLOCKS <= WARPS && READS <= 8);
static_assert(!ESTIMATED || (BLOCKS == 1 && ROUNDS == 1));
constexpr int REGION = 1280;                 // keys that a CTA sends
constexpr int RANKED = 64;                   // keys ranked by comparing each with each
constexpr int GROUP = READS >= 8 ? 16 : 8;   // lanes
constexpr bool IN_REGISTERS = VALUES <= 16;  // whether values are taken from registers, which needs constant indices

struct Sent {
    uint64 low, high;  // all keys from low on are included (every key if 0); none is above high
    int64 count;       // or -1: too many
};

struct Memory {
    uint64 keys[CAPACITY];
    uint64 received[BLOCKS > 1 ? BLOCKS * REGION : 1];
    uint64 last_keys[RANKED];
    Sent sent[BLOCKS];
    uint32 bits[WORDS];  // if ROUNDS > 1, first the order of each line's maximum, then the lines to read again
    Scratch scratch;
    int last_count, before, sending;  // `sending`: in clusters; in a single CTA, the number of selected columns equal to the estimate
};
constexpr int SENT_BYTES = 24, RECEIVED = BLOCKS > 1 ? BLOCKS * REGION : 1;
constexpr int SHARED_BYTES = (8 * (CAPACITY + RECEIVED + RANKED) + SENT_BYTES * BLOCKS + 4 * WORDS + SCRATCH_BYTES + 12 + 15) / 16 * 16;
static_assert(sizeof(Sent) == SENT_BYTES && sizeof(Memory) <= SHARED_BYTES);

// The selected keys: all above `high`, and the `rest` largest of the `here` keys between low and high.
struct Boundary {
    uint64 low, high;
    int rest, here;
    bool enough;  // there are at least k
};

// Find the boundary of the k largest keys from low to high. `each` calls its argument with every key of a thread; the first
// bins may have been counted already. Called by all threads.
template <class Each>
__device__ inline Boundary find_boundary(Scratch& scratch, int k, uint64 low, uint64 high, bool counted, Each each) {
    int rest = k;
#pragma unroll 1
    for (;; counted = false) {
        uint64 span = high - low;
        int shift = max(64 - __clzll(int64(span)) - DIGIT, 0);
        if (!counted)
            each([&](uint64 key) {
                if (key - low <= span) atomicAdd(&scratch.bins[uint32((key - low) >> shift)], 1u);
            });
        int total = find_digit(scratch, rest);
        if (total < rest) return {1, 0, 0, 0, false};
        low += uint64(scratch.digit) << shift, high = low + ((1ull << shift) - 1), rest = scratch.needed;
        if (scratch.here <= RANKED) return {low, high, rest, scratch.here, true};
    }
}

#if BLOCKS > 1
__device__ inline uint32 rank_in_cluster() { return cluster_rank(); }
// Store to the address of `here` in another CTA's shared memory.
__device__ inline void send(const void* here, uint32 rank, uint64 x) {
    asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(cluster_address(shared_address(here), rank)), "l"(x) : "memory");
}
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)
#else
__device__ inline uint32 rank_in_cluster() { return 0; }
#define CLUSTER
#endif

// Number of keys that a CTA looks for: k / BLOCKS and a margin that suffices for all but one row in a million.
__device__ inline int cta_limit(int k) {
    if (BLOCKS == 1) return k;
    float mean = float(k) / BLOCKS;
    return min(k, int(mean + 5.0f * sqrtf(mean)) + 8);
}

// Number of this CTA's groups, from the first on, that have columns for every lane.
__device__ inline int groups_inside(const Row& row, uint32 rank) {
    int lines = int(row.end) / LINE - int(rank);  // whole lines, from this CTA's first on
    return min((lines + BLOCKS - 1) / BLOCKS, LINES) / (GROUP / LANES);
}

// Orders of the smallest and the largest subnormal number; zero is between them.
constexpr uint32 LEAST_SUBNORMAL = 0x7f800000, MOST_SUBNORMAL = 0x807fffff;
__device__ inline bool is_subnormal(uint32 order) { return order - LEAST_SUBNORMAL <= MOST_SUBNORMAL - LEAST_SUBNORMAL; }

__device__ inline uint64 key_of(float x, int column) { return uint64(order_of(x)) << 32 | ~uint32(column); }

// Rarely called; not inlined, to save registers elsewhere.
template <class Out>
__device__ __noinline__ void read_row_again(Scratch& scratch, const float* row, int length, Out out, int topk) {
    select_by_reading(scratch, row, length, out, topk);
}

constexpr int MIN_CTAS = ESTIMATED && THREADS < 1024 ? 2 : 1;  // on an SM

extern "C" CLUSTER __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    top_k_by_bound(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends, const int* lens,
                   int64 lens_stride, int next_n, int per_row, int num_keys, OUTPUT output, int topk) {
    extern __shared__ uint4 memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    Scratch& scratch = shared.scratch;
    const int tid = int(threadIdx.x), lane = tid % 32;
    const uint32 rank = rank_in_cluster();
#if BLOCKS > 1
    cluster_arrive();  // so that no CTA sends to a CTA that has not started
#endif
#pragma unroll
    for (int i = 0; i < RUN; ++i) scratch.bins[i * THREADS + tid] = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i += THREADS)
        if (i + tid < WORDS) shared.bits[i + tid] = 0;
    if (tid == 0) scratch.count = 0, shared.last_count = 0, shared.before = 0, shared.sending = 0;
    pdl_release();
    const int64 number = blockIdx.x / BLOCKS;
    const Columns columns{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    // The row's range is read early, when the previous kernel may still be writing it, and again while columns are loaded.
    const RangeAddresses addresses = columns.addresses_of(number);
    const Range early = addresses.load();
    const Row row = row_of(logits + number * stride, columns.range_of(addresses, early));
    pdl_wait();

    // 1. Candidates for the k largest.
#if ROUNDS > 1
    const float largest = read_in_rounds(shared.bits, row, rank);
#else
    const uint32 first = (tid / LANES * BLOCKS + rank) * LINE + tid % LANES * 4;
    constexpr uint32 STEP = LINES * BLOCKS * LINE;  // distance to a thread's next four columns
    const float* own = row.values + first;
    auto has_four = [&](int i) { return int(row.end - first) >= int(i * STEP) + 4 && (i || first >= row.skipped); };
    float x[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = __uint_as_float(0x7fc00000);
#pragma unroll
    for (int i = 0; i < READS; ++i) read4(own + i * STEP, has_four(i), x + 4 * i);
#pragma unroll
    for (int i = 0; i < READS; ++i)
        if (!has_four(i) && int(row.end - first) > int(i * STEP)) read_at_end(row, first + i * STEP, x + 4 * i);
#endif
    const bool changed = addresses.load() != early;
    const int pages_read = tid * BLOCKS + int(rank);  // pages to check, distributed over the threads of the cluster
    const bool lacks = output.of_row(number, next_n).lacks_page(row.length(), pages_read, THREADS * BLOCKS);
    const int k = cta_limit(topk);
#if ESTIMATED
    const bool estimates = row.length() > 2 * topk && row.length() >= SHORTEST_SAMPLED;
    float largest_of_columns[3] = {x[0], x[1], fmaxf(x[2], x[3])};
#pragma unroll
    for (int i = 4; i < VALUES; ++i) largest_of_columns[min(i % 4, 2)] = fmaxf(largest_of_columns[min(i % 4, 2)], x[i]);
    float largest = fmaxf(fmaxf(largest_of_columns[0], largest_of_columns[1]), largest_of_columns[2]);
    uint32 order = order_of(largest), most = __reduce_max_sync(~0u, order), inverted;
    if (estimates) {
        uint32 estimate = estimated_order(row, largest_of_columns, topk);
        inverted = estimate ? ~estimate : 0;
    } else {  // all columns are candidates
        float smallest = x[0];
#pragma unroll
        for (int i = 1; i < VALUES; ++i) smallest = fminf(smallest, x[i]);
        inverted = __reduce_max_sync(~0u, order ? ~order_of(smallest) : 0);
    }
#else
    const int groups = groups_inside(row, rank), of_each = groups ? (k + groups - 1) / groups : GROUP + 1;
#if ROUNDS == 1  // not earlier, where the compiler would reorder the reads
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < VALUES; ++i) largest = fmaxf(largest, x[i]);
#endif
    uint32 order = order_of(largest), most = __reduce_max_sync(~0u, order);
    uint32 having = __ballot_sync(~0u, order != 0) >> lane / GROUP * GROUP & ((1u << GROUP) - 1);
    uint32 least = order_of(largest_of_lanes<GROUP>(order ? largest : -infinity(), min(of_each, GROUP) - 1));
    if (__popc(having) < of_each) least = 0;
#if ROUNDS == 1
    if (of_each > GROUP) {  // too few groups have columns: the bound is the smallest number
        float smallest = x[0];
#pragma unroll
        for (int i = 1; i < VALUES; ++i) smallest = fminf(smallest, x[i]);
        least = order ? order_of(smallest) : ~0u;
    }
#endif
    uint32 inverted = __reduce_max_sync(~0u, tid / GROUP < groups || of_each > GROUP ? ~least : 0);
#endif
    if (lane == 0) scratch.most[tid / 32] = most, scratch.most[WARPS + tid / 32] = inverted;
    bool failed = __syncthreads_or(changed | lacks);
    const bool all = !failed && row.length() <= topk;  // every column is selected
    most = __reduce_max_sync(~0u, lane < WARPS ? scratch.most[lane] : 0);
#if ESTIMATED
    inverted = lane < WARPS ? scratch.most[WARPS + lane] : 0;
    if (estimates && __popc(__ballot_sync(~0u, inverted != 0)) > WARPS * 3 / 4) {  // the second smallest estimate
        uint32 smallest = __reduce_max_sync(~0u, inverted);
        if (lane == __ffs(__ballot_sync(~0u, inverted == smallest)) - 1) inverted = 0;
    }
    // The candidates exceed `least`: the estimate, or the order below the smallest number, which -ftz=true may have
    // flushed to zero.
    uint32 least = ~__reduce_max_sync(~0u, inverted);
    if (!estimates) least = max((is_subnormal(least) ? LEAST_SUBNORMAL : least) - 1, MINUS_INFINITY);
    int count;
    Boundary best;
#pragma unroll 1
    for (bool again = false;; again = true) {
#else
    least = ~__reduce_max_sync(~0u, lane < WARPS ? scratch.most[WARPS + lane] : 0);
    // Subnormal numbers compare as zeros (-ftz=true): if one of them is a candidate, all are.
    if (is_subnormal(least)) least = LEAST_SUBNORMAL;
#endif
        if (is_subnormal(most)) most = MOST_SUBNORMAL;
        const uint64 low = uint64(least) << 32, high = uint64(most) << 32 | ~0u;
        const int shift = max(64 - __clzll(int64(high - low)) - DIGIT, 0);

        // 2. The candidates, and their first count.
#if ROUNDS > 1
        read_candidates(scratch, shared.bits, shared.keys, row, rank, least);
#else
    float bound = value_of(least);
    uint32 mask = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
#if ESTIMATED
        mark_if_above(mask, x[i], bound, 1u << i);
#else
        if (x[i] >= bound) mask |= 1u << i;
#endif
    }
    if (__any_sync(~0u, mask)) {
        int to = places(scratch, lane, __popc(mask));
        // Store their positions, and values if IN_REGISTERS; keys are computed when the entries are spread evenly over threads.
        if (IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                if (mask >> i & 1) {
                    if (to < CAPACITY) shared.keys[to] = uint64(__float_as_uint(x[i])) << 32 | (first + i / 4 * STEP + i % 4);
                    ++to;
                }
        } else {
            for (; mask; mask &= mask - 1, ++to) {
                int i = __ffs(mask) - 1;
                if (to < CAPACITY) shared.keys[to] = first + i / 4 * STEP + i % 4;
            }
        }
    }
#endif
        __syncthreads();
#if ESTIMATED
        count = min(scratch.count, CAPACITY);
        const bool enough = count >= topk;
#else
    const int count = min(scratch.count, CAPACITY);
    constexpr bool enough = true;
#endif
#pragma unroll 2
        for (int i = tid; i < count; i += THREADS) {
            uint64 found = shared.keys[i];
            uint32 at = uint32(found);
            float value = IN_REGISTERS ? __uint_as_float(uint32(found >> 32)) : read_again(row.values + at);
            uint64 key = key_of(value, int(at - row.skipped));
            shared.keys[i] = key;
            if (!all && enough) atomicAdd(&scratch.bins[uint32((key - low) >> shift)], 1u);
        }
        auto own_keys = [&](auto visit) {
            for (int i = tid; i < count; i += THREADS) visit(shared.keys[i]);
        };
#if ESTIMATED
        best = enough && !all ? find_boundary(scratch, k, low, high, true, own_keys) : Boundary{1, 0, 0, 0, false};
        if (enough || count == row.length() || failed) break;
        uint32 equal = 0;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) mark_if_equal(equal, x[i], bound, 1u << i);
        int equal_ones = min(mark_first(scratch, shared.bits, equal, int(first - row.skipped), topk - count), topk - count);
        if (count + equal_ones == topk || again || !estimates) {
            if (tid == 0) shared.sending = equal_ones;
            __syncthreads();
            break;
        }
        // The estimate was too high.
        for (int i = tid; i < WORDS; i += THREADS) shared.bits[i] = 0;
        if (tid == 0) scratch.count = 0;
        least = MINUS_INFINITY;
        __syncthreads();
    }
    auto own_keys = [&](auto visit) {
        for (int i = tid; i < count; i += THREADS) visit(shared.keys[i]);
    };
    // If all keys of the last bin are selected, they need not be ranked.
    if (best.here == best.rest && best.enough) best.high = best.low - 1, best.here = 0;
#else
    Boundary best = all ? Boundary{1, 0, 0, 0, false} : find_boundary(scratch, k, low, high, true, own_keys);
#endif
    failed |= scratch.count > CAPACITY;
    int num_found = scratch.count + (ESTIMATED ? shared.sending : 0);

#if BLOCKS > 1
    // 3. Exchange of candidates.
    uint64 from = best.enough ? best.low : 0;
    cluster_wait();
    if (!failed)
        for (int i0 = 0; i0 < num_found; i0 += THREADS) {
            int i = i0 + tid;
            uint64 key = i < num_found ? shared.keys[i] : 0;
            bool mine = i < num_found && key >= from;
            uint32 votes = __ballot_sync(~0u, mine);
            if (!votes) continue;
            int to = lane == 0 ? atomicAdd(&shared.sending, __popc(votes)) : 0;
            to = __shfl_sync(~0u, to, 0) + __popc(votes & ((1u << lane) - 1));
            if (mine && to < REGION)
                for (uint32 r = 0; r < BLOCKS; ++r) send(&shared.received[rank * REGION + to], r, key);
        }
    __syncthreads();
    if (tid < BLOCKS) {
        int count = failed || shared.sending > REGION ? -1 : shared.sending;
        send(&shared.sent[rank].low, tid, from), send(&shared.sent[rank].high, tid, high);
        send(&shared.sent[rank].count, tid, uint64(int64(count)));
    }
    cluster_arrive();
    cluster_wait();
    uint64 from_all = 1ull << 32, high_all = 0;  // no key is below
    num_found = 0;
    for (int r = 0; r < BLOCKS; ++r) {
        Sent sent = shared.sent[r];
        failed |= sent.count < 0;
        from_all = max(from_all, sent.low), high_all = max(high_all, sent.high), num_found += int(max(sent.count, int64(0)));
    }
    auto all_keys = [&](auto visit) {
        constexpr int STRIDE = THREADS / BLOCKS;
        int r = tid / 32 % BLOCKS, count = int(shared.sent[r].count);
        for (int i = tid / 32 / BLOCKS * 32 + lane; i < count; i += STRIDE) visit(shared.received[r * REGION + i]);
    };
    if (!failed) {
        if (!all) best = find_boundary(scratch, topk, from_all, high_all, false, all_keys);
        failed = !best.enough && from_all > 1ull << 32;
    }
#else
    auto& all_keys = own_keys;
#endif
    auto out = output.of_row(number, next_n);
    if (failed) {
        Range range = columns.range_of(number);
        if (rank == 0) read_row_again(scratch, logits + number * stride + range.first, range.end - range.first, out, topk);
        return;
    }

    // 4. The selected columns of this CTA's part.
    const bool counts = out.counts();
    const int length = row.length(), part = (length + 32 * BLOCKS - 1) / (32 * BLOCKS) * 32, start = int(rank) * part;
    auto select = [&](uint64 key, int& before) {
        uint32 at = ~uint32(key) - start;
        if (~uint32(key) < uint32(start)) ++before;
        else if (at < uint32(part)) atomicOr(&shared.bits[at / 32], 1u << at % 32);
    };
    int before = 0;
    all_keys([&](uint64 key) {
        if (key > best.high) select(key, before);
        else if (key >= best.low && best.here) shared.last_keys[atomicAdd(&shared.last_count, 1)] = key;
    });
    if (!ESTIMATED || best.here) __syncthreads();
    if (tid < best.here) {
        uint64 key = shared.last_keys[tid];
        int above = 0;
        for (int i = 0; i < best.here; ++i) above += shared.last_keys[i] > key;
        if (above < best.rest) select(key, before);
    }
    if (BLOCKS > 1) {
        before = __reduce_add_sync(~0u, before);
        if (lane == 0 && before) atomicAdd(&shared.before, before);
    }
    __syncthreads();
    // A thread writes the same number of columns as it has read, so that no thread writes many indices in sequence.
    uint32 words[ROUNDS];
    int selected = 0, total;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        int bit = (tid * ROUNDS + i) * VALUES;
        words[i] = shared.bits[bit / 32] >> bit % 32 & uint32((1ull << VALUES) - 1);
        selected += __popc(words[i]);
    }
    auto writer = out.writer(start + tid * ROUNDS * VALUES, selected);
    int place = sum_before(scratch, selected, total) + shared.before;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
        for (uint32 word = words[i]; word; word &= word - 1) writer.write(place++, start + (tid * ROUNDS + i) * VALUES + __ffs(word) - 1);
    if (rank == 0)
        for (int i = min(num_found, topk) + tid; i < topk; i += THREADS) out.clear(i);
    if (rank == 0 && tid == 0) out.write_length(min(num_found, topk), counts);
}
