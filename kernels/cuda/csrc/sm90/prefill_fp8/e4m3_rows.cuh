// Rows of 512 bfloat16 values as e4m3 with one scale, by a warp.
#pragma once
#include "common/device.cuh"
#include "common/pages.cuh"

// 16 values of a lane: 8 lane .. + 7, and 256 further.
struct HeadPart { uint4 low, high; };

// Bits of the largest magnitude of all lanes' bfloat16 values.
__device__ inline uint32 largest_of_row(HeadPart x) {
    uint32 pair = __vmaxu2(largest_of_8(x.low), largest_of_8(x.high));
    return __reduce_max_sync(~0u, max(pair & 0xffff, pair >> 16));
}

// 8 bfloat16 values times a power of two, as e4m3.
__device__ inline uint2 e4m3x8(uint4 x, float factor) {
    uint32 words[4] = {x.x, x.y, x.z, x.w}, pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] = float_to_e4m3x2(__uint_as_float(words[i] << 16) * factor, __uint_as_float(words[i] & 0xffff0000) * factor);
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}
