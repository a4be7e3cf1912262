// Puts the parts of cut tiles together. A warp has a line of each part: 64 values of four heads, eight a lane.
//
// Macros: TILE_HEADS (decode.cuh).
#include "decode.cuh"
#include "overlap.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int AT_ONCE = 4;  // parts that are loaded together
constexpr int LINES = HEADS / 4;  // of 64 values

// A tile cut into the parts of shares first .. last - 1.
struct CutTile {
    int tile, first, last;
};

// The tile that `share` begins inside of, if it is the first share to do so (the one before has the tile's start);
// otherwise nothing, last = first. A warp works together.
__device__ inline CutTile cut_tile_at(const Problem& problem, int share) {
    Start start(problem, share);
    if (start.block == 0 || start.tile >= problem.tiles()) return {};
    Start before(problem, share - 1);
    if (before.tile == start.tile && before.block > 0) return {};
    // A plan made for other lengths may cut where there is nothing any more.
    int blocks = blocks_of_tile(problem, start.tile);
    CutTile cut{start.tile, share - 1, share};
    for (;;) {
        int mine = cut.last + threadIdx.x % 32;
        bool inside = false;
        if (mine < problem.shares) {
            Start next(problem, mine);
            inside = next.tile == cut.tile && next.block < blocks;
        }
        uint32 votes = __ballot_sync(~0u, inside);
        cut.last += __popc(votes);  // those inside come first
        if (~votes) break;
    }
    return cut.last - cut.first > 1 ? cut : CutTile{};
}

__device__ inline void combine(const Problem& problem, const CutTile& cut, int line) {
    int lane = threadIdx.x % 32, value = line / LINES * 64 + lane / 4 * 8;
    int row = line % LINES / 2 * 8 + lane % 4 * 2 + line % 2;
    TilePlace at(problem, cut.tile);
    int head = at.first_head + row;

    float top = -infinity(), total = 0.0f, sums[8] = {};
    for (int first = cut.first; first < cut.last; first += 32) {
        int slot = -1;  // of this lane's share; one that ends where it begins has no part
        if (first + lane < cut.last) {
            Start start(problem, first + lane);
            if (!(start == Start(problem, first + lane + 1)))
                slot = partial_slot(first + lane, start.tile != cut.tile || start.block == 0);
        }
        uint32 parts = __ballot_sync(~0u, slot >= 0);
        while (parts) {
            float lse[AT_ONCE];
            float4 low[AT_ONCE], high[AT_ONCE];
            int source = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                bool another = parts;
                if (another) source = __ffs(parts) - 1;  // or the one before again, without weight
                parts &= parts - 1;
                int64 from = __shfl_sync(~0u, slot, source);
                lse[i] = another ? problem.partial_lse[from * HEADS + row] : -infinity();
                const float4* part = reinterpret_cast<const float4*>(problem.partial_out) + from * (HEADS * V_DIM / 4) +
                                     partial_at(row, value);
                low[i] = part[0], high[i] = part[PLANE];
            }
            float before = top;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) top = fmaxf(top, lse[i]);
            if (top == -infinity()) continue;  // nothing yet
            float rescale = exp2f(before - top);
            total *= rescale;
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] *= rescale;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float weight = exp2f(lse[i] - top);
                total += weight;
                sums[0] += weight * low[i].x, sums[1] += weight * low[i].y;
                sums[2] += weight * low[i].z, sums[3] += weight * low[i].w;
                sums[4] += weight * high[i].x, sums[5] += weight * high[i].y;
                sums[6] += weight * high[i].z, sums[7] += weight * high[i].w;
            }
        }
    }
    if (head >= problem.heads) return;
    bool empty = total == 0.0f;
    float lse = (top + log2f(total)) * LN_2;
    float factor = empty ? 0.0f : 1.0f / total;
    if (problem.attn_sink && !empty) factor *= 1.0f / (1.0f + expf(problem.attn_sink[head] - lse));
    bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + head * problem.out_stride_h;
    *reinterpret_cast<uint4*>(out + value) =
        uint4{pack(bf16{}, sums[0] * factor, sums[1] * factor), pack(bf16{}, sums[2] * factor, sums[3] * factor),
              pack(bf16{}, sums[4] * factor, sums[5] * factor), pack(bf16{}, sums[6] * factor, sums[7] * factor)};
    if (value == 0)
        problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
            empty ? infinity() : lse;
}

// Thread blocks [lines of a part / WARPS][shares - 1].
extern "C" __global__ void __launch_bounds__(THREADS) combine_parts(const __grid_constant__ Problem problem) {
    overlap_with_previous_kernel();
    CutTile cut = cut_tile_at(problem, blockIdx.y + 1);
    if (cut.last > cut.first) combine(problem, cut, blockIdx.x * WARPS + threadIdx.x / 32);
}
