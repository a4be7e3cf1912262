// Quantise the indexer's keys to FP8 and insert them into a paged cache.
//
// Grid: eight lanes per token. Block: 128 threads. No shared memory. A token's 128 values have one scale; a lane has 8 values
// of each of two parts. common/cache_insert.cu, for larger layouts, explains rows and scales.
//
// The kernel is bound by instructions as well as memory. The largest magnitude is therefore found from the bits, which
// have the order of the magnitudes, two 16-bit values at a time. Infinities and NaNs are ignored: if one is the
// largest, the values are scanned again.
//
// Macros: INPUT (bf16, f16 or float), SLOT (int64 or int), POWER_OF_TWO, ALIGNED.
#include "common/pages.cuh"
#include "common/device.cuh"

using Layout = INDEXER_FP8;
constexpr int PARTS = 2, LANES = INDEXER_FP8::head_dim / 8 / PARTS, THREADS = 128, GROUPS = THREADS / LANES;

// The magnitude bits of a word, the larger ones of two words, and the value of the larger half.
template <class T> __device__ inline uint32 magnitudes(T, uint32 word) { return word & 0x7fff7fff; }
__device__ inline uint32 magnitudes(float, uint32 word) { return word & 0x7fffffff; }
template <class T> __device__ inline uint32 larger(T, uint32 a, uint32 b) { return __vmaxu2(a, b); }
__device__ inline uint32 larger(float, uint32 a, uint32 b) { return max(a, b); }
__device__ inline float value_of(bf16, uint32 x) { return to_float(bf16{uint16(max(x & 0xffff, x >> 16))}); }
__device__ inline float value_of(f16, uint32 x) { return to_float(f16{uint16(max(x & 0xffff, x >> 16))}); }
__device__ inline float value_of(float, uint32 x) { return __uint_as_float(x); }

// Largest finite magnitude of the lanes. Called by all lanes of a warp.
__device__ inline float largest_of(const Raw8<INPUT> (&raw)[PARTS]) {
    constexpr int WORDS = sizeof(Raw8<INPUT>) / 4;
    uint32 bits = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < WORDS; ++i) bits = larger(INPUT{}, bits, magnitudes(INPUT{}, reinterpret_cast<const uint32*>(&raw[part])[i]));
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) bits = larger(INPUT{}, bits, __shfl_xor_sync(~0u, bits, lane));
    float largest = value_of(INPUT{}, bits);
    if (__all_sync(~0u, largest < infinity())) return largest;
    largest = 0.0f;
    for (int part = 0; part < PARTS; ++part) {
        float x[8];
        unpack8(raw[part], x);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]) < infinity() ? fabsf(x[i]) : 0.0f);
    }
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
    return largest;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    indexer_k_quant_and_cache(const INPUT* k, int64 k_stride, const SLOT* slot_mapping, int num_tokens, uint8* pages, int64 page_stride,
                              int64 num_slots, int block_size) {
    pdl_release();
    pdl_wait();
    int lane = threadIdx.x % LANES, token = blockIdx.x * GROUPS + threadIdx.x / LANES;
    int64 slot = -1;
    Raw8<INPUT> raw[PARTS] = {};
    if (token < num_tokens) {
        slot = slot_mapping[token];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) raw[part] = load_raw8(k + token * k_stride + 8 * (part * LANES + lane));
    }
    float amax = largest_of(raw);
    if (slot < 0 || slot >= num_slots) return;
    Token to = token_at<Layout>(pages, page_stride, block_size, slot);
    int exponent = POWER_OF_TWO ? scale_exponent(amax, Layout::min_exponent) : 0;
    float scale = POWER_OF_TWO ? power_of_two(exponent) : fmaxf(div(amax, 448.0f), Layout::min_scale);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        float x[8];
        unpack8(raw[part], x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = POWER_OF_TWO ? x[i] * power_of_two(-exponent) : div(x[i], scale);
        store_e4m3x8(to.row + 8 * (part * LANES + lane), x);
    }
    if (lane == 0) store4(to.scales, __float_as_uint(scale));
}
