// Top-k columns of each row of logits, ascending, for a topk above the limit of common/indexer_topk_stream.cu.
//
// Grid: a CTA per row, strided. Block: THREADS threads. Shared memory: one `Scratch`, static.
//
// Macros: THREADS, OUTPUT.
#include "common/select_by_reading.cuh"
#include "common/device.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    top_k_per_row_wide(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends, const int* lens,
                       int64 lens_stride, int next_n, int per_row, int num_keys, OUTPUT output, int topk) {
    __shared__ Scratch shared;
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.bins[i] = 0;
    pdl_wait();
    Columns columns{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    for (int64 number = blockIdx.x; number < num_rows; number += gridDim.x) {
        Range range = columns.range_of(number);
        const float* row = logits + number * stride + range.first;
        select_by_reading(shared, row, range.end - range.first, output.of_row(number, next_n), topk);
    }
}
