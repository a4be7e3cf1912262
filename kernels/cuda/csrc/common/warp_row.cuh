// A row of float32 values in the registers of a warp, or of WARPS warps: lane l of warp w has the values [(32 w + l) *
// VALUES, (32 w + l + 1) * VALUES).
#pragma once
#include "common/head_transforms.cuh"
#include "common/pages.cuh"

template <int VALUES, int WARPS = 1> struct WarpRow {
    static constexpr int DIM = 32 * VALUES * WARPS;
    float x[VALUES];
    int lane, warp = 0;

    __device__ int first() const { return (32 * warp + lane) * VALUES; }

    // Sum of the squares of LANES neighbouring lanes, at most of this warp.
    template <int LANES = 32> __device__ float squares() const {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) total += x[i] * x[i];
#pragma unroll
        for (int other = 1; other < LANES && other < 32; other *= 2) total += __shfl_xor_sync(~0u, total, other);
        return total;
    }

    // x / sqrt(mean(x^2) + eps), given the sum of the squares of the whole row
    __device__ void normalize(float total, float eps) {
        float scale = div(1.0f, sqrtf(div(total, float(DIM)) + eps));
#pragma unroll
        for (int i = 0; i < VALUES; ++i) x[i] *= scale;
    }

    // (x - mean(x)) / sqrt(variance(x) + eps) of a row in one warp
    __device__ void center_and_normalize(float eps) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) total += x[i];
#pragma unroll
        for (int other = 1; other < 32; other *= 2) total += __shfl_xor_sync(~0u, total, other);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) x[i] -= total * (1.0f / DIM);
        normalize(squares(), eps);
    }

    // Hadamard rotation of a row in one warp, rounded to bfloat16 before.
    __device__ void rotate_hadamard() {
        static_assert(WARPS == 1);
        round(bf16{});
        hadamard<32>(x, lane);
    }

    // Rotate the last `rope_dim` values in pairs of neighbours; `direction` -1 is inverse RoPE. rotation: cosines, then sines.
    __device__ void rotate(const float* rotation, int rope_dim, float direction) {
        int start = DIM - rope_dim;
#pragma unroll
        for (int i = 0; i < VALUES; i += 2) {
            int pair = (first() + i - start) / 2;
            if (first() + i < start) continue;
            float cos = rotation[pair], sin = rotation[rope_dim / 2 + pair] * direction;
            float a = x[i], b = x[i + 1];
            x[i] = a * cos - b * sin;
            x[i + 1] = b * cos + a * sin;
        }
    }

    __device__ void round(bf16) {
#pragma unroll
        for (int i = 0; i < VALUES; i += 2) {
            uint32 pair = pack(bf16{}, x[i], x[i + 1]);
            x[i] = to_float(bf16{uint16(pair)});
            x[i + 1] = to_float(bf16{uint16(pair >> 16)});
        }
    }

    // The largest finite magnitude of each group of LANES neighbouring lanes.
    template <int LANES> __device__ float largest_of_tile() const {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) largest = fmaxf(largest, fabsf(x[i]) < infinity() ? fabsf(x[i]) : 0.0f);
#pragma unroll
        for (int other = 1; other < LANES; other *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
        return largest;
    }

    // This lane's values times `factor` as e4m3 bytes.
    __device__ void store_e4m3(uint8* p, float factor, float divisor) const {
#pragma unroll
        for (int i = 0; i < VALUES; i += 4) {
            float y[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) y[j] = divisor == 1.0f ? x[i + j] * factor : div(x[i + j], divisor);
            store4(p + i, float_to_e4m3x2(y[0], y[1]) | float_to_e4m3x2(y[2], y[3]) << 16);
        }
    }

    __device__ void store_bf16(uint8* p) const {
#pragma unroll
        for (int i = 0; i < VALUES; i += 2) store4(p + 2 * i, pack(bf16{}, x[i], x[i + 1]));
    }

    // Write a row as e2m1; each lane has 8 or more values of type Input.
    template <class Layout, class Input> __device__ void insert_e2m1(Token token) const {
        constexpr int lanes = Layout::scale_tile / VALUES;
        static_assert(VALUES % 8 == 0 && lanes > 0);
        bool own_nan = false;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) own_nan |= x[i] != x[i];
        E2m1Scale scale = e2m1_scale<Layout, Input>(largest_of_tile<lanes>(), tile_has_nan<lanes>(own_nan, lane), Layout::min_exponent);
#pragma unroll
        for (int i = 0; i < VALUES; i += 8) store4(token.row + (first() + i) / 2, e2m1_codes<Layout>(Input{}, x + i, scale));
        if (lane % lanes == 0) token.scales[first() / Layout::scale_tile] = scale.byte;
    }

    // Write the row into a cache. Values are rounded to bfloat16; unless ROUNDED, values that are quantised are not.
    // Called by every lane.
    template <class Layout, bool ROUNDED = true> __device__ void insert(Token token) {
        static_assert(Layout::head_dim == DIM);
        if constexpr (Layout::quantized_dim == 0) {
            store_bf16(token.row + 2 * first());
        } else if constexpr (Layout::e2m1_values) {
            if constexpr (ROUNDED) {
                round(bf16{});
                insert_e2m1<Layout, bf16>(token);
            } else {
                insert_e2m1<Layout, float>(token);
            }
        } else {
            if (ROUNDED) round(bf16{});
            constexpr int lanes = Layout::scale_tile / VALUES;
            int tile = first() / Layout::scale_tile;
            int exponent = scale_exponent(largest_of_tile<lanes>(), Layout::min_exponent);
            bool quantized = first() < Layout::quantized_dim;
            if (quantized) store_e4m3(token.row + first(), power_of_two(-exponent), 1.0f);
            else store_bf16(token.row + Layout::rope_offset + 2 * (first() - Layout::quantized_dim));
            if (lane % lanes == 0) {
                // The last byte of the UE8M0 scales of a row belongs to no tile and is 0.
                if (Layout::ue8m0) token.scales[tile] = quantized ? exponent + 127 : 0;
                else store4(token.scales + 4 * tile, __float_as_uint(power_of_two(exponent)));
            }
        }
    }
};

// The row of the cosines and sines of a position. Positions outside the table are clamped to it.
__device__ inline const float* rotation_at(const float* cos_sin, int64 stride, int max_position, int64 position) {
    int64 row = position < 0 ? 0 : position >= max_position ? max_position - 1 : position;
    return cos_sin + row * stride;
}
