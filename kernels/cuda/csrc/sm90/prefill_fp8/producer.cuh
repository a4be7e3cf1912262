// The producers of sm90/prefill_fp8/prefill.cu: warps that copy rows, and warps that transpose values.
#pragma once
#include "sm90/prefill_fp8/memory.cuh"
#include "sm90/prefill_fp8/products.cuh"
#include "sm90/gathered_rows.cuh"

// A warp copies half of a block's rows: 128 bytes of four rows at a time. The copies arrive at the barrier when they
// have landed.
struct Copier {
    static constexpr int ROWS = BLOCK / COPIERS, STEPS = ROWS / 4;

    const SparseProblem& problem;
    const uint32* row_scales;
    int warp, lane;

    // Index of this lane's row in the list, or -1 after the end.
    __device__ int listed_row(const BlockWalk& walk) const {
        const Segment& list = problem.segments[0];
        int at = walk.block * BLOCK + ROWS * warp + lane;
        return at < walk.length ? list.indices[walk.tile / problem.groups * list.indices_stride_b + at] : -1;
    }

    // Start copies of this warp's rows of the CTA's n-th block, and of their scales; zeros for absent rows.
    __device__ void copy(int listed, uint32 n, uint32 slot) const {
        const Segment& list = problem.segments[0];
        int own = uint32(listed) < uint32(list.num_slots) ? listed : -1;
        copy_async<4>(SCALES_AT + n % SCALE_SLOTS * (4 * BLOCK) + 4 * (ROWS * warp + lane), row_scales + max(own, 0), own >= 0);
        int row = lane / 8, chunk = lane % 8;
        uint32 to = K_AT + slot * OPERAND_BYTES + (ROWS * warp + row) * 128 + ((chunk ^ row) << 4);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            int from_row = __shfl_sync(~0u, own, 4 * i + row);
            const uint8* from = list.pages + max(from_row, 0) * list.page_stride + chunk * 16;
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)  // the swizzle of row + 4 differs by 4 chunks
                copy_async<16>((to ^ i % 2 * 64) + i * 512 + piece * TILE_BYTES, from + 128 * piece, from_row >= 0);
        }
        landed[slot].arrive_after_copies();
    }

    __device__ void run() const {
        BlockWalk walk(problem);
        if (!walk.more()) return;
        PipelineState<K_SLOTS> place;
        int listed = listed_row(walk);
        for (uint32 n = 0; walk.more(); ++n, place.advance(1)) {
            k_free[place.slot].wait(place.phase ^ 1);
            copy(listed, n, place.slot);
            walk.advance();
            if (walk.more()) listed = listed_row(walk);
        }
    }
};

// A warp transposes half of the keys of its consumer's pieces: 32 keys and 128 values at a time. Of each 16 keys, lane
// 4 g + c reads keys 2 c + i % 2 + i / 2 * 8, values 16 g .. + 15.
//
// Row 8 j + g of V^T has value 16 g + j of 128. In a row, each 16 keys are in the order of lanes, so that stmatrix
// stores them as they are in registers. Weights have the same order of keys, and results the same order of values
// (consumer.cuh).
struct Transposer {
    const SparseProblem& problem;
    int consumer, half, lane;

    __device__ void load(uint4 (&x)[4], uint32 from) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = lds128((from ^ i % 2 * 16) + i % 2 * 128 + i / 2 * 1024);
    }

    __device__ void store(const uint4 (&x)[4], uint32 to) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32 words[4];
#pragma unroll
            for (int key = 0; key < 4; ++key) words[key] = i == 0 ? x[key].x : i == 1 ? x[key].y : i == 2 ? x[key].z : x[key].w;
            transpose_bytes(words);
            stmatrix4(to + i * 2048, words[0], words[1], words[2], words[3]);
        }
    }

    __device__ void run() const {
        BlockWalk walk(problem);
        PipelineState<K_SLOTS> place;
        PipelineState<VALUE_SLOTS> values;
        int row = 2 * (lane % 4);
        uint32 from_row = K_AT + 2 * consumer * TILE_BYTES + (32 * half + row) * 128 + ((lane / 4 ^ row) << 4);
        uint32 to_row = VALUES_AT + consumer * VALUE_SLOTS * VALUES_BYTES + lane * 64 + ((2 * half ^ (lane / 2 % 4)) << 4);
        for (; walk.more(); walk.advance(), place.advance(1)) {
            landed[place.slot].wait(place.phase);
#pragma unroll 1
            for (int part = 0; part < 2; ++part, values.advance(1)) {
                uint32 from = from_row + place.slot * OPERAND_BYTES + part * TILE_BYTES, to = to_row + values.slot * VALUES_BYTES;
                uint4 x[2][4];  // 16 keys each
                load(x[0], from);
                load(x[1], from + 2048);
                values_free[consumer][values.slot].wait(values.phase ^ 1);
                store(x[0], to);
                store(x[1], to ^ 16);
                fence_proxy_async();
                values_ready[consumer][values.slot].arrive_warp();
            }
            k_free[place.slot].arrive_warp();
        }
    }
};
