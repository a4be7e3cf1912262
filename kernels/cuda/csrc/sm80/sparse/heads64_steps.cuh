// Lists the steps of a work range of sm80/sparse/heads64.cu and the addresses of their rows. Warps of the scores do it
// ahead of the copies, because the sums, which copy, have few free registers.
//
// Queries and keys of a tile arrive as *steps* of KEYS rows of 16-bit values. The first Q_STEPS steps of a tile are its
// queries, a head a row; the others are keys. Steps count through the range, across tiles.
#pragma once
#include "common/device.cuh"
#include "common/sparse/work.cuh"
#include "sm80/steps.cuh"

constexpr int VALUES = V_DIM / SUM_WARPS, PLACE = 2 * VALUES;  // a warp's values of a row, and their bytes
constexpr int AHEAD = STAGES - 1;                              // copies are this number of steps ahead of sums
constexpr int LEAD = STAGES > 3 ? 2 : 1;  // scores, which read expanded rows, are ahead of sums by this number of steps
constexpr int ROWS_LISTED = 4, STEPS_LISTED = 8, TILES_LISTED = 8;
constexpr int TILES_AHEAD =
    5;  // listed at the end of a tile: nine steps belong to at most four tiles, and warps of the scores are up to a step apart
constexpr int Q_STEPS = HEADS / KEYS;
constexpr int ROW_STRIDE = 2 * LAYOUT::head_dim;
constexpr bool TWO_FORMATS = LAYOUT::row_bytes != EXTRA_LAYOUT::row_bytes || LAYOUT::scale_tile != EXTRA_LAYOUT::scale_tile;
constexpr int SCALE_BYTES = LAYOUT::scale_bytes > EXTRA_LAYOUT::scale_bytes ? LAYOUT::scale_bytes : EXTRA_LAYOUT::scale_bytes;
constexpr int SCALED_ROWS = LAYOUT::quantized_dim ? KEYS : 1, SCALE_STRIDE = LAYOUT::quantized_dim ? SCALE_BYTES : 16;
constexpr uint32 ALL_PRESENT = KEYS == 32 ? ~0u : (1u << KEYS % 32) - 1;
static_assert(HEADS == 64 && HEADS / SCORE_WARPS == 16 && (KEYS == 16 || KEYS == 32) && (STAGES == 3 || STAGES == 4), "unsupported sizes");
static_assert(LAYOUT::quantized_dim % VALUES == 0 && (LAYOUT::head_dim == V_DIM || LAYOUT::head_dim == V_DIM + VALUES),
              "unsupported dimensions");
static_assert(LAYOUT::head_dim == EXTRA_LAYOUT::head_dim && LAYOUT::quantized_dim == EXTRA_LAYOUT::quantized_dim, "unsupported formats");

// threadIdx.x, read again by each call, so that values derived from it take no registers between uses.
__device__ inline int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x & 511;  // not negative: divisions by powers of two are shifts
}

// Offset of a byte of a row in the ring. The 16-byte chunks of each 128 bytes are swizzled by the row: copies write
// whole lines of shared memory, and the rows of a matrix are in different banks. Shared memory begins at a multiple of
// 128, so an exclusive or with 16, 32 or 64 gives another chunk of the same 128 bytes.
__device__ inline uint32 place_in_row(uint32 row, uint32 byte) { return byte ^ row % 8 * 16; }

// Warps of scores come first.
constexpr int SUMS_FROM = 32 * SCORE_WARPS;
__device__ inline int sum_thread() { return (thread_index() - SUMS_FROM) & 511; }  // index among the threads of the sums

// The part of a tile that is in the CTA's work range.
struct RangeTile {
    const uint8* q;  // of its first head
    bf16* out;  // likewise
    const int* indices[2];  // of the first key of both lists
    int keys[2];  // number of keys of both lists
    int heads;  // heads of the tile
    int first_keys, second, end;  // its first step of keys, the first one of the second list, the one after its last
    WorkTile work;  // its blocks in the range; tile -1: after the end of the range

    // Take the next tile of the range, whose first step is `first`.
    __device__ void take(const SparseProblem& problem, WorkRange& range, int first) {
        bool more = range.next(problem, work);
        if (!more) work.tile = -1;
        asm volatile("" ::: "memory");  // forces a reload below: few registers are free where tiles are listed
        first_keys = first + Q_STEPS, second = end = INT32_LIMIT;
        keys[0] = keys[1] = 0;
        TileCoord at(problem, more ? work.tile : 0);
        if (more) {
            int blocks0 = blocks_of(work.lengths0);
            list(problem, at, 0, work.lengths0, work.first, work.last);
            list(problem, at, 1, work.lengths1, max(work.first - blocks0, 0), work.last - blocks0);
            second = first_keys + (keys[0] + KEYS - 1) / KEYS;
            end = max(first_keys + 1, second + (keys[1] + KEYS - 1) / KEYS);
        }
        q = reinterpret_cast<const uint8*>(problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s +
                                           at.first_head * problem.q_stride_h);
        out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + at.first_head * problem.out_stride_h;
        heads = problem.heads - at.first_head;
    }

    // Set the keys of a list to blocks [first, last).
    __device__ void list(const SparseProblem& problem, const TileCoord& at, int which, int length, int first, int last) {
        const Segment& of = problem.segments[which];
        keys[which] = max(0, min(length, last * BLOCK) - first * BLOCK);
        indices[which] = of.indices + at.b * of.indices_stride_b + at.s * of.indices_stride_s + first * BLOCK;
    }

    // Delay the tile by `steps` steps.
    __device__ void shift(int steps) {
        first_keys += steps;
        if (work.tile >= 0) second += steps, end += steps;
    }

    // Whether a step of keys is of the second list.
    __device__ bool is_second(uint32 step) const { return step >= second && keys[1] > 0; }
};

// The kind of a step. NONE: after the end of the range.
enum Kind : uint32 { NONE, QUERIES, FIRST, SECOND };
struct Step {
    uint32 bits;  // the kind, + 4 in the last step of a tile, + 8 times the tile's place, + 64 times the number of a step of queries
    uint32 present;  // a bit for each row that is present

    __device__ Kind kind() const { return Kind(bits & 3); }
    __device__ bool has_keys() const { return bits & 2; }
    __device__ bool last() const { return bits & 4; }
    __device__ int tile() const { return bits >> 3 & 7; }
    __device__ int parity() const { return bits >> 3 & 1; }
    __device__ int place_before() const { return (bits >> 3) - 1 & 7; }  // of the previous tile
    __device__ int part() const { return bits >> 6; }
};

struct StepRing {
    alignas(16) uint8 rows[STAGES][KEYS][ROW_STRIDE];
    alignas(16) uint8 scales[ROWS_LISTED][SCALED_ROWS][SCALE_STRIDE];  // as stored
    alignas(16) uint64 sources[ROWS_LISTED][KEYS];  // addresses of rows
    int slots[SCORE_WARPS][KEYS];  // indices of the next step of each warp of the scores
    alignas(8) Step steps[STEPS_LISTED];
    alignas(8) uint8 tiles[TILES_LISTED][sizeof(RangeTile)];
    WorkRange range;  // the rest of the work range
    StepBarriers barriers;
    uint8 has_value[2][SUM_WARPS], is_unsafe[2][SUM_WARPS];  // for tiles of even and odd number, see RowLoader::find

    // The tile of this number in the range.
    __device__ RangeTile& tile(uint32 number) { return reinterpret_cast<RangeTile&>(tiles[number % TILES_LISTED]); }
    __device__ const Step& step(uint32 number) const { return steps[number % STEPS_LISTED]; }

    // List the first tiles, by one warp. Each lane lists one tile, because each waits for memory.
    __device__ void list_first(const SparseProblem& problem) {
        int lane = thread_index() % 32;
        if (lane < 2 * SUM_WARPS) has_value[0][lane] = is_unsafe[0][lane] = 0;
        if (lane == 0) barriers.init();
        WorkRange mine(problem);
        if (lane > 0) mine.tile += lane, mine.first = 0;
        RangeTile& taken = tile(lane % TILES_LISTED);
        if (lane < TILES_AHEAD) taken.take(problem, mine, 0);
        int steps = lane < TILES_AHEAD && taken.work.tile >= 0 ? taken.end : 0, before = 0;
#pragma unroll
        for (int i = 0; i < TILES_AHEAD - 1; ++i) {
            int its = __shfl_sync(~0u, steps, i);
            if (i < lane) before += its;
        }
        if (lane >= TILES_AHEAD) return;
        taken.shift(before);
        if (lane == TILES_AHEAD - 1) range = mine;
    }
    // List the next tile. Called by one thread, in order.
    __device__ void list(const SparseProblem& problem, uint32 number) { tile(number).take(problem, range, tile(number - 1).end); }
};

constexpr int TILE_BYTES = 88, RANGE_BYTES = 16;
constexpr int LIST_BYTES = STEPS_LISTED * 8 + TILES_LISTED * TILE_BYTES + RANGE_BYTES + BARRIER_BYTES + 4 * SUM_WARPS;
constexpr int RING_BYTES =
    to_16(STAGES * KEYS * ROW_STRIDE + ROWS_LISTED * (SCALED_ROWS * SCALE_STRIDE + KEYS * 8) + SCORE_WARPS * KEYS * 4 + LIST_BYTES);
static_assert(sizeof(RangeTile) == TILE_BYTES && sizeof(WorkRange) == RANGE_BYTES && sizeof(StepRing) == RING_BYTES);

// Lists every SCORE_WARPS-th step, by a warp of the scores. Each lane has a row.
struct Lister {
    const SparseProblem& problem;
    StepRing& ring;
    int tile;  // number in the range of the tile of the next step

    __device__ Lister(const SparseProblem& p, StepRing& r, uint32 step) : problem(p), ring(r), tile(0) {
        find(step);
        copies_commit();
    }

    // Find the tile of the next step, and start to copy this lane's index.
    __device__ void find(uint32 step) {
        while (step >= ring.tile(tile).end) ++tile;
        const RangeTile& of = ring.tile(tile);
        int key = key_of(of, step), lane = thread_index() % 32;
        if (lane < KEYS && key >= 0 && key < of.keys[of.is_second(step)])
            copy_async<4>(&ring.slots[step % SCORE_WARPS][lane], of.indices[of.is_second(step)] + key, true);
    }

    // This lane's key of the list; negative in a step of queries.
    static __device__ int key_of(const RangeTile& of, uint32 step) {
        return int(step - (of.is_second(step) ? of.second : of.first_keys)) * KEYS + thread_index() % 32;
    }

    // List a step whose indices have arrived, start to copy its scales, and find the next step. The copies are one
    // group.
    __device__ void list(uint32 step) {
        const RangeTile& of = ring.tile(tile);
        if (of.work.tile < 0) {
            write(step, NONE, false, 0, nullptr, false);
        } else if (step < of.first_keys) {
            int part = step - of.first_keys + Q_STEPS, head = part * KEYS + thread_index() % 32;
            write(step, QUERIES, false, part, of.q + head * (2 * problem.q_stride_h), head < of.heads);
        } else if (TWO_FORMATS && of.is_second(step)) {
            list_keys<EXTRA_LAYOUT>(step, SECOND, of, problem.segments[1]);
        } else {
            list_keys<LAYOUT>(step, FIRST, of, problem.segments[of.is_second(step)]);
        }
        find(step + SCORE_WARPS);
        copies_commit();
    }

    template <class Layout> __device__ void list_keys(uint32 step, Kind kind, const RangeTile& of, const Segment& list) {
        int lane = thread_index() % 32, slot = ring.slots[step % SCORE_WARPS][lane % KEYS];
        bool here = lane < KEYS && key_of(of, step) < of.keys[of.is_second(step)] && uint32(slot) < uint32(list.num_slots);
        int at = here ? slot : 0, page = list.page_of(at);
        int in_page = at - page * list.block_size;
        const uint8* pages = list.pages + page * list.page_stride;
        write(step, kind, step + 1 == of.end, 0, pages + int64(in_page) * Layout::row_bytes, here);
        if (Layout::quantized_dim == 0 || lane >= KEYS) return;
        const uint8* scales =
            pages + (Layout::scale_start + int64(list.block_size) * Layout::scale_start_per_token) + in_page * Layout::scale_stride;
        constexpr int PIECE = Layout::scale_bytes % 16 ? 8 : 16;
#pragma unroll
        for (int i = 0; i < Layout::scale_bytes; i += PIECE) copy_async<PIECE>(ring.scales[step % ROWS_LISTED][lane] + i, scales + i, here);
    }

    __device__ void write(uint32 step, Kind kind, bool last, int part, const uint8* row, bool here) {
        int lane = thread_index() % 32;
        uint32 present = __ballot_sync(~0u, here) & ALL_PRESENT;
        if (lane < KEYS) ring.sources[step % ROWS_LISTED][lane] = reinterpret_cast<uint64>(here ? row : problem.segments[0].pages);
        if (lane == 0)
            ring.steps[step % STEPS_LISTED] = {kind | uint32(last) << 2 | uint32(tile % TILES_LISTED) << 3 | uint32(part) << 6, present};
    }
};
