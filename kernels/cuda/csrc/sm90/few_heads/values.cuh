// The values of sm90/few_heads/prefill.cu.
#pragma once
#include "common/f16.cuh"
#include "common/vectors.cuh"
#include "sm90/few_heads/memory.cuh"
#include "sm90/few_heads/products.cuh"

// One warpgroup: O^T = V^T P^T, 64 values a tile. Rows are values, 16 a warp, columns heads: of warp w, lane 4 g + c has in
// elements 4 j + 2 r + e value 16 w + g + 8 r, head 8 j + 2 c + e.
struct Values {
    static constexpr int OWN = HEADS / 4;  // heads of a lane: at 2 j + e, as in Scores

    const SparseProblem& problem;
    int warp, lane;
    float sums[VALUE_TILES][HEADS / 2];
    float reference[OWN];

    __device__ explicit Values(const SparseProblem& p) : problem(p), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // Numbers of this lane's heads out of an array of all.
    __device__ void load(float (&x)[OWN], uint32 from) const {
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float2 pair = lds_float2(from + (8 * j + 2 * (lane % 4)) * 4);
            x[2 * j] = pair.x, x[2 * j + 1] = pair.y;
        }
    }
    __device__ void scale_sums(const float (&factors)[OWN]) {
#pragma unroll
        for (int tile = 0; tile < VALUE_TILES; ++tile)
#pragma unroll
            for (int i = 0; i < HEADS / 2; ++i) sums[tile][i] *= factors[i / 4 * 2 + i % 2];
    }

    // Take over the n-th block's references: what was added up so far counts less.
    __device__ void take_references(uint32 n, bool fresh) {
        float now[OWN];
        load(now, REFERENCE_AT + n % 2 * (HEADS * 4));
        bool raised = false;
#pragma unroll
        for (int i = 0; i < OWN; ++i) raised |= now[i] != reference[i];
        if (!__any_sync(~0u, raised)) return;
        if (!fresh) {
            float factors[OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i) factors[i] = now[i] == reference[i] ? 1.0f : exp2_approx(reference[i] - now[i]);
            scale_sums(factors);
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) reference[i] = now[i];
    }

    // Add up the n-th block, the first of a tile if `fresh`.
    __device__ void add(uint32 n, bool fresh, Place<SLOTS>& place) {
        barrier_wait(WEIGHTS_READY + 8 * (n % 2), n / 2 % 2);
        take_references(n, fresh);
        uint64 weights = tile_descriptor(WEIGHTS_AT + n % 2 * HEAD_TILE_BYTES);
        uint32 slots[PIECES];
#pragma unroll
        for (int tile = 0; tile < VALUE_TILES; ++tile) pin(sums[tile]);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            slots[piece] = place.slot;
            barrier_wait(READY + 8 * place.slot, place.phase);
            wgmma_fence();
            uint64 values = transposed_descriptor(RING_AT + place.slot * PIECE_BYTES);
#pragma unroll
            for (int step = 0; step < 4; ++step)  // tiles in turn, as products that add to the same sums wait for each other
#pragma unroll
                for (int i = 0; i < PIECE_TILES; ++i)
                    wgmma_values(
                        sums[PIECE_TILES * piece + i], values + i * (TILE_BYTES >> 4) + 128 * step, weights + 2 * step, step > 0 || !fresh);
            wgmma_commit();
            place.advance();
        }
        wgmma_wait<3>();
        warp_arrive(FREE + 8 * slots[0]);
        wgmma_wait<2>();
        warp_arrive(FREE + 8 * slots[1]);
        wgmma_wait<1>();
        warp_arrive(FREE + 8 * slots[2]);
        wgmma_wait<0>();
        warp_arrive(FREE + 8 * slots[3]);
#pragma unroll
        for (int tile = 0; tile < VALUE_TILES; ++tile) pin(sums[tile]);
    }

    // Store the results of a tile.
    __device__ void finish(int tile, uint32 tiles) {
        float checks[4] = {};  // NaN after a number that is not finite; several, as each waits for itself
#pragma unroll
        for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
            for (int k = 0; k < HEADS / 2; ++k) checks[k % 4] = fmaf(sums[i][k], 0.0f, checks[k % 4]);
        barrier_wait(TOTALS_READY + 8 * (tiles % 2), tiles / 2 % 2);
        float totals[OWN];
        load(totals, TOTALS_AT + tiles % 2 * (4 * HEADS * 4));
#pragma unroll
        for (int w = 1; w < 4; ++w) {
            float others[OWN];
            load(others, TOTALS_AT + (tiles % 2 * 4 + w) * (HEADS * 4));
#pragma unroll
            for (int i = 0; i < OWN; ++i) totals[i] += others[i];
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) checks[i % 4] = fmaf(totals[i], 0.0f, checks[i % 4]);
        bool bad = warpgroup_any(2, (checks[0] + checks[1]) + (checks[2] + checks[3]) != 0.0f);
        TileCoord at(problem, tile);
        float factors[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            int head = at.first_head + i / 2 * 8 + 2 * (lane % 4) + i % 2;
            bool here = head < problem.heads, empty = reference[i] == -infinity();
            float lse2 = reference[i] + log2_approx(totals[i]);
            factors[i] = empty ? 0.0f : reciprocal_fast(totals[i]);
            if (here && problem.attn_sink)
                factors[i] *= reciprocal_fast(1.0f + exp2_approx(fmaf(problem.attn_sink[head], LOG2_E, -lse2)));
            if (here && threadIdx.x % 128 < 4)
                problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h] =
                    bad ? __uint_as_float(UNSAFE_BITS) : empty ? infinity() : lse2 * LN_2;
        }
        scale_sums(factors);
        bf16* out = problem.out + at.b * problem.out_stride_b + at.first_head * problem.out_stride_h;
        // Of four 8x8 matrices, transposed, this lane stores a row of one: 8 values of a head.
        int value = lane % 4 / 2 * 64 + 16 * warp + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            int head = 8 * j + lane / 4;
            bool here = at.first_head + head < problem.heads;
#pragma unroll
            for (int i = 0; i < VALUE_TILES; i += 2) {
                uint32 words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float* x = sums[i + k / 2] + 4 * j + k % 2 * 2;
                    words[k] = transposed_matrix(pack(bf16{}, x[0], x[1]));
                }
                transpose_words(words, lane);
                if (here) store16(out + head * problem.out_stride_h + i * 64 + value, {words[0], words[1], words[2], words[3]});
            }
        }
    }

    __device__ void store_nothing(int tile) {
        TileCoord at(problem, tile);
        int thread = threadIdx.x % 128, heads = min(HEADS, problem.heads - at.first_head);
        for (int i = thread; i < heads * (V_DIM / 8); i += 128) {
            int head = at.first_head + i / (V_DIM / 8);
            store16(problem.out + at.b * problem.out_stride_b + head * problem.out_stride_h + i % (V_DIM / 8) * 8, {});
        }
        if (thread < heads) {
            int head = at.first_head + thread;
            problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h] = infinity();
            problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h] = -infinity();
        }
    }

    __device__ void run() {
        Place<SLOTS> place;
        uint32 n = 0, tiles = 0;
        int next_length = length_of_tile(problem, blockIdx.x);
        for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x) {
            int left = blocks_of(__reduce_max_sync(~0u, next_length));  // the same in all lanes, which the compiler then knows
            next_length = length_of_tile(problem, tile + gridDim.x);
            if (!left) {
                store_nothing(tile);
                continue;
            }
#pragma unroll
            for (int i = 0; i < OWN; ++i) reference[i] = -infinity();
            for (bool fresh = true; left; --left, ++n, fresh = false) {
                add(n, fresh, place);
                if (left > 1) warp_arrive(WEIGHTS_FREE + 8 * (n % 2));
            }
            finish(tile, tiles++);
            warp_arrive(WEIGHTS_FREE + 8 * ((n - 1) % 2));  // only now: it also says that totals were read
        }
    }
};
