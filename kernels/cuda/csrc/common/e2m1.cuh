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

// The code of x / scale, where x has as many bits as `Input`.
template <class Layout, class Input> __device__ inline uint32 e2m1_code(Input, float x, const E2m1Scale& scale) {
    if constexpr (Layout::ue8m0) return float_to_e2m1(mul(x, scale.inverse), 1.0f);
    else if constexpr (sizeof(Input) == 4) return float_to_e2m1(div(x, scale.value), 1.0f);
    else return float_to_e2m1(x, scale.value);
}

// Eight values to eight codes.
template <class Layout, class Input> __device__ inline uint32 e2m1_codes(Input input, const float* x, const E2m1Scale& scale) {
    uint32 codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= e2m1_code<Layout>(input, x[i], scale) << 4 * i;
    return scale.is_nan ? 0 : codes;
}

// Whether one of LANES neighbouring lanes has a NaN among its values. Called by a whole warp.
template <int LANES> __device__ inline bool tile_has_nan(bool own, int lane) {
    return __ballot_sync(~0u, own) & (LANES == 32 ? ~0u : ((1u << LANES % 32) - 1) << (lane & -LANES));
}
