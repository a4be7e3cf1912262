// Reductions and transposes over the four lanes that have a row of a product (mma.sync).
#pragma once
#include "common/device.cuh"

__device__ inline float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ inline float quad_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

// A transpose among the four lanes of a quad: x[i] of lane c becomes x[c] of lane i.
__device__ inline void transpose_quad(uint32 (&x)[4], int c) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            uint32 got = __shfl_xor_sync(~0u, c & bit ? x[i] : x[i | bit], bit);
            if (c & bit) x[i] = got;
            else x[i | bit] = got;
        }
}
