// Keys of an indexer: LayerNorm, RoPE, Hadamard rotation, insert.
//
// Grid: a warp per row. Block: 128 threads. Shared memory: a row per warp, for RoPE's partners.
//
// Macros: LAYOUT, INPUT and WEIGHT (float or bf16), SLOT and POSITION (int64 or int), HADAMARD, ALIGNED.
#include "common/device.cuh"
#include "common/warp_row.cuh"

constexpr int WARPS = 4;
using Row = WarpRow<4>;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    indexer_knorm_rope_and_insert(const INPUT* k, int64 k_stride, const WEIGHT* weight, const WEIGHT* bias, int rows, const SLOT* slots,
                                  const POSITION* positions, const float* cos_sin, int64 cos_stride, int max_position, int rope_dim,
                                  float eps, int rope_first, int halves, uint8* pages, int64 page_stride, int64 num_slots, int block_size) {
    __shared__ float before[WARPS][Row::DIM];  // RoPE
    pdl_wait();
    int warp = threadIdx.x / 32, token = blockIdx.x * WARPS + warp;
    if (token >= rows) return;
    int64 slot = slots[token];
    if (slot < 0 || slot >= num_slots) return;
    Row row;
    row.lane = threadIdx.x % 32;
    int first = row.first();
#pragma unroll
    for (int i = 0; i < 4; ++i) row.x[i] = to_float(k[token * k_stride + first + i]);
    row.center_and_normalize(eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        row.x[i] = row.x[i] * to_float(weight[first + i]) + to_float(bias[first + i]);
        before[warp][first + i] = row.x[i];
    }
    __syncwarp();
    const float* rotation = rotation_at(cos_sin, cos_stride, max_position, positions[token]);
    int half = rope_dim / 2, begin = rope_first ? 0 : Row::DIM - rope_dim;  // without RoPE, rope_dim is 0
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int at = first + i - begin;
        if (at < 0 || at >= rope_dim) continue;
        int pair = !halves ? at / 2 : at < half ? at : at - half;
        bool second = halves ? at >= half : at % 2;
        int step = halves ? half : 1, other = begin + (second ? at - step : at + step);
        float cos = rotation[pair], sin = rotation[half + pair];
        row.x[i] = row.x[i] * cos + before[warp][other] * (second ? sin : -sin);
    }
    if (HADAMARD) row.rotate_hadamard();
    row.insert<LAYOUT>(token_at<LAYOUT>(pages, page_stride, block_size, slot));
}
