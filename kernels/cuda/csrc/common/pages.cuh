// Pages of a paged cache: lookups in a block table, and values at any address.
#pragma once
#include "common/numbers.cuh"

struct PageRow {
    int64 page;  // -1 if absent
    int row;
};

// Page and row of a non-negative `slot`. Slots beyond int32 take 64-bit division, which is slow.
__device__ inline PageRow page_row_of(int slot, int block_size) {
    return {uint32(slot) / uint32(block_size), int(uint32(slot) % uint32(block_size))};
}
__device__ inline PageRow page_row_of(int64 slot, int block_size) {
    if (slot <= INT32_LIMIT) return page_row_of(int(slot), block_size);
    return {slot / block_size, int(slot % block_size)};
}

// A block size, and the constants of a division by it as a multiplication (`division` of indices.py).
struct BlockSize {
    int tokens;
    uint32 multiplier;
    int shift;

    __device__ uint32 page_of(uint32 position) const {  // positions below 2^31
        return __umulhi(2 * position, multiplier) >> shift;
    }
    __device__ int remainder_of(uint32 position) const { return int(position - page_of(position) * tokens); }
};

struct BlockTable {
    const int* entries;
    int64 row_stride;  // in entries
    int rows, columns;

    // Positions of a request that have an entry.
    __device__ int64 covered(int block_size) const { return int64(columns) * block_size; }
};

// Page and row of a position (int or int64) of request `row`; absent if the table has no such entry, or if the block is
// absent or has a slot beyond `num_slots` or int32.
template <class Position>
__device__ inline PageRow lookup_page_row(BlockTable table, int row, Position position, int block_size,
                                     int64 num_slots = INT32_LIMIT + 1ll) {
    PageRow absent{-1, 0};
    if (row < 0 || row >= table.rows || position < 0 || position >= int64(table.columns) * block_size) return absent;
    PageRow column = page_row_of(position, block_size);
    int block = table.entries[row * table.row_stride + column.page];
    int64 slot = int64(block) * block_size + column.row;
    return block >= 0 && slot <= INT32_LIMIT && slot < num_slots ? PageRow{block, column.row} : absent;
}

// The slot of a position of request `row`, or -1 if it is absent.
template <class Position>
__device__ inline int lookup_slot(BlockTable table, int row, Position position, int block_size) {
    PageRow at = lookup_page_row(table, row, position, block_size);
    return at.page < 0 ? -1 : int(at.page) * block_size + at.row;
}

// A value in a page, which may start at any address.
template <class T> __device__ inline T read_at(const uint8* from) {
    if (reinterpret_cast<uint64>(from) % sizeof(T) == 0) return *reinterpret_cast<const T*>(from);
    T x;
    for (int i = 0; i < int(sizeof(T)); ++i) reinterpret_cast<uint8*>(&x)[i] = from[i];
    return x;
}
template <class T> __device__ inline void write_at(uint8* to, T x) {
    if (reinterpret_cast<uint64>(to) % sizeof(T) == 0) *reinterpret_cast<T*>(to) = x;
    else
        for (int i = 0; i < int(sizeof(T)); ++i) to[i] = reinterpret_cast<const uint8*>(&x)[i];
}
