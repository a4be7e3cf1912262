// FP8 rows of a cache for decode_sm90.cu: their slices, the range of their scales, their conversion, and their order.
//
// What is float16 in shared memory, Q and K alike, has a group of 32 values, 16 words of two, in the order in which word w
// stands at 4 (w % 4) + w / 4. A lane's columns of a product with V are then 8 neighbouring values in every group, which
// it stores at once, and a thread of the feeder, which has 8 words in a row, writes two of them at a time.
#pragma once
#include "decode.cuh"
#include "f16.cuh"

constexpr int SLICES = LAYOUT::quantized_dim / 64;
constexpr bool ROPE_IN_V = LAYOUT::quantized_dim < V_DIM;

constexpr uint32 MIN_SCALE = 105, F16_NORMAL = 113, MAX_SCALE = 126;  // float32 exponents of scales
constexpr uint32 MAX_F16 = 0x477f, MIN_Q = 0x3a80;  // bfloat16 bits: just below 65536, and 2^-10

// Volatile, so that conversions stay where they are written.
__device__ inline uint32 multiply(uint32 x, uint32 factor) {
    uint32 y;
    asm volatile("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factor));
    return y;
}
// e4m3 bytes to float16 pairs.
__device__ inline void to_f16(uint32 bytes, uint32& low, uint32& high) {
    asm volatile("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
                 : "=r"(low), "=r"(high) : "r"(bytes));
}
