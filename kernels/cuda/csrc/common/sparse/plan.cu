// Cuts the tiles of a problem into shares of about equal work, on the device, in one thread block.
//
// A tile costs its blocks and TILE_COST for reading Q and writing the result.
//
// Where there are a few tiles, each has shares of its own, as many as make the longest share as short as can be. Else
// share i begins where the costs of all blocks before add up to i / shares of the total, but at a tile's edge where that
// is near enough. Shares then have the end of one tile and the start of another, which costs each of them both. Unless whole
// tiles, dealt longest first, make shares that are about as even.
#include "common/sparse/work.cuh"

constexpr int THREADS = 1024;
// In blocks, as in kernels/cuda/sparse/division.py, which says what they stand for.
constexpr int TILE_COST = 2, CUT_COST = 2, STRADDLE_COST = 5, PARTS_A_BLOCK = 64;
constexpr int NEAR = 2;
constexpr int LENGTHS = THREADS;  // that are told apart, in blocks

// The sum of the values of this thread and those before it, and of all.
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
    int tiles, shares, first_tile, end_tile;  // tiles of this thread

    __device__ Planner(const SparseProblem& p, int* to) : problem(p), starts(to), tiles(p.tiles()), shares(p.shares) {
        int per_thread = (tiles + THREADS - 1) / THREADS;
        first_tile = min(int(threadIdx.x) * per_thread, tiles), end_tile = min(first_tile + per_thread, tiles);
    }

    __device__ void begin(int share, int tile, int block) const { starts[2 * share] = tile, starts[2 * share + 1] = block; }

    __device__ static int parts_of(int blocks, int longest) { return (blocks + longest - 1) / longest; }

    // Shares that these tiles need if none may be longer.
    __device__ int64 shares_of(int longest) const {
        int64 sum = 0;
        for (int tile = first_tile; tile < end_tile; ++tile) sum += parts_of(blocks_of_tile(problem, tile), longest);
        return sum;
    }

    // The length of the longest share if every tile has its own, of which there are enough.
    __device__ int shortest(int64 blocks) const {
        int low = max(int64(1), (blocks + shares - 1) / shares);
        int high = max(low, blocks_of_tile(problem.lists[0].topk, problem.lists[1].topk));
        while (low < high) {
            int middle = (low + high) / 2;
            int64 needed;
            block_prefix(shares_of(middle), needed);
            if (needed <= shares) high = middle;
            else low = middle + 1;
        }
        return low;
    }

    // Shares of one tile each, none longer than `longest`. Those that are left over have nothing.
    __device__ void cut_each_tile(int longest) const {
        int64 mine = shares_of(longest), all, end = block_prefix(mine, all);
        int share = int(end - mine);
        for (int tile = first_tile; tile < end_tile; ++tile) {
            int blocks = blocks_of_tile(problem, tile), parts = parts_of(blocks, longest);
            for (int i = 0; i < parts; ++i) begin(share++, tile, i * (blocks / parts) + min(i, blocks % parts));
        }
        for (int i = int(all) + threadIdx.x; i <= shares; i += THREADS) begin(i, tiles, 0);
    }

    // How many tiles shares before this one have if tiles are dealt: longest first, to one share after another and back again.
    __device__ int dealt_before(int share) const {
        int rounds = tiles / shares, rest = tiles % shares;
        return share * rounds + (rounds % 2 ? max(0, share - (shares - rest)) : min(share, rest));
    }

    // Deal tiles. Returns the cost of the longest share.
    __device__ int deal() const {
        __shared__ int places[LENGTHS], longest;
        auto bin = [&](int tile) { return LENGTHS - 1 - min(blocks_of_tile(problem, tile), LENGTHS - 1); };
        places[threadIdx.x] = 0;
        if (threadIdx.x == 0) longest = 0;
        __syncthreads();
        for (int tile = first_tile; tile < end_tile; ++tile) atomicAdd(&places[bin(tile)], 1);
        __syncthreads();
        int64 all, count = places[threadIdx.x], until = block_prefix(count, all);
        places[threadIdx.x] = int(until - count);
        __syncthreads();
        int* order = starts + ORDER_AT;
        for (int tile = first_tile; tile < end_tile; ++tile) {
            int rank = atomicAdd(&places[bin(tile)], 1), round = rank / shares, at = rank % shares;
            order[dealt_before(round % 2 ? shares - 1 - at : at) + round] = tile;
        }
        __syncthreads();
        for (int share = threadIdx.x; share <= shares; share += THREADS) {
            int first = share < shares ? dealt_before(share) : tiles, end = share < shares ? dealt_before(share + 1) : tiles, cost = 0;
            for (int i = first; i < end; ++i) cost += blocks_of_tile(problem, order[i]) + TILE_COST;
            begin(share, first, 0);
            atomicMax(&longest, cost);
        }
        __syncthreads();
        return longest;
    }

    // Tiles one after another, as they are.
    __device__ void keep_order() const {
        if (tiles > MOST_DEALT) return;
        for (int tile = first_tile; tile < end_tile; ++tile) starts[ORDER_AT + tile] = tile;
    }

    // Shares that go on from tile to tile. The costs are those of all tiles up to and with the ones of each thread. Where
    // tiles are cut, a share costs more than one block, so that no two begin at the same.
    __device__ void cut_anywhere(const int64* cost_until, int64 total, bool may_cut) const {
        int64 near_enough = min(int64(NEAR), total / (4 * shares));
        for (int share = threadIdx.x; share <= shares; share += THREADS) {
            int64 wanted = total * share / shares;
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
                int64 cut = max(left - TILE_COST, int64(0));
                if (!may_cut) tile += 2 * left >= blocks + TILE_COST;
                else if (cut >= blocks - near_enough && 2 * cut >= blocks) ++tile;  // the nearer edge
                else if (cut >= near_enough) block = int(cut);
                break;
            }
            if (share == shares) begin(share, tiles, 0);
            else begin(share, tile, block);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
plan_decode(const __grid_constant__ SparseProblem problem, int* starts, int may_cut) {
    __shared__ int64 cost_until[THREADS];
    Planner planner(problem, starts);
    int64 cost = 0, total;
    for (int tile = planner.first_tile; tile < planner.end_tile; ++tile) cost += blocks_of_tile(problem, tile) + TILE_COST;
    cost_until[threadIdx.x] = block_prefix(cost, total);
    __syncthreads();

    if (threadIdx.x == 0) starts[SPLITS_AT] = may_cut;
    if (may_cut && planner.tiles <= problem.shares) {
        int longest = planner.shortest(total - int64(TILE_COST) * planner.tiles);
        if (longest + TILE_COST + CUT_COST <= total / problem.shares + STRADDLE_COST + problem.shares / PARTS_A_BLOCK) {
            int uncut = longest + CUT_COST;
            bool pays = false;
            for (int tile = planner.first_tile; tile < planner.end_tile; ++tile) pays |= blocks_of_tile(problem, tile) > uncut;
            planner.keep_order();
            pays = __syncthreads_or(pays);
            planner.cut_each_tile(pays ? longest : uncut);
            if (threadIdx.x == 0) starts[SPLITS_AT] = pays;
            return;
        }
    }
    if (planner.tiles > MOST_DEALT) {
        planner.cut_anywhere(cost_until, total, may_cut);
        return;
    }
    int dealt = planner.deal();
    if (!may_cut || dealt <= total / problem.shares + STRADDLE_COST + problem.shares / PARTS_A_BLOCK) {
        if (threadIdx.x == 0) starts[SPLITS_AT] = 0;
        return;
    }
    __syncthreads();  // all have read what was dealt
    planner.keep_order();
    planner.cut_anywhere(cost_until, total, true);
}
