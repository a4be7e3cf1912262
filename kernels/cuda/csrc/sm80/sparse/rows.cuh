// Copies cache rows into shared memory, for sm80/sparse/attention.cu.
//
// A ring of stages holds the raw rows of KEYS keys each, with their converted scales and a bias that is -inf for absent
// keys. Rows of absent keys are zeros.
//
// Formats whose scales change within a slice (FINE_SCALES; V4.1's) are expanded in the ring once they have arrived: each row is
// 512 e4m3 values with a factor for FACTOR_TILE of them, whatever its format, so that scores and sums are the same for both lists.
#pragma once
#include "common/sparse/work.cuh"
#include "common/device.cuh"
#include "sm80/mma.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int STEPS = BLOCK / KEYS;  // in a block
constexpr int AHEAD = STAGES - 2;    // copies are this number of steps ahead of the scores; scores are one step ahead of the sums
constexpr int STEPS_LISTED = 16;
constexpr int SLICE = 64;  // values
constexpr int SLICES = LAYOUT::head_dim / SLICE, FP8_SLICES = LAYOUT::quantized_dim / SLICE;
constexpr bool FINE_SCALES = LAYOUT::num_scales > 0 && LAYOUT::scale_tile < SLICE;
constexpr int FACTOR_TILE = LAYOUT::scale_tile < EXTRA_LAYOUT::scale_tile ? LAYOUT::scale_tile : EXTRA_LAYOUT::scale_tile;
constexpr int NUM_SCALES = FINE_SCALES ? LAYOUT::quantized_dim / FACTOR_TILE : LAYOUT::num_scales;  // in the ring
constexpr int SLICES_PER_SCALE = FP8_SLICES && !FINE_SCALES ? LAYOUT::scale_tile / SLICE : 1;
constexpr int BF16_AT = LAYOUT::rope_offset;  // the bfloat16 values of a row

// A row in the ring: the row as in the cache, followed by its scales if these are at the end of the page, or space for
// its expanded values.
template <class Layout> struct RingRow {
    static constexpr bool TAIL_SCALES = Layout::scale_start_per_token > 0;
    static constexpr int SCALES_AT = TAIL_SCALES ? Layout::row_bytes : Layout::scale_start;
};
constexpr int LONGER_ROW = LAYOUT::token_bytes > EXTRA_LAYOUT::token_bytes ? LAYOUT::token_bytes : EXTRA_LAYOUT::token_bytes;
constexpr int ROW_USED = FINE_SCALES && LONGER_ROW < LAYOUT::quantized_dim ? LAYOUT::quantized_dim : LONGER_ROW;
// 32 bytes modulo 64: with the order of columns, all reads are free of bank conflicts.
constexpr int ROW_STRIDE = (ROW_USED + 31) / 64 * 64 + 32;

// Range of scales for which V times a scale is precise in float16: of UE8M0 bytes, and of other scales, which are
// rounded to float16. Tiny scales, as in rows that were never written, turn V into zero; where that matters, results
// are too small (sm80/sparse/attention.cu).
constexpr int MIN_SCALE_BYTE = 105, MAX_SCALE_BYTE = 134, TINY_SCALE_BYTE = 40;
constexpr float MIN_SCALE = 1.0f / 16384.0f, MAX_SCALE = 128.0f, TINY_SCALE = 0x1p-87f;
[[maybe_unused]] constexpr float MIN_FINE_SCALE = 0x1p-22f;  // as MIN_SCALE_BYTE; FINE_SCALES are powers of two, or e4m3 numbers

// The columns of S and P are permuted in each 16 keys: the token at a column, and the column of a token.
__device__ inline int token_of_column(int n) {
    int b = n & 1, c = n >> 1 & 3;
    return (c ^ b << 1) | b << 2 | (n & ~7);
}
__device__ inline int column_of_token(int t) {
    int b = t >> 2 & 1, c = (t & 3) ^ b << 1;
    return c << 1 | b | (t & ~7);
}

// One step of a CTA's work range.
struct Step {
    const int* indices;  // of its first key; `left` entries of the list remain
    int left;
    int tile;                // -1 after the range's end
    bool second;             // of the two lists
    bool last;               // of the tile in this range
    bool whole, from_start;  // whether the range has the whole tile; whether it has the first block
};

// Lists the steps of a work range. One thread runs it, in shared memory, to save registers.
struct StepCursor {
    WorkRange range;
    WorkTile work;
    const int* indices;
    int left, tile_steps, list_steps;
    bool second;

    __device__ void begin(const SparseProblem& problem) {
        range = WorkRange(problem);
        open_tile(problem);
    }

    __device__ void open_tile(const SparseProblem& problem) {
        if (!range.next(problem, work)) {
            work.tile = -1, left = 0;
            return;
        }
        tile_steps = (work.last - work.first) * STEPS;
        int blocks0 = blocks_of(work.lengths0);
        second = work.first >= blocks0;
        open_segment(problem, work.first - (second ? blocks0 : 0));
    }

    __device__ void open_segment(const SparseProblem& problem, int block) {
        const Segment& list = problem.segments[second];
        TileCoord at(problem, work.tile);
        int length = second ? work.lengths1 : work.lengths0;
        indices = list.indices + at.b * list.indices_stride_b + at.s * list.indices_stride_s + block * BLOCK;
        left = length - block * BLOCK;
        list_steps = (blocks_of(length) - block) * STEPS;
    }

    __device__ void next(const SparseProblem& problem, Step& step) {
        step = {indices, left, work.tile, second, tile_steps == 1, work.whole(), work.first == 0};
        if (work.tile < 0) return;
        if (--tile_steps == 0) {
            open_tile(problem);
        } else if (--list_steps == 0 && !second) {
            second = true;
            open_segment(problem, 0);
        } else {
            indices += KEYS, left -= KEYS;
        }
    }
};

struct RowRing {
    alignas(16) uint8 rows[STAGES][KEYS][ROW_STRIDE];
    Step steps[STEPS_LISTED];
    StepCursor cursor;
    int indices[STAGES][KEYS];
    // By column:
    float scales[STAGES][NUM_SCALES ? NUM_SCALES : 1][KEYS];  // times CODE_UNIT
    float bias[STAGES][KEYS];                                 // -infinity where the key is absent
    int unsafe[2];                                            // by tile modulo 2: a tile may end while the next one starts

    __device__ float2 scales_at(int stage, int scale, int column) const {
        return *reinterpret_cast<const float2*>(&scales[stage][scale][column]);
    }
    __device__ float2 bias_at(int stage, int column) const { return *reinterpret_cast<const float2*>(&bias[stage][column]); }
};
constexpr int STEP_BYTES = 24, CURSOR_BYTES = 72;
constexpr int RING_BYTES =
    to_16(STAGES * KEYS * (ROW_STRIDE + 4 + 4 * (NUM_SCALES ? NUM_SCALES : 1) + 4) + STEPS_LISTED * STEP_BYTES + CURSOR_BYTES + 8);
static_assert(sizeof(Step) == STEP_BYTES && sizeof(StepCursor) == CURSOR_BYTES && sizeof(RowRing) == RING_BYTES);

// Copies the rows of a range's steps, LANES threads per row. It runs ahead of the computation, across tiles.
struct RowLoader {
    static constexpr int LANES = THREADS / KEYS;

    const SparseProblem& problem;
    RowRing& ring;
    int row, part;

    // Start all copies that the first step needs.
    __device__ RowLoader(const SparseProblem& p, RowRing& r) : problem(p), ring(r) {
        row = threadIdx.x / LANES, part = threadIdx.x % LANES;
        if (threadIdx.x < 2) ring.unsafe[threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            ring.cursor.begin(problem);
            for (int i = 0; i <= AHEAD; ++i) ring.cursor.next(problem, ring.steps[i]);
        }
        __syncthreads();
        for (int i = 0; i < AHEAD; ++i) copy_indices(i);
        copies_commit();
        copies_wait<0>();
        for (int i = 0; i < AHEAD; ++i) {
            __syncthreads();
            copy(i);
        }
        copies_wait<0>();
        publish(0);
    }

    __device__ const Step& step(int number) const { return ring.steps[number % STEPS_LISTED]; }

    __device__ void copy_indices(int number) {
        const Step& at = step(number);
        if (part == 0 && row < at.left) copy_async<4>(&ring.indices[number % STAGES][row], at.indices + row, true);
    }

    // Start copying a step's rows, whose indices have arrived, and the indices of the step AHEAD after it: one group of
    // copies, empty after the range's end. Then list the step after that, for which a barrier must follow.
    __device__ void copy(int number) {
        int stage = number % STAGES;
        const Step& at = step(number);
        if (at.tile >= 0) {
            const Segment& list = problem.segments[at.second];
            int slot = ring.indices[stage][row];
            bool here = row < at.left && uint32(slot) < uint32(list.num_slots);
            slot = here ? slot : 0;
            int page = list.page_of(slot);
            int in_page = slot - page * list.block_size;
            const uint8* base = list.pages + page * list.page_stride;
            if (FINE_SCALES && at.second) copy_row<EXTRA_LAYOUT>(base, in_page, list.block_size, ring.rows[stage][row], here);
            else copy_row<LAYOUT>(base, in_page, list.block_size, ring.rows[stage][row], here);
            if (part == 0) ring.bias[stage][column_of_token(row)] = here ? 0.0f : -infinity();
        }
        copy_indices(number + AHEAD);
        copies_commit();
        if (threadIdx.x == 0) ring.cursor.next(problem, ring.steps[(number + AHEAD + 1) % STEPS_LISTED]);
    }

    // Start copying token `in_page` of a page, or zeros if it is absent (not `here`).
    template <class Layout> __device__ void copy_row(const uint8* base, int in_page, int block_size, uint8* to, bool here) {
        const uint8* from = base + int64(in_page) * Layout::row_bytes;
#pragma unroll
        for (int i = 0; i < (Layout::row_bytes / 16 + LANES - 1) / LANES; ++i) {
            int at = 16 * (part + i * LANES);
            if (at < Layout::row_bytes) copy_async<16>(to + at, from + at, here);
        }
        if (RingRow<Layout>::TAIL_SCALES && part == 0) {
            int64 scale_at = Layout::scale_start + int64(block_size) * Layout::scale_start_per_token;
            constexpr int PIECE = Layout::scale_bytes % 16 ? 8 : 16;
#pragma unroll
            for (int at = 0; at < Layout::scale_bytes; at += PIECE)
                copy_async<PIECE>(to + RingRow<Layout>::SCALES_AT + at, base + scale_at + in_page * Layout::scale_stride + at, here);
        }
    }

    // The rows of a step have arrived: convert their scales. A barrier must follow.
    __device__ void publish(int number) {
        int stage = number % STAGES;
        int tile = step(number).tile;
        if (FP8_SLICES == 0 || tile < 0) return;
        __syncwarp();  // one lane of each row has copied the scales
        int column = column_of_token(row);
        bool bad = false;
        if constexpr (FINE_SCALES) {
            bad = step(number).second ? expand<EXTRA_LAYOUT>(stage, column) : expand<LAYOUT>(stage, column);
        } else {
            const uint8* scales = ring.rows[stage][row] + RingRow<LAYOUT>::SCALES_AT;
#pragma unroll
            for (int i = part; i < NUM_SCALES; i += LANES) {
                float scale;
                if (LAYOUT::ue8m0) {
                    int byte = scales[i];
                    bad |= (byte < MIN_SCALE_BYTE && byte > TINY_SCALE_BYTE) || byte > MAX_SCALE_BYTE;
                    scale = __uint_as_float(byte << 23);
                } else {
                    scale = reinterpret_cast<const float*>(scales)[i];
                    bad |= !(scale >= MIN_SCALE && scale <= MAX_SCALE) && !(fabsf(scale) <= TINY_SCALE);
                }
                ring.scales[stage][i][column] = scale * CODE_UNIT;
            }
        }
        if (bad && ring.bias[stage][column] == 0.0f) ring.unsafe[tile % 2] = 1;
    }

    // Convert scales of FINE_SCALES formats, and e2m1 values to e4m3. Returns whether a scale is out of range or a
    // value NaN. One warp has all LANES of a row.
    template <class Layout> __device__ bool expand(int stage, int column) {
        constexpr int FACTORS = Layout::scale_tile / FACTOR_TILE, PIECES = Layout::quantized_bytes / 16 / LANES;
        uint8* bytes = ring.rows[stage][row];
        bool bad = false;
#pragma unroll
        for (int i = part; i < Layout::num_scales; i += LANES) {
            int byte = bytes[RingRow<Layout>::SCALES_AT + i];
            float scale = Layout::ue8m0 ? __uint_as_float(byte << 23) : stored_scale<Layout>(byte);
            bad |= !(scale >= MIN_FINE_SCALE && scale <= MAX_SCALE) && !(fabsf(scale) <= TINY_SCALE);
#pragma unroll
            for (int j = 0; j < FACTORS; ++j) ring.scales[stage][FACTORS * i + j][column] = scale * CODE_UNIT;
        }
        uint4 values[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) values[i] = *reinterpret_cast<const uint4*>(bytes + 16 * (part + LANES * i));
        if constexpr (Layout::e2m1_values) {
            __syncwarp();  // all lanes have read the bytes that are overwritten next
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                uint4 low, high;
                expand_e2m1(values[i], low, high, e2m1_to_e4m3);
                uint4* to = reinterpret_cast<uint4*>(bytes + 32 * (part + LANES * i));
                to[0] = low, to[1] = high;
            }
        } else {
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                bad |= is_nan4(values[i].x) || is_nan4(values[i].y) || is_nan4(values[i].z) || is_nan4(values[i].w);
        }
        return bad;
    }
};
