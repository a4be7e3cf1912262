// The columns of the largest logits of each row, by ascending index, for more of them than common/indexer_topk.cu chooses:
// reads the row from global memory four times or, where equal logits compete, seven.
//
// Macro: THREADS.
#include "common/pdl.cuh"
#include "common/selection.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
top_k_per_row_wide(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends,
                   const int* lens, int64 lens_stride, int next_n, int per_row, int num_keys, int* indices,
                   int64 indices_stride, int topk) {
    __shared__ Scratch shared;
    pdl_wait();
    Columns columns{starts, ends, lens, lens_stride, next_n, per_row != 0, num_keys, width};
    for (int64 number = blockIdx.x; number < num_rows; number += gridDim.x) {
        int begin, end;
        columns.range_of(number, begin, end);
        const float* row = logits + number * stride + begin;
        int length = end - begin;
        auto order = [=](int64 i) { return order_of(row[i]); };
        auto numbers = [=](auto number) {
            return [=](auto visit) {
                for (int64 i = threadIdx.x; i < length; i += THREADS) visit(number(i));
            };
        };
        for (int i = threadIdx.x; i < BINS; i += THREADS) shared.bins[i] = 0;
        int valid = 0, there;
        for (int64 i = threadIdx.x; i < length; i += THREADS) valid += order(i) != 0;
        sum_before(shared, valid, there);
        uint32 threshold = 1, least = 0;
        if (topk && there > topk) {
            Kth kth = kth_largest(shared, topk, PASSES, numbers(order));
            threshold = kth.number;
            auto place = [=](int64 i) { return order_of(row[i]) == threshold ? ~uint32(i) : 0; };
            if (!kth.all) least = kth_largest(shared, kth.rest, PASSES, numbers(place)).number;
        }
        __syncthreads();
        int written = 0;
        for (int64 first = 0; first < length; first += THREADS) {
            int64 i = first + threadIdx.x;
            uint32 x = i < length ? order(i) : 0;
            bool keep = x > threshold || (x == threshold && ~uint32(i) >= least);
            int total, to = written + sum_before(shared, keep, total);
            if (keep) indices[number * indices_stride + to] = int(i);
            written += total;
            __syncthreads();
        }
        for (int i = written + threadIdx.x; i < topk; i += THREADS) indices[number * indices_stride + i] = -1;
        __syncthreads();
    }
}
