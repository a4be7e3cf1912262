// The compressor of V4.1: pool one or two tokens, RMSNorm; save tokens in rings for later steps.
//
// Grid: first a CTA per request, then CTAs of four tokens. Block: 128 threads; a warp pools a token, lane i has the channels
// i, i + 32, ... of its row, so each access of a warp is contiguous. No shared memory.
//
// A request's CTA pools its first token, the only one that reads the ring, and saves the request's last tokens after that, as
// one of them may overwrite the row that was read.
//
// Macros: INPUT, WEIGHT and OUTPUT (float or bf16), SLOT and POSITION (int64 or int), RATIO (1 or 2), ROUND_POOLED.
#include "common/numbers.cuh"
#include "common/pdl.cuh"
#include "common/requests.cuh"

constexpr int DIM = 512, WARPS = 4, EACH = DIM / 32;
constexpr float LOG2_E = 1.4426950408889634f;

struct Rings {
    float* rows;
    int64 ring_stride, row_stride, count;  // count: slots of all rings
    int capacity;

    __device__ bool has(int64 slot) const { return slot >= 0 && slot < count; }
    __device__ float* row(int64 ring, int64 place) const { return rows + ring * ring_stride + place * row_stride; }
};

__device__ inline void assign(float x, float& y) { y = x; }
__device__ inline void assign(float x, bf16& y) { y = {uint16(pack(bf16{}, x, 0.0f))}; }

// Pools the row whose last token is `own`; `before` is the token before it. Called by a warp.
template <class Before>
__device__ inline void pool(const Before* before, const INPUT* own, const WEIGHT* weight, float eps, OUTPUT* out) {
    int lane = threadIdx.x % 32;
    float x[EACH], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int channel = lane + 32 * i;
        x[i] = to_float(own[channel]);
        if (RATIO == 2) {
            float a = to_float(before[DIM + channel]), b = to_float(own[DIM + channel]);
            float top = a != a || b != b ? a + b : fmaxf(a, b);
            if (top == -infinity()) top = 0.0f;
            float first = exp2_approx((a - top) * LOG2_E), second = exp2_approx((b - top) * LOG2_E), total = first + second;
            float sum = fmaf(first, to_float(before[channel]), second * x[i]);
            x[i] = total == 0.0f ? 0.0f : div(sum, total);
        }
        if (ROUND_POOLED) {
            bf16 rounded;
            assign(x[i], rounded);
            x[i] = to_float(rounded);
        }
        squares += x[i] * x[i];
    }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) squares += __shfl_xor_sync(~0u, squares, other);
    float scale = div(1.0f, sqrtf(div(squares, float(DIM)) + eps));
#pragma unroll
    for (int i = 0; i < EACH; ++i) assign(x[i] * scale * to_float(weight[lane + 32 * i]), out[lane + 32 * i]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
compress_latents(const INPUT* kv_score, int64 kv_stride, const WEIGHT* weight, const SLOT* slots, int num_slots,
                 OUTPUT* latents, int64 latents_stride, const POSITION* positions, const int* starts, int requests,
                 float* state, int64 ring_stride, int64 row_stride, int64 num_rows, int capacity, float eps) {
    pdl_wait();
    int warp = threadIdx.x / 32;
#if RATIO == 2
    Rings rings{state, ring_stride, row_stride, num_rows, capacity};
    if (blockIdx.x < requests) {
        int start = max(starts[blockIdx.x], 0), end = min(starts[blockIdx.x + 1], num_slots);
        if (start >= end || !rings.has(slots[start])) return;
        int64 position = positions[start], ring = slots[start] / capacity;
        if (warp == 0 && position > 0 && position % 2 == 1)
            pool(rings.row(ring, (position - 1) % capacity), kv_score + start * kv_stride, weight, eps,
                 latents + start * latents_stride);
        __syncthreads();
        for (int token = max(start, end - capacity) + warp; token < end; token += WARPS) {
            int64 slot = slots[token];
            if (!rings.has(slot)) continue;
            float* to = rings.row(slot / capacity, slot % capacity);
            for (int i = threadIdx.x % 32; i < 2 * DIM; i += 32) to[i] = to_float(kv_score[token * kv_stride + i]);
        }
        return;
    }
#endif
    int token = (blockIdx.x - (RATIO == 2 ? requests : 0)) * WARPS + warp;
    if (token >= num_slots) return;
    const INPUT* own = kv_score + token * kv_stride;
#if RATIO == 2
    int64 position = positions[token];
    if (!rings.has(slots[token]) || position < 0 || position % 2 == 0) return;
    int request = GatheredRows{starts, requests}.request(token);
    if (request < 0 || token <= max(starts[request], 0)) return;  // the first is its request's CTA's
    pool(own - kv_stride, own, weight, eps, latents + token * latents_stride);
#else
    if (slots[token] < 0) return;
    pool(own, own, weight, eps, latents + token * latents_stride);
#endif
}
