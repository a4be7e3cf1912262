// Number formats. Conversions from 8 and 16 bits are tables, because they dominate the cost of a matrix product.
#include "emulator.h"
#include <float.h>
#include <immintrin.h>
#include <vector>

namespace emulator {

static uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
static float of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

KeepSubnormals::KeepSubnormals() : before(_mm_getcsr()) { _mm_setcsr(before & ~0x8040u); }
KeepSubnormals::~KeepSubnormals() { _mm_setcsr(before); }

// A value with `mantissa` bits after the point and an exponent's bias; an exponent of all ones is not special.
static float small_float(uint32_t magnitude, int mantissa, int bias) {
    int exponent = magnitude >> mantissa, fraction = magnitude & ((1 << mantissa) - 1);
    int last_place = (exponent ? exponent : 1) - bias - mantissa;
    return ldexpf((exponent ? 1 << mantissa : 0) + fraction, last_place);
}

static const std::vector<float> E4M3 = [] {
    std::vector<float> values(256);
    for (uint32_t byte = 0; byte < 256; ++byte) {
        float value = (byte & 0x7f) == 0x7f ? NAN : small_float(byte & 0x7f, 3, 7);
        values[byte] = byte & 0x80 ? -value : value;
    }
    return values;
}();

#ifdef __F16C__
float from_f16(uint32_t bits) { return _cvtsh_ss(bits); }
#else
static const std::vector<float> F16 = [] {
    std::vector<float> values(1 << 16);
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
        uint32_t magnitude = bits & 0x7fff;
        uint32_t special = 0x7f800000 | (magnitude & 0x3ff) << 13;  // infinity and NaN
        float value = magnitude >= 0x7c00 ? of_bits(special) : small_float(magnitude, 10, 15);
        values[bits] = bits & 0x8000 ? -value : value;
    }
    return values;
}();

float from_f16(uint32_t bits) { return F16[bits & 0xffff]; }
#endif
float from_bf16(uint32_t bits) { return of_bits(bits << 16); }
float from_e4m3(uint32_t byte) { return E4M3[byte & 0xff]; }

static uint32_t to_bf16(float x) {
    if (x != x) return 0x7fff;
    uint32_t bits = bits_of(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A subnormal x becomes zero with or without its flushing, here and in to_e4m3.
static uint32_t to_f16(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7fffffff;
    if (bits > 0x7f800000) return 0x7fff;
    if (bits >= 0x47800000) return sign | 0x7c00;  // 65536 and more; values that round up to it are handled below
    if (bits < 0x38800000) return sign | uint32_t(lrintf(of_bits(bits) * 16777216.0f));  // below 2^-14: steps of 2^-24
    return sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
}

static const std::vector<uint32_t> E4M3_AS_F16 = [] {
    std::vector<uint32_t> values(256);
    for (uint32_t byte = 0; byte < 256; ++byte) values[byte] = to_f16(E4M3[byte]);
    return values;
}();

static uint32_t to_e4m3(float x) {
    if (x != x) return 0x7f;
    float magnitude = fminf(fabsf(x), 448.0f);
    uint32_t low = 0, high = 0x7e;  // the neighbouring codes: values ascend
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (E4M3[middle] <= magnitude) low = middle;
        else high = middle;
    }
    float below = magnitude - E4M3[low], above = E4M3[high] - magnitude;
    uint32_t code = below < above || (below == above && low % 2 == 0) ? low : high;
    return code | (signbit(x) ? 0x80 : 0);
}

uint32_t to_f16x2(float low, float high) { return to_f16(low) | to_f16(high) << 16; }
uint32_t to_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
uint16_t to_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
uint32_t e4m3x2_to_f16x2(uint32_t bytes) { return E4M3_AS_F16[bytes & 0xff] | E4M3_AS_F16[bytes >> 8 & 0xff] << 16; }
uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    KeepSubnormals keep;
    // The product of two bfloat16 values is exact in double; a sum with a third may be rounded twice only where it is no tie.
    auto sum = [](uint32_t x, uint32_t y, uint32_t z) { return to_float(double(from_bf16(x)) * from_bf16(y) + from_bf16(z)); };
    return to_bf16x2(sum(a, b, c), sum(a >> 16, b >> 16, c >> 16));
}
// The product of two float16 values is exact in float32, and the sum in double.
uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    auto sum = [](uint32_t x, uint32_t y, uint32_t z) { return to_float(double(from_f16(x)) * from_f16(y) + from_f16(z)); };
    return to_f16x2(sum(a, b, c), sum(a >> 16, b >> 16, c >> 16));
}
uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    return to_f16x2(from_f16(a) * from_f16(b), from_f16(a >> 16) * from_f16(b >> 16));
}
uint32_t add_f16x2(uint32_t a, uint32_t b) {
    return to_f16x2(from_f16(a) + from_f16(b), from_f16(a >> 16) + from_f16(b >> 16));
}
uint32_t at_least_f16x2(uint32_t a, uint32_t b) {
    auto mask = [](uint32_t a, uint32_t b) { return from_f16(a) >= from_f16(b) ? 0xffffu : 0u; };
    return mask(a, b) | mask(a >> 16, b >> 16) << 16;
}
uint32_t max_f16x2(uint32_t a, uint32_t b) {
    return to_f16x2(fmaxf(from_f16(a), from_f16(b)), fmaxf(from_f16(a >> 16), from_f16(b >> 16)));
}
uint32_t min_f16x2(uint32_t a, uint32_t b) {
    return to_f16x2(fminf(from_f16(a), from_f16(b)), fminf(from_f16(a >> 16), from_f16(b >> 16)));
}
uint32_t to_f16x2_saturated(float low, float high) {
    auto within = [](float x) { return x != x ? x : x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };
    return to_f16x2(within(low), within(high));
}
uint32_t max_magnitudes_bf16x2(uint32_t a, uint32_t b) {
    auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };  // as bits: NaN above infinity
    uint32_t x = a & 0x7fff7fff, y = b & 0x7fff7fff;
    return larger(x & 0xffff, y & 0xffff) | larger(x >> 16, y >> 16) << 16 | ((a ^ b) & 0x80008000);
}

// The mode takes longer to change than the rest, and matters to subnormal operands and results alone; where one is 0,
// infinite or NaN, an operand may have been subnormal.
static bool is_ordinary(float x) { return fabsf(x) >= 2 * FLT_MIN && fabsf(x) <= FLT_MAX; }

float multiply(float a, float b) {
    if (float product = a * b; is_ordinary(product)) return product;
    KeepSubnormals keep;
    volatile float x = a, product = x * b;  // before the mode is restored
    return product;
}
float divide(float a, float b) {
    if (float quotient = a / b; is_ordinary(quotient)) return quotient;
    KeepSubnormals keep;
    volatile float x = a, quotient = x / b;
    return quotient;
}
float to_float(double x) {
    if (float narrow = x; is_ordinary(narrow)) return narrow;
    KeepSubnormals keep;
    volatile double wide = x;
    volatile float narrow = wide;
    return narrow;
}
double to_double(float x) {
    if (is_ordinary(x)) return x;
    KeepSubnormals keep;
    volatile float narrow = x;
    volatile double wide = narrow;
    return wide;
}

}  // namespace emulator
