// Hadamard rotation, and SSMax's factor of a head.
#pragma once
#include "common/device.cuh"

// The orthonormal Hadamard transform in Sylvester's order of 128 values: lane l of LANES neighbouring lanes has the values
// VALUES l to VALUES l + VALUES - 1. Every backend adds in this order. Called by whole warps.
template <int LANES, int VALUES> __device__ inline void hadamard(float (&x)[VALUES], int lane) {
    static_assert(LANES * VALUES == 128);
#pragma unroll
    for (int step = 1; step < VALUES; step *= 2)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            if (i & step) continue;
            float a = x[i], b = x[i + step];
            x[i] = a + b, x[i + step] = a - b;
        }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            float other = __shfl_xor_sync(~0u, x[i], lanes);
            x[i] = lane & lanes ? other - x[i] : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = mul(x[i], 0.08838834764831845f);
}

// A negative position counts as 0.
__device__ inline float head_factor(float scale, float bias, int64 position) {
    return scale * logf(float(position < 0 ? 1 : position + 1)) + bias;
}
