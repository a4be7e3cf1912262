// Quantise rows to FP8 or FP4 and insert them into a paged cache.
//
// Grid: a warp per token, or half a warp if a row has 128 values. Block: 128 threads. No shared memory. Each lane holds
// 8 neighbouring values of a row in each round (32 lanes x 8 values), so a tile of 16 to 128 values is in 2 to 16 lanes
// and its largest magnitude takes 1 to 4 shuffles. A round reads 512 contiguous bytes and writes 256 or 128. Values
// that stay 16-bit come from a second array, `rope`, which may be a part of the first.
//
// Macros: LAYOUT, INPUT (bf16, f16 or float), SLOT (int64 or int), POWER_OF_TWO, MIN_EXPONENT (of such scales), ALIGNED.
#include "common/device.cuh"
#include "common/pages.cuh"

constexpr int THREADS = 128, LANES = LAYOUT::head_dim > 128 ? 32 : 16, TOKENS = THREADS / LANES;  // lanes of a token
constexpr int ROUNDS = (LAYOUT::head_dim + 8 * LANES - 1) / (8 * LANES);
constexpr int TILE_LANES = LAYOUT::scale_tile / 8;

// Largest of |x|, ignoring NaN.
__device__ inline float largest_magnitude(const float (&x)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

__device__ inline float largest_finite(const float (&x)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]) < infinity() ? fabsf(x[i]) : 0.0f);
    return largest;
}

__device__ inline float largest_of_tile(float largest) {
#pragma unroll
    for (int lane = 1; lane < TILE_LANES; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
    return largest;
}

// Whether this half of a warp has no token. A warp without a token has exited.
__device__ inline bool is_absent(Token token) { return LANES < 32 && token.row == nullptr; }

// A tile's largest finite magnitude, and whether it has a NaN. Called by every lane of the warp.
struct Tile {
    float amax;
    bool has_nan;
};
template <class Input> __device__ inline Tile tile_of(Raw8<Input>, const float (&x)[8]) {
    float amax = largest_of_tile(largest_magnitude(x));
    if (__any_sync(~0u, amax == infinity())) amax = largest_of_tile(largest_finite(x));
    bool own_nan = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) own_nan |= x[i] != x[i];
    return {amax, LAYOUT::e2m1_values && tile_has_nan<TILE_LANES>(own_nan, threadIdx.x % 32)};
}
// Magnitudes of bfloat16 values have the order of their bits. Infinities and NaN are the largest; if there is one, the
// values are scanned again.
__device__ inline Tile tile_of(Raw8<bf16> raw, const float (&x)[8]) {
    uint32 largest = largest_of_8(raw.words);
    largest = max(largest & 0xffff, largest >> 16);
#pragma unroll
    for (int lane = 1; lane < TILE_LANES; lane *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lane));
    if (__any_sync(~0u, largest >= 0x7f80)) return tile_of<bf16>(raw, x);
    return {__uint_as_float(largest << 16), false};
}

// Insert e2m1 values [8 * chunk, 8 * chunk + 8) of a row. Returns the tile's stored scale.
__device__ inline uint32 insert_e2m1_chunk(Token token, int chunk, const float (&x)[8], Tile tile) {
    if (8 * chunk >= LAYOUT::quantized_dim || is_absent(token)) return 0;
    E2m1Scale scale = e2m1_scale<LAYOUT, INPUT>(tile.amax, tile.has_nan, MIN_EXPONENT);
    store4(token.row + 4 * chunk, e2m1_codes<LAYOUT>(INPUT{}, x, scale));
    return scale.byte;
}

// Insert values [8 * chunk, 8 * chunk + 8) of a row. Called by every lane of the warp. Returns the tile's scale if it is stored
// in a byte, or 0.
__device__ inline uint32 insert_chunk(Token token, int chunk, Raw8<INPUT> raw) {
    float x[8];
    unpack8(raw, x);
    if constexpr (LAYOUT::e2m1_values) return insert_e2m1_chunk(token, chunk, x, tile_of(raw, x));
    float amax = tile_of<INPUT>(raw, x).amax;
    if (is_absent(token)) return 0;
    int first = 8 * chunk;
    if (first >= LAYOUT::quantized_dim) {
        bf16* rope = reinterpret_cast<bf16*>(token.row + LAYOUT::rope_offset) + (first - LAYOUT::quantized_dim);
        if (first < LAYOUT::head_dim) store_raw8(rope, raw);
        return 0;
    }
    int exponent = POWER_OF_TWO ? scale_exponent(amax, MIN_EXPONENT) : 0;
    float scale = POWER_OF_TWO ? power_of_two(exponent) : fmaxf(div(amax, 448.0f), LAYOUT::min_scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = POWER_OF_TWO ? x[i] * power_of_two(-exponent) : div(x[i], scale);
    store_e4m3x8(token.row + first, x);
    if (!LAYOUT::ue8m0 && chunk % TILE_LANES == 0) store4(token.scales + 4 * (chunk / TILE_LANES), __float_as_uint(scale));
    return exponent + 127;
}

constexpr bool BYTE_SCALES = LAYOUT::ue8m0 || LAYOUT::e4m3_scales;

// Store one-byte scales four at a time, gathered from the lanes of neighbouring tiles.
__device__ inline void store_byte_scales(Token token, int lane, const uint32 (&scales)[ROUNDS]) {
    constexpr int WORD_LANES = 4 * TILE_LANES;
    static_assert(!BYTE_SCALES || LAYOUT::scale_bytes % 4 == 0);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        uint32 word = scales[round] << 8 * (lane / TILE_LANES % 4);
#pragma unroll
        for (int by = TILE_LANES; by < WORD_LANES; by *= 2) word |= __shfl_xor_sync(~0u, word, by);
        int number = (LANES * round + lane) / WORD_LANES;
        if (lane % WORD_LANES == 0 && 4 * number < LAYOUT::scale_bytes && !is_absent(token)) store4(token.scales + 4 * number, word);
    }
}

// Store the eight UE8M0 scales of a row at once: every lane gathers the exponents of all tiles. The last byte is 0.
__device__ inline void store_eight_scales(Token token, int lane, const uint32 (&exponents)[ROUNDS]) {
    uint32 words[2] = {};
#pragma unroll
    for (int round = 0; round < 2 && round < ROUNDS; ++round) {
        uint32 word = exponents[round] << 8 * (lane / 8);
        word |= __shfl_xor_sync(~0u, word, 8);
        words[round] = word | __shfl_xor_sync(~0u, word, 16);
    }
    if (lane == 0) store8(token.scales, {words[0], words[1]});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_and_insert_k_cache(const INPUT* k, int64 k_stride, const INPUT* rope, int64 rope_stride, const SLOT* slot_mapping,
                                int num_tokens, uint8* pages, int64 page_stride, int64 num_slots, int block_size) {
    pdl_wait();
    int lane = threadIdx.x % LANES;
    int token = blockIdx.x * TOKENS + threadIdx.x / LANES;
    bool there = token < num_tokens;
    if (LANES == 32 && !there) return;
    int64 slot = there ? slot_mapping[token] : -1;
    Raw8<INPUT> raw[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {  // loaded before the slot is known; an absent slot discards the row
        int first = 8 * (LANES * round + lane);
        raw[round] = {};
        if (!there) continue;
        if (first < LAYOUT::quantized_dim) raw[round] = load_raw8(k + token * k_stride + first);
        else if (first < LAYOUT::head_dim) raw[round] = load_raw8(rope + token * rope_stride + (first - LAYOUT::quantized_dim));
    }
    there = slot >= 0 && slot < num_slots;
    if (LANES == 32 && !there) return;
    Token token_row = there ? token_at<LAYOUT>(pages, page_stride, block_size, slot) : Token{};
    uint32 exponents[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) exponents[round] = insert_chunk(token_row, LANES * round + lane, raw[round]);
    if constexpr (LAYOUT::ue8m0 && LAYOUT::scale_bytes == 8 && TILE_LANES == 8) store_eight_scales(token_row, lane, exponents);
    else if constexpr (BYTE_SCALES) store_byte_scales(token_row, lane, exponents);
}
