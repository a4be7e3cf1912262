// Copy pages of one cache into pages of another (or of the same).
//
// Grid: ceil(page units / CHUNK) CTAs per page; each copies CHUNK units. Block: 256 threads. No shared memory.
//
// Macros: UNIT, the type that pages are copied in (uint4, uint2, uint32, uint16 or uint8), CHUNK, PAIR (int64 or int).
#include "common/device.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = CHUNK / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_blocks(const uint8* src, int64 src_stride, int64 src_blocks, uint8* dst, int64 dst_stride, int64 dst_blocks, const PAIR* pairs,
                int64 pairs_stride, int64 pair_stride, int64 page_units, int chunks) {
    pdl_wait();
    const PAIR* pair = pairs + (blockIdx.x / chunks) * pairs_stride;
    int64 source = pair[0], destination = pair[pair_stride];
    if (source < 0 || source >= src_blocks || destination < 0 || destination >= dst_blocks) return;
    const UNIT* from = reinterpret_cast<const UNIT*>(src + source * src_stride);
    UNIT* to = reinterpret_cast<UNIT*>(dst + destination * dst_stride);
    int64 first = int64(blockIdx.x % chunks) * CHUNK + threadIdx.x;
    UNIT units[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
        if (first + i * THREADS < page_units) units[i] = from[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
        if (first + i * THREADS < page_units) to[first + i * THREADS] = units[i];
}
