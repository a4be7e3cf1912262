// All rows of a paged cache in bfloat16, for kernels that attend to such rows.
//
// Grid: any; rows are strided over warps, 8 values a lane at a time. Block: 256 threads. No shared memory.
//
// Macro: LAYOUT.
#include "common/device.cuh"
#include "common/rows_in_bf16.cuh"

extern "C" __global__ void __launch_bounds__(256) expand_rows(uint8* pages, int64 page_stride, int block_size, int count, bf16* out) {
    pdl_wait();
    int lane = threadIdx.x % 32;
    for (int row = blockIdx.x * 8 + threadIdx.x / 32; row < count; row += gridDim.x * 8) {
        Token token = token_at<LAYOUT>(pages, page_stride, block_size, page_row_of(row, block_size));
        for (int first = 8 * lane; first < LAYOUT::head_dim; first += 256)
            store16(out + int64(row) * LAYOUT::head_dim + first, bf16x8_of_row<LAYOUT>(token, first));
    }
}
