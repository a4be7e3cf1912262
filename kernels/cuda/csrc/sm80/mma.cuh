// Matrix products of a warp (mma.sync, sm_80 and newer), and loads of their operands.
//
// In a product of 16 rows and 8 columns over 16 values, lane 4 g + c holds
//     a   rows g and g + 8, values 2 c, + 1, 2 c + 8, + 9:   {g: 2c}, {g + 8: 2c}, {g: 2c + 8}, {g + 8: 2c + 8}
//     b   column g, the same values:                         {2c}, {2c + 8}
//     x   rows g and g + 8, columns 2 c and + 1:             g, g, g + 8, g + 8
#pragma once
#include "common/device.cuh"

__device__ inline void mma(f16, float (&x)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma(bf16, float (&x)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same for 8 columns over 4 values in float64: lane 4 g + c holds value c of rows g and g + 8 of a, value c of column g of b.
__device__ inline void mma(double (&x)[4], const double (&a)[2], double b) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(x[2 * i]), "+d"(x[2 * i + 1])
            : "d"(a[i]), "d"(b));
}

// Four 8 x 8 matrices of 16-bit values; lanes 8 i to 8 i + 7 point to the rows of matrix i.
__device__ inline void load_matrices(uint32 (&x)[4], uint32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}
__device__ inline void load_matrices(uint32 (&x)[4], const void* row) { load_matrices(x, shared_address(row)); }

// e4m3 bytes to float16 pairs, in units of 1 / CODE_UNIT.
#if E4M3_ARCH >= 890
[[maybe_unused]] constexpr float CODE_UNIT = 1.0f;
__device__ inline void codes_to_f16(uint32 bytes, uint32& low, uint32& high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
}
__device__ inline bool has_nan(uint32) { return false; }  // the conversion keeps NaN
#else
// The bits of a code, moved to the fields of float16, are its value times 2^-8, also for subnormals; NaN would become
// 480.
[[maybe_unused]] constexpr float CODE_UNIT = 256.0f;
__device__ inline uint32 spread_codes(uint32 x) { return (x & 0x80008000) | (x >> 1 & 0x3f803f80); }
__device__ inline void codes_to_f16(uint32 bytes, uint32& low, uint32& high) {
    low = spread_codes(__byte_perm(bytes, 0, 0x1404));
    high = spread_codes(__byte_perm(bytes, 0, 0x3424));
}
__device__ inline bool has_nan(uint32 bytes) { return is_nan4(bytes); }
#endif

// e4m3 bytes, none NaN, to bfloat16 pairs, times a pair of factors. The bits of a code, moved to the fields of
// bfloat16, are its value times 2^-120, also for subnormals; the factors correct this.
[[maybe_unused]] constexpr float CODE_TO_BF16 = 0x1p120f;
__device__ inline uint32 scaled_bf16(uint32 halves, uint32 factors) {
    uint32 y, x = (halves & 0x80008000) | (halves >> 4 & 0x07f007f0);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(factors), "r"(0x80008000));  // plus -0
    return y;
}
__device__ inline void codes_to_scaled_bf16(uint32 bytes, uint32 factors, uint32& low, uint32& high) {
    low = scaled_bf16(__byte_perm(bytes, 0, 0x1404), factors);
    high = scaled_bf16(__byte_perm(bytes, 0, 0x3424), factors);
}

// Pairs of float16: x y + z.
__device__ inline uint32 multiply_add_f16(uint32 x, uint32 y, uint32 z) {
    uint32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
}
__device__ inline uint32 multiply(uint32 x, uint32 factors) {
    uint32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factors));
    return y;
}

// e4m3 bytes, none NaN, as pairs of 16-bit values.
__device__ inline void codes_to(f16, uint32 bytes, uint32& low, uint32& high) {
    codes_to_f16(bytes, low, high);
    if (CODE_UNIT == 1.0f) return;
    uint32 unit = pack(f16{}, CODE_UNIT, CODE_UNIT);
    low = multiply(low, unit), high = multiply(high, unit);
}
__device__ inline void codes_to(bf16, uint32 bytes, uint32& low, uint32& high) {
    codes_to_scaled_bf16(bytes, pack(bf16{}, CODE_TO_BF16, CODE_TO_BF16), low, high);
}
