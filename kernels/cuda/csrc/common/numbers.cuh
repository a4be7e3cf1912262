// Number formats: bfloat16, float16, float32 and e4m3, to and from float32, without host headers.
// float32 arithmetic that must not flush subnormals is written in PTX: CuPy compiles with -ftz=true.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

// The device whose instructions convert e4m3: this one, or one that it stands in for (kernels/cuda/device.py).
#ifdef ASSUMED_ARCH
#define E4M3_ARCH ASSUMED_ARCH
#else
#define E4M3_ARCH __CUDA_ARCH__
#endif

struct bf16 { uint16 bits; };
struct f16 { uint16 bits; };

[[maybe_unused]] constexpr int INT32_LIMIT = 0x7fffffff;

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(uint32(x.bits) << 16); }
__device__ inline float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Two floats as a pair of 16-bit values, `low` in the low half; to nearest even.
__device__ inline uint32 pack(bf16, float low, float high) {
    uint32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ inline uint32 pack(f16, float low, float high) {
    uint32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ inline float mul(float a, float b) {
    float y;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
__device__ inline float div(float a, float b) {
    float y;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
// The larger of two numbers; a NaN is left out.
__device__ inline float larger(float a, float b) {
    float y;
    asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// 2^e as float32 for -149 <= e <= 127.
__device__ inline float exp2i(int e) {
    return __uint_as_float(e >= -126 ? uint32(e + 127) << 23 : 1u << (e + 149));
}

// 2^e for exponents of normal numbers.
__device__ inline float power_of_two(int e) { return __uint_as_float(uint32(e + 127) << 23); }

// The scale of a UE8M0 byte; 255 is NaN.
__device__ inline float ue8m0_scale(int byte) { return byte == 255 ? __uint_as_float(0x7fc00000) : exp2i(byte - 127); }

#if E4M3_ARCH >= 890

// Two e4m3 bytes (the low 16 bits) to two floats; NaN stays NaN.
__device__ inline void e4m3x2_to_float(uint32 bytes, float& low, float& high) {
    uint32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16(bytes)));
    low = to_float(f16{uint16(pair)});
    high = to_float(f16{uint16(pair >> 16)});
}

// Two floats to two e4m3 bytes, to nearest even; beyond 448 saturates, NaN becomes 0x7F.
__device__ inline uint32 float_to_e4m3x2(float low, float high) {
    uint16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

#else  // the same in integer arithmetic

__device__ inline float e4m3_to_float(uint32 byte) {
    // The byte's exponent and mantissa, moved to float32's fields, are the value times 2^-120, subnormals too.
    uint32 magnitude = byte & 0x7f;
    float value = magnitude == 0x7f ? __uint_as_float(0x7fc00000) : mul(__uint_as_float(magnitude << 20), exp2i(120));
    return byte & 0x80 ? -value : value;
}

__device__ inline void e4m3x2_to_float(uint32 bytes, float& low, float& high) {
    low = e4m3_to_float(bytes & 0xff);
    high = e4m3_to_float(bytes >> 8 & 0xff);
}

__device__ inline uint32 float_to_e4m3(float x) {
    if (x != x) return 0x7f;
    uint32 sign = __float_as_uint(x) >> 24 & 0x80;
    uint32 magnitude = __float_as_uint(x) & 0x7fffffff;
    if (magnitude >= 0x43e00000) return sign | 0x7e;                                  // 448
    if (magnitude < 0x3c800000) return sign | __float2int_rn(fabsf(x) * 512.0f);      // below 2^-6: steps of 2^-9
    return sign | (magnitude + 0x7ffff + (magnitude >> 20 & 1)) - (120u << 23) >> 20;  // 3 bits of mantissa
}

__device__ inline uint32 float_to_e4m3x2(float low, float high) {
    return float_to_e4m3(low) | float_to_e4m3(high) << 8;
}

#endif

// Whether one of four e4m3 bytes is NaN.
__device__ inline bool is_nan4(uint32 bytes) { return ((bytes & 0x7f7f7f7f) + 0x01010101) & 0x80808080; }

// max(x, 0); NaN stays NaN.
__device__ inline float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// Twice that for a finite x or NaN, by an addition, which takes half as long as a comparison.
__device__ inline float twice_relu(float x) { return x + fabsf(x); }

// From this logit on, base 2, fmaf(score, scale, -logit) may be off by more than 1, because `score * scale` is not rounded as the
// maximum logit was. Logits are then rounded, too, so that no weight becomes infinite.
[[maybe_unused]] constexpr float LARGE_LOGIT = 1 << 24;

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
