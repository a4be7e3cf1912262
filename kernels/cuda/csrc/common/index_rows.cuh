// Shared by the index maps: the loop of a warp over a row of entries, positions of query tokens, slots of positions.
//
// Macro: WIDE_ENTRIES (rows start at multiples of 16 bytes; their widths, top-k and window are multiples of 4).
#include "common/pages.cuh"
#include "common/device.cuh"

constexpr int THREADS = 64;                  // per CTA
constexpr int WIDTH = WIDE_ENTRIES ? 4 : 1;  // entries that a lane handles at a time
constexpr int STEP = 32 * WIDTH;             // entries that a warp handles at a time
constexpr int STEPS = 4;                     // loads of a lane in flight

struct LoadedIndices { int at[WIDTH]; };

__device__ inline LoadedIndices load_entries(const int* p) {
    LoadedIndices x;
#if WIDE_ENTRIES
    uint4 four = load16(p);
    x.at[0] = four.x, x.at[1] = four.y, x.at[2] = four.z, x.at[3] = four.w;
#else
    x.at[0] = *p;
#endif
    return x;
}

// A lane's entries of [first, count), and undefined values beyond.
__device__ inline void load_steps(LoadedIndices (&entries)[STEPS], const int* p, int first, int count) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        if (first + step * STEP < count) entries[step] = load_entries(p + first + step * STEP);
}

__device__ inline void store_entries(int* p, LoadedIndices x) {
#if WIDE_ENTRIES
    store16(p, {uint32(x.at[0]), uint32(x.at[1]), uint32(x.at[2]), uint32(x.at[3])});
#else
    *p = x.at[0];
#endif
}

__device__ inline int lane_id() { return threadIdx.x % 32; }
__device__ inline int warp_id() { return blockIdx.x * (THREADS / 32) + threadIdx.x / 32; }

__device__ inline int warp_sum(int value) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    return value;
}

struct QueryPositions {
    const int* query_start_loc;
    const int* seq_lens;
    int count;

    __device__ bool has(int request) const { return request >= 0 && request < count; }

    // Position of a query token in its sequence. The last query token is the last token of the sequence.
    __device__ int64 position(int request, int64 token) const { return int64(seq_lens[request]) - query_start_loc[request + 1] + token; }
};

// Number of complete rows of `compress_ratio` positions at `position`. A 32-bit division suffices: a larger position is
// a caller's error, which must only not access memory outside the arrays.
__device__ inline uint32 complete_rows(int64 position, int compress_ratio) {
    if (position < 0) return 0;
    return (uint32(min(position, int64(INT32_LIMIT))) + 1) / uint32(compress_ratio);
}

// Number of compressed entries that a token at `position` sees, at most `topk`.
__device__ inline int compressed_entries(int64 position, int compress_ratio, int topk) {
    return int(min(complete_rows(position, compress_ratio), uint32(topk)));
}

// p[i], in PTX, because the compiler would otherwise recompute p for each entry of a row.
__device__ inline int load_at(const int* p, uint32 i) {
    int x;
    asm volatile("{ .reg .u64 a; mad.wide.u32 a, %1, 4, %2; ld.global.nc.u32 %0, [a]; }" : "=r"(x) : "r"(i), "l"(p));
    return x;
}

// One request's row of a block table.
struct TableRow {
    const int* entries;
    BlockSize block_size;
    uint32 limit;       // number of positions in the table; 0 if the request is not in the table
    uint32 last_block;  // the last block whose first slot is within int32

    __device__ TableRow(BlockTable table, int row, BlockSize block_size_)
        : entries(table.entries + row * table.row_stride), block_size(block_size_) {
        int64 positions = row >= 0 && row < table.rows ? int64(table.columns) * block_size.tokens : 0;
        limit = uint32(min(positions, INT32_LIMIT + 1ll));
        last_block = block_size.page_of(INT32_LIMIT);
    }

    // Look up only positions below `count` from now on.
    __device__ void see(uint32 count) { limit = min(limit, count); }

    // Slots of positions; -1 for negative positions, and where the table has no entry or an absent block.
    __device__ LoadedIndices slots(LoadedIndices positions) const {
        LoadedIndices blocks, slots;
        uint32 rows[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            uint32 position = positions.at[i];
            uint32 column = block_size.page_of(position);
            rows[i] = position - column * block_size.tokens;
            blocks.at[i] = -1;
            if (position < limit) blocks.at[i] = load_at(entries, column);
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            uint32 slot = uint32(blocks.at[i]) * block_size.tokens + rows[i];  // only the last block's slots can exceed int32
            slots.at[i] = uint32(blocks.at[i]) <= last_block ? max(int(slot), -1) : -1;
        }
        return slots;
    }
};

// start + j, start + j + 1, ... while j, j + 1, ... are below `count`, then -1.
__device__ inline LoadedIndices range(int start, int j, int count) {
    LoadedIndices x;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x.at[i] = j + i < count ? start + j + i : -1;
    return x;
}

// A window of positions up to and including `position`; empty if that is negative.
struct Window {
    int start, length;
    int lookups;  // number of positions within int32: all, unless query_start_loc contradicts seq_lens

    __device__ Window(int64 position, int window_size) {
        int64 first = max(position - window_size + 1, int64(0));
        start = int(first);
        length = int(max(position + 1 - first, int64(0)));
        lookups = position <= INT32_LIMIT ? length : 0;
    }
};

__device__ inline int count_present(LoadedIndices x) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) count += x.at[i] >= 0;
    return count;
}

// Converts slots to a numbering with `span` slots from page to page instead of the block size.
__device__ inline LoadedIndices to_span(LoadedIndices slots, BlockSize block_size, int span) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) slots.at[i] = max(slots.at[i], -1);
    if (span == block_size.tokens) return slots;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        uint32 slot = slots.at[i], page = block_size.page_of(slot);
        int64 moved = int64(page) * span + (slot - page * block_size.tokens);
        slots.at[i] = slots.at[i] >= 0 && moved <= INT32_LIMIT ? int(moved) : -1;
    }
    return slots;
}
