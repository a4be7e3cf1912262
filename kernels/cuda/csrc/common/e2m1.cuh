// Tiles of e2m1 values: their scale, and values to codes.
#pragma once
#include "common/pages.cuh"

// The scale of a tile: a power of two, or an e4m3 number. NaN for a tile with a NaN, which e2m1 cannot hold; its codes are 0.
struct E2m1Scale {
    uint32 byte;    // as stored
    float value;
    float inverse;  // of a power of two
    bool is_nan;
};

// For the tile's largest finite magnitude.
template <class Layout> __device__ inline E2m1Scale e2m1_scale(float amax, bool has_nan, int min_exponent) {
    if constexpr (Layout::ue8m0) {
        int exponent = e2m1_scale_exponent(amax, min_exponent);
        return {has_nan ? 255u : uint32(exponent + 127), power_of_two(exponent), power_of_two(-exponent), has_nan};
    }
    uint32 byte = float_to_e4m3x2(fmaxf(div(amax, 6.0f), Layout::min_scale), 0.0f) & 0xff;
    return {has_nan ? 0x7fu : byte, stored_scale<Layout>(byte), 0.0f, has_nan};
}

// The codes of two values, given times 2^-14: one in the low four bits and one in those of the high half. As float16, an e2m1
// number times 2^-14 has its code's bits, nine places further up, also where it is subnormal: the lowest nine are rounded off.
__device__ inline uint32 e2m1_pair(float low, float high) {
    constexpr uint32 SIX = 0x0e000e00, HALVES = 0x00010001;
    uint32 pair = pack(f16{}, low, high), magnitudes;
    asm("{\n.reg .b32 m;\nabs.f16x2 m, %1;\nmin.f16x2 %0, m, %2;\n}" : "=r"(magnitudes) : "r"(pair), "r"(SIX));
    uint32 rounded = magnitudes + 0xff * HALVES + (magnitudes >> 9 & HALVES);
    return (rounded >> 9 & 7 * HALVES) | (pair >> 12 & 8 * HALVES);
}

// Eight values to eight codes, those of x / scale, to nearest even. A bfloat16 number has 8 bits and a scale at most 4: a quotient
// that is no midpoint of two e2m1 numbers is further than 2^-8 of it away. It stays on its side in float16, and a midpoint, which
// float16 has, is found although the quotient is not quite exact.
template <class Layout> __device__ inline uint32 e2m1_codes(bf16, const float* x, const E2m1Scale& scale) {
    uint32 codes = 0;
    constexpr float SMALLEST = 1.0f / 16384.0f;
    float inverse = Layout::ue8m0 ? scale.inverse : div(SMALLEST, scale.value);
    auto scaled = [&](float y) { return Layout::ue8m0 ? mul(mul(y, inverse), SMALLEST) : mul(y, inverse); };
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= e2m1_pair(scaled(x[i]), scaled(x[i + 4])) << 4 * i;
    return scale.is_nan ? 0 : codes;
}

// The same of values of more bits.
template <class Layout, class Input> __device__ inline uint32 e2m1_codes(Input, const float* x, const E2m1Scale& scale) {
    uint32 codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32 code;
        if (Layout::ue8m0) code = float_to_e2m1(mul(x[i], scale.inverse), 1.0f);
        else code = sizeof(Input) == 4 ? float_to_e2m1(div(x[i], scale.value), 1.0f) : float_to_e2m1(x[i], scale.value);
        codes |= code << 4 * i;
    }
    return scale.is_nan ? 0 : codes;
}

// Whether one of LANES neighbouring lanes has a NaN among its values. Called by a whole warp.
template <int LANES> __device__ inline bool tile_has_nan(bool own, int lane) {
    return __ballot_sync(~0u, own) & (LANES == 32 ? ~0u : ((1u << LANES % 32) - 1) << (lane & -LANES));
}
