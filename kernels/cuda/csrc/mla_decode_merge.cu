// Merge what the splits of dense MLA decode have left. A thread block takes a query token and head.
//
// Macros: VALUE (bf16 or f16), ALIGNED.
#include "overlap.cuh"
#include "packed.cuh"

constexpr int V_DIM = 512, THREADS = 128, MAX_SPLITS = 256;

__device__ inline float warp_max(float x) {
    for (int lane = 16; lane; lane /= 2) {
        float other = __shfl_xor_sync(~0u, x, lane);
        x = x != x || x > other ? x : other;  // NaN wins
    }
    return x;
}
__device__ inline float warp_sum(float x) {
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
mla_decode_merge(const float* partial_out, const float* partial_lse, int splits, int s_q, int heads, VALUE* out,
                 int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b,
                 int64 lse_stride_h, int64 lse_stride_s) {
    overlap_with_previous_kernel();
    __shared__ float weights[MAX_SPLITS];
    int head = blockIdx.x % heads, token = blockIdx.x / heads, b = token / s_q, s = token % s_q;
    int64 first = int64(token) * splits * heads + head;
    if (threadIdx.x < 32) {
        float top = -infinity(), total = 0.0f;
        for (int i = threadIdx.x; i < splits; i += 32) {
            float x = weights[i] = partial_lse[first + int64(i) * heads];
            top = x != x || x > top ? x : top;
        }
        top = warp_max(top);
        bool empty = top == -infinity();
        for (int i = threadIdx.x; i < splits; i += 32) total += weights[i] = empty ? 0.0f : expf(weights[i] - top);
        total = warp_sum(total);
        for (int i = threadIdx.x; i < splits; i += 32) weights[i] *= empty ? 0.0f : 1.0f / total;
        if (threadIdx.x == 0)
            lse[b * lse_stride_b + head * lse_stride_h + s * lse_stride_s] = empty ? infinity() : top + logf(total);
    }
    __syncthreads();
    float4 sum = {};
    const float4* parts = reinterpret_cast<const float4*>(partial_out + first * V_DIM) + threadIdx.x;
#pragma unroll 8
    for (int i = 0; i < splits; ++i) {
        float weight = weights[i];
        float4 part = parts[int64(i) * heads * (V_DIM / 4)];
        sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
    }
    VALUE* to = out + b * out_stride_b + s * out_stride_s + head * out_stride_h + 4 * threadIdx.x;
    store_pair(to, sum.x, sum.y);
    store_pair(to + 2, sum.z, sum.w);
}
