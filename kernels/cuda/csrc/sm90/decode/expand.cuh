// FP4 rows in the ring of sm90/decode/decode.cu: the PV warpgroups expand them to FP8, each warp eight rows of a block.
#pragma once
#include "sm90/decode/memory.cuh"

// A warp expands eight rows with four lanes each. A raw row has its scales in the first 32 bytes and its codes in the
// second half. Codes are expanded in order, so none is overwritten before it is read.
struct Expander {
    int lane;
    uint32 row_at, factor_at;  // this lane's row in slot 0, and the first of the eight factors that it stores

    // For warp `warp` of the eight warps of both PV warpgroups.
    __device__ Expander(int warp, int lane) : lane(lane) {
        int half = warp / 4, row = warp % 4 * 8 + lane / 4, n = permuted(row & 15);
        row_at = RAW_AT + (half * HALF + row) * RAW_BYTES;
        factor_at = FACTOR_AT + half * FACTORS_BYTES + lane % 4 * 8 * FACTOR_STRIDE + (row & 16) * 2 + (n >> 1 & 3) * 8 + (n & 1) * 2 +
                    (n >> 3) * 4;
        if (EXPANDS) asm volatile("" : "+r"(row_at), "+r"(factor_at));
    }

    // Number of FP8 blocks of a tile, which come first and are not expanded.
    __device__ static int fp8_blocks(ScheduledTile scheduled) {
        if (LAYOUT::e2m1_values || scheduled.summary().w & ScheduledTile::SECOND) return 0;
        return scheduled.list(0).w;
    }

    __device__ void expand(PipelineState<RING> at) {
        raw_landed[at.slot].wait(at.phase);
        uint32 row = row_at + at.slot * (2 * HALF * RAW_BYTES);
        uint32 from = chunk_at(row, lane % 4) + RAW_BYTES / 2;
        uint4 codes = lds128(from);
        store_factors(lds64(chunk_at(row, lane % 4 / 2) + lane % 2 * 8), factor_at + at.slot * (2 * FACTORS_BYTES));
        store_values(codes, from, chunk_at(row, lane % 4 * 2));
        __syncwarp();
        if (WARP_ARRIVALS == 32) raw_full[at.slot].arrive();
        else if (lane == 0) raw_full[at.slot].arrive(ROW_ARRIVALS / 8);
    }

    // Address of a chunk of the lane's row.
    __device__ uint32 chunk_at(uint32 row, int chunk) const { return row + raw_offset(lane / 4, chunk) - lane / 4 * RAW_BYTES; }

    __device__ static void store_factors(uint2 scales, uint32 to) {
        constexpr uint32 SIXTY_FOUR = 0x54005400;  // expanded values are 2^-6 times the values of the codes
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            uint32 low, high;
            to_f16(i ? scales.y : scales.x, low, high);
            low = multiply(low, SIXTY_FOUR), high = multiply(high, SIXTY_FOUR);
            uint32 factors[4] = {low, low >> 16, high, high >> 16};
#pragma unroll
            for (int j = 0; j < 4; ++j) sts16(to + (i + j) * FACTOR_STRIDE, factors[j]);
        }
    }

    // Each step of a lane expands 16 bytes of codes, the first ones at `from`. The slices of odd rows are exchanged in
    // pairs (slice_of).
    __device__ static void store_values(uint4 codes, uint32 from, uint32 to) {
        constexpr int STEPS = RAW_BYTES / 128;
        static_assert(!EXPANDS || (RAW_BYTES % 128 == 0 && RAW_AT % 128 == 0));
#pragma unroll 1
        for (int j = 0; j < STEPS; ++j) {
            if (j) codes = lds128(from);
            __syncwarp();  // all lanes have read the bytes that are overwritten next
            uint4 low, high;
            expand_e2m1(codes, low, high, e2m1_to_small_e4m3);
            sts128(to, low), sts128(to ^ 16, high);
            to += 128;
            from = (from ^ 64) + (j & 1) * 128;
        }
    }
};
