// Finds the request of a row of a gather.
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

    // The same by a warp, which divides the range by 32 in each step: two dependent loads for up to a thousand
    // requests.
    __device__ int request_by_warp(int64 row) const {
        int low = 0, count = requests + 1;  // the first `low` starts are at most `row`; the next `count` are still to be searched
        while (count > 0) {
            int part = (count + 31) / 32, last = (int(threadIdx.x % 32) + 1) * part - 1;
            int below = __popc(__ballot_sync(~0u, last < count && starts[low + last] <= row));
            low += below * part, count = min(part - 1, count - below * part);
        }
        return low <= requests ? low - 1 : -1;
    }
};
