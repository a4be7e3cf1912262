// Divides the work of batch-invariant dense MLA decode (common/dense/work.cuh): each token by its own length.
//
// A token has a part for every part_blocks blocks, up to most_parts, of equal lengths. It has most_parts ranges, of one part each;
// the others are empty. A token of one part is not divided.
//
// Grid: a thread for each range.
#include "common/dense/work.cuh"
#include "common/device.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
    plan_dense_decode_by_token(const int* lens, int s_q, int requests, int columns, int block_size, int causal, int ranges, int most_parts,
                               int part_blocks, uint4* division) {
    pdl_wait();
    int range = blockIdx.x * THREADS + threadIdx.x;
    if (range >= ranges) return;
    DenseTokens tokens{lens, s_q, requests * s_q, columns, block_size, causal};
    int token = range / most_parts, part = range - token * most_parts, blocks = tokens.blocks(token);
    int parts = max(1, min(most_parts, (blocks + part_blocks - 1) / part_blocks));
    int each = blocks / parts, longer = blocks - each * parts, first = part * each + min(part, longer);
    uint32 next = token + 1;
    if (part >= parts) division[range] = {next, 0, next, 0};
    else if (part == parts - 1) division[range] = {uint32(token), uint32(first), next, 0};
    else division[range] = {uint32(token), uint32(first), uint32(token), uint32(first + each + (part < longer))};
    if (part == 0) division[ranges + token] = {uint32(token), uint32(range), uint32(parts), 0};
}
