// Copies cache rows into shared memory, for sm80/sparse/attention.cu.
//
// A ring of stages holds the raw rows of KEYS keys each, with their converted scales and a bias that is -inf for absent
// keys. Rows of absent keys are zeros.
#pragma once
#include "common/sparse/work.cuh"
#include "common/pdl.cuh"
#include "sm80/mma.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int STEPS = BLOCK / KEYS;  // in a block
constexpr int AHEAD = STAGES - 2;    // steps by which copies precede the scores; scores precede the sums by one
constexpr int STEPS_LISTED = 16;
constexpr int SLICE = 64;            // values
constexpr int SLICES = LAYOUT::head_dim / SLICE, FP8_SLICES = LAYOUT::quantized_dim / SLICE;
constexpr int NUM_SCALES = LAYOUT::num_scales, SLICES_PER_SCALE = FP8_SLICES ? LAYOUT::scale_tile / SLICE : 1;
constexpr int BF16_AT = LAYOUT::rope_offset;  // the bfloat16 values of a row
constexpr bool TAIL_SCALES = LAYOUT::scale_start_per_token > 0;
constexpr int SCALES_AT = TAIL_SCALES ? LAYOUT::row_bytes : LAYOUT::scale_start;
constexpr int ROW_USED = LAYOUT::row_bytes + (TAIL_SCALES ? LAYOUT::scale_bytes : 0);
// 32 bytes modulo 64: with the order of columns, all reads are free of bank conflicts.
constexpr int ROW_STRIDE = (ROW_USED + 31) / 64 * 64 + 32;

// Range of scales for which V times a scale is precise in float16: UE8M0 bytes, and others, which are rounded to float16. Tiny
// ones, as in rows that were never written, make V zero; where that matters, results are too small (sm80/sparse/attention.cu).
constexpr int MIN_SCALE_BYTE = 105, MAX_SCALE_BYTE = 134, TINY_SCALE_BYTE = 40;
constexpr float MIN_SCALE = 1.0f / 16384.0f, MAX_SCALE = 128.0f, TINY_SCALE = 0x1p-87f;

// The columns of S and P hold keys in another order: of each 16, the token at a column, and the column of a token.
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
    int tile;  // -1 after the range's end
    bool second;            // of the two lists
    bool last;              // of the tile in this range
    bool whole, from_start;  // whether the range has all of the tile, whether it has its start
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
    int unsafe[2];  // by tile modulo 2: one tile may be at its end while the next one starts

    __device__ float2 scales_at(int stage, int scale, int column) const {
        return *reinterpret_cast<const float2*>(&scales[stage][scale][column]);
    }
    __device__ float2 bias_at(int stage, int column) const { return *reinterpret_cast<const float2*>(&bias[stage][column]); }
};

// Copies the rows of a range's steps, LANES threads per row. It runs ahead of the computation, across tiles.
struct RowLoader {
    static constexpr int LANES = THREADS / KEYS;

    const SparseProblem& problem;
    RowRing& ring;
    int row, part;

    // Does all copies that the first step needs.
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
            int page = list.block_shift >= 0 ? slot >> list.block_shift : int(uint32(slot) / uint32(list.block_size));
            int in_page = slot - page * list.block_size;
            const uint8* base = list.pages + page * list.page_stride;
            const uint8* from = base + int64(in_page) * LAYOUT::row_bytes;
            uint8* to = ring.rows[stage][row];
#pragma unroll
            for (int i = 0; i < (LAYOUT::row_bytes / 16 + LANES - 1) / LANES; ++i) {
                int at = 16 * (part + i * LANES);
                if (at < LAYOUT::row_bytes) copy_async<16>(to + at, from + at, here);
            }
            if (part == 0) {
                if (TAIL_SCALES) {
                    int64 scale_at = LAYOUT::scale_start + int64(list.block_size) * LAYOUT::scale_start_per_token;
                    copy_async<8>(to + SCALES_AT, base + scale_at + in_page * LAYOUT::scale_stride, here);
                }
                ring.bias[stage][column_of_token(row)] = here ? 0.0f : -infinity();
            }
        }
        copy_indices(number + AHEAD);
        copies_commit();
        if (threadIdx.x == 0) ring.cursor.next(problem, ring.steps[(number + AHEAD + 1) % STEPS_LISTED]);
    }

    // The rows of a step have arrived: convert their scales. A barrier must follow.
    __device__ void publish(int number) {
        int stage = number % STAGES;
        int tile = step(number).tile;
        if (FP8_SLICES == 0 || tile < 0) return;
        __syncwarp();  // one lane of each row has copied the scales
        const uint8* scales = ring.rows[stage][row] + SCALES_AT;
        int column = column_of_token(row);
        bool bad = false;
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
        if (bad && ring.bias[stage][column] == 0.0f) ring.unsafe[tile % 2] = 1;
    }
};
