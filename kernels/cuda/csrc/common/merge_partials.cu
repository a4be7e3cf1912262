// Merge the attention results of several ranks, each over its own keys, by their LSE; the sink is applied once.
//
// Grid: a warp per 256 values of a head of a query. Block: 128 threads. No shared memory.
//
// Macros: VALUE (bf16, f16 or float), ALIGNED (rows start at multiples of 16 bytes).
#include "common/device.cuh"

constexpr int THREADS = 128;
constexpr int STEP = 32 * 8;  // values that a warp takes at a time

__device__ inline void store_value(float* p, float x) { *p = x; }
__device__ inline void store_value(bf16* p, float x) { p->bits = uint16(pack(bf16{}, x, 0.0f)); }
__device__ inline void store_value(f16* p, float x) { p->bits = uint16(pack(f16{}, x, 0.0f)); }

__device__ inline float larger_or_nan(float x, float y) { return x != x || x > y ? x : y; }

// An infinite LSE of either sign means that no key was attended.
__device__ inline float log_sum_at(const float* lse) { return *lse == infinity() ? -infinity() : *lse; }

extern "C" __global__ void __launch_bounds__(THREADS)
    merge_partials(const VALUE* parts, int64 part_stride, int64 part_stride_b, int64 part_stride_s, int64 part_stride_h, const float* lses,
                   int64 lse_part_stride, int64 lse_part_stride_b, int64 lse_part_stride_h, int64 lse_part_stride_s, const float* attn_sink,
                   VALUE* out, int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b,
                   int64 lse_stride_h, int64 lse_stride_s, int count, int s_q, int heads, int dim, int64 pieces) {
    pdl_wait();
    int64 piece = (int64(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (piece >= pieces) return;
    int lane = threadIdx.x % 32, steps = (dim + STEP - 1) / STEP, step = int(piece % steps);
    int64 row = piece / steps;
    int64 head = row % heads, query = row / heads % s_q, request = row / heads / s_q;
    lses += request * lse_part_stride_b + head * lse_part_stride_h + query * lse_part_stride_s;
    parts += request * part_stride_b + query * part_stride_s + head * part_stride_h;
    out += request * out_stride_b + query * out_stride_s + head * out_stride_h;

    int d = step * STEP + lane * 8;
    bool eight = d + 8 <= dim;  // otherwise fewer, at the end of a row
    Raw8<VALUE> next{};         // loaded one part ahead, before the weight of the part is known
    if (eight) next = load_raw8(parts + d);

    // A lane reads every 32nd part; a NaN in any part wins.
    float top = -infinity();
    for (int i = lane; i < count; i += 32) top = larger_or_nan(log_sum_at(lses + i * lse_part_stride), top);
#pragma unroll
    for (int other = 16; other; other /= 2) top = larger_or_nan(__shfl_xor_sync(~0u, top, other), top);
    bool empty = top == -infinity();
    if (empty) top = 0.0f;
    float total = 0.0f;
    for (int i = lane; i < count; i += 32) total += expf(log_sum_at(lses + i * lse_part_stride) - top);
#pragma unroll
    for (int other = 16; other; other /= 2) total += __shfl_xor_sync(~0u, total, other);
    if (lane == 0 && step == 0)
        lse[request * lse_stride_b + head * lse_stride_h + query * lse_stride_s] = empty ? infinity() : top + logf(total);
    float whole = empty ? 1.0f : attn_sink ? total + expf(attn_sink[head] - top) : total;

    float x[8] = {};
    for (int base = 0; base < count; base += 32) {
        float mine = base + lane < count ? expf(log_sum_at(lses + (base + lane) * lse_part_stride) - top) / whole : 0.0f;
        for (int i = base; i < min(base + 32, count); ++i) {
            float weight = __shfl_sync(~0u, mine, i - base), y[8];
            const VALUE* part = parts + i * part_stride + d;
            if (eight) {
                unpack8(next, y);
                if (i + 1 < count) next = load_raw8(part + part_stride);
            } else {
#pragma unroll
                for (int k = 0; k < 8; ++k) y[k] = d + k < dim ? to_float(part[k]) : 0.0f;
            }
            if (weight == 0.0f) continue;  // the part may hold any value
#pragma unroll
            for (int k = 0; k < 8; ++k) x[k] += weight * y[k];
        }
    }
    if (eight) {
        store_values8(out + d, x);
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (d + k < dim) store_value(out + d + k, x[k]);
    }
}
