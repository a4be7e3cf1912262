// Shared by both schedules of products of few tokens with block-scaled e4m3 weights: sm80/projection.cu with mma.sync
// and sm90/projection.cu with wgmma.
//
// Grid: (SPLITS, tiles of ROWS rows, groups * tiles of TOKENS tokens). The SPLITS CTAs of a tile are a cluster and
// divide K; their sums are added in the order of K, so results do not depend on timing. Eight warps multiply, each 16
// rows (32 of 256 rows); with fewer rows, warps also divide the columns. A ring of STAGES stages has ROWS rows of
// weights and TOKENS rows of x, of DEPTH columns.
//
// A code is converted to bfloat16 in registers, exactly. The tensor cores add the products of a block, whose sum is
// multiplied by the block's scale and added in float32. Scales that are powers of two are part of the bfloat16 weight,
// and products are added to the sum directly. So neither x nor a weight is rounded.
//
// Macros: TOKENS (8 to 128), ROWS (16 to 256), SPLITS (1 to 8), STAGES, OUTPUT (bf16 or float), BLOCK_COLUMNS, ALIGNED
// (whether rows start at multiples of 16 bytes), EARLY (whether weights may be read before the preceding kernel has ended), FINITE
// (whether no code is NaN), POWER_OF_TWO (whether scales are powers of two, 2^-100 to 2^7).
#pragma once
#include "common/device.cuh"

constexpr bool FINE = BLOCK_COLUMNS % 128 != 0;  // several scales in a chunk of 128 columns
constexpr int WARPS = 8, THREADS = 32 * WARPS, HEIGHT = ROWS > 128 ? 2 : 1;  // HEIGHT: tiles of 16 rows of a warp
constexpr int STRIPS = ROWS / 16 / HEIGHT, PARTS = WARPS / STRIPS;
#ifndef CHUNKS_IN_TURN
#define CHUNKS_IN_TURN 0
#endif
constexpr int DEPTH = CHUNKS_IN_TURN ? 128 : 128 * PARTS;  // columns of a stage
constexpr int WEIGHT_BYTES = ROWS * DEPTH, STAGE_BYTES = WEIGHT_BYTES + 2 * TOKENS * DEPTH;
constexpr int SUM_STRIDE = ROWS + 4;  // floats from token to token: the four tokens of a store are in different banks
constexpr int RING_BYTES = STAGES * (STAGE_BYTES + (CHUNKS_IN_TURN ? 16 : 0)), SUM_BYTES = 4 * PARTS * TOKENS * SUM_STRIDE;  // and barriers
[[maybe_unused]] constexpr int SHARED_BYTES = RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES;

struct Weights {
    const uint8* codes;
    const float* scales;
    int64 group_stride, row_stride, scale_group_stride, scale_row_stride;
    int rows, columns;
};
struct Tokens {
    const bf16* x;
    OUTPUT* out;
    int64 x_group_stride, x_stride, out_group_stride, out_stride;
    int count, tiles;
};

// A pair of factors for codes whose bits were moved to the fields of bfloat16, which gives their values times 2^-120,
// also for subnormals.
__device__ inline uint32 code_unit(float scale) {
    return POWER_OF_TWO ? __byte_perm(__float_as_uint(scale) + (120 << 23), 0, 0x3232) : 0x7b807b80;
}

// The codes in the upper bytes of both halves of a word, none NaN, as bfloat16.
__device__ inline uint32 upper_bytes_to_bf16(uint32 codes, uint32 unit) {
    uint32 y = (codes & 0x80008000) | (codes >> 4 & 0x07f007f0);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(y), "r"(unit), "r"(0x80008000));  // plus -0
    return y;
}

// Four codes, none NaN, as two pairs of bfloat16.
__device__ inline void codes_to_bf16(uint32 codes, uint32 unit, uint32& low, uint32& high) {
    uint32 upper = (codes >> 4 & 0x07070707) | (codes & 0x80808080), lower = codes * 16 & 0xf0f0f0f0;
    low = __byte_perm(lower, upper, 0x5140), high = __byte_perm(lower, upper, 0x7362);
    constexpr uint32 MINUS_ZERO = 0x80008000;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(low) : "r"(low), "r"(unit), "r"(MINUS_ZERO));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(high) : "r"(high), "r"(unit), "r"(MINUS_ZERO));
}

// The sums of a warp: lane 4 g + c has rows g and g + 8 of each tile, tokens 8 n + 2 c and + 1.
struct Sums {
    float x[HEIGHT][TOKENS / 8][4];
    uint32 nan[HEIGHT][2];  // bit 7 of a byte: a code was NaN, for each row
};
#if SPLITS > 1
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#else
#define CLUSTER
#endif

// Two floats at `from` in the shared memory of CTA `rank` of the cluster.
__device__ inline float2 load_pair_of(int rank, const float* from) {
#if SPLITS > 1
    uint32 remote = cluster_address(shared_address(from), rank);
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(remote) : "memory");
    return x;
#else
    return *reinterpret_cast<const float2*>(from);
#endif
}
__device__ inline void sync_splits() {
#if SPLITS > 1
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
}
// A CTA of a cluster exits after the others have read its sums. Unlike sync_splits, this does not wait for writes.
__device__ inline void leave_splits() {
#if SPLITS > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    cluster_wait();
#endif
}

__device__ inline void store(float* p, float x) { *p = x; }
__device__ inline void store(bf16* p, float x) { p->bits = uint16(pack(bf16{}, x, 0.0f)); }
// Two neighbouring rows, the first of them even.
__device__ inline void store_pair(float* p, float2 x) { *reinterpret_cast<float2*>(p) = x; }
__device__ inline void store_pair(bf16* p, float2 x) { *reinterpret_cast<uint32*>(p) = pack(bf16{}, x.x, x.y); }

// The work of a CTA: rows of the weights of a group, tokens, and chunks of DEPTH columns.
struct Tile {
    int split, row, group, first, count, begin, chunks;

    __device__ Tile(const Weights& w, const Tokens& tokens) {
        split = blockIdx.x, row = blockIdx.y * ROWS, group = blockIdx.z / tokens.tiles;
        first = blockIdx.z % tokens.tiles * TOKENS, count = min(tokens.count - first, TOKENS);
        int all = (w.columns + DEPTH - 1) / DEPTH;
        begin = split * all / SPLITS, chunks = (split + 1) * all / SPLITS - begin;
    }
    __device__ int column(int i) const { return (begin + i) * DEPTH; }
    __device__ const bf16* x(const Tokens& tokens) const { return tokens.x + group * tokens.x_group_stride + first * tokens.x_stride; }
};

// Whether a code of a row was NaN, from the bits of the four lanes of the row.
__device__ inline bool row_is_nan(uint32 nan) {
    if (FINITE) return false;
    nan |= __shfl_xor_sync(~0u, nan, 1);
    nan |= __shfl_xor_sync(~0u, nan, 2);
    return nan & 0x80808080;
}

// Store the sums of a warp to `partial`, [PARTS][TOKENS][SUM_STRIDE], in the memory of the ring.
__device__ inline void store_sums(float* partial, const Sums& sums, int part, int strip_row) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * HEIGHT; ++i) {
        bool is_nan = row_is_nan(sums.nan[i / 2][i % 2]);
        float* to = partial + (part * TOKENS + lane % 4 * 2) * SUM_STRIDE + strip_row + 8 * i + lane / 4;
#pragma unroll
        for (int j = 0; j < TOKENS / 4; ++j)
            to[(j / 2 * 8 + j % 2) * SUM_STRIDE] = is_nan ? __uint_as_float(0x7fc00000) : sums.x[i / 2][j / 2][i % 2 * 2 + j % 2];
    }
}

// Add the partial sums of all parts and splits, in the order of K, and write the result. Called by THREADS threads of
// each CTA.
__device__ inline void write_result(const Tokens& tokens, const Weights& w, const Tile& tile, const float* partial) {
    OUTPUT* out = tokens.out + tile.group * tokens.out_group_stride + tile.first * tokens.out_stride + tile.row;
    for (int i = tile.split * THREADS + threadIdx.x; i < TOKENS * ROWS / 2; i += SPLITS * THREADS) {
        int t = i / (ROWS / 2), r = i % (ROWS / 2) * 2;
        if (t >= tile.count || tile.row + r >= w.rows) continue;
        float2 y = {0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < SPLITS; ++s)
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                float2 its = load_pair_of(s, partial + (p * TOKENS + t) * SUM_STRIDE + r);
                y.x += its.x, y.y += its.y;
            }
        OUTPUT* to = out + t * tokens.out_stride + r;
        if (ALIGNED && tile.row + r + 1 < w.rows) {
            store_pair(to, y);
        } else {
            store(to, y.x);
            if (tile.row + r + 1 < w.rows) store(to + 1, y.y);
        }
    }
}
