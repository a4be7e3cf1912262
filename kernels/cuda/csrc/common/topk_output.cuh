// Output of a top-k selection among the columns of a row: the selected columns, ascending, then -1. With ToSlots also
// their slots in a paged cache, equal to the result of compute_compact_topk_indices_and_lens (common/indices.cu).
//
// Macros: OUTPUT (ToColumns or ToSlots), the kernel's parameter; both give the output of a row the same member functions.
// POOL (1 if it is absent): rows of a column. The slots of a column's rows are written, and behind those of all selected
// columns those of the open pool, as compute_pooled_topk_indices_and_lens writes them; a block's size then counts pools.
#pragma once
#include "common/pages.cuh"

#ifndef POOL
#define POOL 1
#endif

struct ColumnsOfRow {
    int* columns;

    __device__ bool lacks_page(int length, int thread, int threads) const { return false; }
    __device__ ColumnsOfRow writer(int first, bool any) const { return *this; }
    __device__ void write(uint32 place, int column) const { columns[place] = column; }
    __device__ void clear(int place) const { columns[place] = -1; }
    __device__ bool counts() const { return true; }
    __device__ void write_length(int, bool) const {}
};

struct ToColumns {
    static constexpr bool MAPPED = false;
    int* indices;
    int64 indices_stride;

    __device__ ColumnsOfRow of_row(int64 number, int next_n) const { return {indices + number * indices_stride}; }
};

struct SlotsOfRow {
    int *columns, *slots, *length;
    const bool* is_valid;  // or null
    const int* pages;      // of the row's request
    int num_pages;
    BlockSize block_size;
    const int* position;  // of the query, where POOL is not 1

    static constexpr int64 PLACES = (INT32_LIMIT + 1ll) / POOL;  // columns whose slots are within int32

    // Whether a page of the first `length` rows is absent, among the pages that this one of `threads` threads checks. A
    // block whose last slot may exceed int32 counts as absent.
    __device__ bool lacks_page(int length, int thread, int threads) const {
        int needed = length > 0 ? int(block_size.page_of(length - 1)) + 1 : 0;
        uint32 beyond = block_size.page_of(uint32(PLACES - 1));
        bool lacks = needed > num_pages;
#pragma unroll 1
        for (int i = thread; i < min(needed, num_pages); i += threads) lacks |= uint32(pages[i]) >= beyond;
        return lacks;
    }
    // The slot of a column, in units of POOL slots, or -1.
    __device__ int slot_of(int column) const {
        int slot = lookup_slot(BlockTable{pages, 0, 1, num_pages}, 0, column, block_size.tokens);
        return POOL == 1 || slot < PLACES ? slot : -1;
    }
    // Write the slots of a column at a place.
    __device__ void write_slots(int place, int slot) const {
        int* to = slots + place * POOL;
        if (POOL == 4 && reinterpret_cast<uint64>(to) % 16 == 0) {
            uint32 first = 4 * uint32(slot);
            *reinterpret_cast<uint4*>(to) = {first, first + 1, first + 2, first + 3};
            return;
        }
#pragma unroll
        for (int i = 0; i < POOL; ++i) to[i] = slot * POOL + i;
    }

    // Writes columns whose pages are all present; neighbours use one lookup.
    struct Writer {
        const SlotsOfRow* row = nullptr;
        uint32 page = ~0u, moved = 0;  // page of the last column, and slot minus column of its rows

        __device__ void look_up(int column) {
            uint32 needed = row->block_size.page_of(column);
            if (needed == page) return;
            page = needed, moved = (uint32(row->pages[page]) - page) * row->block_size.tokens;
        }
        __device__ void write(uint32 place, int column) {
            look_up(column);
            row->columns[place] = column, row->write_slots(place, int(column + moved));
        }
    };
    // Writer for columns from `first` on, which must be a column of the row. Loads its page ahead if there are any columns.
    __device__ Writer writer(int first, bool any) const {
        Writer writer{this};
        if (any) writer.look_up(first);
        return writer;
    }
    __device__ void clear(int place) const { columns[place] = -1, clear_slots(place); }
    // The slots behind the open pool's; write_length writes those.
    __device__ void clear_slots(int place) const {
#pragma unroll
        for (int i = 0; i < POOL; ++i) slots[place * POOL + POOL - 1 + i] = -1;
    }
    __device__ bool counts() const { return !is_valid || *is_valid; }  // read before the length is needed
    // Called by one thread, with the number of columns that have slots.
    __device__ void write_length(int found, bool counts) const {
        int count = found;
        if constexpr (POOL > 1) {
            int seen = max(*position, -1) + 1, slot = slot_of(seen / POOL), tail = slot >= 0 ? seen % POOL : 0;
            count *= POOL;
#pragma unroll 1
            for (int i = 0; i < POOL - 1; ++i) slots[count + i] = i < tail ? slot * POOL + i : -1;
            count += tail;
        }
        *length = counts ? count : 0;
    }
};

struct ToSlots {
    static constexpr bool MAPPED = true;
    int* indices;
    int64 indices_stride;
    int* slots;
    int64 slots_stride;
    int* lens;
    const bool* is_valid;  // of each row, or null
    const int* block_table;
    int64 table_stride;
    int num_pages, block_size;
    uint32 block_multiplier;
    int block_shift;
    const int* positions;  // where POOL is not 1

    // Row `number`, one of next_n of its request.
    __device__ SlotsOfRow of_row(int64 number, int next_n) const {
        int64 request = next_n == 1 ? number : number >> 32 ? number / next_n : uint32(number) / next_n;
        return {indices + number * indices_stride,           slots + number * slots_stride,           lens + number,
                is_valid ? is_valid + number : nullptr,      block_table + request * table_stride,    num_pages,
                {block_size, block_multiplier, block_shift}, POOL == 1 ? nullptr : positions + number};
    }
};
