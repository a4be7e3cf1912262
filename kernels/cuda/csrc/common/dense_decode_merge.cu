// Combine the partial results of dense MLA decode.
//
// `parts` has the number of partial results of each token (common/dense/work.cuh).
//
// Grid: a CTA per head of an entry of `parts`; with MAX_SETS 1 also fewer CTAs, which stride over them. Block: up to
// MAX_SETS sets of four warps; each thread has four values. Shared memory: sums of the other sets. Partial results are
// in L2, so latency counts rather than bytes: log-sums and values of up to AT_ONCE splits are loaded together. More
// splits are divided among several sets.
//
// Macros: VALUE (bf16 or f16), ALIGNED, AT_ONCE (parts that a thread asks for together), MAX_SETS.
#include "common/device.cuh"
#include "common/latent.cuh"

constexpr int SET = LATENT_V / 4;  // threads that hold a head's values
#if __CUDA_ARCH__ >= 900
constexpr int MANY_BLOCKS = 12;  // per SM
#else
constexpr int MANY_BLOCKS = 10;  // 40 registers are too few
#endif
constexpr int MIN_BLOCKS = MAX_SETS > 1 ? 1 : AT_ONCE > 4 ? 8 : MANY_BLOCKS;

// Over splits: values times exp(log-sum - top).
struct PartSum {
    float top, total;
    float4 x;

    __device__ void scale(float factor) { total *= factor, x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor; }
    __device__ void add(float weight, float weight_of_total, float4 part) {
        total += weight_of_total;
        x.x += weight * part.x, x.y += weight * part.y, x.z += weight * part.z, x.w += weight * part.w;
    }
};

__device__ inline float base_of(float top) { return top == -infinity() ? 0.0f : top; }  // avoids NaN without keys

// One head of a token that is divided: {token, range of its first part, number of its parts}.
__device__ inline void merge(uint4 entry, int head, const float* partial_out, const float* partial_lse, int s_q, int heads, VALUE* out,
                             int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b, int64 lse_stride_h,
                             int64 lse_stride_s) {
    int thread = threadIdx.x % SET, set = threadIdx.x / SET, sets = blockDim.x / SET;
    // Row of part i of a token: first_row + 2 * i, but one more for part 0.
    int token = int(entry.x), splits = int(entry.z);
    int b = token / s_q, s = token % s_q;
    int64 part_heads = 2 * int64(heads), part = entry.y * part_heads + head + set * AT_ONCE * part_heads;
    const float* lse_at = partial_lse + part;
    const float4* at = reinterpret_cast<const float4*>(partial_out + part * LATENT_V) + thread;
    out += b * out_stride_b + s * out_stride_s + head * out_stride_h + 4 * thread;
    lse += b * lse_stride_b + head * lse_stride_h + s * lse_stride_s;
    PartSum sum{-infinity(), 0.0f, {}};
    for (int first = set * AT_ONCE; first < splits; first += sets * AT_ONCE) {
        float log_sums[AT_ONCE];
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {  // volatile, so that the last load does not wait for the first
            log_sums[i] = -infinity(), x[i] = {};
            if (first + i >= splits) continue;
            int64 row = i * part_heads + (first + i == 0) * heads;
            asm volatile("ld.global.f32 %0, [%1];" : "=f"(log_sums[i]) : "l"(lse_at + row));
            asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x[i].x), "=f"(x[i].y), "=f"(x[i].z), "=f"(x[i].w)
                         : "l"(at + row * (LATENT_V / 4)));
        }
        float before = sum.top;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sum.top = fmaxf(sum.top, log_sums[i]);  // a NaN reaches the total instead
        float base = base_of(sum.top);
        sum.scale(expf(before - base));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            float weight = expf(log_sums[i] - base);
            sum.add(weight, weight, x[i]);
        }
        lse_at += sets * AT_ONCE * part_heads, at += sets * AT_ONCE * part_heads * (LATENT_V / 4);
    }
#if MAX_SETS > 1
    __shared__ PartSum sums[MAX_SETS - 1][SET];
    if (set) sums[set - 1][thread] = sum;
    __syncthreads();
    if (set) return;
    for (int i = 0; i < sets - 1; ++i) {
        PartSum other = sums[i][thread];
        float before = sum.top;
        sum.top = fmaxf(sum.top, other.top);
        float base = base_of(sum.top), weight = expf(other.top - base);
        sum.scale(expf(before - base));
        sum.add(weight, weight * other.total, other.x);
    }
#endif
    bool empty = sum.top == -infinity() && sum.total == 0.0f;
    float factor = empty ? 0.0f : 1.0f / sum.total;
    store_pair(out, factor * sum.x.x, factor * sum.x.y);
    store_pair(out + 2, factor * sum.x.z, factor * sum.x.w);
    if (thread == 0) *lse = empty ? infinity() : sum.top + logf(sum.total);
}

extern "C" __global__ void __launch_bounds__(SET* MAX_SETS, MIN_BLOCKS)
    mla_decode_merge(const float* partial_out, const float* partial_lse, const uint4* parts, int entries, int s_q, int heads, VALUE* out,
                     int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b, int64 lse_stride_h,
                     int64 lse_stride_s) {
    pdl_release();
    auto any_divided = [&] {
        bool any = false;
        for (int i = threadIdx.x; i < entries; i += blockDim.x) any |= parts[i].z > 1;
        return __syncthreads_or(any);
    };
    // The division precedes the decode, so it is usually complete when this kernel starts. Partial results are not.
    bool any = any_divided();
    pdl_wait();
    if (!any && !any_divided()) return;
    for (int item = blockIdx.x; item < entries * heads; item += gridDim.x) {
        uint4 entry = parts[item / heads];
        if (entry.z > 1)
            merge(entry, item % heads, partial_out, partial_lse, s_q, heads, out, out_stride_b, out_stride_s, out_stride_h, lse,
                  lse_stride_b, lse_stride_h, lse_stride_s);
    }
}
