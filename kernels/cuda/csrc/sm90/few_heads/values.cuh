// The values warpgroups of sm90/few_heads/prefill.cu.
#pragma once
#include "common/device.cuh"
#include "sm90/gathered_rows.cuh"
#include "sm90/few_heads/memory.cuh"

// One warpgroup computes half of the values; a warp has 64 of them, 16 a product. Sums are transposed: rows are values, columns
// are heads. Lane 4 g + c has value 16 i + g + 8 r of its warp's, head 8 j + 2 c + e in element 4 j + 2 r + e of sums[i].
struct Values {
    static constexpr int TILES_OF_WARP = 4;

    const SparseProblem& problem;
    int half, warp, lane;
    // Offset of this lane's row of fragments in a slot of keys, or in the epilogue of heads, which are stored in the
    // same layout; offset of its columns in arrays of heads.
    uint32 fragment_at, columns_at;
    float sums[TILES_OF_WARP][HEADS / 2];

    __device__ Values(const SparseProblem& p, int h) : problem(p), half(h), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
        fragment_at = (lane / 16 * 8 + lane % 8) * PITCH + own_values() * 2 + lane / 8 % 2 * 16;
        columns_at = lane % 4 * 8;
        // Keeps the compiler from rematerialising these from threadIdx, which is slower.
        asm volatile("" : "+r"(fragment_at), "+r"(columns_at), "+r"(lane));
    }

    __device__ int own_values() const { return 256 * half + 64 * warp; }

    // Wait for the n-th block's weights, and rescale the sums if that block raised a reference.
    __device__ void await_weights(uint32 n, bool fresh) {
        uint32 slot = n % WEIGHT_SLOTS;
        weights_ready[slot].wait(n / WEIGHT_SLOTS % 2);
        if (fresh || !__any_sync(~0u, lds32(RAISED_AT + 4 * slot))) return;
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float2 lower = lds_float2(LOWER_AT + slot * (HEADS * 4) + columns_at + 32 * j);
#pragma unroll
            for (int i = 0; i < TILES_OF_WARP; ++i) {
                sums[i][4 * j] *= lower.x, sums[i][4 * j + 1] *= lower.y;
                sums[i][4 * j + 2] *= lower.x, sums[i][4 * j + 3] *= lower.y;
            }
        }
    }

    // Add the n-th block, the first of a tile if `fresh`. Slots are freed after their rows are in registers, except the
    // slots of the last block of a tile, which the epilogue reuses: `slots` returns them.
    __device__ void add(uint32 n, bool fresh, bool last, PipelineState<SLOTS>& place, uint32 (&slots)[BLOCK_SLOTS]) {
        uint32 a[2][4];  // fragments of V^T: 16 keys and 16 values
        rows_ready[place.slot].wait(place.phase);
        ldmatrix4_transposed(a[0], fragment_at + slot_at(place.slot));
        await_weights(n, fresh);
        uint64 weights = tile_descriptor(WEIGHTS_AT) + n % WEIGHT_SLOTS * (HEAD_TILE_BYTES >> 4);
#pragma unroll
        for (int i = 0; i < TILES_OF_WARP; ++i) pin(sums[i]);
#pragma unroll
        for (int part = 0; part < BLOCK_SLOTS * TILES_OF_WARP; ++part) {  // a product, then the next one's fragment
            int k = part / TILES_OF_WARP, next = (part + 1) % TILES_OF_WARP;
            wgmma_fence();
            wgmma_rows(bf16{}, sums[part % TILES_OF_WARP], a[part % 2], weights + 2 * k, k != 0 || !fresh);
            wgmma_commit();
            if (next == 0) {
                slots[k] = place.slot;
                if (!last) rows_free[place.slot].arrive_warp();
                place.advance(1);
            }
            if (part + 1 == BLOCK_SLOTS * TILES_OF_WARP) break;
            if (part > 0) wgmma_wait<1>();
            if (next == 0) rows_ready[place.slot].wait(place.phase);
            ldmatrix4_transposed(a[(part + 1) % 2], fragment_at + slot_at(place.slot) + 32 * next);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < TILES_OF_WARP; ++i) pin(sums[i]);
    }

    // Epilogue: store the results of a tile. They are transposed in the slots of the last block, whose rows become
    // heads. No other warp needs this warp's values in them any more.
    __device__ void finish(int tile, uint32 tiles, const uint32 (&slots)[BLOCK_SLOTS]) {
        uint32 parity = tiles % 2;
        result_ready[parity].wait(tiles / 2 % 2);
        float checks[4] = {};  // NaN if a value is not finite; several accumulators shorten the dependent chains
#pragma unroll
        for (int j = 0; j < HEADS / 8; j += 2) {
            float2 inv_sum[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) inv_sum[k] = lds_float2(INV_SUM_AT + parity * (HEADS * 4) + columns_at + 32 * (j + k));
            uint32 to = fragment_at + slot_at(slots[j / 2]);
#pragma unroll
            for (int i = 0; i < TILES_OF_WARP; ++i) {
                uint32 words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float* x = sums[i] + 4 * j + 2 * k;
                    float low = x[0] * inv_sum[k / 2].x, high = x[1] * inv_sum[k / 2].y;
                    checks[k] = fmaf(low, 0.0f, fmaf(high, 0.0f, checks[k]));
                    words[k] = pack(bf16{}, low, high);
                }
                stmatrix4_transposed(to + 32 * i, words[0], words[1], words[2], words[3]);
            }
        }
        bool bad = warpgroup_any(2 + half, (checks[0] + checks[1]) + (checks[2] + checks[3]) != 0.0f);
        TileCoord at(problem, tile);
        int thread = threadIdx.x % 128;
        if (thread < HEADS && at.first_head + thread < problem.heads) {
            int head = at.first_head + thread;
            float x = lds_float(LOGITS_AT + (2 * parity + half) * (HEADS * 4) + 4 * thread);
            float* to = half ? problem.lse + at.b * problem.lse_stride_b + head * problem.lse_stride_h
                             : problem.max_logits + at.b * problem.max_stride_b + head * problem.max_stride_h;
            bad |= __float_as_uint(x) == UNSAFE_BITS;
            *to = bad ? __uint_as_float(UNSAFE_BITS) : x;
            if (bad) sts32(FLAGGED, 1);
        }
        // Each warp copies four rows of 128 bytes at a time. The vote above has synchronised its lanes.
        uint32 from = lane / 8 * PITCH + own_values() * 2 + lane % 8 * 16;
        bf16* out = problem.out + at.b * problem.out_stride_b + at.first_head * problem.out_stride_h + own_values() + lane % 8 * 8;
        constexpr int AT_ONCE = HEADS / 4 < 8 ? HEADS / 4 : 8;
#pragma unroll
        for (int first = 0; first < HEADS / 4; first += AT_ONCE) {
            uint4 x[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) x[i] = lds128(from + slot_at(slots[(first + i) / 4]) + (first + i) % 4 * (4 * PITCH));
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                int head = 4 * (first + i) + lane / 8;
                if (at.first_head + head < problem.heads) store16(out + head * problem.out_stride_h, x[i]);
            }
        }
        fence_proxy_async();  // before bulk copies overwrite the slots
#pragma unroll
        for (int k = 0; k < BLOCK_SLOTS; ++k) rows_free[slots[k]].arrive_warp();
    }

    __device__ void run() {
        PipelineState<SLOTS> place;
        uint32 n = 0, tiles = 0, slots[BLOCK_SLOTS];
        int next_length = length_of_tile(problem, blockIdx.x);
        for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x) {
            int left = blocks_of(uniform(next_length));
            next_length = length_of_tile(problem, tile + gridDim.x);
            if (!left) {
                store_nothing<true>(problem, tile, half);
                continue;
            }
#pragma unroll 1
            for (bool fresh = true; left; --left, ++n, fresh = false) {
                add(n, fresh, left == 1, place, slots);
                if (left > 1) weights_free[n % WEIGHT_SLOTS].arrive_warp();
            }
            finish(tile, tiles++, slots);
            weights_free[(n - 1) % WEIGHT_SLOTS].arrive_warp();  // only now: this also frees INV_SUM
        }
    }
};
