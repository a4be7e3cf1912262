// Top-k selection that stores no part of a row: a CTA reads the row four times or, if equal logits compete, seven
// times. It writes columns in order, and so can omit rows without a slot.
//
// Macro: THREADS.
#pragma once
#include "common/topk_output.cuh"
#include "common/selection.cuh"

// Write the selected columns of a chunk, one per thread, after `written` earlier ones.
__device__ inline void write_chunk(Scratch& shared, ColumnsOfRow out, bool keep, int column, int& written, int&) {
    int total, to = written + sum_before(shared, keep, total);
    if (keep) out.columns[to] = column;
    written += total;
    __syncthreads();
}
// The same, and the slots of the columns that have one, after `mapped` earlier ones.
__device__ inline void write_chunk(Scratch& shared, const SlotsOfRow& out, bool keep, int column, int& written, int& mapped) {
    write_chunk(shared, ColumnsOfRow{out.columns}, keep, column, written, mapped);
    int slot = keep ? out.slot_of(column) : -1;
    int total, to = mapped + sum_before(shared, slot >= 0, total);
    if (slot >= 0) out.write_slots(to, slot);
    mapped += total;
    __syncthreads();
}

__device__ inline void clear_from(ColumnsOfRow out, int written, int, int topk) {
    for (int i = written + threadIdx.x; i < topk; i += THREADS) out.clear(i);
}
__device__ inline void clear_from(const SlotsOfRow& out, int written, int mapped, int topk) {
    clear_from(ColumnsOfRow{out.columns}, written, 0, topk);
    for (int i = mapped + threadIdx.x; i < topk; i += THREADS) out.clear_slots(i);
}

template <class Out>
__device__ inline void select_by_reading(Scratch& shared, const float* row, int length, const Out& out, int topk) {
    auto order = [=](int64 i) { return order_of(row[i]); };
    auto numbers = [=](auto number) {
        return [=](auto visit) {
            for (int64 i = threadIdx.x; i < length; i += THREADS) visit(number(i));
        };
    };
    int valid = 0, total;
    for (int64 i = threadIdx.x; i < length; i += THREADS) valid += order(i) != 0;
    sum_before(shared, valid, total);
    uint32 threshold = 1, least = 0;
    if (topk && total > topk) {
        Kth kth = kth_largest(shared, topk, PASSES, numbers(order));
        threshold = kth.number;
        auto place = [=](int64 i) { return order_of(row[i]) == threshold ? ~uint32(i) : 0; };
        if (!kth.all) least = kth_largest(shared, kth.rest, PASSES, numbers(place)).number;
    }
    __syncthreads();
    int written = 0, mapped = 0;
    for (int64 first = 0; first < length; first += THREADS) {
        int64 i = first + threadIdx.x;
        uint32 x = i < length ? order(i) : 0;
        bool keep = x > threshold || (x == threshold && ~uint32(i) >= least);
        write_chunk(shared, out, keep, int(i), written, mapped);
    }
    clear_from(out, written, mapped, topk);
    if (threadIdx.x == 0) out.write_length(mapped, out.counts());
    __syncthreads();
}
