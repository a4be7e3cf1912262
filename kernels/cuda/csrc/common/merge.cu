// Merge attention over two sets of keys.
//
// Grid: a CTA per token and head. Block: threads stride over the values. No shared memory.
//
// Macros: VALUE (bf16, f16 or float).
#include "common/device.cuh"

__device__ inline void store(float* p, float x) { *p = x; }
__device__ inline void store(bf16* p, float x) { p->bits = uint16(pack(bf16{}, x, 0.0f)); }
__device__ inline void store(f16* p, float x) { p->bits = uint16(pack(f16{}, x, 0.0f)); }

// An infinite LSE of either sign means that no key was attended.
__device__ inline float finite_or_minus_infinity(float lse) { return lse == infinity() ? -infinity() : lse; }

extern "C" __global__ void merge_attn_states(VALUE* output, int64 output_stride_t, int64 output_stride_h, const VALUE* prefix,
                                             int64 prefix_stride_t, int64 prefix_stride_h, const float* prefix_lse,
                                             int64 prefix_lse_stride_h, int64 prefix_lse_stride_t, const VALUE* suffix,
                                             int64 suffix_stride_t, int64 suffix_stride_h, const float* suffix_lse,
                                             int64 suffix_lse_stride_h, int64 suffix_lse_stride_t, float* output_lse,
                                             int64 output_lse_stride_h, int64 output_lse_stride_t, int heads, int dim) {
    int64 token = blockIdx.x / heads, head = blockIdx.x % heads;
    float a = finite_or_minus_infinity(prefix_lse[head * prefix_lse_stride_h + token * prefix_lse_stride_t]);
    float b = finite_or_minus_infinity(suffix_lse[head * suffix_lse_stride_h + token * suffix_lse_stride_t]);
    float top = a != a || a > b ? a : b;  // NaN if either is NaN
    bool empty = top == -infinity();
    float weight_a = empty ? 0.0f : expf(a - top), weight_b = empty ? 0.0f : expf(b - top);
    float total = weight_a + weight_b;
    if (empty) total = 1.0f;
    weight_a /= total, weight_b /= total;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float x = 0.0f;
        // A partial result of weight 0 may hold any value.
        if (weight_a != 0.0f) x += weight_a * to_float(prefix[token * prefix_stride_t + head * prefix_stride_h + d]);
        if (weight_b != 0.0f) x += weight_b * to_float(suffix[token * suffix_stride_t + head * suffix_stride_h + d]);
        store(output + token * output_stride_t + head * output_stride_h + d, x);
    }
    if (output_lse && threadIdx.x == 0)
        output_lse[head * output_lse_stride_h + token * output_lse_stride_t] = empty ? infinity() : top + logf(total);
}
