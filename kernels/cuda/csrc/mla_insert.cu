// Insert rows of kv_c and k_pe, side by side, into a cache of plain rows.
//
// A warp takes a token; each lane has 8 neighbouring values of the row in each of its rounds.
//
// Macros: INPUT (bf16, f16 or float), CACHE (bf16, f16 or e4m3), KV_C_DIM, SLOT (int64 or int), ALIGNED.
#include "pages.cuh"
#include "vectors.cuh"

struct e4m3 { uint8 bits; };

template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;

constexpr int HEAD_DIM = MLA_BF16::head_dim;
constexpr int ROUNDS = (HEAD_DIM + 255) / 256;

// Values [first, first + 8) of a row; 16-bit values of the cache's type keep their bits, NaN's included.
template <class Cache, class Input>
__device__ inline void store_chunk(uint8* row, int first, Raw8<Input> raw, float scale) {
    float x[8];
    unpack8(raw, x);
    if constexpr (SAME<Cache, e4m3>) {
        uint32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = float_to_e4m3x2(div(x[2 * i], scale), div(x[2 * i + 1], scale));
        store8(row + first, {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16});
    } else if constexpr (SAME<Cache, Input>) {
        store16(row + 2 * first, raw.words);
    } else {
        Cache t{};
        store16(row + 2 * first, {pack(t, x[0], x[1]), pack(t, x[2], x[3]), pack(t, x[4], x[5]), pack(t, x[6], x[7])});
    }
}

extern "C" __global__ void __launch_bounds__(256)
concat_and_cache_mla(const INPUT* kv_c, int64 kv_c_stride, const INPUT* k_pe, int64 k_pe_stride,
                     const SLOT* slot_mapping, int num_tokens, uint8* pages, int64 page_stride, int64 num_slots,
                     int block_size, const float* scale, float scale_value) {
    int lane = threadIdx.x % 32;
    int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= num_tokens) return;
    int64 slot = slot_mapping[token];
    if (slot < 0 || slot >= num_slots) return;
    Raw8<INPUT> raw[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        int first = 8 * (32 * round + lane);
        if (first < KV_C_DIM) raw[round] = load_raw8(kv_c + token * kv_c_stride + first);
        else if (first < HEAD_DIM) raw[round] = load_raw8(k_pe + token * k_pe_stride + (first - KV_C_DIM));
    }
    if (scale) scale_value = *scale;
    Place place = place_of(slot, block_size);
    uint8* row = pages + place.page * page_stride + int64(place.row) * (HEAD_DIM * int(sizeof(CACHE)));
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        int first = 8 * (32 * round + lane);
        if (first < HEAD_DIM) store_chunk<CACHE, INPUT>(row, first, raw[round], scale_value);
    }
}
