// out [tokens, rows] = x [tokens, K] W^T for few tokens: W is e4m3 with a float32 scale for each block, x is bfloat16.
//
// Uses mma.sync with the weights as the first operand: a product has 16 rows of weights and only 8 tokens.
// sm80/block_scaled.cuh describes how the work is divided. 16-byte chunks of x are swizzled so that loads of its
// fragments have no bank conflicts.
#include "sm80/block_scaled.cuh"
#include "sm80/mma.cuh"

#if TOKENS + 16 * (BLOCK_COLUMNS % 128 != 0) <= 32 && ROWS <= 128
#define BOUNDS THREADS, 2
#else
#define BOUNDS THREADS
#endif

constexpr int AHEAD = STAGES > 2 ? 2 : 1;  // stages of weights that are copied before the preceding kernel has ended

// Copy 16 bytes of a row to shared memory, zeros from `size` bytes on.
__device__ inline void copy16(uint8* to, const void* from, int size) {
#if ALIGNED
    copy_async_part(shared_address(to), from, size);
#else
    for (int i = 0; i < 16; ++i) to[i] = i < size ? static_cast<const uint8*>(from)[i] : 0;
#endif
}

__device__ inline void copy_whole16(uint8* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// What a thread copies: 16 columns of every ROWS_APART-th row, to [PARTS][ROWS][128] bytes. 16-byte chunks are swizzled, so that
// eight bytes of four rows are in different banks.
struct WeightCopies {
    static constexpr int PIECES = DEPTH / 16, ROWS_APART = THREADS / PIECES;
    const uint8* from;
    int64 apart;
    int column, rows, to;

    __device__ WeightCopies(const Weights& w, const uint8* codes, int row) {
        int r = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
        column = 16 * piece;
        from = codes + (row + r) * w.row_stride + column;
        apart = ROWS_APART * w.row_stride;
        rows = w.rows - row - r;
        to = (piece / 8 * ROWS + r) * 128 + ((piece % 8) ^ 2 * (r & 3)) * 16;
    }
    // Copy columns [k, k + DEPTH), zeros from `end` on. Rows beyond the weights are not written: their results are not
    // used.
    __device__ void copy(uint8* stage, int k, int end) const {
        const uint8* source = from + k;
        stage += to;
        if (ALIGNED && k + DEPTH <= end) {
#pragma unroll
            for (int i = 0; i < ROWS / ROWS_APART; ++i, source += apart)
                if (i * ROWS_APART < rows) copy_whole16(stage + i * ROWS_APART * 128, source);
            return;
        }
        int size = min(max(end - k - column, 0), 16);
#pragma unroll 1
        for (int i = 0; i < ROWS / ROWS_APART; ++i, source += apart)
            if (i * ROWS_APART < rows) copy16(stage + i * ROWS_APART * 128, size ? source : from - column, size);
    }
};

using Scales = float[HEIGHT][2][4];  // of these rows, for each 32 columns of 128
using Codes = uint32[HEIGHT][8][4];

// The operand of the warp's rows: for each step of 16 columns, lane 4 g + c holds columns 32 q + 8 c + 4 (step % 2) to
// + 3.
__device__ inline void load_weights(Codes& a, Sums& sums, const uint8* weights, const Scales& scale) {
    int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int at = (16 * h + g + 8 * half) * 128 + ((2 * q + c / 2) ^ 2 * (g & 3)) * 16 + c % 2 * 8;
                uint2 codes = *reinterpret_cast<const uint2*>(weights + at);
                if (!FINITE) sums.nan[h][half] |= ((codes.x & 0x7f7f7f7f) + 0x01010101) | ((codes.y & 0x7f7f7f7f) + 0x01010101);
                uint32 unit = code_unit(scale[h][half][FINE ? q : 3]);
                codes_to_bf16(codes.x, unit, a[h][2 * q][half], a[h][2 * q][half + 2]);
                codes_to_bf16(codes.y, unit, a[h][2 * q + 1][half], a[h][2 * q + 1][half + 2]);
            }
}

// The scales for columns [k, k + 128) of the rows whose scales are at `rows`; beyond K the last scale.
__device__ inline void load_scales(Scales& scale, const Weights& w, const float* (&rows)[HEIGHT][2], int k) {
#pragma unroll
    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int q = FINE ? 0 : 3; q < 4; ++q)
                scale[h][half][q] = rows[h][half][min(k + (FINE ? 32 * q : 0), w.columns - 1) / BLOCK_COLUMNS];
}

// Where the scales of a lane's rows are; `row` is the warp's first row of the weights.
__device__ inline void find_scales(const float* (&scales)[HEIGHT][2], const Weights& w, int group, int row, int block_rows) {
#pragma unroll
    for (int i = 0; i < 2 * HEIGHT; ++i)
        scales[i / 2][i % 2] = w.scales + group * w.scale_group_stride +
                               min(row + 8 * i + int(threadIdx.x) % 32 / 4, w.rows - 1) / block_rows * w.scale_row_stride;
}

struct Mma {
    const Tokens& tokens;
    const bf16* x;
    int count;

    __device__ Mma(const Tokens& tokens, const bf16* x, int count) : tokens(tokens), x(x), count(count) {}

    // Columns [k, k + DEPTH) to [PARTS][TOKENS][256] bytes.
    __device__ void copy(uint8* to, int k, int end) const {
        constexpr int PIECES = DEPTH / 8;
#pragma unroll
        for (int i = threadIdx.x; i < TOKENS * PIECES; i += THREADS) {
            int t = i / PIECES, piece = i % PIECES, column = k + 8 * piece;
            int size = t < count ? 2 * min(max(end - column, 0), 8) : 0;
            const bf16* from = size ? x + t * tokens.x_stride + column : x;
            copy16(to + (piece / 16 * TOKENS + t) * 256 + ((piece % 16) ^ 4 * (t & 1)) * 16, from, size);
        }
    }

    // Add the products of 128 columns.
    __device__ void multiply(Sums& sums, const Codes& a, const uint8* x, const Scales& scale) const {
        int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            const uint8* row = x + (8 * n + g) * 256;
            float products[HEIGHT][4] = {};
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                uint4 values = *reinterpret_cast<const uint4*>(row + ((4 * q + c) ^ 4 * (g & 1)) * 16);
#pragma unroll
                for (int h = 0; h < HEIGHT; ++h) {
                    float (&to)[4] = POWER_OF_TWO ? sums.x[h][n] : products[h];
                    mma(bf16{}, to, a[h][2 * q], {values.x, values.y});
                    mma(bf16{}, to, a[h][2 * q + 1], {values.z, values.w});
                    if (!POWER_OF_TWO && (FINE || q == 3)) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            sums.x[h][n][i] = fmaf(products[h][i], scale[h][i / 2][q], sums.x[h][n][i]);
                            products[h][i] = 0.0f;
                        }
                    }
                }
            }
        }
    }
};

extern "C" CLUSTER __global__ void __launch_bounds__(BOUNDS) block_scaled_product(Weights w, Tokens tokens, int block_rows) {
    extern __shared__ uint4 memory[];
    uint8* ring = reinterpret_cast<uint8*>(memory);
    Tile tile(w, tokens);
    int warp = threadIdx.x / 32, part = warp / STRIPS, strip_row = warp % STRIPS * 16 * HEIGHT;  // the warp's first row in the tile
    int slot = 0, free_slot = STAGES - 1;  // of the ring: slot of the chunk, and slot of the previous chunk
    WeightCopies copies(w, w.codes + tile.group * w.group_stride, tile.row);
    Mma products(tokens, tile.x(tokens), tile.count);
    auto copy_weights = [&](int i, int slot) {
        if (i < tile.chunks) copies.copy(ring + slot * STAGE_BYTES, tile.column(i), w.columns);
    };
    auto copy_x = [&](int i, int slot) {
        if (i < tile.chunks) products.copy(ring + slot * STAGE_BYTES + WEIGHT_BYTES, tile.column(i), w.columns);
    };
    if (!EARLY) pdl_wait();
    for (int i = 0; i < AHEAD; ++i) copy_weights(i, i);
    const float* scale_rows[HEIGHT][2];
    find_scales(scale_rows, w, tile.group, tile.row + strip_row, block_rows);
    Scales next;
    load_scales(next, w, scale_rows, tile.column(0) + 128 * part);
    if (EARLY) pdl_wait();
    for (int i = 0; i < STAGES - 1; ++i) {  // the first stage arrives before the last one
        if (i >= AHEAD) copy_weights(i, i);
        copy_x(i, i);
        copies_commit();
    }

    Sums sums = {};
    for (int i = 0; i < tile.chunks; ++i) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        copy_weights(i + STAGES - 1, free_slot);
        copy_x(i + STAGES - 1, free_slot);
        copies_commit();
        Scales scale;
#pragma unroll
        for (int j = 0; j < 8 * HEIGHT; ++j) scale[j / 8][j / 4 % 2][j % 4] = next[j / 8][j / 4 % 2][j % 4];
        load_scales(next, w, scale_rows, tile.column(i + 1) + 128 * part);
        Codes a;
        const uint8* stage = ring + slot * STAGE_BYTES;
        load_weights(a, sums, stage + (part * ROWS + strip_row) * 128, scale);
        products.multiply(sums, a, stage + WEIGHT_BYTES + part * TOKENS * 256, scale);
        free_slot = slot;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    pdl_release();
    copies_wait<0>();
    __syncthreads();
    float* partial = reinterpret_cast<float*>(ring);
    store_sums(partial, sums, part, strip_row);
    sync_splits();
    write_result(tokens, w, tile, partial);
    if (SPLITS > 1) sync_splits();  // this CTA's sums have been read
}
