// RMSNorm and RoPE before and after sparse attention. Rows of 512 values take a warp each.
//
//                              grid                     block
//   qnorm_rope_and_insert      (tokens, heads / 4)      128           h query heads and the row of the window cache, the last
//                                                                     of h + 1
//   norm_rope_and_insert       a warp per row           128           RMSNorm if it has a weight
//   inverse_rope_and_quantize  a warp per head          128           128 values, 8 lanes, have one scale
//   fused_q_kv_rmsnorm         (tokens, 2)              up to 1,024   blockIdx.y 0: a query's row, 1: a key's; UNIT values per
//                                                                     thread at a time
//   apply_rope                 (tokens, strided heads)  256           UNIT values per thread
//
// Shared memory: only in fused_q_kv_rmsnorm, a float per warp.
//
// Macros: LAYOUT, SLOT and POSITION (int64 or int), WEIGHT (float or bf16), UNIT (8, 2, or 1 for halves), IN_HALVES and SSMAX (apply_rope), ROUND_ROWS (rows are rounded
// before they are quantised: norm_rope_and_insert), ALIGNED. Rows are bf16.
#include "common/device.cuh"
#include "common/warp_row.cuh"

constexpr int VALUES = 512 / 32;
using Row = WarpRow<VALUES>;

__device__ inline Row load_row(const bf16* p) {
    Row row;
    row.lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < VALUES; i += 8) {
        float x[8];
        unpack8(load_raw8(p + row.first() + i), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) row.x[i + j] = x[j];
    }
    return row;
}

// A head of a query. Lane l has values [8 l, 8 l + 8) of both halves, so that a warp's accesses are contiguous.
struct Query {
    float x[2][8];
    int lane;

    __device__ void load(const bf16* p) {
#pragma unroll
        for (int half = 0; half < 2; ++half) unpack8(load_raw8(p + 256 * half + 8 * lane), x[half]);
    }

    __device__ void store(bf16* p) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) store_values8(p + 256 * half + 8 * lane, x[half]);
    }

    // x / sqrt(mean(x^2) + eps), rotated. Cosines and sines are loaded before the reduction of the sum.
    __device__ void normalize_and_rotate(float eps, const float* rotation, int rope_dim) {
        float cosines[2][4], sines[2][4], total = 0.0f;
        int start = 512 - rope_dim;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int at = first(i);
            if (at >= start) {
                cosines[i / 4][i % 4] = rotation[(at - start) / 2];
                sines[i / 4][i % 4] = rotation[(rope_dim + at - start) / 2];
            }
            total += x[i / 4][2 * (i % 4)] * x[i / 4][2 * (i % 4)];
            total += x[i / 4][2 * (i % 4) + 1] * x[i / 4][2 * (i % 4) + 1];
        }
#pragma unroll
        for (int other = 1; other < 32; other *= 2) total += __shfl_xor_sync(~0u, total, other);
        float scale = div(1.0f, sqrtf(total * (1.0f / 512) + eps));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float a = x[i / 4][2 * (i % 4)] * scale, b = x[i / 4][2 * (i % 4) + 1] * scale;
            if (first(i) >= start) {
                float cos = cosines[i / 4][i % 4], sin = sines[i / 4][i % 4], before = a;
                a = a * cos - b * sin;
                b = b * cos + before * sin;
            }
            x[i / 4][2 * (i % 4)] = a, x[i / 4][2 * (i % 4) + 1] = b;
        }
    }

    // First value of pair i in the head.
    __device__ int first(int i) const { return i / 4 * 256 + 8 * lane + 2 * (i % 4); }
};

// Grid: (tokens, CTAs): a warp per head of the token, and then one for its row.
extern "C" __global__ void __launch_bounds__(128)
    qnorm_rope_and_insert(const bf16* q, int64 q_token, int64 q_head, const bf16* kv, int64 kv_token, bf16* out, int64 out_token,
                          int64 out_head, int heads, const SLOT* slots, int num_slots_given, const POSITION* positions,
                          const float* cos_sin, int64 cos_stride, int max_position, int rope_dim, float eps, uint8* pages,
                          int64 page_stride, int64 num_slots, int block_size) {
    pdl_wait();
    int token = blockIdx.x, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (head > heads) return;
    if (head < heads) {
        Query query;
        query.lane = threadIdx.x % 32;
        query.load(q + token * q_token + head * q_head);
        const float* rotation = rotation_at(cos_sin, cos_stride, max_position, positions[token]);
        query.normalize_and_rotate(eps, rotation, rope_dim);
        query.store(out + token * out_token + head * out_head);
        return;
    }
    if (token >= num_slots_given) return;
    int64 slot = slots[token];
    if (slot < 0 || slot >= num_slots) return;
    Row row = load_row(kv + token * kv_token);
    row.rotate(rotation_at(cos_sin, cos_stride, max_position, positions[token]), rope_dim, 1.0f);
    row.insert<LAYOUT>(token_at<LAYOUT>(pages, page_stride, block_size, slot));
}

extern "C" __global__ void __launch_bounds__(128)
    norm_rope_and_insert(const bf16* kv, int64 kv_token, const WEIGHT* weight, int rows, const SLOT* slots, const POSITION* positions,
                         const float* cos_sin, int64 cos_stride, int max_position, int rope_dim, float eps, uint8* pages, int64 page_stride,
                         int64 num_slots, int block_size) {
    pdl_wait();
    int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= rows) return;
    int64 slot = slots[token];
    if (slot < 0 || slot >= num_slots) return;
    Row row = load_row(kv + token * kv_token);
    if (weight) {
        row.normalize(row.squares(), eps);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) row.x[i] *= to_float(weight[row.first() + i]);
    }
    row.rotate(rotation_at(cos_sin, cos_stride, max_position, positions[token]), rope_dim, 1.0f);
    row.insert<LAYOUT, ROUND_ROWS>(token_at<LAYOUT>(pages, page_stride, block_size, slot));
}

extern "C" __global__ void __launch_bounds__(128)
    inverse_rope_and_quantize(const bf16* o, int64 o_token, int64 o_head, int tokens, int heads, int heads_of_group,
                              const POSITION* positions, const float* cos_sin, int64 cos_stride, int max_position, int rope_dim,
                              int powers_of_two, uint8* values, int64 values_group, int64 values_token, float* scales, int64 scales_group,
                              int64 scales_token) {
    pdl_wait();
    int64 item = int64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (item >= int64(tokens) * heads) return;
    int token = int(item / heads), head = int(item % heads);
    Row row = load_row(o + token * o_token + head * o_head);
    row.rotate(rotation_at(cos_sin, cos_stride, max_position, positions[token]), rope_dim, -1.0f);
    row.round(bf16{});
    float amax = fmaxf(row.largest_of_tile<8>(), 1e-10f);
    int exponent = scale_exponent(amax, -126);
    float scale = powers_of_two ? power_of_two(exponent) : div(amax, 448.0f);
    int group = head / heads_of_group, place = head % heads_of_group;
    uint8* to = values + group * values_group + token * values_token + 512 * place + row.first();
    row.store_e4m3(to, power_of_two(-exponent), powers_of_two ? 1.0f : scale);
    if (row.lane % 8 == 0) scales[group * scales_group + token * scales_token + 4 * place + row.lane / 8] = scale;
}

extern "C" __global__ void __launch_bounds__(1024)
    fused_q_kv_rmsnorm(const bf16* qr, int64 qr_stride, int q_dim, const WEIGHT* q_weight, bf16* q_out, int64 q_out_stride, const bf16* kv,
                       int64 kv_stride, int kv_dim, const WEIGHT* kv_weight, bf16* kv_out, int64 kv_out_stride, float eps) {
    __shared__ float partial[32];
    pdl_wait();
    bool keys = blockIdx.y == 1;
    int dim = keys ? kv_dim : q_dim;
    const bf16* x = keys ? kv + blockIdx.x * kv_stride : qr + blockIdx.x * qr_stride;
    const WEIGHT* weight = keys ? kv_weight : q_weight;
    bf16* out = keys ? kv_out + blockIdx.x * kv_out_stride : q_out + blockIdx.x * q_out_stride;
    float total = 0.0f;
#if UNIT == 8  // once per thread
    int at = 8 * threadIdx.x;
    float values[8] = {}, weights[8];
    if (at < dim) {
        unpack8(load_raw8(x + at), values);
        unpack8(load_raw8(weight + at), weights);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) total += values[i] * values[i];
#else
    for (int i = threadIdx.x; i < dim; i += blockDim.x) total += to_float(x[i]) * to_float(x[i]);
#endif
#pragma unroll
    for (int other = 1; other < 32; other *= 2) total += __shfl_xor_sync(~0u, total, other);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0.0f;
    for (int i = 0; i < blockDim.x / 32; ++i) total += partial[i];
    float scale = div(1.0f, sqrtf(div(total, float(dim)) + eps));
#if UNIT == 8
    if (at >= dim) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = values[i] * scale * weights[i];
    store_values8(out + at, values);
#else
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        out[i] = bf16{uint16(pack(bf16{}, to_float(x[i]) * scale * to_float(weight[i]), 0.0f))};
#endif
}

// Grid: (tokens, CTAs that stride over the token's heads). A thread takes UNIT neighbouring values that are not rotated, or
// are rotated in neighbours; or, in IN_HALVES, UNIT values of each half. Values that stay are not written if x is rotated in
// place (copies 0).
extern "C" __global__ void __launch_bounds__(256)
    apply_rope(const bf16* x, int64 x_token, int64 x_head, bf16* out, int64 out_token, int64 out_head, int heads, int dim, int copies,
               const POSITION* positions, const float* cos_sin, int64 cos_stride, int max_position, int rope_dim, float direction,
               int rope_first, const float* ssmax_scale, const float* ssmax_bias) {
    pdl_wait();
    int half = rope_dim / 2, rotations = rope_dim / (UNIT * (IN_HALVES + 1)), units = rotations + copies;
    int64 token = blockIdx.x, position = positions[token];
    const float* rotation = rotation_at(cos_sin, cos_stride, max_position, position);
    for (int64 item = int64(blockIdx.y) * blockDim.x + threadIdx.x; item < int64(heads) * units; item += int64(gridDim.y) * blockDim.x) {
        int64 head = item / units;
        int unit = int(item % units), at = UNIT * unit;
        bool rotates = unit < rotations;
        if (rotates) at += rope_first ? 0 : dim - rope_dim;
        else at += rope_first ? rope_dim - UNIT * rotations : -UNIT * rotations;
        const bf16* source = x + token * x_token + head * x_head + at;
        bf16* target = out + token * out_token + head * out_head + at;
        float factor = SSMAX ? head_factor(ssmax_scale[head], ssmax_bias[head], position) : 1.0f;
#if UNIT == 8
        Raw8<bf16> raw = load_raw8(source);
        if (!rotates && !SSMAX) {
            store_raw8(target, raw);
            continue;
        }
        float values[8];
        unpack8(raw, values);
        if (SSMAX)
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] *= factor;
        if (!rotates) {
            store_values8(target, values);
            continue;
        }
#if IN_HALVES
        float others[8], cosines[8], sines[8];
        unpack8(load_raw8(source + half), others);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            *reinterpret_cast<float4*>(cosines + i) = *reinterpret_cast<const float4*>(rotation + UNIT * unit + i);
            *reinterpret_cast<float4*>(sines + i) = *reinterpret_cast<const float4*>(rotation + half + UNIT * unit + i);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float a = values[i], b = SSMAX ? others[i] * factor : others[i], sine = sines[i] * direction;
            values[i] = a * cosines[i] - b * sine, others[i] = b * cosines[i] + a * sine;
        }
        store_values8(target, values);
        store_values8(target + half, others);
#else
        int pair = UNIT / 2 * unit;
        float4 cos = *reinterpret_cast<const float4*>(rotation + pair);
        float4 sin = *reinterpret_cast<const float4*>(rotation + half + pair);
        float cosines[4] = {cos.x, cos.y, cos.z, cos.w}, sines[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a = values[2 * i], b = values[2 * i + 1], sine = sines[i] * direction;
            values[2 * i] = a * cosines[i] - b * sine;
            values[2 * i + 1] = b * cosines[i] + a * sine;
        }
        store_values8(target, values);
#endif
#else
        int other = IN_HALVES ? half : 1, pair = IN_HALVES ? UNIT * unit : unit;
#pragma unroll
        for (int i = 0; i < (IN_HALVES ? UNIT : 1); ++i) {
            if (!rotates) break;
            float cos = rotation[pair + i], sin = rotation[half + pair + i] * direction;
            float a = to_float(source[i]), b = to_float(source[other + i]);
            if (SSMAX) a *= factor, b *= factor;
            uint32 both = pack(bf16{}, a * cos - b * sin, b * cos + a * sin);
            target[i] = bf16{uint16(both)};
            target[other + i] = bf16{uint16(both >> 16)};
        }
        if (!rotates)
#pragma unroll
            for (int i = 0; i < UNIT; ++i) target[i] = SSMAX ? bf16{uint16(pack(bf16{}, to_float(source[i]) * factor, 0.0f))} : source[i];
#endif
    }
}
