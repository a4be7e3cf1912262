// Dequantise e4m3 weights with a float32 scale for each block to bfloat16, for products of many tokens by cuBLAS.
//
// Grid: (rows, groups, parts of a row). Block: 128 threads; each takes 16 values at a time, which share a scale. A value is its code
// times its scale, rounded once.
//
// Macros: ALIGNED (whether rows start at multiples of 16 bytes and columns are a multiple of 16).
#include "common/device.cuh"

extern "C" __global__ void __launch_bounds__(128)
    dequantize_blocks(const uint8* codes, int64 group_stride, int64 row_stride, const float* scales, int64 scale_group_stride,
                      int64 scale_row_stride, bf16* out, int64 out_group_stride, int64 out_row_stride, int columns, int block_rows,
                      int block_columns) {
    pdl_wait();
    int row = blockIdx.x, group = blockIdx.y;
    codes += group * group_stride + row * row_stride;
    scales += group * scale_group_stride + row / block_rows * scale_row_stride;
    out += group * out_group_stride + row * out_row_stride;
    for (int k = (blockIdx.z * 128 + threadIdx.x) * 16; k < columns; k += gridDim.z * 128 * 16) {
        float scale = scales[k / block_columns], x[8];
#if ALIGNED
        uint4 words = load16(codes + k);
        dequantize8({words.x, words.y}, scale, x);
        store_values8(out + k, x);
        dequantize8({words.z, words.w}, scale, x);
        store_values8(out + k + 8, x);
#else
        for (int i = k; i < min(k + 16, columns); ++i) {
            e4m3x2_to_float(codes[i], x[0], x[1]);
            out[i].bits = uint16(pack(bf16{}, mul(x[0], scale), 0.0f));
        }
#endif
    }
}
