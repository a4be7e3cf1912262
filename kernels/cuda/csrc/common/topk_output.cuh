// Output of a top-k selection among the columns of a row: the selected columns, ascending, then -1. With ToSlots also
// their slots in a paged cache, equal to the result of compute_compact_topk_indices_and_lens (common/indices.cu).
//
// Macro: OUTPUT (ToColumns or ToSlots), the kernel's parameter. Both give the output of a row the same member
// functions.
#pragma once
#include "common/pages.cuh"

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

    // Whether a page of the first `length` rows is absent, among the pages that this one of `threads` threads checks. A
    // block whose last slot may exceed int32 counts as absent.
    __device__ bool lacks_page(int length, int thread, int threads) const {
        int needed = length > 0 ? int(block_size.page_of(length - 1)) + 1 : 0;
        uint32 beyond = block_size.page_of(INT32_LIMIT);
        bool lacks = needed > num_pages;
#pragma unroll 1
        for (int i = thread; i < min(needed, num_pages); i += threads) lacks |= uint32(pages[i]) >= beyond;
        return lacks;
    }
    // The slot of a row, or -1.
    __device__ int slot_of(int column) const { return lookup_slot(BlockTable{pages, 0, 1, num_pages}, 0, column, block_size.tokens); }

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
            row->columns[place] = column, row->slots[place] = int(column + moved);
        }
    };
    // Writer for columns from `first` on, which must be a column of the row. Loads its page ahead if there are any columns.
    __device__ Writer writer(int first, bool any) const {
        Writer writer{this};
        if (any) writer.look_up(first);
        return writer;
    }
    __device__ void clear(int place) const { columns[place] = slots[place] = -1; }
    __device__ bool counts() const { return !is_valid || *is_valid; }  // read before the length is needed
    __device__ void write_length(int found, bool counts) const { *length = counts ? found : 0; }
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

    // Row `number`, one of next_n of its request.
    __device__ SlotsOfRow of_row(int64 number, int next_n) const {
        int64 request = next_n == 1 ? number : number >> 32 ? number / next_n : uint32(number) / next_n;
        return {indices + number * indices_stride,          slots + number * slots_stride,        lens + number,
                is_valid ? is_valid + number : nullptr,     block_table + request * table_stride, num_pages,
                {block_size, block_multiplier, block_shift}};
    }
};
