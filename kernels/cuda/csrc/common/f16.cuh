// Pairs of float16 from bfloat16, and approximate arithmetic.
#pragma once
#include "common/numbers.cuh"

__device__ inline uint32 bf16x2_to_f16x2(uint32 x) {
    return pack(f16{}, __uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ inline uint4 bf16x8_to_f16x8(uint4 x) {
    return {bf16x2_to_f16x2(x.x), bf16x2_to_f16x2(x.y), bf16x2_to_f16x2(x.z), bf16x2_to_f16x2(x.w)};
}
// Larger of the magnitudes of 8 bfloat16 values, in each half of a word.
__device__ inline uint32 largest_of_8(uint4 x) {
    return __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff), __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff));
}
__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
