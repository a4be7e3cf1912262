// out [tokens, rows] = x [tokens, K] W^T for few tokens: W is e4m3 with a float32 scale for each block, x is bfloat16.
//
// The weights are the first operand of mma.sync, so that a product takes 16 of their rows and as few as 8 tokens. A code becomes
// bfloat16 in registers, exactly; a block's products are added in float32, then times its scale, then to the sum. So neither x nor
// a weight is rounded.
//
// Grid: (SPLITS, tiles of ROWS rows, groups * tiles of TOKENS tokens). The SPLITS CTAs of a tile are a cluster and divide K; sums
// are added in the order of K, so results do not depend on timing. Block: 8 warps, each with 16 rows (of 256 rows 32), the others
// along K. A ring of STAGES stages is filled by cp.async: ROWS rows of weights and TOKENS rows of x, 128 values for each warp along K.
// 16-byte chunks are swizzled so that neither copies nor loads of fragments conflict in shared memory's banks.
//
// Registers are bound by TOKENS / 2 sums and 32 of converted weights a thread; memory by 16 KB of weights a stage (32 for 256 rows).
//
// Macros: TOKENS (8 to 128), ROWS (16 to 256), SPLITS (1, 2, 4, 8), STAGES, OUTPUT (bf16 or float), FINE (whether a block has
// fewer than 128 columns), ALIGNED (whether rows start at multiples of 16 bytes), EARLY (whether weights may be read before the
// preceding kernel has ended).
#include "sm80/mma.cuh"
#include "common/pdl.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, HEIGHT = ROWS > 128 ? 2 : 1;  // HEIGHT: tiles of 16 rows of a warp
constexpr int STRIPS = ROWS / 16 / HEIGHT, PARTS = WARPS / STRIPS, DEPTH = 128 * PARTS;
constexpr int WEIGHT_BYTES = ROWS * DEPTH, STAGE_BYTES = WEIGHT_BYTES + 2 * TOKENS * DEPTH;
constexpr int SUM_STRIDE = ROWS + 4;  // floats from token to token: the four tokens of a store are in different banks

struct Weights {
    const uint8* codes;
    const float* scales;
    int64 group_stride, row_stride, scale_group_stride, scale_row_stride;
    int rows, columns, block_rows, block_columns;
};
struct Tokens {
    const bf16* x;
    OUTPUT* out;
    int64 x_group_stride, x_stride, out_group_stride, out_stride;
    int count, tiles;
};

// 16 bytes of a row to shared memory, zeros from `size` bytes on.
__device__ inline void copy16(uint8* to, const void* from, int size) {
#if ALIGNED
    copy_async_part(shared_address(to), from, size);
#else
    for (int i = 0; i < 16; ++i) to[i] = i < size ? static_cast<const uint8*>(from)[i] : 0;
#endif
}

// Columns [k, k + DEPTH) of the rows from `row` on: [PARTS][ROWS][128] bytes.
__device__ inline void copy_weights(uint8* to, const Weights& w, const uint8* codes, int row, int k, int end) {
    constexpr int PIECES = DEPTH / 16;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        int r = i / PIECES, piece = i % PIECES, column = k + 16 * piece;
        int size = row + r < w.rows ? min(max(end - column, 0), 16) : 0;
        const uint8* from = size ? codes + (row + r) * w.row_stride + column : codes;
        copy16(to + (piece / 8 * ROWS + r) * 128 + ((piece % 8) ^ 2 * (r & 3)) * 16, from, size);
    }
}

// The same columns of x: [PARTS][TOKENS][256] bytes.
__device__ inline void copy_x(uint8* to, const Tokens& tokens, const bf16* x, int count, int k, int end) {
    constexpr int PIECES = DEPTH / 8;
#pragma unroll
    for (int i = threadIdx.x; i < TOKENS * PIECES; i += THREADS) {
        int t = i / PIECES, piece = i % PIECES, column = k + 8 * piece;
        int size = t < count ? 2 * min(max(end - column, 0), 8) : 0;
        const bf16* from = size ? x + t * tokens.x_stride + column : x;
        copy16(to + (piece / 16 * TOKENS + t) * 256 + ((piece % 16) ^ 4 * (t & 1)) * 16, from, size);
    }
}

// A warp's sums: of each of its tiles rows g and g + 8, tokens 8 n + 2 c and + 1, for lane 4 g + c.
struct Sums {
    float x[HEIGHT][TOKENS / 8][4];
    uint32 nan[HEIGHT][2];  // bit 7 of a byte: a code was NaN, for each row
};
using Scales = float[HEIGHT][2][4];  // of these rows, for each 32 columns of 128

// Add the products of 128 columns.
__device__ inline void multiply_chunk(Sums& sums, const uint8* weights, const uint8* x, const Scales& scale) {
    int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint32 a[HEIGHT][8][4];
#pragma unroll
    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int at = (16 * h + g + 8 * half) * 128 + ((2 * q + c / 2) ^ 2 * (g & 3)) * 16 + c % 2 * 8;
                uint2 codes = *reinterpret_cast<const uint2*>(weights + at);
                sums.nan[h][half] |= ((codes.x & 0x7f7f7f7f) + 0x01010101) | ((codes.y & 0x7f7f7f7f) + 0x01010101);
                constexpr uint32 UNIT = 0x7b807b80;  // 2^120, twice
                codes_to_scaled_bf16(codes.x, UNIT, a[h][2 * q][half], a[h][2 * q][half + 2]);
                codes_to_scaled_bf16(codes.y, UNIT, a[h][2 * q + 1][half], a[h][2 * q + 1][half + 2]);
            }
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
        const uint8* row = x + (8 * n + g) * 256;
        float products[HEIGHT][4] = {};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            uint4 values = *reinterpret_cast<const uint4*>(row + ((4 * q + c) ^ 4 * (g & 1)) * 16);
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h) {
                mma(bf16{}, products[h], a[h][2 * q], {values.x, values.y});
                mma(bf16{}, products[h], a[h][2 * q + 1], {values.z, values.w});
                if (FINE || q == 3) {
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

// The scales for columns [k, k + 128) of the rows whose scales are at `rows`; the last one's beyond K.
__device__ inline void load_scales(Scales& scale, const Weights& w, const float* (&rows)[HEIGHT][2], int k) {
#pragma unroll
    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int q = FINE ? 0 : 3; q < 4; ++q)
                scale[h][half][q] = rows[h][half][min(k + (FINE ? 32 * q : 0), w.columns - 1) / w.block_columns];
}

#if SPLITS > 1
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#else
#define CLUSTER
#endif

#if TOKENS + 16 * FINE <= 32 && ROWS <= 128
#define BOUNDS THREADS, 2
#else
#define BOUNDS THREADS
#endif

// Two floats at `from` in the shared memory of CTA `rank` of the cluster.
__device__ inline float2 load_pair_of(int rank, const float* from) {
#if SPLITS > 1
    uint32 there;
    float2 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(from)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(there) : "memory");
    return x;
#else
    return *reinterpret_cast<const float2*>(from);
#endif
}
__device__ inline void sync_splits() {
#if SPLITS > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

__device__ inline void store(float* p, float x) { *p = x; }
__device__ inline void store(bf16* p, float x) { p->bits = uint16(pack(bf16{}, x, 0.0f)); }
// Two neighbouring rows, the first of them even.
__device__ inline void store_pair(float* p, float2 x) { *reinterpret_cast<float2*>(p) = x; }
__device__ inline void store_pair(bf16* p, float2 x) { *reinterpret_cast<uint32*>(p) = pack(bf16{}, x.x, x.y); }

extern "C" CLUSTER __global__ void __launch_bounds__(BOUNDS)
block_scaled_product(Weights w, Tokens tokens) {
    extern __shared__ uint4 memory[];
    uint8* ring = reinterpret_cast<uint8*>(memory);
    int split = blockIdx.x, row = blockIdx.y * ROWS, group = blockIdx.z / tokens.tiles;
    int first = blockIdx.z % tokens.tiles * TOKENS, count = min(tokens.count - first, TOKENS);
    const uint8* codes = w.codes + group * w.group_stride;
    const bf16* x = tokens.x + group * tokens.x_group_stride + first * tokens.x_stride;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / STRIPS;
    int strip_row = warp % STRIPS * 16 * HEIGHT;  // the warp's first row in the tile

    int all = (w.columns + DEPTH - 1) / DEPTH, begin = split * all / SPLITS, chunks = (split + 1) * all / SPLITS - begin;
    auto stage = [&](int i) { return ring + i % STAGES * STAGE_BYTES; };
    auto column = [&](int i) { return (begin + i) * DEPTH; };
    if (!EARLY) pdl_wait();
    for (int i = 0; i < min(STAGES - 1, chunks); ++i) copy_weights(stage(i), w, codes, row, column(i), w.columns);
    const float* scale_rows[HEIGHT][2];
#pragma unroll
    for (int i = 0; i < 2 * HEIGHT; ++i)
        scale_rows[i / 2][i % 2] = w.scales + group * w.scale_group_stride +
                                   min(row + strip_row + 8 * i + lane / 4, w.rows - 1) / w.block_rows * w.scale_row_stride;
    Scales next;
    load_scales(next, w, scale_rows, column(0) + 128 * part);
    if (EARLY) pdl_wait();
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < chunks) copy_x(stage(i) + WEIGHT_BYTES, tokens, x, count, column(i), w.columns);
        copies_commit();
    }

    Sums sums = {};
    for (int i = 0; i < chunks; ++i) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        int later = i + STAGES - 1;
        if (later < chunks) {
            copy_weights(stage(later), w, codes, row, column(later), w.columns);
            copy_x(stage(later) + WEIGHT_BYTES, tokens, x, count, column(later), w.columns);
        }
        copies_commit();
        Scales scale;
#pragma unroll
        for (int j = 0; j < 8 * HEIGHT; ++j) scale[j / 8][j / 4 % 2][j % 4] = next[j / 8][j / 4 % 2][j % 4];
        load_scales(next, w, scale_rows, column(i + 1) + 128 * part);
        multiply_chunk(sums, stage(i) + (part * ROWS + strip_row) * 128, stage(i) + WEIGHT_BYTES + part * TOKENS * 256, scale);
    }
    pdl_release();
    copies_wait<0>();
    __syncthreads();

    float* partial = reinterpret_cast<float*>(memory);  // [PARTS][TOKENS][SUM_STRIDE], in place of the ring
#pragma unroll
    for (int i = 0; i < 2 * HEIGHT; ++i) {
        uint32 nan = sums.nan[i / 2][i % 2];
        nan |= __shfl_xor_sync(~0u, nan, 1);
        nan |= __shfl_xor_sync(~0u, nan, 2);
        bool is_nan = nan & 0x80808080;
        float* to = partial + (part * TOKENS + lane % 4 * 2) * SUM_STRIDE + strip_row + 8 * i + lane / 4;
#pragma unroll
        for (int j = 0; j < TOKENS / 4; ++j)
            to[(j / 2 * 8 + j % 2) * SUM_STRIDE] =
                is_nan ? __uint_as_float(0x7fc00000) : sums.x[i / 2][j / 2][i % 2 * 2 + j % 2];
    }
    sync_splits();
    OUTPUT* out = tokens.out + group * tokens.out_group_stride + first * tokens.out_stride + row;
    for (int i = split * THREADS + threadIdx.x; i < TOKENS * ROWS / 2; i += SPLITS * THREADS) {
        int t = i / (ROWS / 2), r = i % (ROWS / 2) * 2;
        if (t >= count || row + r >= w.rows) continue;
        float2 y = {0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < SPLITS; ++s)
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                float2 its = load_pair_of(s, partial + (p * TOKENS + t) * SUM_STRIDE + r);
                y.x += its.x, y.y += its.y;
            }
        OUTPUT* to = out + t * tokens.out_stride + r;
        if (ALIGNED && row + r + 1 < w.rows) {
            store_pair(to, y);
        } else {
            store(to, y.x);
            if (row + r + 1 < w.rows) store(to + 1, y.y);
        }
    }
    if (SPLITS > 1) sync_splits();  // this CTA's sums have been read
}
