// A choice that holds nothing of a row: a thread block reads it four times or, where equal logits compete, seven.
//
// Macro: THREADS.
#pragma once
#include "common/selection.cuh"

__device__ inline void choose_by_reading(Scratch& shared, const float* row, int length, int* indices, int topk) {
    auto order = [=](int64 i) { return order_of(row[i]); };
    auto numbers = [=](auto number) {
        return [=](auto visit) {
            for (int64 i = threadIdx.x; i < length; i += THREADS) visit(number(i));
        };
    };
    int valid = 0, there;
    for (int64 i = threadIdx.x; i < length; i += THREADS) valid += order(i) != 0;
    sum_before(shared, valid, there);
    uint32 threshold = 1, least = 0;
    if (topk && there > topk) {
        Kth kth = kth_largest(shared, topk, PASSES, numbers(order));
        threshold = kth.number;
        auto place = [=](int64 i) { return order_of(row[i]) == threshold ? ~uint32(i) : 0; };
        if (!kth.all) least = kth_largest(shared, kth.rest, PASSES, numbers(place)).number;
    }
    __syncthreads();
    int written = 0;
    for (int64 first = 0; first < length; first += THREADS) {
        int64 i = first + threadIdx.x;
        uint32 x = i < length ? order(i) : 0;
        bool keep = x > threshold || (x == threshold && ~uint32(i) >= least);
        int total, to = written + sum_before(shared, keep, total);
        if (keep) indices[to] = int(i);
        written += total;
        __syncthreads();
    }
    for (int i = written + threadIdx.x; i < topk; i += THREADS) indices[i] = -1;
    __syncthreads();
}
