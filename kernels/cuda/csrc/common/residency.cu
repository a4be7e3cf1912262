// Rows of a cache in host memory, the hot ones of them in device memory: slots of selected rows, and copies of rows that miss.
#include "common/device.cuh"

constexpr int THREADS = 512;
constexpr int MOST_HOT = 16384;  // slots of a lane: their list is in shared memory
constexpr int ROWS = 8;          // slots of a warp of fetch_resident
constexpr int FETCH_THREADS = 128;

// Slots of hot rows of one request.
struct Lane {
    int* slot_of_row;
    int* row_of_slot;
    int* last_use;
    int rows, hot, now;

    __device__ bool has(int row) const { return uint32(row) < uint32(rows); }
    __device__ bool is_slot(int slot) const { return uint32(slot) < uint32(hot); }
    // Whether a slot is a victim at `oldest` or before.
    __device__ bool idle(int slot, int64 oldest) const { return slot < hot && last_use[slot] != now && last_use[slot] <= oldest; }
};

struct Scratch {
    int counts[THREADS / 32];
    uint16 victims[MOST_HOT];
};

// Number of threads before this one whose flag is set; `total` becomes the number of all. All threads call it.
__device__ inline int rank_of(bool flag, int& total, Scratch& scratch) {
    uint32 flags = __ballot_sync(~0u, flag);
    int lane = threadIdx.x % 32, rank = __popc(flags & (1u << lane) - 1);
    if (lane == 0) scratch.counts[threadIdx.x / 32] = __popc(flags);
    __syncthreads();
    total = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        if (warp == int(threadIdx.x / 32)) rank += total;
        total += scratch.counts[warp];
    }
    __syncthreads();
    return rank;
}

__device__ inline int count_idle(const Lane& lane, int64 oldest, Scratch& scratch) {
    int count = 0, total = 0;
    for (int slot = threadIdx.x; slot < lane.hot; slot += THREADS) count += lane.idle(slot, oldest);
    for (int step = 16; step; step /= 2) count += __shfl_xor_sync(~0u, count, step);
    if (threadIdx.x % 32 == 0) scratch.counts[threadIdx.x / 32] = count;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; ++warp) total += scratch.counts[warp];
    __syncthreads();
    return total;
}

// List the `count` slots of least recent use, or all idle ones, in order of their numbers. Returns how many there are.
__device__ inline int list_victims(const Lane& lane, int count, Scratch& scratch) {
    int64 low = 0, high = lane.now;  // the last use of the last victim is found between them
    while (low < high) {
        int64 middle = (low + high) / 2;
        if (count_idle(lane, middle, scratch) >= count) high = middle;
        else low = middle + 1;
    }
    int equal = count - count_idle(lane, low - 1, scratch), listed = 0;  // victims whose last use is `low`
    for (int first = 0; first < lane.hot; first += THREADS) {
        int slot = first + int(threadIdx.x), found;
        bool idle = lane.idle(slot, low), tie = idle && lane.last_use[slot] == low;
        int rank = rank_of(tie, found, scratch);
        bool victim = idle && (!tie || rank < equal);
        equal -= found < equal ? found : equal;
        rank = listed + rank_of(victim, found, scratch);
        if (victim) scratch.victims[rank] = uint16(slot);
        listed += found;
    }
    __syncthreads();
    return listed;
}

// Grid: a CTA per request. A request's own slots make the choice of victims local.
extern "C" __global__ void __launch_bounds__(THREADS)
    resolve_resident(const int* topk_indices, int64 topk_stride, int tokens, int topk, const int* query_start_loc, const int* seq_lens,
                     const int* lanes, int requests, int* slot_of_row, int64 slot_stride, int rows, int* row_of_slot, int64 row_stride,
                     int hot, int* last_use, int64 use_stride, int* clock, int num_lanes, int compress_ratio, int* slots,
                     int64 slots_stride, int* misses, int64 misses_stride) {
    __shared__ Scratch scratch;
    pdl_wait();
    int r = blockIdx.x, start = min(max(query_start_loc[r], 0), tokens);
    int end = requests ? min(max(query_start_loc[r + 1], start), tokens) : start;
    if (r == 0)
        for (int64 i = threadIdx.x; i < int64(start) * topk; i += THREADS) slots[i / topk * slots_stride + i % topk] = -1;
    if (r >= requests - 1)
        for (int64 i = int64(end) * topk + threadIdx.x; i < int64(tokens) * topk; i += THREADS)
            slots[i / topk * slots_stride + i % topk] = -1;
    if (!requests) return;
    int number = lanes[r], entries = (end - start) * topk;
    int* missing = misses + r * misses_stride;
    for (int slot = threadIdx.x; slot < hot; slot += THREADS) missing[slot] = -1;
    topk_indices += start * topk_stride;
    slots += start * slots_stride;
    if (uint32(number) >= uint32(num_lanes)) {
        for (int i = threadIdx.x; i < entries; i += THREADS) slots[i / topk * slots_stride + i % topk] = -1;
        return;
    }
    Lane lane{slot_of_row + number * slot_stride,
              row_of_slot + number * row_stride,
              last_use + number * use_stride,
              rows,
              hot,
              clock[number] + 1};
    int seq_len = seq_lens[r], first_written = max(seq_len - (end - start), 0) / compress_ratio;
    for (int row = first_written + threadIdx.x; row < min(seq_len / compress_ratio, rows); row += THREADS) {
        int slot = lane.slot_of_row[row];
        if (lane.is_slot(slot)) {
            lane.row_of_slot[slot] = -1;
            lane.last_use[slot] = 0;
        }
        lane.slot_of_row[row] = -1;
    }
    __syncthreads();  // also: all have read the clock
    if (threadIdx.x == 0) clock[number] = lane.now;

    // The first entry of a row that misses leaves its number - entries - 1 in slot_of_row.
    bool any = false;
    for (int i = threadIdx.x; i < entries; i += THREADS) {
        int64 token = i / topk;
        int j = i - int(token) * topk, row = topk_indices[token * topk_stride + j];
        int slot = lane.has(row) ? lane.slot_of_row[row] : -1;
        bool hit = lane.is_slot(slot);
        slots[token * slots_stride + j] = hit ? number * hot + slot : -1;
        if (hit) lane.last_use[slot] = lane.now;
        else if (lane.has(row)) {
            atomicMin(&lane.slot_of_row[row], i - entries - 1);
            any = true;
        }
    }
    if (!__syncthreads_or(any)) return;

    int count = 0;
    auto row_at = [&](int i) { return i < entries ? topk_indices[i / topk * topk_stride + i % topk] : -1; };
    auto is_first = [&](int i, int row) { return lane.has(row) && lane.slot_of_row[row] == i - entries - 1; };
    for (int i = threadIdx.x; i < entries; i += THREADS) count += is_first(i, row_at(i));
    for (int step = 16; step; step /= 2) count += __shfl_xor_sync(~0u, count, step);
    if (threadIdx.x % 32 == 0) scratch.counts[threadIdx.x / 32] = count;
    __syncthreads();
    count = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) count += scratch.counts[warp];
    __syncthreads();
    int victims = list_victims(lane, count, scratch), before = 0;
    for (int first = 0; first < entries; first += THREADS) {
        int i = first + int(threadIdx.x), row = row_at(i), found;
        bool is = is_first(i, row);
        int rank = before + rank_of(is, found, scratch);
        before += found;
        if (!is) continue;
        if (rank >= victims) {
            lane.slot_of_row[row] = -1;
            continue;
        }
        int slot = scratch.victims[rank], old = lane.row_of_slot[slot];
        if (lane.has(old)) lane.slot_of_row[old] = -1;
        lane.row_of_slot[slot] = row;
        lane.slot_of_row[row] = slot;
        lane.last_use[slot] = lane.now;
        missing[slot] = row;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < entries; i += THREADS) {
        int64 at = i / topk * slots_stride + i % topk;
        int row = row_at(i), slot = slots[at] < 0 && lane.has(row) ? lane.slot_of_row[row] : -1;
        if (lane.is_slot(slot)) slots[at] = number * hot + slot;
    }
}

template <class Unit> __device__ inline void copy_units(const uint8* from, uint8* to, int size) {
    constexpr int UNROLL = 4;
    for (int first = threadIdx.x % 32; first < size / int(sizeof(Unit)); first += UNROLL * 32) {
        Unit values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (first + 32 * i < size / int(sizeof(Unit))) values[i] = reinterpret_cast<const Unit*>(from)[first + 32 * i];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (first + 32 * i < size / int(sizeof(Unit))) reinterpret_cast<Unit*>(to)[first + 32 * i] = values[i];
    }
}

__device__ inline void copy_part(const uint8* from, uint8* to, int size) {
    uint64 bits = reinterpret_cast<uint64>(from) | reinterpret_cast<uint64>(to) | uint64(size);
    if (bits % 16 == 0) copy_units<uint4>(from, to, size);
    else if (bits % 8 == 0) copy_units<uint2>(from, to, size);
    else if (bits % 4 == 0) copy_units<uint32>(from, to, size);
    else copy_units<uint8>(from, to, size);
}

// Grid: a warp per ROWS slots of a request. `source` may be pinned host memory.
extern "C" __global__ void __launch_bounds__(FETCH_THREADS)
    fetch_resident(const int* misses, int64 misses_stride, int requests, int hot, const int* lanes, const int* block_table,
                   int64 table_stride, int columns, const uint8* source, int64 source_stride, int source_pages, int source_size,
                   uint8* target, int64 target_stride, int target_pages, int target_size, int row_bytes, int tail_bytes) {
    pdl_wait();
    int64 warp = int64(blockIdx.x) * (FETCH_THREADS / 32) + threadIdx.x / 32;
    int groups = (hot + ROWS - 1) / ROWS, first = int(warp % groups) * ROWS;
    int64 r = warp / groups;
    if (r >= requests) return;
    int lane = threadIdx.x % 32, mine = lane < ROWS && first + lane < hot ? misses[r * misses_stride + first + lane] : -1;
    uint32 present = __ballot_sync(~0u, mine >= 0);
    if (!present) return;
    int state = lanes[r], page = -1;
    if (mine >= 0 && mine / source_size < columns) page = block_table[r * table_stride + mine / source_size];
    for (; present; present &= present - 1) {
        int i = __ffs(int(present)) - 1, row = __shfl_sync(~0u, mine, i), from = __shfl_sync(~0u, page, i);
        int64 to = int64(state) * hot + first + i;
        if (state < 0 || uint32(from) >= uint32(source_pages) || to / target_size >= target_pages) continue;
        const uint8* source_page = source + from * source_stride;
        uint8* target_page = target + to / target_size * target_stride;
        int64 source_row = row % source_size, target_row = to % target_size;
        copy_part(source_page + source_row * row_bytes, target_page + target_row * row_bytes, row_bytes);
        if (tail_bytes)
            copy_part(source_page + int64(source_size) * row_bytes + source_row * tail_bytes,
                      target_page + int64(target_size) * row_bytes + target_row * tail_bytes, tail_bytes);
    }
}
