// Quantise bfloat16 values to e4m3 with a scale, a power of two, for each 128 of a row: activations of FP8 products.
//
// Grid: (tokens, groups, warps' 512 columns / 4). Block: 128 threads; 8 lanes of a warp have 128 values.
//
// Macros: ALIGNED.
#include "common/device.cuh"
#include "common/warp_row.cuh"

using Row = WarpRow<16>;

extern "C" __global__ void __launch_bounds__(128)
    quantize_groups(const bf16* x, int64 x_group, int64 x_token, uint8* values, int64 values_group, int64 values_token, float* scales,
                    int64 scales_group, int64 scales_token, int64 scales_column, int columns) {
    pdl_wait();
    int token = blockIdx.x, group = blockIdx.y, column = (blockIdx.z * 4 + threadIdx.x / 32) * 512;
    Row row = {};
    row.lane = threadIdx.x % 32;
    column += row.first();
    bool present = column < columns;
    x += group * x_group + token * x_token + column;
    if (present)
#pragma unroll
        for (int i = 0; i < 16; i += 8) {
            float eight[8];
            unpack8(load_raw8(x + i), eight);
#pragma unroll
            for (int j = 0; j < 8; ++j) row.x[i + j] = eight[j];
        }
    int exponent = scale_exponent(fmaxf(row.largest_of_tile<8>(), 1e-10f), -126);
    if (!present) return;
    float factor = power_of_two(-exponent);
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        words[i] = float_to_e4m3x2(row.x[4 * i] * factor, row.x[4 * i + 1] * factor) |
                   float_to_e4m3x2(row.x[4 * i + 2] * factor, row.x[4 * i + 3] * factor) << 16;
    store16(values + group * values_group + token * values_token + column, {words[0], words[1], words[2], words[3]});
    if (row.lane % 8 == 0) scales[group * scales_group + token * scales_token + column / 128 * scales_column] = power_of_two(exponent);
}
