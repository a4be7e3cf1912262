// Merge what the splits of dense MLA decode have left. A thread block takes a query token and head.
//
// Macros: VALUE (bf16 or f16), ALIGNED.
#include "packed.cuh"

constexpr int V_DIM = 512, THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
mla_decode_merge(const float* partial_out, const float* partial_lse, int splits, int s_q, int heads, VALUE* out,
                 int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b,
                 int64 lse_stride_h, int64 lse_stride_s) {
    int head = blockIdx.x % heads, token = blockIdx.x / heads, b = token / s_q, s = token % s_q;
    int64 first = int64(token) * splits * heads + head;
    float top = -infinity(), total = 0.0f;
    for (int i = 0; i < splits; ++i) {
        float x = partial_lse[first + int64(i) * heads];
        top = x != x || x > top ? x : top;  // NaN wins
    }
    bool empty = top == -infinity();
    float4 sum = {};
    for (int i = 0; i < splits; ++i) {
        float x = partial_lse[first + int64(i) * heads];
        if (x == -infinity()) continue;
        float weight = expf(x - top);
        total += weight;
        float4 part = reinterpret_cast<const float4*>(partial_out + (first + int64(i) * heads) * V_DIM)[threadIdx.x];
        sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
    }
    float share = empty ? 0.0f : 1.0f / total;
    VALUE* to = out + b * out_stride_b + s * out_stride_s + head * out_stride_h + 4 * threadIdx.x;
    store_pair(to, sum.x * share, sum.y * share);
    store_pair(to + 2, sum.z * share, sum.w * share);
    if (threadIdx.x == 0)
        lse[b * lse_stride_b + head * lse_stride_h + s * lse_stride_s] = empty ? infinity() : top + logf(total);
}
