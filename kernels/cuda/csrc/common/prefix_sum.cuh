// Prefix sums over the lanes of a warp.
#pragma once

// The sum of x over the lanes up to and including this one.
template <class T> __device__ inline T sum_to(T x) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        T left = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += left;
    }
    return x;
}
