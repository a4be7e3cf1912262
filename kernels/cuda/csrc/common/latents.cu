// The compressor of V4.1: pool one or two tokens, RMSNorm; save tokens in rings for later steps.
//
// Grid: first a CTA per request, then CTAs of four warps, each of which takes RATIO neighbouring tokens: of two, at most one
// completes a row, unless the other is its request's first. Block: 128 threads; lane i has the channels 4 i to 4 i + 3 of each 128
// of a row. No shared memory.
//
// A request's CTA pools its first token, the only one that reads the ring, and saves the request's last tokens once that row
// has been read, as one of them may overwrite it.
//
// Macros: INPUT, WEIGHT and OUTPUT (float or bf16), SLOT and POSITION (int64 or int), RATIO (1 or 2), ROUND_POOLED, WIDE (rows
// may be accessed 4 values at a time).
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/quads.cuh"
#include "common/requests.cuh"

constexpr int DIM = 512, WARPS = 4, QUADS = DIM / 128;

struct Rings {
    float* rows;
    int64 ring_stride, row_stride, count;  // count: slots of all rings
    int capacity;

    __device__ bool has(int64 slot) const { return slot >= 0 && slot < count; }
    __device__ float* row(int64 ring, int64 place) const { return rows + ring * ring_stride + place * row_stride; }
};

__device__ inline void write4(bf16* p, Quad q) {
    uint32 low = pack(bf16{}, q.x[0], q.x[1]), high = pack(bf16{}, q.x[2], q.x[3]);
#if WIDE
    *reinterpret_cast<uint2*>(p) = {low, high};
#else
    p[0] = {uint16(low)}, p[1] = {uint16(low >> 16)}, p[2] = {uint16(high)}, p[3] = {uint16(high >> 16)};
#endif
}

// What a lane has of a row. Two of its tokens are loaded before the first is used.
struct LatentRow {
    Quad kv[RATIO][QUADS], score[RATIO][QUADS];

    static __device__ int channel(int quad) { return 4 * (threadIdx.x % 32) + 128 * quad; }

    template <class T> __device__ void load(int which, const T* token) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            kv[which][i] = read4(token + channel(i));
            if (RATIO == 2) score[which][i] = read4(token + DIM + channel(i));
        }
    }

    // The same of the step's own tokens, which no thread writes: begins before it is known whether they are needed.
    __device__ void ask(int which, const INPUT* token) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            kv[which][i] = ask4(token + channel(i));
            if (RATIO == 2) score[which][i] = ask4(token + DIM + channel(i));
        }
    }

    // The mean of both tokens, its norm, and the row. Called by a warp.
    __device__ void finish(const WEIGHT* weight, float eps, OUTPUT* out) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& x = kv[0][i].x[j];
#if RATIO == 2
                float a = score[0][i].x[j], b = score[1][i].x[j];
                float top = a != a || b != b ? a + b : fmaxf(a, b);
                if (top == -infinity()) top = 0.0f;
                float first = exp2_approx((a - top) * LOG2_E), second = exp2_approx((b - top) * LOG2_E);
                float total = first + second, sum = fmaf(first, x, second * kv[1][i].x[j]);
                x = total == 0.0f ? 0.0f : div(sum, total);
#endif
                if (ROUND_POOLED) x = to_float(bf16{uint16(pack(bf16{}, x, 0.0f))});
                squares += x * x;
            }
        }
#pragma unroll
        for (int other = 1; other < 32; other *= 2) squares += __shfl_xor_sync(~0u, squares, other);
        float scale = div(1.0f, sqrtf(div(squares, float(DIM)) + eps));
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            Quad norm = read4(weight + channel(i));
#pragma unroll
            for (int j = 0; j < 4; ++j) kv[0][i].x[j] *= scale * norm.x[j];
            write4(out + channel(i), kv[0][i]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
compress_latents(const INPUT* kv_score, int64 kv_stride, const WEIGHT* weight, const SLOT* slots, int num_slots,
                 OUTPUT* latents, int64 latents_stride, const POSITION* positions, const int* starts, int requests,
                 float* state, int64 ring_stride, int64 row_stride, int64 num_rows, int capacity, float eps) {
    pdl_wait();
    int warp = threadIdx.x / 32;
    LatentRow row;
#if RATIO == 2
    Rings rings{state, ring_stride, row_stride, num_rows, capacity};
    if (blockIdx.x < requests) {
        int start = max(starts[blockIdx.x], 0), end = min(starts[blockIdx.x + 1], num_slots);
        if (start >= end) return;
        int64 slot = slots[start], position = positions[start];
        if (!rings.has(slot)) return;
        bool pools = warp == 0 && position > 0 && position % 2 == 1;
        if (pools) {
            row.load(0, rings.row(slot / capacity, (position - 1) % capacity));
            row.load(1, kv_score + start * kv_stride);
        }
        __syncthreads();
        // The warp that pools saves last.
        for (int token = max(start, end - capacity) + (warp + WARPS - 1) % WARPS; token < end; token += WARPS) {
            int64 slot = slots[token];
            if (!rings.has(slot)) continue;
            const INPUT* from = kv_score + token * kv_stride;
            float* to = rings.row(slot / capacity, slot % capacity);
#pragma unroll
            for (int i = 0; i < 2 * QUADS; ++i) write4(to + LatentRow::channel(i), read4(from + LatentRow::channel(i)));
        }
        if (pools) row.finish(weight, eps, latents + start * latents_stride);
        return;
    }
#endif
    int token = ((blockIdx.x - (RATIO == 2 ? requests : 0)) * WARPS + warp) * RATIO;
#if RATIO == 2
    bool odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int64 position = token + i < num_slots ? int64(positions[token + i]) : 0;
        odd[i] = position > 0 && position % 2 == 1 && rings.has(slots[token + i]);
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i, ++token) {
        if (!(i ? odd[1] : odd[0]) || token == 0) continue;
        const INPUT* own = kv_score + token * kv_stride;
        row.ask(0, own - kv_stride);
        row.ask(1, own);
        int request = GatheredRows{starts, requests}.request_by_warp(token);
        if (request < 0 || token <= max(starts[request], 0)) continue;  // the first is its request's CTA's
        row.finish(weight, eps, latents + token * latents_stride);
    }
#else
    if (token >= num_slots || slots[token] < 0) return;
    row.load(0, kv_score + token * kv_stride);
    row.finish(weight, eps, latents + token * latents_stride);
#endif
}
