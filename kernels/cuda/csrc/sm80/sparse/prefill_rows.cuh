// The ring of rows of sm80/sparse/prefill.cu: what a tile needs arrives as *steps* of KEYS rows of 16-bit values.
//
// The first Q_STEPS steps of a tile are its queries, a head a row; the others are keys. Copies run AHEAD steps ahead of their use,
// across tiles. Rows of absent keys and heads are zeros.
#pragma once
#include "common/pdl.cuh"
#include "common/sparse/work.cuh"
#include "sm80/operands.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int AHEAD = STAGES - 2;  // the rows of a step, the values of the one before, and the rows that are arriving
constexpr int TILES_LISTED = 4;
constexpr int Q_STEPS = HEADS / KEYS;
constexpr int ROW_BYTES = 2 * LAYOUT::head_dim, ROW_STRIDE = row_stride(LAYOUT::head_dim);
static_assert(HEADS == 64 && HEADS % KEYS == 0 && KEYS % 16 == 0 && STAGES >= 3 && AHEAD <= Q_STEPS, "unsupported sizes");

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
    int current;      // number of the tile that is computed

    // The tile `ahead` after the current one.
    __device__ RingTile& tile(int ahead = 0) { return reinterpret_cast<RingTile&>(tiles[(current + ahead) % TILES_LISTED]); }
    // The tile of a step that is copied now.
    __device__ RingTile& tile_of(int step) { return tile(step >= tile().end); }
};

// threadIdx.x, read again: values that depend on it are then computed where they are used, and take no register elsewhere.
__device__ inline int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// LANES threads copy a row.
struct RowLoader {
    static constexpr int LANES = THREADS / KEYS;

    const SparseProblem& problem;
    RowRing& ring;
    int slot;  // of this thread's row in the step to copy next

    // Starts the copies of the first AHEAD steps and waits for the first one. A barrier must follow.
    __device__ RowLoader(const SparseProblem& p, RowRing& r) : problem(p), ring(r) {
        if (threadIdx.x == 0) {
            ring.range = WorkRange(problem), ring.current = 0;
            ring.tile() = RingTile(problem, ring.range, 0), ring.tile(1) = RingTile(problem, ring.range, ring.tile().end);
        }
        __syncthreads();
        slot = slot_in(0);
        for (int i = 0; i < AHEAD; ++i) copy(i);
        wait();
    }

    __device__ int slot_in(int number) const {
        const RingTile& of = ring.tile_of(number);
        int key = (number - of.first_keys) * KEYS + thread_index() / LANES;
        return key >= 0 && key < of.keys ? of.indices[key] : -1;
    }

    // Start copying a step's rows: one group of copies, empty after the range's end. To be called for one step after another.
    __device__ void copy(int number) {
        const RingTile& of = ring.tile_of(number);
        if (of.tile >= 0) {
            const Segment& list = problem.segments[0];
            int row = thread_index() / LANES, part = thread_index() % LANES;
            bool queries = number < of.first_keys;
            int head = (number - of.first_keys + Q_STEPS) * KEYS + row;
            bool here = queries ? head < of.heads : uint32(slot) < uint32(list.num_slots);
            const uint8* from = queries ? of.q : list.pages;
            from += here ? (queries ? head * (2 * problem.q_stride_h) : slot * list.page_stride) : 0;
            if (part == 0) ring.bias[number % STAGES][row] = here ? 0.0f : -infinity();
            uint32 to = shared_address(ring.rows[number % STAGES][row]) + 16 * part;
#pragma unroll
            for (int i = 0; i < (ROW_BYTES / 16 + LANES - 1) / LANES; ++i)
                if ((i + 1) * LANES <= ROW_BYTES / 16 || part + i * LANES < ROW_BYTES / 16)
                    copy_async<16>(to + 16 * i * LANES, from + 16 * (part + i * LANES), here);
        }
        copies_commit();
        slot = slot_in(number + 1);
    }

    // At the start of a tile: list the one after the next, which copies reach after a barrier.
    __device__ void list_ahead() {
        if (threadIdx.x == 0) ring.tile(2) = RingTile(problem, ring.range, ring.tile(1).end);
    }

    // The next step's rows have arrived, for all threads after a barrier.
    __device__ void wait() { copies_wait<AHEAD - 1>(); }
};
