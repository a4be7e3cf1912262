// Splits the tiles of a problem into work ranges of about equal cost, on the device.
//
// Grid: one CTA.
// Block: 1,024 threads, each with a run of neighbouring tiles.
// Shared memory: about 12 KiB, static.
// Limits: MAX_RANGES work ranges; more than MAX_ORDERED tiles are not reordered.
//
// A tile costs its blocks plus TILE_COST for reading Q and writing the result. Three divisions are tried, in this order:
//   split_each_tile  few tiles: each has work ranges of its own, as many as minimise the longest range
//   assign_tiles     whole tiles, assigned longest first, if the ranges are about as even as after splitting
//   split_anywhere   range i begins where the cost of all blocks before reaches i / ranges of the total, or at a tile's edge
//                    if that is near enough. A range may then end one tile and start another, and pays for both.
#include "common/sparse/work.cuh"

constexpr int THREADS = 1024;
// In blocks; kernels/cuda/sparse/division.py reads and describes them.
constexpr int TILE_COST = 2, SPLIT_COST = 2, STRADDLE_COST = 5, PARTS_A_BLOCK = 64;
constexpr int NEAR = 2;
constexpr int LENGTHS = THREADS;  // distinct lengths in the sort, in blocks

// Inclusive prefix sum over the block's threads; `sum` is the total.
__device__ inline int64 block_prefix(int64 x, int64& sum) {
    __shared__ int64 warp_sums[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto warp_prefix = [&](int64 x) {
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            int64 before = __shfl_up_sync(~0u, x, by);
            if (lane >= by) x += before;
        }
        return x;
    };
    x = warp_prefix(x);
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    int64 sums = warp_prefix(warp_sums[lane]), before = __shfl_sync(~0u, sums, max(warp - 1, 0));
    sum = __shfl_sync(~0u, sums, 31);
    __syncthreads();  // before they are written again
    return warp > 0 ? x + before : x;
}

struct Planner {
    const SparseProblem& problem;
    int* starts;
    int tiles, ranges, first_tile, end_tile;  // tiles of this thread

    __device__ Planner(const SparseProblem& p, int* to) : problem(p), starts(to), tiles(p.tiles()), ranges(p.ranges) {
        int per_thread = (tiles + THREADS - 1) / THREADS;
        first_tile = min(int(threadIdx.x) * per_thread, tiles), end_tile = min(first_tile + per_thread, tiles);
    }

    __device__ void begin(int range, int tile, int block) const { starts[2 * range] = tile, starts[2 * range + 1] = block; }

    __device__ static int parts_of(int blocks, int longest) { return (blocks + longest - 1) / longest; }

    // Work ranges that this thread's tiles need if none may be longer.
    __device__ int64 ranges_of(int longest) const {
        int64 sum = 0;
#pragma unroll 1
        for (int tile = first_tile; tile < end_tile; ++tile) sum += parts_of(blocks_of_tile(problem, tile), longest);
        return sum;
    }

    // Smallest possible length of the longest range if every tile has ranges of its own. There must be enough ranges.
    __device__ int shortest(int64 blocks) const {
        int low = max(int64(1), (blocks + ranges - 1) / ranges);
        int high = max(low, blocks_of_tile(problem.segments[0].topk, problem.segments[1].topk));
        while (low < high) {
            int middle = (low + high) / 2;
            int64 needed;
            block_prefix(ranges_of(middle), needed);
            if (needed <= ranges) high = middle;
            else low = middle + 1;
        }
        return low;
    }

    // Ranges of one tile each, none longer than `longest`. Surplus ranges are empty.
    __device__ void split_each_tile(int longest) const {
        int64 mine = ranges_of(longest), all, end = block_prefix(mine, all);
        int range = int(end - mine);
#pragma unroll 1
        for (int tile = first_tile; tile < end_tile; ++tile) {
            int blocks = blocks_of_tile(problem, tile), parts = parts_of(blocks, longest);
            for (int i = 0; i < parts; ++i) begin(range++, tile, i * (blocks / parts) + min(i, blocks % parts));
        }
        for (int i = int(all) + threadIdx.x; i <= ranges; i += THREADS) begin(i, tiles, 0);
    }

    // Number of tiles of the ranges before this one if tiles are assigned longest first, to the ranges in alternating order.
    __device__ int assigned_before(int range) const {
        int rounds = tiles / ranges, rest = tiles % ranges;
        return range * rounds + (rounds % 2 ? max(0, range - (ranges - rest)) : min(range, rest));
    }

    // Assign whole tiles to ranges. Returns the cost of the longest range.
    __device__ int assign_tiles() const {
        __shared__ int places[LENGTHS], longest;
        auto bin = [&](int tile) { return LENGTHS - 1 - min(blocks_of_tile(problem, tile), LENGTHS - 1); };
        places[threadIdx.x] = 0;
        if (threadIdx.x == 0) longest = 0;
        __syncthreads();
#pragma unroll 1
        for (int tile = first_tile; tile < end_tile; ++tile) atomicAdd(&places[bin(tile)], 1);
        __syncthreads();
        int64 all, count = places[threadIdx.x], until = block_prefix(count, all);
        places[threadIdx.x] = int(until - count);
        __syncthreads();
        int* order = starts + ORDER_AT;
#pragma unroll 1
        for (int tile = first_tile; tile < end_tile; ++tile) {
            int rank = atomicAdd(&places[bin(tile)], 1), round = rank / ranges, at = rank % ranges;
            order[assigned_before(round % 2 ? ranges - 1 - at : at) + round] = tile;
        }
        __syncthreads();
        for (int range = threadIdx.x; range <= ranges; range += THREADS) {
            int first = range < ranges ? assigned_before(range) : tiles, end = range < ranges ? assigned_before(range + 1) : tiles,
                cost = 0;
            for (int i = first; i < end; ++i) cost += blocks_of_tile(problem, order[i]) + TILE_COST;
            begin(range, first, 0);
            atomicMax(&longest, cost);
        }
        __syncthreads();
        return longest;
    }

    // Tiles in their own order.
    __device__ void keep_order() const {
        if (tiles > MAX_ORDERED) return;
#pragma unroll 1
        for (int tile = first_tile; tile < end_tile; ++tile) starts[ORDER_AT + tile] = tile;
    }

    // Ranges that continue from tile to tile. `cost_until`: cost of all tiles up to the last one of each thread. Where
    // tiles are split, a range costs more than one block, so no two ranges begin at the same place. Called at two places:
    // inlined at both it takes twice as long to compile.
    __device__ __noinline__ void split_anywhere(const int64* cost_until, int64 total, bool may_split) const {
        int64 near_enough = min(int64(NEAR), total / (4 * ranges));
        for (int range = threadIdx.x; range <= ranges; range += THREADS) {
            int64 wanted = total * range / ranges;
            int low = 0, high = THREADS;  // the first thread whose tiles end beyond `wanted`
            while (low < high) {
                int middle = (low + high) / 2;
                if (cost_until[middle] > wanted) high = middle;
                else low = middle + 1;
            }
            int tile = min(low * ((tiles + THREADS - 1) / THREADS), tiles), block = 0;
            int64 left = low < THREADS ? wanted - (low ? cost_until[low - 1] : 0) : 0;
            while (tile < tiles) {
                int blocks = blocks_of_tile(problem, tile);
                if (left >= blocks + TILE_COST) {
                    left -= blocks + TILE_COST, ++tile;
                    continue;
                }
                int64 split_at = max(left - TILE_COST, int64(0));
                if (!may_split) tile += 2 * left >= blocks + TILE_COST;
                else if (split_at >= blocks - near_enough && 2 * split_at >= blocks) ++tile;  // the nearer edge
                else if (split_at >= near_enough) block = int(split_at);
                break;
            }
            if (range == ranges) begin(range, tiles, 0);
            else begin(range, tile, block);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    plan_decode(const __grid_constant__ SparseProblem problem, int* starts, int may_split) {
    __shared__ int64 cost_until[THREADS];
    Planner planner(problem, starts);
    int64 cost = 0, total;
#pragma unroll 1
    for (int tile = planner.first_tile; tile < planner.end_tile; ++tile) cost += blocks_of_tile(problem, tile) + TILE_COST;
    cost_until[threadIdx.x] = block_prefix(cost, total);
    __syncthreads();

    if (threadIdx.x == 0) starts[SPLITS_AT] = may_split;
    if (may_split && planner.tiles <= problem.ranges) {
        int longest = planner.shortest(total - int64(TILE_COST) * planner.tiles);
        if (longest + TILE_COST + SPLIT_COST <= total / problem.ranges + STRADDLE_COST + problem.ranges / PARTS_A_BLOCK) {
            int unsplit = longest + SPLIT_COST;
            bool pays = false;
#pragma unroll 1
            for (int tile = planner.first_tile; tile < planner.end_tile; ++tile) pays |= blocks_of_tile(problem, tile) > unsplit;
            planner.keep_order();
            pays = __syncthreads_or(pays);
            planner.split_each_tile(pays ? longest : unsplit);
            if (threadIdx.x == 0) starts[SPLITS_AT] = pays;
            return;
        }
    }
    if (planner.tiles > MAX_ORDERED) {
        planner.split_anywhere(cost_until, total, may_split);
        return;
    }
    int assigned = planner.assign_tiles();
    if (!may_split || assigned <= total / problem.ranges + STRADDLE_COST + problem.ranges / PARTS_A_BLOCK) {
        if (threadIdx.x == 0) starts[SPLITS_AT] = 0;
        return;
    }
    __syncthreads();  // all have read the assignment
    planner.keep_order();
    planner.split_anywhere(cost_until, total, true);
}
