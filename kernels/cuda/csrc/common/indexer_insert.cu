// Quantise the indexer's keys to FP8 and insert them into a paged cache.
//
// 16 lanes take a token, 8 of its 128 values each, which share one scale; and TOKENS tokens, all of whose values they
// ask for before the first is there. What rows and scales are is in common/cache_insert.cu, whose layouts are larger.
//
// Macros: INPUT (bf16, f16 or float), SLOT (int64 or int), POWER_OF_TWO, ALIGNED, TOKENS.
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
    int lane = threadIdx.x % LANES, first = blockIdx.x * GROUPS * TOKENS + threadIdx.x / LANES;
    int64 slots[TOKENS];
    Raw8<INPUT> raw[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        int token = first + i * GROUPS;
        slots[i] = -1, raw[i] = {};
        if (token < num_tokens) slots[i] = slot_mapping[token], raw[i] = load_raw8(k + token * k_stride + 8 * lane);
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        float x[8];
        unpack8(raw[i], x);
        float amax = largest_of(x);
        if (slots[i] < 0 || slots[i] >= num_slots) continue;  // the warp meets again in largest_of()
        Token token = token_at<Layout>(pages, page_stride, block_size, slots[i]);
        int exponent = POWER_OF_TWO ? scale_exponent(amax, Layout::min_exponent) : 0;
        float scale = POWER_OF_TWO ? power_of_two(exponent) : fmaxf(div(amax, 448.0f), Layout::min_scale);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = POWER_OF_TWO ? x[j] * power_of_two(-exponent) : div(x[j], scale);
        store_e4m3x8(token.row + 8 * lane, x);
        if (lane == 0) store4(token.scales, __float_as_uint(scale));
    }
}
