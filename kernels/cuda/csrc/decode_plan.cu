// Cuts the tiles of a problem into shares of about equal work, on the device, in one thread block.
//
// A tile costs its blocks and TILE_COST for reading Q and writing the result. Share i begins where the costs of
// all blocks before add up to i / shares of the total, but at a tile's edge where that is near enough: a cut
// costs about CUT_COST, for partial results are written and read again.
#include "decode.cuh"

constexpr int THREADS = 1024;
constexpr int TILE_COST = 2, CUT_COST = 5;

__device__ inline int64 warp_prefix(int64 x) {
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        int64 before = __shfl_up_sync(~0u, x, by);
        if (int(threadIdx.x % 32) >= by) x += before;
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
plan_decode(const __grid_constant__ Problem problem, int* starts, int may_cut) {
    __shared__ int64 cost_until[THREADS];  // the cost of all tiles up to and with those of a thread
    __shared__ int64 warp_costs[THREADS / 32];
    int tiles = problem.tiles(), thread = threadIdx.x, per_thread = (tiles + THREADS - 1) / THREADS;

    int64 cost = 0;
    for (int i = 0; i < per_thread; ++i) {
        int tile = thread * per_thread + i;
        if (tile < tiles) cost += blocks_of_tile(problem, tile) + TILE_COST;
    }
    int64 prefix = warp_prefix(cost);
    if (thread % 32 == 31) warp_costs[thread / 32] = prefix;
    __syncthreads();
    if (thread < 32) warp_costs[thread] = warp_prefix(warp_costs[thread]);
    __syncthreads();
    cost_until[thread] = prefix + (thread >= 32 ? warp_costs[thread / 32 - 1] : 0);
    __syncthreads();

    int64 total = cost_until[THREADS - 1];
    int64 near_enough = min(int64(CUT_COST), total / (4 * problem.shares));
    for (int share = thread; share <= problem.shares; share += THREADS) {
        int64 wanted = total * share / problem.shares;
        int low = 0, high = THREADS;  // the first thread whose tiles end beyond `wanted`
        while (low < high) {
            int middle = (low + high) / 2;
            if (cost_until[middle] > wanted) high = middle;
            else low = middle + 1;
        }
        int tile = min(low * per_thread, tiles), block = 0;
        int64 left = low < THREADS ? wanted - (low ? cost_until[low - 1] : 0) : 0;
        while (tile < tiles) {
            int blocks = blocks_of_tile(problem, tile);
            if (left >= blocks + TILE_COST) {
                left -= blocks + TILE_COST, ++tile;
                continue;
            }
            int64 cut = max(left - TILE_COST, int64(0));
            if (!may_cut) tile += 2 * left >= blocks + TILE_COST;
            else if (cut >= blocks - near_enough && 2 * cut >= blocks) ++tile;  // the nearer edge
            else if (cut >= near_enough) block = int(cut);
            break;
        }
        starts[2 * share] = share == problem.shares ? tiles : tile;
        starts[2 * share + 1] = share == problem.shares ? 0 : block;
    }
}
