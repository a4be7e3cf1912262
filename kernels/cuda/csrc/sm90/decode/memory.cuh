// What all roles of sm90/decode/decode.cu use: rows in the ring, registers, barriers and the layout of shared memory.
#pragma once
#include "common/sparse/work.cuh"
#include "sm90/hopper.cuh"

// ---- rows: order of tokens and bytes, range of scales, conversion to float16

constexpr int HALF = 32;  // tokens that are gathered, and freed, together
constexpr int SLICES = LAYOUT::quantized_dim / 64;
constexpr int Q_SLICES = LAYOUT::head_dim / 64;
constexpr int TAIL_TILES = Q_SLICES - SLICES;  // tiles of 64 bfloat16 values: none, RoPE, or all
constexpr bool TAIL = TAIL_TILES > 0, BF16_ROWS = SLICES == 0;
constexpr bool ROPE_IN_V = LAYOUT::quantized_dim < V_DIM;
constexpr int RAW_BYTES = LAYOUT::quantized_dim;  // of a row's quantised values in the ring
static_assert((TAIL_TILES <= 1 || BF16_ROWS) && LAYOUT::head_dim % 64 == 0 && LAYOUT::quantized_dim % 64 == 0);
static_assert(LAYOUT::head_dim == EXTRA_LAYOUT::head_dim && LAYOUT::quantized_dim == EXTRA_LAYOUT::quantized_dim);

// Whether a cache has FP4 values, which the PV warpgroups expand to FP8 in the ring (expand.cuh).
constexpr bool EXPANDS = LAYOUT::e2m1_values || EXTRA_LAYOUT::e2m1_values;

// Number of values that share a factor in the ring, at most a slice: the smaller scale tile of both formats.
constexpr int FINER_TILE = LAYOUT::scale_tile < EXTRA_LAYOUT::scale_tile ? LAYOUT::scale_tile : EXTRA_LAYOUT::scale_tile;
constexpr int FACTOR_TILE = FINER_TILE < 64 && !BF16_ROWS ? FINER_TILE : 64;
constexpr int FACTORS = LAYOUT::quantized_dim / FACTOR_TILE;  // of a row
// Distance from a factor of all rows to the next one; padded where warps store factors of several tiles at a time,
// against bank conflicts.
constexpr int FACTOR_STRIDE = HALF * 2 + (EXPANDS ? 8 : 0), FACTORS_BYTES = FACTORS * FACTOR_STRIDE;  // of half a block
static_assert(FACTOR_TILE >= 16, "a lane of QK-softmax has one factor for its 16 values of a slice");

constexpr float MAX_PRECISE_SCORE =
    1024.0f;  // base 2; beyond it, float32 sums of products of bfloat16 rows have an error of more than 2^-10

// float32 exponents of scales. Values with a scale of 2^-87 or less, such as a row that was never written, are
// negligible for scores if q is in range and softmax_scale below MAX_SOFTMAX_SCALE, and for results of at least
// MIN_RESULT.
constexpr uint32 TINY_SCALE = 40, MIN_SCALE = 105, F16_NORMAL = 113, MAX_SCALE = 126;
constexpr float MAX_SOFTMAX_SCALE = 1 << 24, MIN_RESULT = 1.0f / 16384.0f;
constexpr uint32 INFINITE_F16 = 0x7c00, MIN_Q = 0x1400;  // float16 bits: infinity, and 2^-10
constexpr uint32 SIGNS = 0x80008000;
constexpr uint32 TOO_LARGE = 0x4780, INFINITE_BF16 = 0x7f80;  // bfloat16 bits: 2^16, too large for float16, and infinity

// Position of token t of 16 in the permuted order; see sm90/decode/decode.cu.
__device__ inline int permuted(int t) {
    int b = t >> 2 & 1, c = (t & 3) ^ b;
    return 2 * c + b + (t & 8);
}
// The token at a position of the permuted order.
__device__ inline int token_at_permuted(int n) {
    int b = n & 1, c = n >> 1 & 3;
    return (c ^ b) | b << 2 | (n & 8);
}

// Offset of 16-byte chunk `chunk` of raw row t, swizzled so that the 32-byte halves of 4 tokens have no bank conflicts.
__device__ inline uint32 raw_offset(int t, int chunk) {
    int swizzle = (t >> 1 & 1) << 1;
    if (RAW_BYTES % 128 == 0) swizzle |= (t & 1) << 2;
    if (EXPANDS) swizzle ^= t & 1;  // a lane expands 16 bytes to 32: the first 16 bytes of even rows and of odd rows have no conflict
    return t * RAW_BYTES + ((chunk ^ swizzle) << 4);
}

// Address of a slice of a row; `raw` is the address of its slice 0. Where a row is a multiple of 128 bytes, the swizzle
// of odd tokens exchanges neighbouring slices.
__device__ inline uint32 slice_of(uint32 raw, int slice, int token) {
    if (RAW_BYTES % 128 == 0 && token & 1) return raw + ((slice ^ 1) - 1) * 64;
    return raw + slice * 64;
}

// Volatile, so that the compiler keeps conversions between the products that they overlap with.
__device__ inline uint32 multiply(uint32 x, uint32 factor) {
    uint32 y;
    asm volatile("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factor));
    return y;
}
// Bytes of x or of a zero word, by the selector (prmt).
__device__ inline uint32 permuted(uint32 x, uint32 selector) {
    uint32 y;
    asm volatile("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(selector));
    return y;
}
// Two floats as a float16 pair, saturated to the largest finite value.
__device__ inline uint32 pack_saturated(float low, float high) {
    uint32 y;
    asm volatile("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
// The same of a bfloat16 pair.
__device__ inline uint32 to_f16_saturated(uint32 x) { return pack_saturated(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000)); }
// Raise both halves of `largest` to the magnitudes of a bfloat16 pair; the signs are arbitrary. NaN stays NaN.
__device__ inline void raise_to_bf16(uint32& largest, uint32 x) { asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(largest) : "r"(x)); }
// Raise both halves of `largest` to the magnitudes of a float16 pair.
__device__ inline void raise_to_magnitude(uint32& largest, uint32 x) {
    asm("{\n.reg .b32 m;\nabs.f16x2 m, %1;\nmax.f16x2 %0, %0, m;\n}" : "+r"(largest) : "r"(x));
}
// e4m3 bytes to float16 pairs.
__device__ inline void to_f16(uint32 bytes, uint32& low, uint32& high) {
    asm volatile("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
                 : "=r"(low), "=r"(high)
                 : "r"(bytes));
}

// ---- roles and shared memory

#ifndef PARTS
#define PARTS 1
#endif
constexpr bool ONE_TILE = PARTS > 1;  // a CTA of a cluster has only one tile

constexpr int RING = BF16_ROWS ? 2 : 3;  // blocks of raw rows
// Two blocks of 576 bfloat16 values and Q leave 11 KiB: one slot for weights, sums of one tile.
constexpr bool TIGHT = BF16_ROWS && LAYOUT::head_dim > 512;
constexpr int P_SLOTS = TIGHT ? 1 : 2, SUM_SLOTS = TIGHT ? 1 : 2;
static_assert(!BF16_ROWS || (HEADS == 64 && PARTS == 1));
constexpr int FREED_PARTS = BF16_ROWS ? 4 : 2;  // parts of a block that are freed separately
constexpr int TAIL_BYTES = (TAIL ? TAIL_TILES : 1) * 2 * HALF * 128;  // the RoPE values of a block in bfloat16, tile by tile
constexpr int Q_TILE_BYTES = HEADS * 128;  // Q: 64 values of each head; P: the weights of 64 tokens
constexpr int SCHEDULED_TILES = 4, SCHEDULED_TILE_BYTES = 80;  // see ScheduledTile
constexpr int ROW_PRODUCERS = BF16_ROWS ? 3 : 2;  // warps: each has half of a block, or a third of the tiles

constexpr int THREADS = 512;
constexpr int QK_REGISTERS = BF16_ROWS ? 104 : 120, PV_REGISTERS = 176, PRODUCER_REGISTERS = BF16_ROWS ? 56 : 40;

constexpr float NO_MAX = -1e30f;
constexpr float LAZY = 8;  // the running maximum is raised when a weight exceeds 2^LAZY

// Barriers. One lane arrives for its warp, after all lanes (with -DEVERY_LANE_ARRIVES every lane: 32 for each 1 of a warp).
//
//     barrier                arrivals of a phase                     waits             guards
//     raw_full[slot]         65: 64 lanes of the row producers,      QK-softmax, both  raw rows, RoPE, FACTOR and BIAS of a block
//                            when their copies have landed; the      PV
//                            scale warp. For FP4 rows both PV in
//                            place of those lanes (ROW_ARRIVALS)
//     raw_landed[slot]       64: lanes of the row producers          both PV           FP4 rows that they expand (EXPANDS)
//     raw_empty[slot][part]  10: warps of both PV, and the two of    row producer      the same of half a block, until it is in
//                            QK-softmax that score the half.         `part`, the       registers; bfloat16 rows: of a quarter
//                            bfloat16 rows: 9, and one of those      scale warp
//     p_full[slot]           4: warps of QK-softmax                  both PV           P, ALPHA and RAISED of a block
//     p_empty[slot]          8: warps of both PV, when their         QK-softmax        the same; for a tile's last block also INV_SUM
//                            products have ended; for a tile's last                    and ScheduledTile
//                            block, when results are stored
//     scheduled_full[t % 4]  1: lane 0 of the scheduler              all roles         ScheduledTile of tile t
//     sums_full[t % 2]       4: warps of QK-softmax                  scheduler         SUMS and TOP of tile t
//     inv_sum_full[t % 2]    1: scheduler                            both PV           INV_SUM of tile t; WEIGHT and SINK_FACTOR
//     log_sums_full          1: thread 0 at initialisation, and      scheduler         LOG_SUMS of all parts
//                            bytes that all parts' schedulers store
//     parts_full             1: thread 0 at initialisation, and      both PV           lines from the other parts
//                            bytes of the others' lines
//     named 1                128: QK-softmax                         QK-softmax        Q; HIGHEST, TOP and ALPHA
//     cluster                all threads of the cluster              schedulers        barriers of all parts are initialised
//
// log_sums_full, parts_full and the cluster barrier are used only where PARTS > 1, for one phase each. Not freed by a barrier:
//     SUMS, TOP      tile t + 2 writes them after it is scheduled, and so after the scheduler's epilogue of tile t
//     INV_SUM        tile t + 2 writes it after its sums_full. Before that, the weights of its last block waited for p_empty of tile
//                    t's last block or of a later block: each tile has at least one block, and P_SLOTS is 2
//     ScheduledTile  the comment of that struct has its rule
//     PARTS_AT in Q  a part sends lines after its log_sums_full phase, and every part has scored its last block by then

// Arrivals of the row producers at raw_full, or of the warps of both PV if they have expanded the rows.
constexpr int COPY_ARRIVALS = EXPANDS && WARP_ARRIVALS == 32 ? 4 : 1;  // of a lane
constexpr int ROW_ARRIVALS = 32 * ROW_PRODUCERS * COPY_ARRIVALS;

struct SharedMemory {
    alignas(16) uint8 q[Q_SLICES][Q_TILE_BYTES];  // the last tile is RoPE if it is bfloat16
    uint8 p[P_SLOTS][Q_TILE_BYTES];
    uint8 rope[TAIL ? RING : 1][TAIL ? TAIL_BYTES : 128];  // [slot]: bfloat16 values, tile by tile, both halves of a block
    uint8 raw[RING][2][BF16_ROWS ? 4 : HALF * RAW_BYTES];
    uint16 factor[RING][2][BF16_ROWS ? 1 : FACTORS][BF16_ROWS ? 2 : FACTOR_STRIDE / 2];  // scales in float16
    float bias[RING][2][BF16_ROWS ? 1 : HALF];  // of each token: 0, or -inf if absent; of bfloat16 rows a bit a token
    float top[2][HEADS];  // [tile % 2]: running maximum, base 2
    float sums[SUM_SLOTS][4][HEADS];  // [tile % 2][warp of QK-softmax]: sums of weights
    float inv_sum[2][HEADS];  // [tile % 2]: scales accumulators by 1/l, sink included
    float highest[TIGHT ? 1 : 4][TIGHT ? 2 : HEADS];  // [warp of QK-softmax]: maxima of a block's scores
    float alpha[P_SLOTS][HEADS];  // rescales earlier sums after a raised maximum
    alignas(16) uint8 schedule[SCHEDULED_TILES][SCHEDULED_TILE_BYTES];  // read 16 bytes at a time, see ScheduledTile
    uint32 raised[P_SLOTS + (BF16_ROWS ? 8 : 0)];  // whether a block raised a maximum; SEEN
    uint64 raw_full[EXPANDS ? 2 * RING : RING];  // barriers: raw_full, and after it raw_landed
    uint64 raw_empty[RING][FREED_PARTS];
    uint64 p_full[P_SLOTS], p_empty[P_SLOTS];
    uint64 scheduled_full[SCHEDULED_TILES];
    uint64 sums_full[2], inv_sum_full[2];  // [tile % 2]
    // PARTS > 1: exchanged between the CTAs of a cluster.
    uint64 log_sums_full, parts_full;
    float weight[HEADS];       // weight of this CTA in the combined result
    float sink_factor[HEADS];  // factor by which the sink reduces the combined result
    float log_sums[PARTS][HEADS];
};
constexpr uint32 Q_AT = SHARED_AT(q), P_AT = SHARED_AT(p), ROPE_AT = SHARED_AT(rope), RAW_AT = SHARED_AT(raw);
constexpr uint32 FACTOR_AT = SHARED_AT(factor), BIAS_AT = SHARED_AT(bias), TOP_AT = SHARED_AT(top), SUMS_AT = SHARED_AT(sums);
constexpr uint32 INV_SUM_AT = SHARED_AT(inv_sum), HIGHEST_AT = TIGHT ? P_AT : SHARED_AT(highest), ALPHA_AT = SHARED_AT(alpha);
constexpr uint32 SCHEDULE_AT = SHARED_AT(schedule), RAISED_AT = SHARED_AT(raised);
constexpr uint32 SEEN_AT = RAISED_AT + 4 * P_SLOTS;  // [tile % 2][warp of QK-softmax]: whether it scored a present bfloat16 row
constexpr Barriers<RING> raw_full{SHARED_AT(raw_full)}, raw_landed{raw_full.end()};
constexpr Barriers<RING, FREED_PARTS> raw_empty{SHARED_AT(raw_empty)};
constexpr Barriers<P_SLOTS> p_full{SHARED_AT(p_full)}, p_empty{SHARED_AT(p_empty)};
constexpr Barriers<SCHEDULED_TILES> scheduled_full{SHARED_AT(scheduled_full)};
constexpr Barriers<2> sums_full{SHARED_AT(sums_full)}, inv_sum_full{SHARED_AT(inv_sum_full)};
constexpr Barrier log_sums_full{SHARED_AT(log_sums_full)}, parts_full{SHARED_AT(parts_full)};
constexpr uint32 WEIGHT_AT = SHARED_AT(weight), SINK_FACTOR_AT = SHARED_AT(sink_factor), LOG_SUMS_AT = SHARED_AT(log_sums);
constexpr uint32 PARTS_END = LOG_SUMS_AT + PARTS * HEADS * 4;
constexpr int LINES = HEADS / 4;  // lines of a PV lane; a line is 8 neighbouring values of a head
constexpr int PART_LINES = (LINES + PARTS - 1) / PARTS;  // lines that a CTA combines; the last CTAs may have fewer
constexpr int LINE_BYTES = 256 * 16;  // of all PV lanes, as float16
constexpr int PART_BYTES = PART_LINES * LINE_BYTES;  // from each other CTA
constexpr bool PARTS_IN_Q = (PARTS - 1) * PART_BYTES <= Q_SLICES * Q_TILE_BYTES;  // Q is no longer needed by then
constexpr uint32 PARTS_AT = PARTS_IN_Q ? Q_AT : (PARTS_END + 127) / 128 * 128;
constexpr uint32 SHARED_END = PARTS == 1 ? SHARED_AT(log_sums_full) : PARTS_IN_Q ? PARTS_END : PARTS_AT + (PARTS - 1) * PART_BYTES;
constexpr uint32 SHARED_BYTES = SHARED_END - SHARED_START;
static_assert(SHARED_BYTES <= MOST_SHARED_BYTES);

// The slot of a tile's sums.
__device__ inline int sums_slot(int parity) { return SUM_SLOTS == 1 ? 0 : parity; }

// Lines that a CTA of a cluster combines.
__device__ inline int lines_of(int rank) { return max(0, min(PART_LINES, LINES - rank * PART_LINES)); }

// A tile of this CTA, or its split of one, as the tile scheduler publishes it to all roles. Tile t + 1 is published
// after tile t - 1 has been scored. By then the results of tile t - 3 are stored, because QK-softmax is at most P_SLOTS
// blocks ahead of PV. So the SCHEDULED_TILES entries need no barrier that frees them.
struct ScheduledTile {
    uint32 at;

    __device__ explicit ScheduledTile(const PipelineState<SCHEDULED_TILES>& ring) : at(SCHEDULE_AT + ring.slot * SCHEDULED_TILE_BYTES) {
        scheduled_full[ring.slot].wait(ring.phase);
    }
    // The tile's number, its number of blocks (0 after the last tile), its number of heads, and flags.
    __device__ uint4 summary() const { return lds128(at); }
    static constexpr uint32 WHOLE = 1, FROM_START = 2, SECOND = 4;
    // Address of a list's indices from the first block on (two words), the number of keys from there, and of blocks.
    __device__ uint4 list(int i) const { return lds128(at + 16 + 16 * i); }
    // Addresses of the first head's q and of its results.
    __device__ uint4 query_and_result() const { return lds128(at + 48); }
    // Address of the first head's lse, and that head.
    __device__ uint4 lse_and_head() const { return lds128(at + 64); }
};

__device__ inline uint64 joined(uint32 low, uint32 high) { return uint64(high) << 32 | low; }
__device__ inline uint2 parted(const void* p) {
    uint64 x = reinterpret_cast<uint64>(p);
    return {uint32(x), uint32(x >> 32)};
}
