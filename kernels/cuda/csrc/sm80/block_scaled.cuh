// Products of few tokens with block-scaled e4m3 weights: what both schedules have in common (sm80/projection.cu by mma.sync,
// sm90/projection.cu by wgmma). They define Products, which copies x and multiplies.
//
// Grid: (SPLITS, tiles of ROWS rows, groups * tiles of TOKENS tokens). The SPLITS CTAs of a tile are a cluster and divide K; sums
// are added in the order of K, so results do not depend on timing. Block: 8 warps, each with 16 rows (of 256 rows 32), the others
// along K. A ring of STAGES stages is filled by cp.async: ROWS rows of weights and TOKENS rows of x, 128 values for each warp along K.
//
// A code becomes bfloat16 in registers, exactly; a block's products are added by the tensor cores, then times its scale, then to the
// sum in float32. Scales that are powers of two are part of the bfloat16 weight, and products go to the sum at once. So neither x nor
// a weight is rounded.
//
// Macros: TOKENS (8 to 128), ROWS (16 to 256), SPLITS (1, 2, 4, 8), STAGES, OUTPUT (bf16 or float), BLOCK_COLUMNS, ALIGNED (whether rows start at multiples of 16 bytes), EARLY (whether weights may be read before the
// preceding kernel has ended), FINITE (whether no code is NaN), POWER_OF_TWO (whether scales are powers of two, 2^-100 to 2^7).
#pragma once
#include "common/async_copy.cuh"
#include "common/pdl.cuh"

constexpr bool FINE = BLOCK_COLUMNS % 128 != 0;  // several scales in a chunk of 128 columns
constexpr int WARPS = 8, THREADS = 32 * WARPS, HEIGHT = ROWS > 128 ? 2 : 1;  // HEIGHT: tiles of 16 rows of a warp
constexpr int STRIPS = ROWS / 16 / HEIGHT, PARTS = WARPS / STRIPS, DEPTH = 128 * PARTS;
constexpr int WEIGHT_BYTES = ROWS * DEPTH, STAGE_BYTES = WEIGHT_BYTES + 2 * TOKENS * DEPTH;
constexpr int SUM_STRIDE = ROWS + 4;  // floats from token to token: the four tokens of a store are in different banks
constexpr int AHEAD = STAGES > 2 ? 2 : 1;  // stages of weights that are copied before the preceding kernel has ended

struct Weights {
    const uint8* codes;
    const float* scales;
    int64 group_stride, row_stride, scale_group_stride, scale_row_stride;
    int rows, columns, block_rows, unused;
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

__device__ inline void copy_whole16(uint8* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Copies of a thread: 16 columns of every ROWS_APART-th row to [PARTS][ROWS][128] bytes, whose 16-byte chunks are swizzled so that
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
    // Columns [k, k + DEPTH); zeros from `end` on. Rows that the weights lack stay as they are: nothing reads what they make.
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

// The factor of codes' bits in bfloat16's fields, which are their values times 2^-120, subnormals too; twice.
__device__ inline uint32 code_unit(float scale) {
    return POWER_OF_TWO ? __byte_perm(__float_as_uint(scale) + (120 << 23), 0, 0x3232) : 0x7b807b80;
}

// Four codes, none NaN, as two pairs of bfloat16.
__device__ inline void codes_to_bf16(uint32 codes, uint32 unit, uint32& low, uint32& high) {
    uint32 upper = (codes >> 4 & 0x07070707) | (codes & 0x80808080), lower = codes * 16 & 0xf0f0f0f0;
    low = __byte_perm(lower, upper, 0x5140), high = __byte_perm(lower, upper, 0x7362);
    constexpr uint32 MINUS_ZERO = 0x80008000;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(low) : "r"(low), "r"(unit), "r"(MINUS_ZERO));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(high) : "r"(high), "r"(unit), "r"(MINUS_ZERO));
}

// A warp's sums: of each of its tiles rows g and g + 8, tokens 8 n + 2 c and + 1, for lane 4 g + c.
struct Sums {
    float x[HEIGHT][TOKENS / 8][4];
    uint32 nan[HEIGHT][2];  // bit 7 of a byte: a code was NaN, for each row
};
using Scales = float[HEIGHT][2][4];  // of these rows, for each 32 columns of 128
using Codes = uint32[HEIGHT][8][4];

// The operand of the warp's rows: of each step of 16 columns lane 4 g + c holds columns 32 q + 8 c + 4 (step % 2) to + 3.
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
                if (!FINITE)
                    sums.nan[h][half] |= ((codes.x & 0x7f7f7f7f) + 0x01010101) | ((codes.y & 0x7f7f7f7f) + 0x01010101);
                uint32 unit = code_unit(scale[h][half][FINE ? q : 3]);
                codes_to_bf16(codes.x, unit, a[h][2 * q][half], a[h][2 * q][half + 2]);
                codes_to_bf16(codes.y, unit, a[h][2 * q + 1][half], a[h][2 * q + 1][half + 2]);
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
                scale[h][half][q] = rows[h][half][min(k + (FINE ? 32 * q : 0), w.columns - 1) / BLOCK_COLUMNS];
}

#if SPLITS > 1
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#else
#define CLUSTER
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

// The whole of a CTA's work; `ring` is its shared memory.
template <class Products> __device__ inline void multiply_rows(const Weights& w, const Tokens& tokens, uint8* ring) {
    int split = blockIdx.x, row = blockIdx.y * ROWS, group = blockIdx.z / tokens.tiles;
    int first = blockIdx.z % tokens.tiles * TOKENS, count = min(tokens.count - first, TOKENS);
    const uint8* codes = w.codes + group * w.group_stride;
    const bf16* x = tokens.x + group * tokens.x_group_stride + first * tokens.x_stride;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / STRIPS;
    int strip_row = warp % STRIPS * 16 * HEIGHT;  // the warp's first row in the tile

    int all = (w.columns + DEPTH - 1) / DEPTH, begin = split * all / SPLITS, chunks = (split + 1) * all / SPLITS - begin;
    int slot = 0, free_slot = STAGES - 1;  // of the ring: the chunk's, and that of the chunk before it
    auto column = [&](int i) { return (begin + i) * DEPTH; };
    WeightCopies copies(w, codes, row);
    Products products(tokens, x, count);
    auto copy_weights = [&](int i, int slot) {
        if (i < chunks) copies.copy(ring + slot * STAGE_BYTES, column(i), w.columns);
    };
    auto copy_x = [&](int i, int slot) {
        if (i < chunks) products.copy(ring + slot * STAGE_BYTES + WEIGHT_BYTES, column(i), w.columns);
    };
    if (!EARLY) pdl_wait();
    for (int i = 0; i < AHEAD; ++i) copy_weights(i, i);
    const float* scale_rows[HEIGHT][2];
#pragma unroll
    for (int i = 0; i < 2 * HEIGHT; ++i)
        scale_rows[i / 2][i % 2] = w.scales + group * w.scale_group_stride +
                                   min(row + strip_row + 8 * i + lane / 4, w.rows - 1) / w.block_rows * w.scale_row_stride;
    Scales next;
    load_scales(next, w, scale_rows, column(0) + 128 * part);
    if (EARLY) pdl_wait();
    for (int i = 0; i < STAGES - 1; ++i) {  // the first stage is there before the last one
        if (i >= AHEAD) copy_weights(i, i);
        copy_x(i, i);
        copies_commit();
    }

    Sums sums = {};
    for (int i = 0; i < chunks; ++i) {
        copies_wait<STAGES - 2>();
        Products::sync();
        copy_weights(i + STAGES - 1, free_slot);
        copy_x(i + STAGES - 1, free_slot);
        copies_commit();
        Scales scale;
#pragma unroll
        for (int j = 0; j < 8 * HEIGHT; ++j) scale[j / 8][j / 4 % 2][j % 4] = next[j / 8][j / 4 % 2][j % 4];
        load_scales(next, w, scale_rows, column(i + 1) + 128 * part);
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

    float* partial = reinterpret_cast<float*>(ring);  // [PARTS][TOKENS][SUM_STRIDE], in place of the ring
#pragma unroll
    for (int i = 0; i < 2 * HEIGHT; ++i) {
        uint32 nan = sums.nan[i / 2][i % 2];
        nan |= __shfl_xor_sync(~0u, nan, 1);
        nan |= __shfl_xor_sync(~0u, nan, 2);
        bool is_nan = !FINITE && (nan & 0x80808080);
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
