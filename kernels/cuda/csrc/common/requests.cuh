// The request of a row of a gather.
#pragma once
#include "common/pages.cuh"

// Rows of several requests, in order: request r has the rows [starts[r], starts[r + 1]).
struct GatheredRows {
    const int* starts;  // ascending
    int requests;

    // Number of rows, at most `capacity`.
    __device__ int count(int capacity) const { return min(max(starts[requests], 0), capacity); }

    // The request of a row, or -1 if it is before the first or after the last.
    __device__ int request(int64 row) const {
        int low = 0, high = requests + 1;  // starts before `low` are at most `row`, those from `high` on are above it
        while (low < high) {
            int middle = (low + high) / 2;
            if (starts[middle] <= row) low = middle + 1;
            else high = middle;
        }
        return low <= requests ? low - 1 : -1;
    }
};
