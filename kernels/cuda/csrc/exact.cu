// Attention in float64 of the tiles that a fast kernel marked as outside its range, or of all. Usually there are none.
//
// `flags` holds two counters and then Problem::unsafe; the last thread block to come by leaves it zero for the next call.
//
// Macros: LAYOUT, ALIGNED.
#include "exact.cuh"
#include "overlap.cuh"

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

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attend_exactly_where_unsafe(const __grid_constant__ Problem problem, int* flags, int all_unsafe) {
    __shared__ Shared shared;
    __shared__ bool last;
    overlap_with_previous_kernel();
    auto unsafe = [&](int tile) { return all_unsafe || problem.unsafe[tile]; };
    bool seen = false;
    for_wanted(problem.tiles() * UNITS, [&](int item) { return unsafe(item / UNITS); },
        [&](int item) {
            seen = true;
            TilePlace at(problem, item / UNITS);
            int head = at.first_head + item % UNITS * UNIT;
            if (head < problem.heads) attend_exactly(problem, at.b, at.s, head, shared);
        });
    if (all_unsafe) return;
    if (threadIdx.x == 0) {
        if (seen) atomicAdd(flags + 1, 1);
        __threadfence();
        last = atomicAdd(flags, 1) == int(gridDim.x) - 1;
    }
    __syncthreads();
    if (!last) return;
    if (atomicAdd(flags + 1, 0))
        for (int tile = threadIdx.x; tile < problem.tiles(); tile += THREADS) problem.unsafe[tile] = 0;
    __syncthreads();
    if (threadIdx.x == 0) flags[0] = flags[1] = 0;
}
