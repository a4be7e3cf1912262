// The compressor of V4.1: pool one or two tokens, RMSNorm; save tokens in rings for later steps.
//
// Grid: first a CTA per request, then one per RATIO neighbouring tokens: of two tokens at most one completes a row,
// unless the other one is the first token of its request. Block: 128 threads; thread i has the channels 4 i to 4 i + 3
// of a row. Shared memory: sums of squares.
//
// The CTA of a request pools the first token, the only one that reads the ring, and saves the last tokens of the
// request. A saved token may overwrite the row that was read: each thread reads its channels before it writes them.
// That row and the first token's position are saved for a repetition of the step (restart_rows, restart_positions; 0:
// none).
//
// Macros: INPUT, WEIGHT and OUTPUT (float or bf16), SLOT and POSITION (int64 or int), RATIO (1 or 2), ROUND_POOLED, WIDE (rows
// may be accessed 4 values at a time).
#include "common/packed.cuh"
#include "common/device.cuh"
#include "common/channels4.cuh"
#include "common/requests.cuh"
#include "common/rings.cuh"

constexpr int DIM = 512, THREADS = 128;
[[maybe_unused]] constexpr int SAVED_AT_ONCE = 2;
static_assert(4 * THREADS == DIM);

// The channels of a row that a thread has.
struct LatentRow {
    Channels4 kv[RATIO], score[RATIO], norm;

    static __device__ int channel() { return 4 * threadIdx.x; }

    template <class T> __device__ void load(int which, const T* token) {
        kv[which] = read4(token + channel());
        if (RATIO == 2) score[which] = read4(token + DIM + channel());
    }
    // The same for tokens of this step, which no thread writes: loaded before it is known whether they are needed.
    __device__ void load_early(int which, const INPUT* token) {
        kv[which] = read4_volatile(token + channel());
        if (RATIO == 2) score[which] = read4_volatile(token + DIM + channel());
    }
    __device__ void load_norm(const WEIGHT* weight) { norm = read4_volatile(weight + channel()); }

    // Pool both tokens, normalise, and write the row. Called by the CTA; no other call uses `squares`.
    __device__ void finish(float (&squares)[THREADS / 32], float eps, OUTPUT* out) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float& x = kv[0].x[j];
#if RATIO == 2
            float a = score[0].x[j], b = score[1].x[j];
            float top = a != a || b != b ? a + b : fmaxf(a, b);
            if (top == -infinity()) top = 0.0f;
            float first = exp2_approx((a - top) * LOG2_E), second = exp2_approx((b - top) * LOG2_E);
            float total = first + second;
            x = total == 0.0f ? 0.0f : div(fmaf(first, x, second * kv[1].x[j]), total);
#endif
            if (ROUND_POOLED) x = to_float(bf16{uint16(pack(bf16{}, x, 0.0f))});
            sum += x * x;
        }
#pragma unroll
        for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < THREADS / 32; ++i) sum += squares[i];
        float scale = div(1.0f, sqrtf(div(sum, float(DIM)) + eps));
#pragma unroll
        for (int j = 0; j < 4; ++j) kv[0].x[j] *= scale * norm.x[j];
        write4(out + channel(), kv[0]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 10)
    compress_latents(const INPUT* kv_score, int64 kv_stride, const WEIGHT* weight, const SLOT* slots, int num_slots, OUTPUT* latents,
                     int64 latents_stride, const POSITION* positions, const int* starts, int requests, float* state, int64 ring_stride,
                     int64 row_stride, int64 num_rows, int capacity, float* restart_rows, int64 restart_stride, int* restart_positions,
                     float eps) {
    __shared__ float squares[RATIO][THREADS / 32];
    pdl_wait();
    LatentRow row;
#if RATIO == 2
    Rings<float> rings{state, ring_stride, row_stride, num_rows, capacity};
    if (blockIdx.x < requests) {
        int start = max(starts[blockIdx.x], 0), end = min(starts[blockIdx.x + 1], num_slots);
        if (start >= end) return;
        int64 slot = slots[start], position = positions[start];
        if (!rings.has(slot)) return;
        bool pools = position > 0 && position % 2 == 1;
        int restart = 0;  // position at which the ring's last long step began
        if (pools) {
            if (restart_rows) restart = restart_positions[slot / capacity];
            row.load(0, rings.row(slot / capacity, (position - 1) % capacity));
            row.load_early(1, kv_score + start * kv_stride);
            row.load_norm(weight);
        }
#pragma unroll 1  // else registers spill on sm_120
        for (int first = max(start, end - capacity); first < end; first += SAVED_AT_ONCE) {
            int64 to[SAVED_AT_ONCE];
            Channels4 kv[SAVED_AT_ONCE], score[SAVED_AT_ONCE];
#pragma unroll
            for (int i = 0; i < SAVED_AT_ONCE; ++i) to[i] = first + i < end ? int64(slots[first + i]) : -1;
#pragma unroll
            for (int i = 0; i < SAVED_AT_ONCE; ++i) {
                const INPUT* from = kv_score + min(first + i, end - 1) * kv_stride + LatentRow::channel();
                kv[i] = read4_volatile(from), score[i] = read4_volatile(from + DIM);
            }
#pragma unroll
            for (int i = 0; i < SAVED_AT_ONCE; ++i)
                if (rings.has(to[i])) {
                    float* place = rings.row(to[i] / capacity, to[i] % capacity) + LatentRow::channel();
                    write4(place, kv[i]), write4(place + DIM, score[i]);
                }
        }
        if (restart_rows && pools) {
            float* saved = restart_rows + slots[start] / capacity * restart_stride + LatentRow::channel();
            if (restart == int(positions[start])) row.kv[0] = read4(saved), row.score[0] = read4(saved + DIM);
            else if (end - start >= capacity) write4(saved, row.kv[0]), write4(saved + DIM, row.score[0]), restart = int(positions[start]);
            else restart = 0;
        }
        if (pools) row.finish(squares[0], eps, latents + start * latents_stride);
        // All threads have read it: in a CTA that pools, before the barrier in `finish`.
        if (restart_rows && threadIdx.x == 0) restart_positions[slots[start] / capacity] = restart;
        return;
    }
    int token = 2 * (blockIdx.x - requests);
    // Usually the second token completes a row with the first one, so they are loaded before this is known.
    row.load_early(0, kv_score + token * kv_stride);
    row.load_early(1, kv_score + min(token + 1, num_slots - 1) * kv_stride);
    row.load_norm(weight);
    bool odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int64 position = token + i < num_slots ? int64(positions[token + i]) : 0;
        odd[i] = position > 0 && position % 2 == 1 && rings.has(slots[token + i]);
    }
    ++token;
#pragma unroll 1
    for (int i = 1; i >= 0; --i, --token) {
        if (!(i ? odd[1] : odd[0]) || token == 0) continue;
        if (i == 0) row.load_early(0, kv_score + (token - 1) * kv_stride), row.load_early(1, kv_score + token * kv_stride);
        int request = GatheredRows{starts, requests}.request_by_warp(token);
        if (request < 0 || token <= max(starts[request], 0)) continue;  // the CTA of the request has the first token
        row.finish(squares[i], eps, latents + token * latents_stride);
    }
#else
    int token = blockIdx.x;
    row.load_early(0, kv_score + token * kv_stride);
    row.load_norm(weight);
    if (slots[token] >= 0) row.finish(squares[0], eps, latents + token * latents_stride);
#endif
}
