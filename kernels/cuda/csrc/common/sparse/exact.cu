// Epilogue kernel: combines split tiles (common/sparse/combine.cuh) and recomputes tiles that a fast kernel flagged as outside
// its range, within the error bounds for any values. Usually no tile is flagged. Without a fast kernel it computes all tiles.
//
// Grid: up to 2 CTAs per SM, which claim work items dynamically.
// Block: 256 threads. The eight warps work on the same ROWS = 16 heads.
// Shared memory: one `Memory`, static.
// Limits: bfloat16 products need sm_80, earlier devices use float64 only.
//
// SparseProblem::unsafe holds 0 for most tiles, otherwise the reason for which the tile is flagged. The word before it
// says whether any tile is flagged. A tile whose results are all NaN is not recomputed. The heads of the other flagged
// tiles are recomputed ROWS at a time (common/sparse/exact_mma.cuh). If few tiles are flagged, several CTAs split the
// keys of ROWS heads, into as many parts as fit in memory. Without `unsafe`, UNSAFE_BITS flags a tile, and keys are not
// split.
//
// Every call pays for this kernel's CTAs, which run between two persistent kernels. If nothing has to be combined, most CTAs
// therefore do not wait for the previous kernel to end: they start as its CTAs exit, and exit at once if no tile is flagged by
// then. The first WAITING CTAs run on SMs without other work and wait for tiles flagged later. The number of participating CTAs
// is thus unknown: work items are claimed with atomics, and each participant enters and leaves (Participants). The last one to
// leave clears the flags and counters for the next call.
//
// Macros: LAYOUT, EXTRA_LAYOUT, TILE_HEADS (common/sparse/work.cuh), ALIGNED, FLOAT64_ONLY: compute in float64 alone, as for
// formats whose scales change within a slice (common/sparse/exact_mma_scores.cuh), and for two formats. COMBINES: whether calls
// may have split tiles; combining them is a third of the compile time.
#include "common/sparse/combine.cuh"
#include "common/sparse/exact_unit.cuh"
#include "common/device.cuh"

#ifndef COMBINES
#define COMBINES 0
#endif
constexpr int WAITING = 8, CTAS = 2;  // on an SM

union Memory {
    UnitMemory unit;
    SplitTile split_tiles[MAX_RANGES];
};

// Reads a word that other CTAs may be writing.
__device__ inline int load_relaxed(const int* p) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// The CTAs that recompute flagged tiles. Each method is called by all threads of the block.
struct Participants {
    static constexpr int CLOSED = 1 << 30;
    int *count, *next;  // number of participants, CLOSED and more after the last has left; the next item to claim
    bool all;           // every CTA takes part, and reads the flags before it enters: `count` then counts CTAs that are done

    // Returns thread 0's `x` to all threads.
    __device__ static int broadcast(int x) {
        __shared__ int place;
        __syncthreads();  // all have read the previous value
        if (threadIdx.x == 0) place = x;
        __syncthreads();
        return place;
    }

    // False if the last participant is about to clear the flags. If true, they are not cleared until this CTA leaves.
    __device__ bool enter() const {
        if (all) return true;
        int before = threadIdx.x == 0 ? atomicAdd(count, 1) : 0;
        __threadfence();
        return broadcast(before) < CLOSED;
    }

    __device__ int next_item() const { return broadcast(threadIdx.x == 0 ? atomicAdd(next, 1) : 0); }

    // True for the last participant, when all items are done.
    __device__ bool leave() const {
        __syncthreads();
        bool last = false;
        if (threadIdx.x == 0) {
            __threadfence();
            last = all ? atomicAdd(count, 1) == int(gridDim.x) - 1 : atomicSub(count, 1) == 1 && atomicCAS(count, 0, CLOSED) == 0;
        }
        return broadcast(last);
    }

    __device__ void reopen() const {
        __syncthreads();
        __threadfence();
        if (threadIdx.x == 0) *next = 0, __threadfence(), atomicExch(count, 0);
    }
};

// The tiles to recompute, as a bitmap of 32 tiles a word. The first CACHED words are cached in shared memory.
struct Marks {
    static constexpr int CACHED = 32;
    const int* marks;
    int end;
    uint32 (&cached)[CACHED];

    // Called by a whole warp.
    __device__ uint32 word(int number) const {
        int mine = 32 * number + int(threadIdx.x) % 32;
        return __ballot_sync(~0u, mine < end && load_relaxed(marks + mine) == RECOMPUTE);
    }

    // Number of tiles to recompute. Called by all threads of the block.
    __device__ int count() const {
        __shared__ int counts[WARPS];
        int warp = threadIdx.x / 32, own = 0;
        for (int number = warp; 32 * number < end; number += WARPS) {
            uint32 found = word(number);
            if (number < CACHED && threadIdx.x % 32 == 0) cached[number] = found;
            own += __popc(found);
        }
        if (threadIdx.x % 32 == 0) counts[warp] = own;
        __syncthreads();
        int all = 0;
        for (int i = 0; i < WARPS; ++i) all += counts[i];
        return all;
    }

    // The tile to recompute that has `before` others before it; it must exist.
    __device__ int find(int before) const {
#pragma unroll 1
        for (int number = 0;; ++number) {
            uint32 found = number < CACHED ? cached[number] : word(number);
            int count = __popc(found), lane = threadIdx.x % 32;
            if (before < count) return 32 * number + __ffs(__ballot_sync(~0u, __popc(found & ((2u << lane) - 1)) == before + 1)) - 1;
            before -= count;
        }
    }
};

// The wanted items among 0 .. count - 1, distributed over all CTAs. One thread evaluates `wanted` for an item, EXACT_THREADS items of
// a CTA at a time.
template <class Wanted> struct WantedItems {
    int count;
    Wanted wanted;
    uint32 (&found)[WARPS];
    int first, warp = WARPS;  // first item of this round; the warp whose votes are read next
    uint32 left = 0;          // votes of that warp that have not been read
    bool reads_found = false;

    __device__ WantedItems(int count, Wanted wanted, uint32 (&found)[WARPS])
        : count(count), wanted(wanted), found(found), first(-int(EXACT_THREADS * gridDim.x)) {}

    // The next one, or -1 after the last. All threads of the block.
    __device__ int next() {
        for (;;) {
            for (; warp < WARPS; left = ++warp < WARPS ? found[warp] : 0) {
                if (!left) continue;
                int bit = __ffs(left) - 1;
                left &= left - 1;
                return first + (32 * warp + bit) * gridDim.x + blockIdx.x;
            }
            if (reads_found) __syncthreads();  // before `found` is written again
            reads_found = false;
            first += EXACT_THREADS * gridDim.x;
            if (first >= count) return -1;
            int mine = first + threadIdx.x * gridDim.x + blockIdx.x;
            uint32 votes = __ballot_sync(~0u, mine < count && wanted(mine));
            if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = votes;
            if (!__syncthreads_or(votes)) continue;
            reads_found = true, warp = 0, left = found[0];
        }
    }
};

// parts     memory for `most_slots` parts, at most `most_parts` for a unit; unused without `unsafe`
// counters  zeros between calls: the participants, then one counter for each slot, the next item, the word that says whether
//           any tile is flagged, and the flags
// combined  0, or the approximate number of splits of each split tile; 0 without COMBINES
extern "C" __global__ void __launch_bounds__(EXACT_THREADS, CTAS)
    attention_epilogue(const __grid_constant__ SparseProblem problem, int everything, uint8* parts, int* counters, int most_slots,
                       int most_parts, int combined) {
    __shared__ Memory memory;
    int* marks = everything ? nullptr : problem.unsafe;
    if constexpr (!COMBINES) combined = 0;
    pdl_release();
    if (marks && !combined && blockIdx.x >= WAITING && !__syncthreads_or(load_relaxed(marks - 1))) return;
    pdl_wait();
    // A plan that splits no tile leaves nothing to combine. Read after pdl_wait: the plan may be made in this call.
    if (combined && problem.starts && !problem.starts[SPLITS_AT]) combined = 0;
    int marked = marks ? load_relaxed(marks - 1) : 0;  // in flight while tiles are combined
    if (marks && !combined && !__syncthreads_or(marked)) return;  // the usual case, within the first few instructions
    if constexpr (COMBINES)
        if (combined) combine_tiles(problem, combined, memory.split_tiles);
    int tiles = problem.tiles(), of_tile = min(UNITS, (problem.heads + ROWS - 1) / ROWS);  // units that exist
    if (marks && combined && !__syncthreads_or(marked)) return;
    Participants participants{counters, marks - 2, combined != 0};
    if (marks && !participants.enter()) return;
    __shared__ uint32 cached[Marks::CACHED], found[WARPS];
    auto is_wanted = [&](int item) { return everything || is_unsafe(problem, item / of_tile, item % of_tile); };
    WantedItems<decltype(is_wanted)> wanted(tiles * of_tile, is_wanted, found);
    Marks all_marks{marks, tiles, cached};
    int units = marks ? all_marks.count() * of_tile : 0, splits = marks ? max(1, min(most_parts, most_slots / max(1, units))) : 1;
    // One loop for both ways to find items: the attention code is inlined once, which halves the compile time.
    for (;;) {
        int tile, unit, part = 0, slot = 0;
        if (marks) {
            int item = participants.next_item();
            if (item >= units * splits) break;
            part = item % splits, slot = item / splits;
            tile = all_marks.find(slot / of_tile), unit = slot % of_tile;
        } else {
            int item = wanted.next();
            if (item < 0) break;
            tile = item / of_tile, unit = item % of_tile;
        }
        Unit(problem, memory.unit, tile, unit).attend(part, splits, reinterpret_cast<Part*>(parts) + slot * splits, counters + 1 + slot);
    }
    if (!marks) return;
    if (!participants.leave()) return;
    for (int tile = threadIdx.x - 1; tile < tiles; tile += EXACT_THREADS) marks[tile] = 0;  // and the word before them
    participants.reopen();
}
