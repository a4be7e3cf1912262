// RoPE of the indexer's queries, their quantisation to FP8 or MXFP4, and their scales folded into the weights of the heads.
//
// Grid: 16 lanes per head, 8 values each. Block: 128 threads. No shared memory. The 64 rotated values are in 8
// neighbouring lanes; the partner of a value is its neighbour, or 4 lanes away. Four lanes hold a tile of MXFP4.
//
// Macros: INPUT, WEIGHT and TABLE (types of queries, weights and cosines), POSITION (int64 or int), OUTPUT (uint8 for
// quantised queries, else float or bf16), Q_FORMAT of quantised queries (FP8, MXFP4 in e4m3 bytes, MXFP4_ROWS), SSMAX
// (heads are multiplied by factors of their positions), HADAMARD, ALIGNED.
#include "common/pages.cuh"
#include "common/device.cuh"
#include "common/head_transforms.cuh"

enum { FP8, MXFP4, MXFP4_ROWS };
constexpr int DIM = 128, ROPE = 64, LANES = DIM / 8, THREADS = 128;
constexpr int TILE_LANES = INDEXER_MXFP4::scale_tile / 8;
constexpr int MXFP4_SHIFT = 6;  // 6 * 2^6 is below 448; 0.5 * 2^6 * 2^-14 is the smallest number of e4m3
constexpr int MXFP4_GONE = 30;  // values of a tile whose scale is this many powers of two below the scale of the head are 0 in e4m3

__device__ inline float to_bf16_and_back(float x) { return to_float(bf16{uint16(pack(bf16{}, x, 0.0f))}); }

__device__ inline void store(uint8* p, const float (&x)[8]) { store_e4m3x8(p, x); }
__device__ inline void store(float* p, const float (&x)[8]) { store_values8(p, x); }
__device__ inline void store(bf16* p, const float (&x)[8]) { store_values8(p, x); }

// The largest finite magnitude of the values of SOME neighbouring lanes.
template <int SOME> __device__ inline float largest_finite(const float (&x)[8]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]) < infinity() ? fabsf(x[i]) : 0.0f);
#pragma unroll
    for (int step = 1; step < SOME; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    return amax;
}

// Eight codes as floats, times a power of two. A code shifted left by nine bits is its value times 2^-14 in float16.
__device__ inline void e2m1_values(uint32 codes, int exponent, float (&x)[8]) {
    float factor = power_of_two(exponent + 14);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32 code = codes >> 4 * i;
        x[i] = to_float(f16{uint16((code & 8) << 12 | (code & 7) << 9)}) * factor;
    }
}

// Eight values of a lane in MXFP4.
__device__ inline E2m1Scale to_mxfp4(const float (&x)[8], uint32& codes, int least_exponent) {
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) is_nan |= x[i] != x[i];
    is_nan = tile_has_nan<TILE_LANES>(is_nan, threadIdx.x % 32);
    E2m1Scale scale = e2m1_scale<INDEXER_MXFP4>(largest_finite<TILE_LANES>(x), is_nan, least_exponent);
    codes = e2m1_codes<INDEXER_MXFP4>(bf16{}, x, scale);
    return scale;
}

// The values in e4m3, divided by the scale of the head, whose exponent is returned.
__device__ inline int mxfp4_in_e4m3(float (&x)[8], uint32 codes, const E2m1Scale& scale, int least_exponent) {
    int exponent = int(scale.byte) - 127, head = scale.is_nan ? least_exponent : max(exponent - MXFP4_SHIFT, least_exponent);
#pragma unroll
    for (int step = TILE_LANES; step < LANES; step *= 2) head = max(head, __shfl_xor_sync(~0u, head, step));
    e2m1_values(codes, max(exponent - head, -MXFP4_GONE), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = scale.is_nan ? __uint_as_float(0x7fffffff) : x[i];
    return head;
}

// A lane's part of a row of INDEXER_MXFP4.
__device__ inline void store_row(uint8* row, uint32 codes, const E2m1Scale& scale, int lane) {
    store_bytes(row + 4 * lane, &codes, 4);
    if (lane % TILE_LANES == 0) row[DIM / 2 + lane / TILE_LANES] = uint8(scale.byte);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fused_indexer_q_rope_quant(const POSITION* positions, const INPUT* q, int64 q_stride, int64 q_head_stride, const TABLE* table,
                               int64 table_stride, int table_rows, const float* ssmax_scale, const float* ssmax_bias, const WEIGHT* weights,
                               int64 weights_stride, float scale, int rope_first, int is_neox, int least_exponent, int64 tokens, int heads,
                               OUTPUT* q_out, int64 out_stride, int64 out_head_stride, float* weights_out, int64 weights_out_stride) {
    pdl_wait();
    int lane = threadIdx.x % LANES;
    int64 number = int64(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    bool present = number < tokens * heads;  // all lanes of a warp take part in the shuffles below
    int64 token = present ? number / heads : 0, head = present ? number % heads : 0;
    float x[8];
    unpack8(load_raw8(q + token * q_stride + head * q_head_stride + 8 * lane), x);
    int64 position = positions[token];
    if constexpr (SSMAX) {
        float factor = head_factor(ssmax_scale[head], ssmax_bias[head], position);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= factor;
    }
    int rotated = lane - (rope_first ? 0 : (DIM - ROPE) / 8);  // which of the 8 rotated lanes
    float partner[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) partner[i] = __shfl_xor_sync(~0u, x[i], ROPE / 16);
    if (rotated >= 0 && rotated < ROPE / 8 && position >= 0 && position < table_rows) {
        const TABLE* angles = table + position * table_stride;
        if (is_neox) {
            bool second = rotated >= ROPE / 16;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int angle = 8 * (rotated % (ROPE / 16)) + i;
                float cosine = to_float(angles[angle]), sine = to_float(angles[ROPE / 2 + angle]);
                x[i] = x[i] * cosine + (second ? partner[i] : -partner[i]) * sine;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                int angle = 4 * rotated + i / 2;
                float cosine = to_float(angles[angle]), sine = to_float(angles[ROPE / 2 + angle]);
                float low = x[i], high = x[i + 1];
                x[i] = low * cosine - high * sine, x[i + 1] = high * cosine + low * sine;
            }
        }
    }
    if constexpr (HADAMARD) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = sizeof(OUTPUT) == 4 ? x[i] : to_bf16_and_back(x[i]);
        hadamard<LANES>(x, lane);
    }
    float q_scale = 1.0f;
    OUTPUT* to = q_out + token * out_stride + head * out_head_stride;
    if (sizeof(OUTPUT) == 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = to_bf16_and_back(x[i]);
    }
    if constexpr (Q_FORMAT != FP8) {
        uint32 codes;
        E2m1Scale scale = to_mxfp4(x, codes, least_exponent);
        if (Q_FORMAT == MXFP4) q_scale = power_of_two(mxfp4_in_e4m3(x, codes, scale, least_exponent));
        else if (present) store_row(reinterpret_cast<uint8*>(to), codes, scale, lane);
    } else if (sizeof(OUTPUT) == 1) {
        int exponent = scale_exponent(largest_finite<LANES>(x), least_exponent);
        q_scale = power_of_two(exponent);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= power_of_two(-exponent);
    }
    if (!present) return;
    if constexpr (Q_FORMAT != MXFP4_ROWS) store(to + 8 * lane, x);
    if (lane == 0) weights_out[token * weights_out_stride + head] = to_float(weights[token * weights_stride + head]) * q_scale * scale;
}
