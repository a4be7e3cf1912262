// Attention in float64 of the tiles that a fast kernel marked as outside its range, or of all. Usually there are none.
//
// SparseProblem::unsafe is 0 for most tiles, 1 for these. Each unit of such a tile that is done adds 2, and the last of them
// leaves 0 for the next call: nothing else is written where all is well. Without it UNSAFE_BITS tell.
//
// Macros: LAYOUT, ALIGNED, TILE_HEADS (common/sparse/work.cuh).
#include "common/sparse/exact.cuh"
#include "common/pdl.cuh"

constexpr int UNITS = HEADS / UNIT;  // of a tile

// Go through items 0 .. count - 1 of all thread blocks, THREADS at a time: `wanted` is asked by one thread an
// item, and the whole block does those that are.
template <class Wanted, class Do> __device__ inline void for_wanted(int count, Wanted wanted, Do act) {
    __shared__ uint32 found[THREADS / 32];
    for (int first = 0; first < count; first += THREADS * gridDim.x) {
        int mine = first + threadIdx.x * gridDim.x + blockIdx.x;
        uint32 votes = __ballot_sync(~0u, mine < count && wanted(mine));
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = votes;
        if (!__syncthreads_or(votes)) continue;
        for (int warp = 0; warp < THREADS / 32; ++warp)
            for (uint32 left = found[warp]; left; left &= left - 1)
                act(first + (32 * warp + __ffs(left) - 1) * gridDim.x + blockIdx.x);
        __syncthreads();  // before `found` is written again
    }
}

// Whether a fast kernel asks for a unit of a tile.
__device__ inline bool is_unsafe(const SparseProblem& problem, int tile, int unit) {
    if (problem.unsafe) return problem.unsafe[tile];
    TileCoord at(problem, tile);
    int head = at.first_head + unit * UNIT;
    if (head >= problem.heads) return false;
    return __float_as_uint(problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h]) == UNSAFE_BITS ||
           __float_as_uint(problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h]) == UNSAFE_BITS;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attend_exactly_where_unsafe(const __grid_constant__ SparseProblem problem, int everything) {
    __shared__ ExactShared shared;
    int count = problem.tiles() * UNITS;
    pdl_wait();
    // Usually it ends here. The same is asked again below, but only behind all that prepares for an answer.
    bool any = everything;
    for (int item = threadIdx.x * gridDim.x + blockIdx.x; item < count && !any; item += THREADS * gridDim.x)
        any = is_unsafe(problem, item / UNITS, item % UNITS);
    if (!__syncthreads_or(any)) return;
    for_wanted(count, [&](int item) { return everything || is_unsafe(problem, item / UNITS, item % UNITS); },
        [&](int item) {
            int tile = item / UNITS;
            TileCoord at(problem, tile);
            int head = at.first_head + item % UNITS * UNIT;
            if (head < problem.heads) attend_exactly(problem, at.b, at.s, head, shared);
            if (!everything && problem.unsafe && threadIdx.x == 0 && atomicAdd(problem.unsafe + tile, 2) == 1 + 2 * (UNITS - 1))
                problem.unsafe[tile] = 0;
        });
}
