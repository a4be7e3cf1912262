// Rows of a cache in host memory, the hot ones of them in device memory: slots of selected rows, and copies of rows that miss.
#include "common/device.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int MOST_HOT = 16384;  // slots of a lane: a thread has the last uses of MOST_HOT / THREADS in registers
constexpr int UNROLL = 4;        // entries whose loads a thread of resolve_resident issues at a time
constexpr int IN_USE = INT32_LIMIT;  // the last use, in registers, of a slot that this step uses

constexpr int FETCH_THREADS = 128;
constexpr int ENTRIES = 8;  // of a warp of fetch_resident: few, so that rows that miss are copied by many warps
constexpr int ROWS = 2;     // which a warp copies at a time

struct Scratch {
    int sums[2][WARPS];  // by turns: a barrier separates a sum from the sum before the last
    int low[WARPS], high[WARPS];
    uint16 victims[MOST_HOT];
};

// Sums over the CTA. All threads call each method.
struct Sums {
    Scratch& scratch;
    int turn = 0;

    __device__ int* next() { return scratch.sums[turn ^= 1]; }
    __device__ int of(int x) {
        int before;
        return before_warp(__reduce_add_sync(~0u, x), before);
    }
    // The sum of one number of each warp; `before`: of the warps before this one.
    __device__ int before_warp(int x, int& before) {
        int *sums = next(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) sums[warp] = x;
        __syncthreads();
        int sum = lane < WARPS ? sums[lane] : 0;
        before = __reduce_add_sync(~0u, lane < warp ? sum : 0);
        return __reduce_add_sync(~0u, sum);
    }
};

__device__ inline int bits_below(uint32 mask) { return __popc(mask & (1u << threadIdx.x % 32) - 1); }

// Slots of hot rows of one request.
struct Lane {
    int* slot_of_row;
    int* row_of_slot;
    int* last_use;
    int rows, hot, now;

    __device__ bool has(int row) const { return uint32(row) < uint32(rows); }
    __device__ bool is_slot(int slot) const { return uint32(slot) < uint32(hot); }
};

// Entries of the tokens of a request. A batch has `each` entries of every thread, at most UNROLL; a warp's entries follow one another.
struct Entries {
    const int* rows;
    int64 stride;
    int topk, count, each;

    __device__ Entries(const int* rows, int64 stride, int topk, int count)
        : rows(rows), stride(stride), topk(topk), count(count), each(min((count + THREADS - 1) / THREADS, UNROLL)) {}
    __device__ int number(int batch, int u) const { return batch + (int(threadIdx.x / 32) * each + u) * 32 + int(threadIdx.x % 32); }
    __device__ int64 at(int i, int64 its_stride) const { return its_stride == topk ? i : i / topk * its_stride + i % topk; }
    __device__ void load(int batch, int (&row)[UNROLL]) const {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            row[u] = -1;
            if (u < each && number(batch, u) < count) row[u] = rows[at(number(batch, u), stride)];
        }
    }
};

// List the `count` slots of least recent use, or all that are not in use, in ascending order. Returns how many there are.
__device__ inline int list_victims(const Lane& lane, int count, Sums& sums) {
    constexpr int MOST = MOST_HOT / THREADS;
    Scratch& scratch = sums.scratch;
    int in_warp = threadIdx.x % 32, warp = threadIdx.x / 32;
    int each = (lane.hot + THREADS - 1) / THREADS, first = warp * 32 * each + in_warp;  // a warp's slots follow one another
    int used[MOST], low = IN_USE, high = -IN_USE - 1, idle = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        int slot = first + 32 * i;
        used[i] = i < each && slot < lane.hot ? lane.last_use[slot] : lane.now;
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (used[i] == lane.now) {
            used[i] = IN_USE;
            continue;
        }
        used[i] = min(used[i], IN_USE - 1);
        ++idle;
        low = min(low, used[i]);
        high = max(high, used[i]);
    }
    low = ~__reduce_max_sync(~0u, ~low);
    high = __reduce_max_sync(~0u, high);
    if (in_warp == 0) {
        scratch.low[warp] = low;
        scratch.high[warp] = high;
    }
    idle = sums.of(idle);
    low = ~__reduce_max_sync(~0u, ~scratch.low[in_warp % WARPS]);
    high = __reduce_max_sync(~0u, scratch.high[in_warp % WARPS]);
    count = min(count, idle);
    if (count == idle) low = high;
    while (low < high) {  // the last use of the last victim is found between them
        int middle = low + int((uint32(high) - uint32(low)) / 2), found = 0;
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (i < each) found += used[i] <= middle;
        found = sums.of(found);
        if (found >= count) high = middle;
        else low = middle + 1;
        if (found == count) low = middle;
    }
    int older = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i < each) {
            older += used[i] < low;
            equal += used[i] == low;
        }
    older = __reduce_add_sync(~0u, older);
    equal = __reduce_add_sync(~0u, equal);
    int older_before, equal_before, all_older = sums.before_warp(older, older_before);
    sums.before_warp(equal, equal_before);
    int places = count - all_older;  // of slots last used at `low`, the first ones
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i < each) {
            uint32 olders = __ballot_sync(~0u, used[i] < low), equals = __ballot_sync(~0u, used[i] == low);
            int rank = equal_before + bits_below(equals);
            bool is_older = olders >> in_warp & 1, is_victim = is_older || ((equals >> in_warp & 1) && rank < places);
            if (is_victim) scratch.victims[older_before + bits_below(olders) + min(rank, places)] = uint16(first + 32 * i);
            older_before += __popc(olders);
            equal_before += __popc(equals);
        }
    __syncthreads();
    return count;
}

// Grid: a CTA per request. A request's own slots make the choice of victims local.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    resolve_resident(const int* topk_indices, int64 topk_stride, int tokens, int topk, const int* query_start_loc, const int* seq_lens,
                     const int* lanes, int requests, int* slot_of_row, int64 slot_stride, int rows, int* row_of_slot, int64 row_stride,
                     int hot, int* last_use, int64 use_stride, int* clock, int num_lanes, int compress_ratio, int* slots,
                     int64 slots_stride, int* misses, int64 misses_stride) {
    __shared__ Scratch scratch;
    pdl_wait();
    int r = blockIdx.x, start = query_start_loc[r], end = start, number = -1, seq_len = 0;
    if (requests) end = query_start_loc[r + 1], number = lanes[r], seq_len = seq_lens[r];
    start = min(max(start, 0), tokens);
    end = min(max(end, start), tokens);
    auto none = [&](int first, int last) {
#pragma unroll 1
        for (int i = first * topk + threadIdx.x; i < last * topk; i += THREADS) {
            slots[i / topk * slots_stride + i % topk] = -1;
            misses[i / topk * misses_stride + i % topk] = -1;
        }
    };
    if (r == 0) none(0, start);
    if (r >= requests - 1) none(end, tokens);
    if (uint32(number) >= uint32(num_lanes)) {
        none(start, end);
        return;
    }
    Entries entries(topk_indices + start * topk_stride, topk_stride, topk, (end - start) * topk);
    slots += start * slots_stride;
    misses += start * misses_stride;
    Lane lane{slot_of_row + number * slot_stride,
              row_of_slot + number * row_stride,
              last_use + number * use_stride,
              rows,
              hot,
              clock[number] + 1};
    Sums sums{scratch};
    const int step = entries.each * THREADS;

    // This step has written these rows: their slots are given up, so they miss.
    int written = max(seq_len - (end - start), 0) / compress_ratio, end_written = min(seq_len / compress_ratio, rows);
    auto is_written = [&](int row) { return row >= written && row < end_written; };

    // The first entry of a row that misses leaves its number - entries - 1 in slot_of_row. Returns whether no entry had.
    auto mark = [&](int i, int row) { return atomicMin(&lane.slot_of_row[row], i - entries.count - 1) >= -1; };
    int count = 0, row[UNROLL], slot[UNROLL];
#pragma unroll 1
    for (int batch = 0; batch < entries.count; batch += step) {
        entries.load(batch, row);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) slot[u] = lane.has(row[u]) && !is_written(row[u]) ? lane.slot_of_row[row[u]] : -1;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            int i = entries.number(batch, u);
            if (u >= entries.each || i >= entries.count) continue;
            bool hit = lane.is_slot(slot[u]);
            slots[entries.at(i, slots_stride)] = hit ? number * hot + slot[u] : -1;
            misses[entries.at(i, misses_stride)] = -1;
            if (hit) lane.last_use[slot[u]] = lane.now;
            else if (lane.has(row[u]) && !is_written(row[u])) count += mark(i, row[u]);
        }
    }
    bool any_written = written < end_written;
#pragma unroll 1
    for (int row = written + threadIdx.x; row < end_written; row += THREADS) {
        int slot = lane.slot_of_row[row];
        if (lane.is_slot(slot)) {
            lane.row_of_slot[slot] = -1;
            lane.last_use[slot] = 0;
        }
        lane.slot_of_row[row] = -1;
    }
    if (any_written) __syncthreads();
#pragma unroll 1
    for (int batch = 0; any_written && batch < entries.count; batch += step) {
        entries.load(batch, row);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (is_written(row[u])) count += mark(entries.number(batch, u), row[u]);
    }
    count = sums.of(count);  // also: all have read the clock
    if (threadIdx.x == 0) clock[number] = lane.now;
    if (!count) return;

    int victims = list_victims(lane, count, sums), ranked = 0;
#pragma unroll 1
    for (int batch = 0; batch < entries.count; batch += step) {
        entries.load(batch, row);
        uint32 firsts[UNROLL];
        int found = 0, rank;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) slot[u] = lane.has(row[u]) ? lane.slot_of_row[row[u]] : INT32_LIMIT;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            firsts[u] = __ballot_sync(~0u, slot[u] == entries.number(batch, u) - entries.count - 1);
            found += __popc(firsts[u]);
        }
        found = sums.before_warp(found, rank);
        rank += ranked;
        ranked += found;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            int i = entries.number(batch, u), place = rank + bits_below(firsts[u]);
            rank += __popc(firsts[u]);
            if (!(firsts[u] >> threadIdx.x % 32 & 1)) continue;
            if (place >= victims) {
                lane.slot_of_row[row[u]] = -1;
                continue;
            }
            int victim = scratch.victims[place], old = lane.row_of_slot[victim];
            if (lane.has(old)) lane.slot_of_row[old] = -1;
            lane.row_of_slot[victim] = row[u];
            lane.slot_of_row[row[u]] = victim;
            lane.last_use[victim] = lane.now;
            slots[entries.at(i, slots_stride)] = number * hot + victim;
            misses[entries.at(i, misses_stride)] = row[u];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int batch = 0; batch < entries.count; batch += step) {  // other entries of rows that missed
        entries.load(batch, row);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) slot[u] = lane.has(row[u]) ? lane.slot_of_row[row[u]] : -1;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (lane.is_slot(slot[u])) slots[entries.at(entries.number(batch, u), slots_stride)] = number * hot + slot[u];
    }
}

// Copies `size` bytes of each of up to ROWS rows; addresses and size are multiples of the unit. All loads of 2 units a lane and row
// precede their stores: reads of host memory take microseconds.
template <class Unit>
__device__ inline void copy_units(const uint8* const (&from)[ROWS], uint8* const (&to)[ROWS], int rows, int size) {
    constexpr int UNITS = 2;
    int units = size / int(sizeof(Unit));
    for (int first = threadIdx.x % 32; first < units; first += UNITS * 32) {
        Unit values[ROWS][UNITS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
#pragma unroll
            for (int i = 0; i < UNITS; ++i)
                if (k < rows && first + 32 * i < units) values[k][i] = reinterpret_cast<const Unit*>(from[k])[first + 32 * i];
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
#pragma unroll
            for (int i = 0; i < UNITS; ++i)
                if (k < rows && first + 32 * i < units) reinterpret_cast<Unit*>(to[k])[first + 32 * i] = values[k][i];
    }
}

// `bits`: of all addresses and of the size.
__device__ inline void copy_part(const uint8* const (&from)[ROWS], uint8* const (&to)[ROWS], int rows, int size, uint32 bits) {
    if (bits % 16 == 0) copy_units<uint4>(from, to, rows, size);
    else if (bits % 8 == 0) copy_units<uint2>(from, to, rows, size);
    else if (bits % 4 == 0) copy_units<uint32>(from, to, rows, size);
    else copy_units<uint8>(from, to, rows, size);
}

template <class T> __device__ inline T* of_lane(T* pointer, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<uint64>(pointer), lane));
}

// Grid: `ctas` CTAs per request, a warp per ENTRIES entries of its tokens. `source` may be pinned host memory.
extern "C" __global__ void __launch_bounds__(FETCH_THREADS, 7)
    fetch_resident(const int* misses, int64 misses_stride, const int* slots, int64 slots_stride, int tokens, int topk,
                   const int* query_start_loc, int ctas, const int* block_table, int64 table_stride, int columns, const uint8* source,
                   int64 source_stride, int source_pages, int source_size, uint8* target, int64 target_stride, int target_pages,
                   int target_size, int row_bytes, int tail_bytes) {
    pdl_wait();
    int r = blockIdx.x / ctas, warp = blockIdx.x % ctas * (FETCH_THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    int start = min(max(query_start_loc[r], 0), tokens), end = min(max(query_start_loc[r + 1], start), tokens);
    int entries = (end - start) * topk;
    misses += start * misses_stride;
    slots += start * slots_stride;
    uint64 bits = reinterpret_cast<uint64>(source) | reinterpret_cast<uint64>(target) | uint64(source_stride) | uint64(target_stride);
    uint32 row_bits = uint32(bits) | row_bytes, tail_bits = row_bits | tail_bytes;
    for (int64 first = int64(warp) * ENTRIES; first < entries; first += int64(ctas) * (FETCH_THREADS / 32) * ENTRIES) {
        int i = int(first) + lane;
        bool mine = lane < ENTRIES && i < entries;
        int row = mine ? misses[i / topk * misses_stride + i % topk] : -1;
        if (!__any_sync(~0u, row >= 0)) continue;
        int slot = -1, page = -1;
        if (row >= 0) slot = slots[i / topk * slots_stride + i % topk];
        if (row >= 0 && row / source_size < columns) page = block_table[r * table_stride + row / source_size];
        uint32 present = __ballot_sync(~0u, slot >= 0 && slot / target_size < target_pages && uint32(page) < uint32(source_pages));
        const uint8* source_page = source + int64(page) * source_stride;
        uint8* target_page = target + int64(slot / target_size) * target_stride;
        row %= source_size;
        slot %= target_size;

        // Bytes at pages' ends: LANES lanes for each entry. Their loads precede the rows', their stores follow.
        constexpr int LANES = 32 / ENTRIES, WORDS = 2;
        int entry = lane / LANES, unit = tail_bits % 4 ? 1 : 4;
        const uint8* from_tail = of_lane(source_page + int64(source_size) * row_bytes + int64(row) * tail_bytes, entry);
        uint8* to_tail = of_lane(target_page + int64(target_size) * row_bytes + int64(slot) * tail_bytes, entry);
        bool has_tail = present >> entry & 1;
        uint32 words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            int at = (lane % LANES + i * LANES) * 4;
            if (unit == 4 && has_tail && at < tail_bytes) words[i] = *reinterpret_cast<const uint32*>(from_tail + at);
        }
        const uint8* from_row = source_page + int64(row) * row_bytes;
        uint8* to_row = target_page + int64(slot) * row_bytes;
        for (uint32 left = present; left;) {
            const uint8* from[ROWS];
            uint8* to[ROWS];
            int rows = 0;
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                int from_lane = left ? __ffs(int(left)) - 1 : 0;
                rows += left != 0;
                left &= left - 1;
                from[k] = of_lane(from_row, from_lane);
                to[k] = of_lane(to_row, from_lane);
            }
            copy_part(from, to, rows, row_bytes, row_bits);
        }
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            int at = (lane % LANES + i * LANES) * 4;
            if (unit == 4 && has_tail && at < tail_bytes) *reinterpret_cast<uint32*>(to_tail + at) = words[i];
        }
        for (int at = lane % LANES + (unit == 4 ? WORDS * LANES * 4 : 0); has_tail && at < tail_bytes; at += LANES)
            to_tail[at] = from_tail[at];
    }
}
