// Gather the last rows of each request from a paged FP8 or FP4 cache into a dense workspace.
//
// Grid: (a warp per TOKENS rows, requests, which are strided). Block: 128 threads. No shared memory.
//
// Macros: LAYOUT, OUTPUT (bf16, f16 or float), TOKENS, ALIGNED, STREAM.
#include "common/gathered_rows.cuh"
#include "common/device.cuh"

extern "C" __global__ void __launch_bounds__(128) dequantize_and_gather_k_cache(GatheredRows rows) {
    pdl_wait();
    const int first_row = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * TOKENS;
    for (int request = blockIdx.y; request < rows.requests; request += gridDim.y) gather_rows<LAYOUT>(rows, request, first_row);
}
