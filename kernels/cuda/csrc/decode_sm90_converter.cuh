// The converters of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

// Three warps; each converts a slice of a block, 64 tokens of 64 values, and slices go round the warps.
struct Converter {
    int warp, lane;

    __device__ Converter() : warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // Rows of a slice are in permuted order: of each 8 rows, this lane has a quarter of the one at q.
    __device__ void convert(int stage, int slice, uint32 target) {
        int part = lane % 4, q = lane / 4, token = token_at_place(q);
        uint32 source = slice_of(RAW_AT + stage * (STAGE * RAW_BYTES) + raw_offset(token, part), slice, token);
        uint32 factor_at = FACTOR_AT + stage * (SLICES * STAGE * 2) + slice * (STAGE * 2) + (q >> 1 & 3) * 8 + (q & 1) * 2;
        target += q * 128;
        uint32 low = (2 * part ^ q) << 4, high = low ^ 16;
#pragma unroll
        for (int batch = 0; batch < 2; ++batch) {  // a stage each
            uint4 raw[4];
            uint32 factors[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                raw[i] = lds128(source + (4 * batch + i) * 8 * RAW_BYTES);
                factors[i] = lds16(factor_at + batch * (SLICES * STAGE * 2) + i / 2 * 32 + i % 2 * 4);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32 scale = factors[i] | factors[i] << 16;
                uint32 in[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w}, words[8];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    to_f16(in[w], words[2 * w], words[2 * w + 1]);
                    words[2 * w] = multiply(words[2 * w], scale);
                    words[2 * w + 1] = multiply(words[2 * w + 1], scale);
                }
                uint32 row = target + (4 * batch + i) * 1024;
                sts128(row + low, {words[0], words[1], words[2], words[3]});
                sts128(row + high, {words[4], words[5], words[6], words[7]});
            }
        }
    }

    __device__ void run(int blocks) {
        Ring<STAGES> at;
        int slice = warp;
        uint32 k = warp;  // slices converted before this one, over all blocks
#pragma unroll 1
        for (; blocks; --blocks) {
            barrier_wait(RAW_FULL + 8 * at.slot, at.round);
            barrier_wait(RAW_FULL + 8 * (at.slot + 1), at.round);
#pragma unroll 1
            for (; slice < SLICES; slice += CONVERTERS, k += CONVERTERS) {
                int slot = k % K_SLOTS;
                barrier_wait(K_EMPTY + 8 * slot, (k / K_SLOTS & 1) ^ 1);
                convert(at.slot, slice, K_AT + slot * TILE_BYTES);
                warp_arrive(K_FULL + 8 * slot);
            }
            slice -= SLICES;
            warp_arrive(RAW_EMPTY + 8 * at.slot);
            warp_arrive(RAW_EMPTY + 8 * (at.slot + 1));
            at.advance(2);
        }
    }
};
