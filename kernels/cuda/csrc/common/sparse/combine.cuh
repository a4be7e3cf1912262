// Puts the parts of cut tiles together. A warp has a piece of each part, four values a lane.
//
// The results of a small batch lie in L2, so that time goes into round trips rather than bytes: the weights and values
// of up to AT_ONCE parts are asked for together, by as many thread blocks as there are multiprocessors.
//
// Macros: TILE_HEADS (common/sparse/work.cuh).
#pragma once
#include "common/sparse/work.cuh"

constexpr int PIECES = HEADS * V_DIM / 128;       // of a tile
constexpr int PART_VECTORS = HEADS * V_DIM / 4;   // float4 of a part

constexpr int NEXT_OCTETS = HEADS / 4 * 2 * PLANE;  // float4 from eight octets of a head to the next eight

// AT_ONCE parts of WIDE pieces of the same heads. The loads are volatile, or the compiler would wait for the first before it
// asks for the last.
template <int AT_ONCE, int WIDE> struct PartsOfPiece {
    float log_sums[AT_ONCE];
    float4 x[AT_ONCE][WIDE];

    // From these places in a share's slot on, of which every share has two.
    // `first_slot`: how far the first part of all is from there.
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

// A tile whose parts are those of several shares, from one on.
struct CutTile {
    int tile;
    uint16 first_share, parts;
};

// Put together WIDE pieces of a tile, unless the exact kernel does it.
template <int AT_ONCE, int WIDE> __device__ inline void combine_piece(const SparseProblem& problem, CutTile cut, int piece) {
    int first = cut.first_share, count = cut.parts;
    // Lanes 16 .. 31 have the other half of the eight neighbouring values of lanes 0 .. 15: a warp reads two runs of
    // 256 bytes and writes whole sectors.
    int lane = threadIdx.x % 32, line = piece / 2, at = piece % 2 * 16 + lane % 16;
    int row = line % (HEADS / 4) / 2 * 8 + at % 4 * 2 + line % 2, octet = line / (HEADS / 4) * (8 * WIDE) + at / 4;
    int value = 8 * octet + lane / 16 * 4;
    // Of all parts but the first, which is in the other slot.
    const float* lse = problem.partial_lse + partial_slot(first, false) * HEADS + row;
    const float4* values = reinterpret_cast<const float4*>(problem.partial_out) + partial_slot(first, false) * PART_VECTORS +
                           partial_at(row, 8 * octet) + lane / 16 * PLANE;
    PartsOfPiece<AT_ONCE, WIDE> parts;
    parts.load(lse, values, partial_slot(0, true), count);
    // Under way, so that it costs no time: where the result goes.
    bool is_unsafe = problem.unsafe[cut.tile];
    TileCoord to(problem, cut.tile);
    int head = to.first_head + row;
    bool exists = head < problem.heads, has_sink = exists && problem.attn_sink;
    float sink = has_sink ? problem.attn_sink[head] : 0.0f;
    bf16* out = problem.out + to.b * problem.out_stride_b + to.s * problem.out_stride_s + head * problem.out_stride_h;
    float* out_lse = problem.lse + to.b * problem.lse_stride_b + head * problem.lse_stride_h + to.s * problem.lse_stride_s;
    PartSum<WIDE> sum;
    sum.add(parts);
    for (int next = AT_ONCE; next < count; next += AT_ONCE) {
        parts.load(lse + 2 * next * HEADS, values + 2 * next * PART_VECTORS, partial_slot(0, false), count - next);
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
        *reinterpret_cast<uint2*>(out + value + 64 * k) = uint2{pack(bf16{}, x.x * factor, x.y * factor), pack(bf16{}, x.z * factor, x.w * factor)};
    }
    if (value == 0) *out_lse = empty ? infinity() : log_sum;
}

// The tiles that are cut, which each thread block finds for itself; returns how many there are.
__device__ inline int find_cut_tiles(const SparseProblem& problem, CutTile (&cut_tiles)[MAX_SHARES]) {
    // Of each share: whether it begins inside of a tile, and whether it is the first to do so.
    __shared__ uint32 inside[MAX_SHARES / 32], begins[MAX_SHARES / 32];
    for (int first = 0; first < problem.shares; first += blockDim.x) {
        int share = first + threadIdx.x;
        bool is_inside = false, is_first = false;
        if (share > 0 && share < problem.shares) {
            Start start(problem, share), before(problem, share - 1);
            // A plan made for other lengths may cut where there is nothing any more.
            is_inside = start.block > 0 && start.tile < problem.tiles() && start.block < blocks_of_tile(problem, start.tile);
            is_first = is_inside && !(before.tile == start.tile && before.block > 0);
        }
        uint32 votes = __ballot_sync(~0u, is_inside), first_votes = __ballot_sync(~0u, is_first);
        if (threadIdx.x % 32 == 0 && share < MAX_SHARES) inside[share / 32] = votes, begins[share / 32] = first_votes;
    }
    __syncthreads();
    int words = (problem.shares + 31) / 32, count = 0;
    for (int word = 0; word < words; ++word) {
        uint32 mine = begins[word];
        int bit = threadIdx.x % 32;
        if (threadIdx.x / 32 == word % (blockDim.x / 32) && mine >> bit & 1) {
            int share = 32 * word + bit, last = share + 1;
            for (uint32 stop = 0; last / 32 < words && !stop; last = stop ? last : last / 32 * 32 + 32) {
                stop = (~inside[last / 32] | begins[last / 32]) & ~0u << last % 32;
                if (stop) last = last / 32 * 32 + __ffs(stop) - 1;
            }
            Start start(problem, share);
            cut_tiles[count + __popc(mine & ((1u << bit) - 1))] = {start.tile, uint16(share - 1), uint16(last - share + 1)};
        }
        count += __popc(mine);
    }
    __syncthreads();
    return count;
}

// Put together all tiles that are cut. Warps of all thread blocks take turns, neighbours in different thread blocks.
template <int AT_ONCE, int WIDE>
__device__ inline void combine_pieces(const SparseProblem& problem, int tiles, bool equal, const CutTile (&cut_tiles)[MAX_SHARES]) {
    int parts = problem.cut_shares;
    for (int i = threadIdx.x / 32 * gridDim.x + blockIdx.x; i < tiles * (PIECES / WIDE); i += gridDim.x * (blockDim.x / 32)) {
        int tile = i / (PIECES / WIDE);
        CutTile cut = equal ? CutTile{tile, uint16(tile * parts), uint16(parts)} : cut_tiles[tile];
        combine_piece<AT_ONCE, WIDE>(problem, cut, i % (PIECES / WIDE));
    }
}

// The same, `at_once` parts of a piece under way together. All threads of the block.
__device__ inline void combine_tiles(const SparseProblem& problem, int at_once, CutTile (&cut_tiles)[MAX_SHARES]) {
    // Where each tile has as many parts, there is nothing to be looked for.
    bool equal = problem.starts == nullptr && problem.cut_tiles == 1;
    int tiles = equal ? problem.tiles() : find_cut_tiles(problem, cut_tiles);
    // Of few parts as many bytes have to be under way as of many, unless there is less than a piece for each warp.
    bool wide = tiles * PIECES > int(gridDim.x * (blockDim.x / 32));
    if (wide && at_once <= 2) combine_pieces<2, 4>(problem, tiles, equal, cut_tiles);
    else if (wide && at_once <= 4) combine_pieces<4, 2>(problem, tiles, equal, cut_tiles);
    else if (at_once <= 4) combine_pieces<4, 1>(problem, tiles, equal, cut_tiles);
    else if (at_once <= 8) combine_pieces<8, 1>(problem, tiles, equal, cut_tiles);
    else combine_pieces<16, 1>(problem, tiles, equal, cut_tiles);
}
