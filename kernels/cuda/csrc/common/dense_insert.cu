// Insert rows of kv_c and k_pe, side by side, into a cache of plain rows.
//
// Grid: a warp per token. Block: 128 threads; each lane has 8 neighbouring values of the row in each of its rounds. No
// shared memory.
//
// Macros: INPUT (bf16, f16 or float), CACHE (bf16, f16 or e4m3), KV_C_DIM, SLOT (int64 or int), ALIGNED.
#include "common/device.cuh"
#include "common/pages.cuh"

struct e4m3 { uint8 bits; };

constexpr int HEAD_DIM = MLA_BF16::head_dim;
constexpr int ROUNDS = (HEAD_DIM + 255) / 256;

template <class T> __device__ inline void store_chunk(T* p, Raw8<INPUT> raw, float) { store_raw8(p, raw); }
__device__ inline void store_chunk(e4m3* p, Raw8<INPUT> raw, float scale) {
    float x[8];
    unpack8(raw, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = div(x[i], scale);
    store_e4m3x8(reinterpret_cast<uint8*>(p), x);
}

extern "C" __global__ void __launch_bounds__(128)
    concat_and_cache_mla(const INPUT* kv_c, int64 kv_c_stride, const INPUT* k_pe, int64 k_pe_stride, const SLOT* slot_mapping,
                         int num_tokens, uint8* pages, int64 page_stride, int64 num_slots, int block_size, const float* scale,
                         float scale_value) {
    pdl_wait();
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
    PageRow at = page_row_of(slot, block_size);
    CACHE* row = reinterpret_cast<CACHE*>(pages + at.page * page_stride) + int64(at.row) * HEAD_DIM;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        int first = 8 * (32 * round + lane);
        if (first < HEAD_DIM) store_chunk(row + first, raw[round], scale_value);
    }
}
