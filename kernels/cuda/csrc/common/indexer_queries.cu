// RoPE of the indexer's queries, their quantisation to FP8, and their scales folded into the weights of the heads.
//
// Grid: 16 lanes per head, 8 values each. Block: 128 threads. No shared memory. The 64 rotated values are in 8 neighbouring
// lanes; a value's partner is its neighbour, or 4 lanes away.
//
// Macros: INPUT, WEIGHT and TABLE (types of queries, weights and cosines), POSITION (int64 or int), OUTPUT (uint8 for
// e4m3, or float or bf16 for no quantisation), ALIGNED.
#include "common/pages.cuh"
#include "common/pdl.cuh"
#include "common/vectors.cuh"

constexpr int DIM = 128, ROPE = 64, LANES = DIM / 8, THREADS = 128;

__device__ inline float to_bf16_and_back(float x) { return to_float(bf16{uint16(pack(bf16{}, x, 0.0f))}); }

__device__ inline void store(uint8* p, const float (&x)[8]) { store_e4m3x8(p, x); }
__device__ inline void store(float* p, const float (&x)[8]) { store_values8(p, x); }
__device__ inline void store(bf16* p, const float (&x)[8]) { store_values8(p, x); }

extern "C" __global__ void __launch_bounds__(THREADS)
fused_indexer_q_rope_quant(const POSITION* positions, const INPUT* q, int64 q_stride, int64 q_head_stride,
                           const TABLE* table, int64 table_stride, int table_rows, const WEIGHT* weights,
                           int64 weights_stride, float scale, int rope_first, int is_neox, int least_exponent,
                           int64 tokens, int heads, OUTPUT* q_out, int64 out_stride, int64 out_head_stride,
                           float* weights_out, int64 weights_out_stride) {
    pdl_wait();
    int lane = threadIdx.x % LANES;
    int64 number = int64(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    bool present = number < tokens * heads;  // all lanes of a warp take part in the shuffles below
    int64 token = present ? number / heads : 0, head = present ? number % heads : 0;
    float x[8];
    unpack8(load_raw8(q + token * q_stride + head * q_head_stride + 8 * lane), x);
    int64 position = positions[token];
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
    float q_scale = 1.0f;
    if (sizeof(OUTPUT) == 1) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = to_bf16_and_back(x[i]);
            amax = fmaxf(amax, fabsf(x[i]) < infinity() ? fabsf(x[i]) : 0.0f);
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
        int exponent = scale_exponent(amax, least_exponent);
        q_scale = power_of_two(exponent);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= power_of_two(-exponent);
    }
    if (!present) return;
    store(q_out + token * out_stride + head * out_head_stride + 8 * lane, x);
    if (lane == 0)
        weights_out[token * weights_out_stride + head] = to_float(weights[token * weights_stride + head]) * q_scale * scale;
}
