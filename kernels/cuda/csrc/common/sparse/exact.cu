// What is left to do behind a fast kernel: the parts of cut tiles are put together (common/sparse/combine.cuh), and tiles that it
// marked as outside its range attended to again, within the bounds whatever the values. Usually there are none. Or attention
// to all tiles, where there is no fast kernel.
//
// SparseProblem::unsafe is 0 for most tiles, else it says why; no whole tile is written where all are 0, as one word tells. What
// is missing of large RoPE values is added (common/sparse/amend.cuh), and nothing done where all results are NaN; the others' heads
// are done ROWS at a time (common/sparse/exact_mma.cuh). Where few tiles are marked, several thread blocks share the keys of
// ROWS heads, in as many parts as there is room for. Without `unsafe`, UNSAFE_BITS tell, and nothing is
// shared.
//
// What all calls pay is that these thread blocks come and go between two kernels that need whole multiprocessors. So most do
// not wait for the kernel ahead to end if there is nothing to put together: they come as its thread blocks leave, and leave at
// once if nothing is marked so far. The first WAITING, for whom there are multiprocessors without work, see what is marked
// later. Hence nobody knows who takes part: items are asked for one by one, and whoever takes part enters and leaves
// (Participants). The last to leave makes the marks and counters 0 for the next call.
//
// Macros: LAYOUT, ALIGNED, TILE_HEADS (common/sparse/work.cuh).
#include "common/sparse/combine.cuh"
#include "common/sparse/amend.cuh"
#include "common/sparse/exact_mma.cuh"
#include "common/pdl.cuh"

constexpr int UNITS = HEADS / ROWS;  // of a tile
constexpr int WAITING = 8;

union Memory {
    Wide wide;
    ExactShared float64;
    LargeKeys large_keys;
    CutTile cut_tiles[MAX_SHARES];
};

// Attend for ROWS heads of a tile, to blocks first .. last - 1 of its keys.
struct Unit {
    const SparseProblem& problem;
    Memory& memory;
    TileCoord at;
    WideAttention wide;

    __device__ Unit(const SparseProblem& problem, Memory& memory, int tile, int unit)
        : problem(problem), memory(memory), at(problem, tile), wide(problem, memory.wide, at.b, at.s, at.first_head + unit * ROWS) {}

    __device__ bool exists() const { return wide.first_head < problem.heads; }

    __device__ int blocks() const { return blocks_of_tile(problem.lists[0].length(at.b, at.s), problem.lists[1].length(at.b, at.s)); }

    __device__ void attend_in_float64() {
        for (int head = 0; head < ROWS; head += UNIT)
            ::attend_in_float64(problem, at.b, at.s, wide.first_head + head, memory.float64);
    }

    // Add what the fast kernel left out; false if that does not do.
    __device__ bool amend() { return !exists() || ::amend(problem, memory.large_keys, at, wide.first_head); }

    // Part `part` of `count`; `arrived` counts them, and is 0 again after the last.
    __device__ void attend(int part, int count, Part* parts, int* arrived) {
        if (!exists()) return;
#if __CUDA_ARCH__ >= 800
        int all = blocks();
        wide.attend(all * part / count, all * (part + 1) / count);
        if (count > 1 && !gathered(part, count, parts, arrived)) return;
        if (wide.store()) return;
#endif
        attend_in_float64();
    }

    // Leave this part to the last one, or, as that, put all together.
    __device__ bool gathered(int part, int count, Part* parts, int* arrived) {
        __shared__ bool is_last;
        wide.leave(parts[part]);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1) == count - 1;
        __syncthreads();
        if (!is_last) return false;
        __threadfence();
        wide.gather(parts, count);
        if (threadIdx.x == 0) *arrived = 0;
        return true;
    }
};

// What other thread blocks may write meanwhile.
__device__ inline int look_at(const int* p) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// The thread blocks that do what is marked. All threads of the block, in each of these.
struct Participants {
    static constexpr int CLOSED = 1 << 30;
    int *count, *next;  // how many there are, or CLOSED and more; the item that nobody has yet
    bool all;           // every thread block is one, and looks at marks before it is: those who are done are counted

    // The same number for all threads.
    __device__ static int told(int x) {
        __shared__ int place;
        __syncthreads();  // all have read what was told before
        if (threadIdx.x == 0) place = x;
        __syncthreads();
        return place;
    }

    // False if the last one is about to make all marks 0. Once this is true, nobody does.
    __device__ bool enter() const {
        if (all) return true;
        int before = threadIdx.x == 0 ? atomicAdd(count, 1) : 0;
        __threadfence();
        return told(before) < CLOSED;
    }

    __device__ int next_item() const { return told(threadIdx.x == 0 ? atomicAdd(next, 1) : 0); }

    // True for the last one, when all items are done.
    __device__ bool leave() const {
        __syncthreads();
        bool last = false;
        if (threadIdx.x == 0) {
            __threadfence();
            last = all ? atomicAdd(count, 1) == int(gridDim.x) - 1 : atomicSub(count, 1) == 1 && atomicCAS(count, 0, CLOSED) == 0;
        }
        return told(last);
    }

    __device__ void reopen() const {
        __syncthreads();
        __threadfence();
        if (threadIdx.x == 0) *next = 0, __threadfence(), atomicExch(count, 0);
    }
};

// What a mark asks for: the reason that counts, or 0.
__device__ inline int asked_for(int mark) { return mark & ALL_NAN ? 0 : mark & AGAIN ? AGAIN : mark; }

// Marks, 32 a word and a bit each: those that ask for LARGE_ROPE, and for AGAIN. Of the first ones they are kept.
struct Marks {
    static constexpr int KEPT = 32;
    const int* marks;
    int end;
    uint32 (&kept)[2][KEPT];

    // The warp.
    __device__ uint32 word(int number, int asked) const {
        int mine = 32 * number + int(threadIdx.x) % 32;
        return __ballot_sync(~0u, mine < end && asked_for(look_at(marks + mine)) == asked);
    }

    // How many there are of both. All threads of the block.
    __device__ int2 count() const {
        __shared__ int counts[WARPS][2];
        int warp = threadIdx.x / 32, large = 0, again = 0;
        for (int number = warp; 32 * number < end; number += WARPS) {
            uint32 of_large = word(number, LARGE_ROPE), of_again = word(number, AGAIN);
            if (number < KEPT && threadIdx.x % 32 == 0) kept[0][number] = of_large, kept[1][number] = of_again;
            large += __popc(of_large), again += __popc(of_again);
        }
        if (threadIdx.x % 32 == 0) counts[warp][0] = large, counts[warp][1] = again;
        __syncthreads();
        int2 count = {};
        for (int i = 0; i < WARPS; ++i) count.x += counts[i][0], count.y += counts[i][1];
        return count;
    }

    // Where the mark is that asks for this and has `before` others before it that do. There is one.
    __device__ int find(int asked, int before) const {
#pragma unroll 1
        for (int number = 0;; ++number) {
            uint32 found = number < KEPT ? kept[asked == AGAIN][number] : word(number, asked);
            int count = __popc(found), lane = threadIdx.x % 32;
            if (before < count) return 32 * number + __ffs(__ballot_sync(~0u, __popc(found & ((2u << lane) - 1)) == before + 1)) - 1;
            before -= count;
        }
    }
};

// Go through items 0 .. count - 1 of all thread blocks, THREADS at a time: `wanted` is asked by one thread an
// item, and the whole block does those that are.
template <class Wanted, class Do> __device__ inline void for_wanted(int count, Wanted wanted, Do act) {
    __shared__ uint32 found[WARPS];
    for (int first = 0; first < count; first += THREADS * gridDim.x) {
        int mine = first + threadIdx.x * gridDim.x + blockIdx.x;
        uint32 votes = __ballot_sync(~0u, mine < count && wanted(mine));
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = votes;
        if (!__syncthreads_or(votes)) continue;
        for (int warp = 0; warp < WARPS; ++warp)
            for (uint32 left = found[warp]; left; left &= left - 1)
                act(first + (32 * warp + __ffs(left) - 1) * gridDim.x + blockIdx.x);
        __syncthreads();  // before `found` is written again
    }
}

// Whether max_logits say that a unit of a tile is asked for.
__device__ inline bool is_unsafe(const SparseProblem& problem, int tile, int unit) {
    TileCoord at(problem, tile);
    int head = at.first_head + unit * ROWS;
    if (head >= problem.heads) return false;
    return __float_as_uint(problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h]) == UNSAFE_BITS ||
           __float_as_uint(problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h]) == UNSAFE_BITS;
}

// parts     room for `most_slots` parts, of which a unit has no more than `most_parts`; not used without `unsafe`
// counters  zeros between calls: the participants, one behind it for each slot, the next item, and what says whether any
//           tile is marked, behind which the marks are
// combined  0, or about how many parts there are of each tile that is cut
extern "C" __global__ void __launch_bounds__(THREADS, 2)
finish_attention(const __grid_constant__ SparseProblem problem, int everything, uint8* parts, int* counters, int most_slots, int most_parts, int combined) {
    __shared__ Memory memory;
    int* marks = everything ? nullptr : problem.unsafe;
    pdl_release();
    if (marks && !combined && blockIdx.x >= WAITING && !__syncthreads_or(look_at(marks - 1))) return;
    pdl_wait();
    // A plan that splits no tile leaves nothing to combine. Not asked before: the plan may be of this call.
    if (combined && problem.starts && !problem.starts[SPLITS_AT]) combined = 0;
    int marked = marks ? look_at(marks - 1) : 0;  // under way while parts are put together
    if (marks && !combined && !__syncthreads_or(marked)) return;  // what usually happens, within the first few instructions
    if (combined) combine_tiles(problem, combined, memory.cut_tiles);
    int tiles = problem.tiles(), of_tile = min(UNITS, (problem.heads + ROWS - 1) / ROWS);  // units that exist
    if (!marks) {
        for_wanted(
            tiles * of_tile, [&](int item) { return everything || is_unsafe(problem, item / of_tile, item % of_tile); },
            [&](int item) { Unit(problem, memory, item / of_tile, item % of_tile).attend(0, 1, nullptr, nullptr); });
        return;
    }
    if (combined && !__syncthreads_or(marked)) return;
    Participants participants{counters, marks - 2, combined != 0};
    if (!participants.enter()) return;
    __shared__ uint32 kept[2][Marks::KEPT];
    Marks all_marks{marks, tiles, kept};
    int2 units = all_marks.count();
    units.x *= of_tile, units.y *= of_tile;
    int count = max(1, min(most_parts, most_slots / max(1, units.y)));
    for (int item; (item = participants.next_item()) < units.x + units.y * count;) {
        bool again = item >= units.x;
        int part = again ? (item - units.x) % count : 0, number = again ? (item - units.x) / count : item;
        Unit unit(problem, memory, all_marks.find(again ? AGAIN : LARGE_ROPE, number / of_tile), number % of_tile);
        if (!again && unit.amend()) continue;
        unit.attend(part, again ? count : 1, reinterpret_cast<Part*>(parts) + number * count, counters + 1 + number);
    }
    if (!participants.leave()) return;
    for (int tile = threadIdx.x - 1; tile < tiles; tile += THREADS) marks[tile] = 0;  // and the word before them
    participants.reopen();
}
