// Quantise the indexer's keys to FP8 and insert them into a paged cache.
//
// 16 lanes take a token, 8 of its 128 values each, which share one scale. What rows and scales are is in
// common/cache_insert.cu, whose layouts are larger.
//
// Macros: INPUT (bf16, f16 or float), SLOT (int64 or int), POWER_OF_TWO, ALIGNED.
#include "common/pages.cuh"
#include "common/pdl.cuh"
#include "common/vectors.cuh"

using Layout = INDEXER_FP8;
constexpr int LANES = Layout::head_dim / 8, THREADS = 128, GROUPS = THREADS / LANES;

// The largest of the lanes' finite magnitudes.
__device__ inline float largest_of(const float (&x)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]) < infinity() ? fabsf(x[i]) : 0.0f);
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
    return largest;
}

extern "C" __global__ void __launch_bounds__(THREADS)
indexer_k_quant_and_cache(const INPUT* k, int64 k_stride, const SLOT* slot_mapping, int num_tokens, uint8* pages,
                          int64 page_stride, int64 num_slots, int block_size) {
    pdl_wait();
    int lane = threadIdx.x % LANES, token = blockIdx.x * GROUPS + threadIdx.x / LANES;
    int64 slot = -1;
    Raw8<INPUT> raw = {};
    if (token < num_tokens) slot = slot_mapping[token], raw = load_raw8(k + token * k_stride + 8 * lane);
    float x[8];
    unpack8(raw, x);
    float amax = largest_of(x);
    if (slot < 0 || slot >= num_slots) return;
    Token to = token_at<Layout>(pages, page_stride, block_size, slot);
    int exponent = POWER_OF_TWO ? scale_exponent(amax, Layout::min_exponent) : 0;
    float scale = POWER_OF_TWO ? power_of_two(exponent) : fmaxf(div(amax, 448.0f), Layout::min_scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = POWER_OF_TWO ? x[i] * power_of_two(-exponent) : div(x[i], scale);
    store_e4m3x8(to.row + 8 * lane, x);
    if (lane == 0) store4(to.scales, __float_as_uint(scale));
}
