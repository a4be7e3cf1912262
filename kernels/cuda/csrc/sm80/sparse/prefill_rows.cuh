// The ring of rows of sm80/sparse/prefill.cu: what a tile needs arrives as *steps* of KEYS rows of 16-bit values.
//
// The first Q_STEPS steps of a tile are its queries, a head a row; the others are keys. Copies run AHEAD steps ahead of their sums,
// across tiles. Rows of absent keys and heads are zeros.
//
// Each warp of the sums copies the values that it multiplies, 128 bytes of a row, and part of what follows the values. So it knows
// by itself when these have arrived and when their place is free.
#pragma once
#include "common/pdl.cuh"
#include "common/sparse/work.cuh"
#include "sm80/operands.cuh"

constexpr int SUM_WARPS = 8, SCORE_WARPS = 4, THREADS = 32 * (SUM_WARPS + SCORE_WARPS);
constexpr int AHEAD = STAGES - 1;
constexpr int LEAD = STAGES > 3 ? 2 : 1;  // steps by which scores precede sums
constexpr int TILES_LISTED = 4;
constexpr int Q_STEPS = HEADS / KEYS;
constexpr int ROW_STRIDE = row_stride(LAYOUT::head_dim);
static_assert(HEADS == 64 && HEADS / SCORE_WARPS == 16 && (KEYS == 16 || KEYS == 32) && STAGES >= 3 && AHEAD <= Q_STEPS + 1, "unsupported sizes");

// Barriers between the sums, which copy, and the scores. A step's rows have arrived; its weights are written, and its rows no longer
// read by the scores; its weights are no longer read.
constexpr int ARRIVED = 1, ARRIVED_SLOTS = 4, WEIGHED = ARRIVED + ARRIVED_SLOTS, WEIGHED_SLOTS = 2, SUMMED = WEIGHED + WEIGHED_SLOTS;
constexpr int AMONG_SUMS = SUMMED + WEIGHED_SLOTS;
template <int COUNT> __device__ inline void barrier_sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory"); }
template <int COUNT> __device__ inline void barrier_arrive(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory"); }

// A tile of the CTA's work range. One thread lists it, where registers are free: it takes divisions.
struct RingTile {
    const uint8* q;      // of its first head
    const int* indices;
    int heads, keys;     // that it has
    int tile;            // -1 after the range's end
    int first_keys, end;  // numbers of its first step of keys, and after its last one: steps count through the range

    __device__ RingTile(const SparseProblem& problem, WorkRange& range, int first_step) {
        WorkTile work;
        bool more = range.next(problem, work);
        tile = more ? work.tile : -1, keys = more ? work.lengths0 : 0;
        first_keys = first_step + Q_STEPS, end = more ? first_keys + max(1, (keys + KEYS - 1) / KEYS) : INT32_LIMIT;
        TileCoord at(problem, more ? tile : 0);
        const Segment& list = problem.segments[0];
        q = reinterpret_cast<const uint8*>(problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s +
                                           at.first_head * problem.q_stride_h);
        indices = list.indices + at.b * list.indices_stride_b + at.s * list.indices_stride_s;
        heads = problem.heads - at.first_head;
    }
};

struct RowRing {
    alignas(16) uint8 rows[STAGES][KEYS][ROW_STRIDE];
    alignas(8) float bias[STAGES][KEYS];  // -infinity where the key is absent
    alignas(8) uint8 tiles[TILES_LISTED][sizeof(RingTile)];
    WorkRange range;  // that is left

    // The tile of this number in the range.
    __device__ RingTile& tile(int number) { return reinterpret_cast<RingTile&>(tiles[number % TILES_LISTED]); }
};
constexpr int TILE_BYTES = 40, RANGE_BYTES = 16;
constexpr int RING_BYTES = to_16(STAGES * KEYS * (ROW_STRIDE + 4) + TILES_LISTED * TILE_BYTES + RANGE_BYTES);
static_assert(sizeof(RingTile) == TILE_BYTES && sizeof(WorkRange) == RANGE_BYTES && sizeof(RowRing) == RING_BYTES);

// threadIdx.x, read again: values that depend on it are then computed where they are used, and take no register elsewhere.
__device__ inline int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// The copies of a warp of the sums.
struct RowLoader {
    const SparseProblem& problem;
    RowRing& ring;
    int current;  // number of the tile whose sums are computed
    int slot;     // of this lane's row in the step to copy next

    // Before a barrier of the CTA.
    static __device__ void list_first(const SparseProblem& problem, RowRing& ring) {
        ring.range = WorkRange(problem);
        ring.tile(0) = RingTile(problem, ring.range, 0), ring.tile(1) = RingTile(problem, ring.range, ring.tile(0).end);
    }

    // Starts the first copies; the first LEAD steps have arrived.
    __device__ RowLoader(const SparseProblem& p, RowRing& r) : problem(p), ring(r), current(0) {
        slot = slot_in(0);
        for (int i = 0; i < AHEAD; ++i) copy(i);
        copies_wait<AHEAD - LEAD>();
        __syncwarp();
        for (int i = 0; i < LEAD; ++i) barrier_arrive<THREADS>(ARRIVED + i);
    }

    __device__ RingTile& tile() { return ring.tile(current); }
    // The tile of a step that is copied now.
    __device__ RingTile& tile_of(int step) { return ring.tile(current + (step >= tile().end)); }

    __device__ int slot_in(int number) {
        const RingTile& of = tile_of(number);
        int key = (number - of.first_keys) * KEYS + thread_index() % KEYS;
        return key >= 0 && key < of.keys ? of.indices[key] : -1;
    }

    // Start copying this warp's part of a step: one group of copies, empty after the range's end. For one step after another.
    __device__ void copy(int number) {
        const RingTile& of = tile_of(number);
        if (of.tile >= 0) {
            const Segment& list = problem.segments[0];
            int thread = thread_index(), lane = thread % 32, warp = thread / 32, stage = number % STAGES;
            bool queries = number < of.first_keys;
            const uint8* base = queries ? of.q : list.pages;
            int64 stride = queries ? 2 * problem.q_stride_h : list.page_stride;
            int head = (number - of.first_keys + Q_STEPS) * KEYS + lane % KEYS;
            int row = queries ? (head < of.heads ? head : -1) : (uint32(slot) < uint32(list.num_slots) ? slot : -1);
            if (warp == 0 && lane < KEYS) ring.bias[stage][lane] = row >= 0 ? 0.0f : -infinity();
            uint32 to = shared_address(ring.rows[stage][lane / 8]) + 128 * warp + lane % 8 * 16;
#pragma unroll
            for (int i = 0; i < KEYS; i += 4) {
                int from = __shfl_sync(~0u, row, i + lane / 8);
                copy_async<16>(to + i * ROW_STRIDE, base + max(from, 0) * stride + (128 * warp + lane % 8 * 16), from >= 0);
            }
            if (LAYOUT::head_dim > V_DIM) {
                constexpr int ROWS = KEYS / SUM_WARPS;
                int at = ROWS * warp + lane / 8 % ROWS, from = __shfl_sync(~0u, row, at);
                if (lane < 8 * ROWS)
                    copy_async<16>(ring.rows[stage][at] + 2 * V_DIM + lane % 8 * 16,
                                   base + max(from, 0) * stride + (2 * V_DIM + lane % 8 * 16), from >= 0);
            }
        }
        copies_commit();
        slot = slot_in(number + 1);
    }

    // At a step of the sums: copy a later one, and signal to the scores that theirs has arrived.
    __device__ void advance(int number) {
        copy(number + AHEAD);
        copies_wait<AHEAD - LEAD>();
        __syncwarp();
        barrier_arrive<THREADS>(ARRIVED + (number + LEAD) % ARRIVED_SLOTS);
    }

    // At the start of a tile: list the one after the next.
    __device__ void list_ahead() {
        if (threadIdx.x == 0) ring.tile(current + 2) = RingTile(problem, ring.range, ring.tile(current + 1).end);
    }
    // After a tile's end: all warps have its successor's list.
    __device__ void next_tile() {
        barrier_sync<32 * SUM_WARPS>(AMONG_SUMS);
        ++current;
    }
};
