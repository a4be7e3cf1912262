// Transposes among the four lanes that have a row of a product (mma.sync).
#pragma once
#include "common/device.cuh"

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
