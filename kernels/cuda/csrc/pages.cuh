// Where a token's bytes are in a paged cache, and what a block table says.
#pragma once
#include "numbers.cuh"
#include "layouts.cuh"

struct Token {
    uint8* row;
    uint8* scales;
};

struct Place {
    int64 page;
    int row;
};

// Where `slot` is. Slots of a large pool take 64-bit division, which is slow.
__device__ inline Place place_of(int64 slot, int block_size) {
    if (slot <= INT32_LIMIT) return {uint32(slot) / uint32(block_size), int(uint32(slot) % uint32(block_size))};
    return {slot / block_size, int(slot % block_size)};
}

// The row and scales of `slot`. The page stride may be anything, so page offsets are 64-bit.
template <class Layout>
__device__ inline Token token_at(uint8* pages, int64 page_stride, int block_size, int64 slot) {
    Place place = place_of(slot, block_size);
    uint8* base = pages + place.page * page_stride;
    int64 scale_start = Layout::scale_start + int64(block_size) * Layout::scale_start_per_token;
    return {base + int64(place.row) * Layout::row_bytes, base + scale_start + int64(place.row) * Layout::scale_stride};
}

struct BlockTable {
    const int* entries;
    int64 row_stride;  // in entries
    int rows, columns;
};

// The slot of a position of request `row`, or -1 where the table has no such entry or no such block.
__device__ inline int lookup_slot(BlockTable table, int row, int64 position, int block_size) {
    if (row < 0 || row >= table.rows || position < 0 || position >= int64(table.columns) * block_size) return -1;
    int column, offset;
    if (position <= INT32_LIMIT) {
        column = uint32(position) / uint32(block_size);
        offset = uint32(position) % uint32(block_size);
    } else {
        column = int(position / block_size);
        offset = int(position % block_size);
    }
    int block = table.entries[row * table.row_stride + column];
    int64 slot = int64(block) * block_size + offset;
    return block >= 0 && slot <= INT32_LIMIT ? int(slot) : -1;
}
