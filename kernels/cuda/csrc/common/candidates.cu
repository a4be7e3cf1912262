// Candidate blocks: the largest logit of each block of columns of a row, a mask of the columns outside the selected
// blocks, and the positions of candidate columns.
//
// Grid: CTAs over blocks or segments of a row, and rows; both strided. Block: THREADS threads. Shared memory: for the
// mask, a bit for each block of a segment, 1 KiB, static.
//
// The first two read or write each logit once and are bound by memory.
//
// Macros: THREADS.
#include "common/device.cuh"
#include "common/selection.cuh"

constexpr int SEGMENT = 8192;  // blocks of a row that a CTA masks

// NaN, which top_k_per_row never selects, for blocks beyond the row, and for those without a logit above -inf. +inf for the
// newest block; for another one it counts as the largest finite value, so that the newest is always selected. Subnormal logits
// keep their values (fmaxf and fminf would flush them, -ftz=true).
extern "C" __global__ void __launch_bounds__(THREADS)
    candidate_maxima(const float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends, const int* lens,
                     int64 lens_stride, int next_n, int per_row, int block, float* maxima, int64 maxima_stride, int blocks) {
    pdl_wait();
    Columns columns{starts, ends, lens, lens_stride, next_n, per_row != 0, -1, width};
    for (int64 m = blockIdx.y; m < num_rows; m += gridDim.y) {
        Range range = columns.range_of(m);
        int count = range.end - range.first, newest = count > 0 ? (count - 1) / block : -1;
        const float* row = logits + m * stride + range.first;
        const bool eight = block == 8 && uint64(row) % 16 == 0;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < blocks; i += gridDim.x * THREADS) {
            float best = -infinity();
            int first = i <= newest ? i * block : 0, end = i <= newest ? min(block, count - first) : 0;
            if (eight && end == 8) {
                float4 low = *reinterpret_cast<const float4*>(row + first), high = *reinterpret_cast<const float4*>(row + first + 4);
                best = larger(larger(larger(low.x, low.y), larger(low.z, low.w)), best);
                best = larger(larger(larger(high.x, high.y), larger(high.z, high.w)), best);
            } else {
                for (int j = 0; j < end; ++j) best = larger(best, row[first + j]);
            }
            if (best == infinity()) best = __uint_as_float(0x7f7fffff);  // the largest finite value
            if (best == -infinity()) best = __uint_as_float(0x7fc00000);
            maxima[m * maxima_stride + i] = i == newest ? infinity() : best;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    apply_candidate_mask(float* logits, int64 stride, int width, int64 num_rows, const int* starts, const int* ends, const int* lens,
                         int64 lens_stride, int next_n, int per_row, int block, const int* candidates, int64 candidates_stride,
                         int num_candidates, float fill) {
    __shared__ uint32 is_candidate[SEGMENT / 32];
    pdl_wait();
    Columns columns{starts, ends, lens, lens_stride, next_n, per_row != 0, -1, width};
    int64 span = int64(SEGMENT) * block;
    for (int64 m = blockIdx.y; m < num_rows; m += gridDim.y) {
        Range range = columns.range_of(m);
        int64 count = range.end - range.first;
        for (int64 segment = blockIdx.x; segment * span < count; segment += gridDim.x) {
            for (int i = threadIdx.x; i < SEGMENT / 32; i += THREADS) is_candidate[i] = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < num_candidates; i += THREADS) {
                int64 here = candidates[m * candidates_stride + i] - segment * SEGMENT;
                if (here >= 0 && here < SEGMENT) atomicOr(&is_candidate[here / 32], 1u << here % 32);
            }
            __syncthreads();
            float* row = logits + m * stride + range.first + segment * span;
            int columns_here = int(min(span, count - segment * span));
            for (int column = threadIdx.x; column < columns_here; column += THREADS) {
                int i = uint32(column) / uint32(block);
                if (!(is_candidate[i / 32] >> i % 32 & 1)) row[column] = fill;
            }
            __syncthreads();
        }
    }
}

// Convert columns of candidate logits to positions, in place.
extern "C" __global__ void __launch_bounds__(THREADS)
    candidate_positions(int* indices, int64 stride, int topk, int64 num_rows, const int* candidates, int64 candidates_stride, int block) {
    pdl_wait();
    for (int64 m = blockIdx.y; m < num_rows; m += gridDim.y)
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < topk; i += gridDim.x * THREADS) {
            int column = indices[m * stride + i];
            if (column < 0) continue;
            int candidate = uint32(column) / uint32(block);
            indices[m * stride + i] = candidates[m * candidates_stride + candidate] * block + column - candidate * block;
        }
}
