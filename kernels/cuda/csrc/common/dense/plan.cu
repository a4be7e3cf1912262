// Divides the work of dense MLA decode by lengths (common/dense/work.cuh), once for all layers of a step.
//
// Grid: a CTA for each range. Block: one warp, which reads all lengths.
#include "common/dense/work.cuh"
#include "common/device.cuh"

constexpr int THREADS = 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    plan_dense_decode(const int* lens, int s_q, int requests, int columns, int block_size, int causal, int ranges, uint4* division) {
    pdl_wait();
    int range = blockIdx.x;
    DenseTokens tokens{lens, s_q, requests * s_q, columns, block_size, causal};
    DenseWork work = divide_work(tokens, ranges, range);
    if (threadIdx.x == 0)
        division[range] = {uint32(work.begin.token), uint32(work.begin.block), uint32(work.end.token), uint32(work.end.block)};
    publish_parts(work, tokens.count, ranges, range, division + ranges);
}
