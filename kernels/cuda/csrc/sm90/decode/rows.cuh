// Rows in the ring of sm90/decode/decode.cu: order of tokens and bytes, range of scales, conversion to float16.
#pragma once
#include "common/sparse/work.cuh"
#include "common/f16.cuh"

constexpr int HALF = 32;  // tokens that are gathered, and freed, together
constexpr int SLICES = LAYOUT::quantized_dim / 64;
constexpr int Q_SLICES = LAYOUT::head_dim / 64;
constexpr int TAIL_TILES = Q_SLICES - SLICES;  // of 64 values that are bfloat16: none, RoPE, or all
constexpr bool TAIL = TAIL_TILES > 0, BF16_ROWS = SLICES == 0;
constexpr bool ROPE_IN_V = LAYOUT::quantized_dim < V_DIM;
constexpr int RAW_BYTES = LAYOUT::quantized_dim;  // of a row's quantised values in the ring
static_assert((TAIL_TILES <= 1 || BF16_ROWS) && LAYOUT::head_dim % 64 == 0 && LAYOUT::quantized_dim % 64 == 0);
static_assert(LAYOUT::head_dim == EXTRA_LAYOUT::head_dim && LAYOUT::quantized_dim == EXTRA_LAYOUT::quantized_dim);

// Whether a cache has FP4 values, which the PV warpgroups expand to FP8 in the ring (expand.cuh).
constexpr bool EXPANDS = LAYOUT::e2m1_values || EXTRA_LAYOUT::e2m1_values;

// Values that share a factor in the ring, at most a slice: those of the finer of both formats.
constexpr int FINER_TILE = LAYOUT::scale_tile < EXTRA_LAYOUT::scale_tile ? LAYOUT::scale_tile : EXTRA_LAYOUT::scale_tile;
constexpr int FACTOR_TILE = FINER_TILE < 64 && !BF16_ROWS ? FINER_TILE : 64;
constexpr int FACTORS = LAYOUT::quantized_dim / FACTOR_TILE;  // of a row
// From a factor of all rows to the next; where warps store factors of several tiles at a time, without bank conflicts.
constexpr int FACTOR_STRIDE = HALF * 2 + (EXPANDS ? 8 : 0), FACTORS_BYTES = FACTORS * FACTOR_STRIDE;  // of half a block
static_assert(FACTOR_TILE >= 16, "a lane of QK-softmax has one factor for its 16 values of a slice");

constexpr float MAX_PRECISE_SCORE = 1024.0f;  // base 2; float32 sums of products of bfloat16 rows are off by 2^-10 there

// float32 exponents of scales. Values with a scale of 2^-87 or less, as of a row that was never written, are negligible: to
// scores if q is in range and softmax_scale below MAX_SOFTMAX_SCALE, and to results of at least MIN_RESULT.
constexpr uint32 TINY_SCALE = 40, MIN_SCALE = 105, F16_NORMAL = 113, MAX_SCALE = 126;
constexpr float MAX_SOFTMAX_SCALE = 1 << 24, MIN_RESULT = 1.0f / 16384.0f;
constexpr uint32 INFINITE_F16 = 0x7c00, MIN_Q = 0x1400;  // float16 bits: infinity, and 2^-10
constexpr uint32 SIGNS = 0x80008000;
constexpr uint32 TOO_LARGE = 0x4780, INFINITE_BF16 = 0x7f80;  // bfloat16 bits: 2^16, too large for float16, and infinity

// Position of token t of 16 in the permuted order; see sm90/decode/decode.cu.
__device__ inline int permuted(int t) {
    int b = t >> 2 & 1, c = (t & 3) ^ b;
    return 2 * c + b + (t & 8);
}
// The token at a position of the permuted order.
__device__ inline int token_at_permuted(int n) {
    int b = n & 1, c = n >> 1 & 3;
    return (c ^ b) | b << 2 | (n & 8);
}

// Byte of 16-byte chunk `chunk` of raw row t, such that 4 tokens' 32-byte halves have no bank conflicts.
__device__ inline uint32 raw_offset(int t, int chunk) {
    int swizzle = (t >> 1 & 1) << 1;
    if (RAW_BYTES % 128 == 0) swizzle |= (t & 1) << 2;
    if (EXPANDS) swizzle ^= t & 1;  // a lane expands 16 bytes to 32: its first 16 of an even row, and of an odd one, have no conflict
    return t * RAW_BYTES + ((chunk ^ swizzle) << 4);
}

// Address of another slice of the row at `raw`, given that of its slice 0. Where a row is a multiple of 128
// bytes, the swizzle of odd tokens exchanges neighbouring slices.
__device__ inline uint32 slice_of(uint32 raw, int slice, int token) {
    if (RAW_BYTES % 128 == 0 && token & 1) return raw + ((slice ^ 1) - 1) * 64;
    return raw + slice * 64;
}

// Volatile, so that the compiler keeps conversions between the products that they overlap with.
__device__ inline uint32 multiply(uint32 x, uint32 factor) {
    uint32 y;
    asm volatile("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factor));
    return y;
}
// Bytes of x, or of a zero word, chosen by the selector (prmt).
__device__ inline uint32 permuted(uint32 x, uint32 selector) {
    uint32 y;
    asm volatile("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(selector));
    return y;
}
// Two floats as a float16 pair, saturated to the largest finite value.
__device__ inline uint32 pack_saturated(float low, float high) {
    uint32 y;
    asm volatile("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
// The same of a bfloat16 pair.
__device__ inline uint32 to_f16_saturated(uint32 x) { return pack_saturated(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000)); }
// Raise `largest` to the magnitudes of a bfloat16 pair, each half by itself; its signs are arbitrary. NaN is kept.
__device__ inline void raise_to_bf16(uint32& largest, uint32 x) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(largest) : "r"(x));
}
// Raise `largest` to the magnitudes of a float16 pair, each half by itself.
__device__ inline void raise_to_magnitude(uint32& largest, uint32 x) {
    asm("{\n.reg .b32 m;\nabs.f16x2 m, %1;\nmax.f16x2 %0, %0, m;\n}" : "+r"(largest) : "r"(x));
}
// e4m3 bytes to float16 pairs.
__device__ inline void to_f16(uint32 bytes, uint32& low, uint32& high) {
    asm volatile("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
                 : "=r"(low), "=r"(high) : "r"(bytes));
}
