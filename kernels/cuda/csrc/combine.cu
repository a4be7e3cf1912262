// Puts the parts of cut tiles together: a warp a head of a tile.
#include "decode.cuh"
#include "overlap.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int LANE_VALUES = V_DIM / 32;

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

// A warp a head.
__device__ inline void combine(const Problem& problem, const CutTile& cut, int row) {
    int lane = threadIdx.x % 32;
    TilePlace at(problem, cut.tile);
    int head = at.first_head + row;
    if (head >= problem.heads) return;

    // A lane looks after one part at a time: where it is (-1 of a share that ends where it begins) and its sum.
    auto slot_of = [&](int share) -> int64 {
        if (share >= cut.last) return -1;
        Start start(problem, share);
        if (start == Start(problem, share + 1)) return -1;
        return int64(partial_slot(share, start.tile != cut.tile || start.block == 0)) * HEADS + row;
    };
    float top = -infinity();
    for (int first = cut.first; first < cut.last; first += 32) {
        int64 slot = slot_of(first + lane);
        if (slot >= 0) top = fmaxf(top, problem.partial_lse[slot]);
    }
#pragma unroll
    for (int by = 16; by; by /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
    bool empty = top == -infinity();
    float total = 0.0f, sums[LANE_VALUES] = {};
    for (int first = cut.first; first < cut.last && !empty; first += 32) {
        int64 slot = slot_of(first + lane);
        float weight = slot >= 0 ? exp2f(problem.partial_lse[slot] - top) : 0.0f;
        int count = min(32, cut.last - first);
#pragma unroll 4
        for (int part = 0; part < count; ++part) {
            int64 part_slot = __shfl_sync(~0u, slot, part);
            float part_weight = __shfl_sync(~0u, weight, part);
            if (part_weight == 0.0f) continue;  // nothing was written where there is no part
            total += part_weight;
            const float4* values = reinterpret_cast<const float4*>(problem.partial_out + part_slot * V_DIM) + lane;
#pragma unroll
            for (int i = 0; i < LANE_VALUES / 4; ++i) {
                float4 x = values[32 * i];
                sums[4 * i] += part_weight * x.x, sums[4 * i + 1] += part_weight * x.y;
                sums[4 * i + 2] += part_weight * x.z, sums[4 * i + 3] += part_weight * x.w;
            }
        }
    }
    float lse = (top + log2f(total)) * LN_2;
    float factor = empty ? 0.0f : 1.0f / total;
    if (problem.attn_sink && !empty) factor *= 1.0f / (1.0f + expf(problem.attn_sink[head] - lse));
    uint2* out = reinterpret_cast<uint2*>(problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s +
                                          head * problem.out_stride_h) + lane;
#pragma unroll
    for (int i = 0; i < LANE_VALUES / 4; ++i)
        out[32 * i] = uint2{pack(bf16{}, sums[4 * i] * factor, sums[4 * i + 1] * factor),
                            pack(bf16{}, sums[4 * i + 2] * factor, sums[4 * i + 3] * factor)};
    if (lane == 0)
        problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
            empty ? infinity() : lse;
}

// Thread blocks [HEADS / WARPS][shares - 1].
extern "C" __global__ void __launch_bounds__(THREADS) combine_parts(const __grid_constant__ Problem problem) {
    overlap_with_previous_kernel();
    CutTile cut = cut_tile_at(problem, blockIdx.y + 1);
    if (cut.last > cut.first) combine(problem, cut, blockIdx.x * WARPS + threadIdx.x / 32);
}
