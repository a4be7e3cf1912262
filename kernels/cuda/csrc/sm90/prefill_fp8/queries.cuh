// Conversion of a tile's Q to e4m3, head by head, by a warp.
#pragma once
#include "common/device.cuh"
#include "sm90/gathered_rows.cuh"
#include "sm90/prefill_fp8/e4m3_rows.cuh"
#include "sm90/prefill_fp8/memory.cuh"

constexpr int LEAST_EXPONENT = -100;

__device__ inline const bf16* head_of_q(const SparseProblem& problem, int tile, int head) {
    return problem.q + tile / problem.groups * problem.q_stride_b + (tile % problem.groups * HEADS + head) * problem.q_stride_h;
}
__device__ inline bool head_exists(const SparseProblem& problem, int tile, int head) {
    return tile % problem.groups * HEADS + head < problem.heads;
}

__device__ inline void sts64(uint32 address, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(own(address)), "r"(x.x), "r"(x.y) : "memory");
}

// The factor of the values of a head, and the factor of its scores. The latter is positive: the sign of a negative
// softmax scale goes to the values. It is NaN if a value is not finite, or if scores might not be.
struct HeadScale { float of_values, of_scores; };
__device__ inline HeadScale scale_of_head(float softmax_scale, uint32 largest) {
    int e = scale_exponent(__uint_as_float(largest << 16), LEAST_EXPONENT);
    // A scale of 0 would turn the -inf score of a masked key into NaN.
    float scale = softmax_scale == 0.0f ? 1e-30f : fabsf(softmax_scale) * LOG2_E * power_of_two(e);
    if (!(largest < 0x7f80 && scale < 0x1p50f)) scale = __uint_as_float(0x7fc00000);
    return {softmax_scale < 0.0f ? -power_of_two(-e) : power_of_two(-e), scale};
}

// `COUNT` heads of a tile from `first` on. All loads precede all reductions, and these precede all stores, so that they
// overlap.
template <int COUNT> struct SomeHeads {
    HeadPart x[COUNT];

    __device__ void load(const SparseProblem& problem, int tile, int first, int lane) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            x[i] = {};
            if (!head_exists(problem, tile, first + i)) continue;
            const bf16* q = head_of_q(problem, tile, first + i) + 8 * lane;
            x[i] = {load16(q), load16(q + 256)};
        }
    }

    __device__ void store(float softmax_scale, int first, uint32 buffer, int lane) const {
        uint32 largest[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) largest[i] = largest_of_row(x[i]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            HeadScale scale = scale_of_head(softmax_scale, largest[i]);
            int head = first + i, chunk = lane % 16 / 2;
            uint32 at = Q_AT + buffer * OPERAND_BYTES + lane / 16 * TILE_BYTES + head * 128 + ((chunk ^ head % 8) << 4) + lane % 2 * 8;
            sts64(at, e4m3x8(x[i].low, scale.of_values));
            sts64(at + 2 * TILE_BYTES, e4m3x8(x[i].high, scale.of_values));
            if (lane == 0) sts_float(Q_SCALE_AT + 4 * HEADS * buffer + 4 * head, scale.of_scores);
        }
    }
};

// Convert the first tile's Q, by all warps.
__device__ inline void convert_first_q(const SparseProblem& problem, int tile) {
    constexpr int OWN = HEADS / (THREADS / 32);
    int first = threadIdx.x / 32 * OWN, lane = threadIdx.x % 32;
    SomeHeads<OWN> heads;
    heads.load(problem, tile, first, lane);
    heads.store(problem.softmax_scale, first, 0, lane);
}

// A warp converts heads of the next tile's Q while a tile's keys are processed.
struct Converter {
    static constexpr int AT_ONCE = 2, OWN = HEADS / CONVERTERS;

    const SparseProblem& problem;
    int warp, lane;

    __device__ void run() const {
        TileWalk walk(problem);
        if (!walk.more()) return;
        q_ready[0].arrive_warp();  // the first tile's, by all warps
        walk.advance();
        for (uint32 tiles = 1; walk.more(); ++tiles, walk.advance()) {
            uint32 buffer = tiles % 2;
            q_free[buffer].wait(tiles / 2 % 2 ^ 1);
            SomeHeads<AT_ONCE> heads, next;
            next.load(problem, walk.tile, OWN * warp, lane);
#pragma unroll 1
            for (int i = 0; i < OWN; i += AT_ONCE) {
                heads = next;
                if (i + AT_ONCE < OWN) next.load(problem, walk.tile, OWN * warp + i + AT_ONCE, lane);
                heads.store(problem.softmax_scale, OWN * warp + i, buffer, lane);
            }
            fence_proxy_async();
            q_ready[buffer].arrive_warp();
        }
    }
};
