// The values warpgroups of sm90/prefill_fp8/prefill.cu.
#pragma once
#include "common/vectors.cuh"
#include "sm90/gathered_rows.cuh"
#include "sm90/prefill_fp8/memory.cuh"
#include "sm90/prefill_fp8/products.cuh"

// One warpgroup computes values 256 half .. + 255 of the result. Lane 4 g + c of warp w has rows (heads) 16 w + g + 8 r; element
// 4 j + 2 r + e of `low` has value 16 (2 c + e) + j, that of `high` 128 further (see Producer).
struct Values {
    const SparseProblem& problem;
    int half, warp, lane, head;
    float low[64], high[64];

    __device__ Values(const SparseProblem& p, int h) : problem(p), half(h), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
        head = 16 * warp + lane / 4;
    }

    // Add up the CTA's n-th block, the first of a tile if `fresh`.
    __device__ __forceinline__ void add(uint32 n, bool fresh, Place<VALUE_SLOTS>& place) {
        uint32 slot = n % WEIGHT_SLOTS;
        barrier_wait(WEIGHTS_READY + 8 * slot, n / WEIGHT_SLOTS % 2);
        if (!fresh && uniform(lds32(RAISED_AT + 16 * slot + 4 * warp))) {
            uint32 at = LOWER_AT + 4 * HEADS * slot + 4 * head;
            float lower[2] = {lds_float(at), lds_float(at + 32)};
#pragma unroll
            for (int i = 0; i < 64; ++i) low[i] *= lower[i / 2 % 2], high[i] *= lower[i / 2 % 2];
        }
        uint64 weights = narrow_descriptor(WEIGHTS_AT) + slot * (WEIGHT_BYTES >> 4);
        uint64 values = narrow_descriptor(VALUES_AT) + place.slot * (HALF_BYTES >> 4);
        pin(low), pin(high);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            wgmma_e4m3(low, weights + 2 * step, values + 2 * step, step || !fresh);
            wgmma_e4m3(high, weights + 2 * step, values + (HALF_BYTES / 2 >> 4) + 2 * step, step || !fresh);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(low), pin(high);
        warp_arrive(VALUES_FREE + 8 * place.slot);
        place.advance(2);
    }

    // Epilogue: store the results of a tile.
    __device__ void finish(int tile, uint32 tiles, uint32 n) {
        float checks[4] = {};  // NaN once a value is not finite; several, to shorten the dependent chains
#pragma unroll
        for (int i = 0; i < 64; ++i) checks[i % 4] = fmaf(low[i], 0.0f, fmaf(high[i], 0.0f, checks[i % 4]));
        bool bad = __any_sync(~0u, (checks[0] + checks[1]) + (checks[2] + checks[3]) != 0.0f);
        barrier_wait(RESULT_READY + 8 * (tiles % 2), tiles / 2 % 2);
        uint32 from = INV_SUM_AT + 4 * HEADS * (tiles % 2) + 4 * head;
        float factors[2] = {lds_float(from), lds_float(from + 32)};
        warp_arrive(WEIGHTS_FREE + 8 * (n % WEIGHT_SLOTS));  // only now: this also frees INV_SUM
        TileCoord at(problem, tile);
        int own_head = at.first_head + head;
        bf16* out = problem.out + at.b * problem.out_stride_b + own_head * problem.out_stride_h + 256 * half + 32 * (lane & 2) + 8 * (lane & 1);
#pragma unroll
        for (int r = 0; r < 2; ++r, own_head += 8, out += 8 * problem.out_stride_h) {
            bool here = own_head < problem.heads;
            store_row(out, low, r, factors[r], here);
            store_row(out + 128, high, r, factors[r], here);
            if (bad && here && lane % 4 == 0)
                problem.max_logits[at.b * problem.max_stride_b + own_head * problem.max_stride_h] = __uint_as_float(UNSAFE_BITS);
        }
    }

    // Store 32 values of row r for each of two neighbouring lanes: both store 16 bytes of the same 32, a sector.
    __device__ void store_row(bf16* out, const float (&x)[64], int r, float factor, bool here) {
        bool odd = lane & 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 words[2][4];  // 8 values each
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                int k = 8 * j + 2 * r + i;
                words[j / 4][j % 4] = pack(bf16{}, x[k] * factor, x[k + 4] * factor);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32 got = __shfl_xor_sync(~0u, odd ? words[0][j] : words[1][j], 1);
                words[0][j] = odd ? got : words[0][j], words[1][j] = odd ? words[1][j] : got;
            }
            // The even lane's values, then the odd one's.
            if (!here) continue;
            store16(out + 16 * i, {words[0][0], words[0][1], words[0][2], words[0][3]});
            store16(out + 16 * i + 32, {words[1][0], words[1][1], words[1][2], words[1][3]});
        }
    }

    __device__ void store_nothing(int tile) {
        TileCoord at(problem, tile);
        int thread = threadIdx.x % 128 + 128 * half, heads = min(HEADS, problem.heads - at.first_head);
#pragma unroll 1
        for (int i = thread; i < heads * (V_DIM / 8); i += 256) {
            int own_head = at.first_head + i / (V_DIM / 8);
            store16(problem.out + at.b * problem.out_stride_b + own_head * problem.out_stride_h + i % (V_DIM / 8) * 8, {});
        }
        if (thread < heads) {
            int own_head = at.first_head + thread;
            problem.lse[at.b * problem.lse_stride_b + own_head * problem.lse_stride_h] = infinity();
            problem.max_logits[at.b * problem.max_stride_b + own_head * problem.max_stride_h] = -infinity();
        }
    }

    __device__ __forceinline__ void run() {
        Place<VALUE_SLOTS> place;
        place.slot = half;
        uint32 n = 0, tiles = 0;
        int next_length = length_of_tile(problem, blockIdx.x);
        for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x) {
            int left = blocks_of(uniform(next_length));
            next_length = length_of_tile(problem, tile + gridDim.x);
            if (!left) {
                store_nothing(tile);
                continue;
            }
#pragma unroll 1
            for (bool fresh = true; left; --left, ++n, fresh = false) {
                add(n, fresh, place);
                if (left > 1) warp_arrive(WEIGHTS_FREE + 8 * (n % WEIGHT_SLOTS));
            }
            finish(tile, tiles++, n - 1);
        }
    }
};
