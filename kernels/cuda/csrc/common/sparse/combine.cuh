// Combines the partial results of split tiles. A warp takes a piece of a tile, four values a lane, over all its splits.
//
// The partial results of a small batch are in L2, so latency counts rather than bytes: the LSEs and values of up to AT_ONCE
// splits are loaded together, by as many CTAs as there are SMs.
//
// Macros: TILE_HEADS (common/sparse/work.cuh).
#pragma once
#include "common/sparse/work.cuh"

constexpr int PIECE = 128;                       // values that a warp combines at a time
constexpr int PIECES = HEADS * V_DIM / PIECE;    // in a tile
constexpr int PART_VECTORS = HEADS * V_DIM / 4;  // float4 in a partial result

constexpr int NEXT_OCTETS = HEADS / 4 * 2 * PLANE;  // float4 from eight octets of a head to the next eight

// AT_ONCE partial results of WIDE pieces of the same heads. The loads are volatile: otherwise the compiler would wait for the
// first before it issues the last.
template <int AT_ONCE, int WIDE> struct PartsOfPiece {
    float log_sums[AT_ONCE];
    float4 x[AT_ONCE][WIDE];

    // From these addresses, which are in slot 0; every work range has two slots.
    // `first_slot`: distance of the tile's first partial result from there.
    __device__ void load(const float* lse, const float4* values, int first_slot, int count) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            log_sums[i] = -infinity();
#pragma unroll
            for (int k = 0; k < WIDE; ++k) x[i][k] = {};
            const float* lse_at = lse + (i ? 2 * i : first_slot) * HEADS;
            const float4* at = values + (i ? 2 * i : first_slot) * PART_VECTORS;
            if (i < count) {
                asm volatile("ld.global.f32 %0, [%1];" : "=f"(log_sums[i]) : "l"(lse_at));
#pragma unroll
                for (int k = 0; k < WIDE; ++k)
                    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(x[i][k].x), "=f"(x[i][k].y), "=f"(x[i][k].z), "=f"(x[i][k].w)
                                 : "l"(at + k * NEXT_OCTETS));
            }
        }
    }
};

template <int WIDE> struct PartSum {
    float top = -infinity(), total = 0.0f;
    float4 x[WIDE] = {};

    template <int AT_ONCE> __device__ void add(const PartsOfPiece<AT_ONCE, WIDE>& parts) {
        float before = top;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) top = fmaxf(top, parts.log_sums[i]);
        float base = top == -infinity() ? 0.0f : top, rescale = exp2f(before - base);  // no NaN where no keys are yet
        total *= rescale;
#pragma unroll
        for (int k = 0; k < WIDE; ++k) x[k].x *= rescale, x[k].y *= rescale, x[k].z *= rescale, x[k].w *= rescale;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            float weight = exp2f(parts.log_sums[i] - base);
            total += weight;
#pragma unroll
            for (int k = 0; k < WIDE; ++k) {
                float4 part = parts.x[i][k];
                x[k].x += weight * part.x, x[k].y += weight * part.y, x[k].z += weight * part.z, x[k].w += weight * part.w;
            }
        }
    }
};

// A split tile: `parts` consecutive work ranges from `first_range` on have its partial results.
struct SplitTile {
    int tile;
    uint16 first_range, parts;
};

// Combine WIDE pieces of a tile, unless the tile is flagged (SparseProblem::mark).
template <int AT_ONCE, int WIDE> __device__ inline void combine_piece(const SparseProblem& problem, SplitTile split, int piece) {
    int first = split.first_range, count = split.parts;
    // Lanes 16 .. 31 take the other half of the eight neighbouring values of lanes 0 .. 15: a warp reads two runs of
    // 256 bytes and writes whole sectors.
    int lane = threadIdx.x % 32, line = piece / 2, at = piece % 2 * 16 + lane % 16;
    int row = line % (HEADS / 4) / 2 * 8 + at % 4 * 2 + line % 2, octet = line / (HEADS / 4) * (8 * WIDE) + at / 4;
    int value = 8 * octet + lane / 16 * 4;
    // Addresses for all splits but the first, whose result is in the other slot.
    const float* lse = problem.partial_lse + partial_slot(first, false) * HEADS + row;
    const float4* values = reinterpret_cast<const float4*>(problem.partial_out) + partial_slot(first, false) * PART_VECTORS +
                           partial_at(row, 8 * octet) + lane / 16 * PLANE;
    // Where the result goes; prepared while the first loads are in flight.
    bool is_unsafe, exists, has_sink;
    float sink, *out_lse;
    bf16* out;
    PartSum<WIDE> sum;
#pragma unroll 1
    for (int next = 0; next < count; next += AT_ONCE) {
        PartsOfPiece<AT_ONCE, WIDE> parts;
        parts.load(lse + 2 * next * HEADS, values + 2 * next * PART_VECTORS, partial_slot(0, next == 0), count - next);
        if (next == 0) {
            is_unsafe = problem.unsafe[split.tile];
            TileCoord to(problem, split.tile);
            int head = to.first_head + row;
            exists = head < problem.heads, has_sink = exists && problem.attn_sink;
            sink = has_sink ? problem.attn_sink[head] : 0.0f;
            out = problem.out + to.b * problem.out_stride_b + to.s * problem.out_stride_s + head * problem.out_stride_h;
            out_lse = problem.lse + to.b * problem.lse_stride_b + head * problem.lse_stride_h + to.s * problem.lse_stride_s;
        }
        sum.add(parts);
    }
    if (!exists || is_unsafe) return;
    bool empty = sum.total == 0.0f;
    float log_sum = (sum.top + log2f(sum.total)) * LN_2;
    float factor = empty ? 0.0f : 1.0f / sum.total;
    if (has_sink && !empty) factor *= 1.0f / (1.0f + expf(sink - log_sum));
#pragma unroll
    for (int k = 0; k < WIDE; ++k) {
        float4 x = sum.x[k];
        *reinterpret_cast<uint2*>(out + value + 64 * k) =
            uint2{pack(bf16{}, x.x * factor, x.y * factor), pack(bf16{}, x.z * factor, x.w * factor)};
    }
    if (value == 0) *out_lse = empty ? infinity() : log_sum;
}

// Find the split tiles; every CTA does so for itself. Returns their number.
__device__ inline int find_split_tiles(const SparseProblem& problem, SplitTile (&split_tiles)[MAX_RANGES]) {
    // A bit a work range: whether it begins inside a tile, and whether it is the first to do so in its tile.
    __shared__ uint32 inside[MAX_RANGES / 32], begins[MAX_RANGES / 32];
    for (int first = 0; first < problem.ranges; first += blockDim.x) {
        int range = first + threadIdx.x;
        bool is_inside = false, is_first = false;
        if (range > 0 && range < problem.ranges) {
            Start start(problem, range), before(problem, range - 1);
            // A plan made for other lengths may split a tile beyond its end.
            is_inside = start.block > 0 && start.tile < problem.tiles() && start.block < blocks_of_tile(problem, start.tile);
            is_first = is_inside && !(before.tile == start.tile && before.block > 0);
        }
        uint32 votes = __ballot_sync(~0u, is_inside), first_votes = __ballot_sync(~0u, is_first);
        if (threadIdx.x % 32 == 0 && range < MAX_RANGES) inside[range / 32] = votes, begins[range / 32] = first_votes;
    }
    __syncthreads();
    int words = (problem.ranges + 31) / 32, count = 0;
    for (int word = 0; word < words; ++word) {
        uint32 mine = begins[word];
        int bit = threadIdx.x % 32;
        if (threadIdx.x / 32 == word % (blockDim.x / 32) && mine >> bit & 1) {
            int range = 32 * word + bit, last = range + 1;
            for (uint32 stop = 0; last / 32 < words && !stop; last = stop ? last : last / 32 * 32 + 32) {
                stop = (~inside[last / 32] | begins[last / 32]) & ~0u << last % 32;
                if (stop) last = last / 32 * 32 + __ffs(stop) - 1;
            }
            Start start(problem, range);
            split_tiles[count + __popc(mine & ((1u << bit) - 1))] = {start.tile, uint16(range - 1), uint16(last - range + 1)};
        }
        count += __popc(mine);
    }
    __syncthreads();
    return count;
}

// Combine all split tiles. Pieces are distributed over the CTAs first, then over their warps.
template <int AT_ONCE, int WIDE>
__device__ inline void combine_pieces(const SparseProblem& problem, int tiles, bool equal, const SplitTile (&split_tiles)[MAX_RANGES]) {
    int parts = problem.period_ranges;
    for (int i = threadIdx.x / 32 * gridDim.x + blockIdx.x; i < tiles * (PIECES / WIDE); i += gridDim.x * (blockDim.x / 32)) {
        int tile = i / (PIECES / WIDE);
        SplitTile split = equal ? SplitTile{tile, uint16(tile * parts), uint16(parts)} : split_tiles[tile];
        combine_piece<AT_ONCE, WIDE>(problem, split, i % (PIECES / WIDE));
    }
}

// The same, with `at_once` splits of a piece loaded together. Called by all threads of the block.
__device__ inline void combine_tiles(const SparseProblem& problem, int at_once, SplitTile (&split_tiles)[MAX_RANGES]) {
    // All tiles have the same number of splits: no search is needed.
    bool equal = problem.starts == nullptr && problem.period_tiles == 1;
    int tiles = equal ? problem.tiles() : find_split_tiles(problem, split_tiles);
    // With few splits a warp takes more pieces, so that enough bytes are in flight, unless that leaves warps without a
    // piece.
    bool wide = tiles * PIECES > int(gridDim.x * (blockDim.x / 32));
    if (wide && at_once <= 2) combine_pieces<2, 4>(problem, tiles, equal, split_tiles);
    else if (wide && at_once <= 4) combine_pieces<4, 2>(problem, tiles, equal, split_tiles);
    else if (at_once <= 4) combine_pieces<4, 1>(problem, tiles, equal, split_tiles);
    else if (at_once <= 8) combine_pieces<8, 1>(problem, tiles, equal, split_tiles);
    else combine_pieces<16, 1>(problem, tiles, equal, split_tiles);
}
