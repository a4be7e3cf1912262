// Quantise rows to FP8 and insert them into a paged cache.
//
// A warp takes TOKENS neighbouring tokens. Each lane holds 8 neighbouring values of a row in each of its
// rounds (a round is 32 lanes x 8 values), so a tile of 64 or 128 values is 8 or 16 lanes and its largest
// magnitude takes 3 or 4 shuffles. Reads of a row are 512 contiguous bytes a round, writes 256.
// The values that stay 16-bit come from an array of their own, `rope`, which may be a part of the other.
//
// Macros: LAYOUT, INPUT (bf16, f16 or float), SLOT (int64 or int), POWER_OF_TWO, TOKENS, ALIGNED.
#include "pages.cuh"
#include "vectors.cuh"

constexpr int ROUNDS = (LAYOUT::head_dim + 255) / 256;
constexpr int TILE_LANES = LAYOUT::scale_tile / 8;

__device__ inline float largest_finite(const float (&x)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float magnitude = fabsf(x[i]);
        largest = fmaxf(largest, magnitude < infinity() ? magnitude : 0.0f);  // NaN compares false
    }
    return largest;
}

// Values [8 * chunk, 8 * chunk + 8) of a row; every lane of the warp takes part.
__device__ inline void insert_chunk(Token token, int chunk, const float (&x)[8]) {
    float amax = largest_finite(x);
#pragma unroll
    for (int lane = 1; lane < TILE_LANES; lane *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lane));
    int first = 8 * chunk;
    if (first >= LAYOUT::head_dim) return;
    bool quantized = first < LAYOUT::quantized_dim;
    int exponent = POWER_OF_TWO ? scale_exponent(amax, LAYOUT::min_exponent) : 0;
    float scale = POWER_OF_TWO ? exp2i(exponent) : fmaxf(div(amax, 448.0f), LAYOUT::min_scale);
    if (quantized) {
        float inverse = exp2i(-exponent);
        uint32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low = POWER_OF_TWO ? x[2 * i] * inverse : div(x[2 * i], scale);
            float high = POWER_OF_TWO ? x[2 * i + 1] * inverse : div(x[2 * i + 1], scale);
            pairs[i] = float_to_e4m3x2(low, high);
        }
        store8(token.row + first, {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16});
    } else {
        store16(token.row + LAYOUT::rope_offset + 2 * (first - LAYOUT::quantized_dim),
                {pack(bf16{}, x[0], x[1]), pack(bf16{}, x[2], x[3]), pack(bf16{}, x[4], x[5]), pack(bf16{}, x[6], x[7])});
    }
    if (chunk % TILE_LANES == 0) {
        int tile = chunk / TILE_LANES;
        if (LAYOUT::ue8m0) {
            // The tile of RoPE values has the spare byte, which is 0.
            if (tile < LAYOUT::scale_bytes) token.scales[tile] = quantized ? uint8(exponent + 127) : 0;
        } else if (quantized) {
            store4(token.scales + 4 * tile, __float_as_uint(scale));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
quantize_and_insert_k_cache(const INPUT* k, int64 k_stride, const INPUT* rope, int64 rope_stride,
                            const SLOT* slot_mapping, int num_tokens, uint8* pages, int64 page_stride, int64 num_slots,
                            int block_size) {
    int lane = threadIdx.x % 32;
    int first_token = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * TOKENS;
    Raw8<INPUT> raw[TOKENS][ROUNDS];
    int64 slots[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        int token = first_token + t;
        slots[t] = token < num_tokens ? int64(slot_mapping[token]) : -1;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int first = 8 * (32 * round + lane);
            const INPUT* values = first < LAYOUT::quantized_dim
                                      ? k + token * k_stride + first
                                      : rope + token * rope_stride + (first - LAYOUT::quantized_dim);
            if (token < num_tokens && first < LAYOUT::head_dim) raw[t][round] = load_raw8(values);
            else raw[t][round] = {};
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (slots[t] < 0 || slots[t] >= num_slots) continue;
        Token token = token_at<LAYOUT>(pages, page_stride, block_size, slots[t]);
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            float x[8];
            unpack8(raw[t][round], x);
            insert_chunk(token, 32 * round + lane, x);
        }
    }
}
