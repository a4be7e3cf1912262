// The row producers of sm90/decode/decode.cu where a cache has FP4 values: they expand these to FP8 in the ring.
#pragma once
#include "sm90/decode/producer.cuh"

// Eight e2m1 codes, the first in the lowest bits, as eight e4m3 bytes of 2^-6 times their values, subnormals too: exponent and
// mantissa only move. Factors make up for it (ScaleProducer).
__device__ inline void e2m1_to_small_e4m3(uint32 codes, uint32& first, uint32& second) {
    constexpr uint32 SIGN = 0x80808080, MAGNITUDE = 0x1c1c1c1c;
    uint32 even = (codes << 4 & SIGN) | (codes << 2 & MAGNITUDE), odd = (codes & SIGN) | (codes >> 2 & MAGNITUDE);
    first = __byte_perm(even, odd, 0x5140), second = __byte_perm(even, odd, 0x7362);
}

// A warp copies one half of each block into the ring, up to AHEAD blocks before it delivers them. FP8 rows arrive at the barrier
// themselves. FP4 rows are copied to the first half of their place, and delivered by the warp, which expands them there.
struct ExpandingProducer {
    static constexpr int AHEAD = RING - 1;

    BlockCursor upcoming;
    int half;
    PipelineState<RING> oldest;  // of the blocks that are copied and not delivered
    int ahead = 0;               // how many these are
    uint32 packed = 0;           // whether they have FP4 values, the oldest in bit 0
    int index = 0;               // of this lane's row in the block to copy next

    __device__ ExpandingProducer(const SparseProblem& problem, int h) : upcoming(problem), half(h) {}

    __device__ void copy() {
        const Segment& list = upcoming.problem.segments[upcoming.second];
        if (upcoming.second) copy_from<EXTRA_LAYOUT>(list);
        else copy_from<LAYOUT>(list);
        copies_commit();
        ++ahead;
    }

    template <class Layout> __device__ void copy_from(const Segment& list) {
        uint64 row = reinterpret_cast<uint64>(token_in<Layout>(list, index).row);
        if (upcoming.tile_blocks > 1) upcoming.next_block(), index = upcoming.fetch_index(half);
        else upcoming.tile_blocks = 0;
        int slot = oldest.slot + ahead;
        bool next_round = slot >= RING;
        if (next_round) slot -= RING;
        barrier_wait(RAW_EMPTY + 8 * (2 * slot + half), oldest.phase ^ !next_round);
        copy_rows<Layout::quantized_bytes>(slot, half, upcoming.lane, row);
        if (Layout::e2m1_values) packed |= 1u << ahead;
        else copies_arrive(RAW_FULL + 8 * slot);
    }

    __device__ void deliver() {
        if (packed & 1) {
            if (ahead == AHEAD) copies_wait<AHEAD - 1>();
            else copies_wait<0>();
            expand(RAW_AT + (2 * oldest.slot + half) * (HALF * RAW_BYTES));
            barrier_arrive(RAW_FULL + 8 * oldest.slot);
        }
        packed >>= 1;
        oldest.advance(), --ahead;
    }

    // Eight rows at a time, of which each lane expands what it has copied itself. Its values overwrite what others copied.
    __device__ void expand(uint32 rows) {
        int first = upcoming.lane / 4, part = upcoming.lane % 4;
        uint32 from = rows + raw_offset(first, part), to = rows + raw_offset(first, 2 * part), end = from + HALF * RAW_BYTES;
#pragma unroll 1
        for (; from < end; from += 8 * RAW_BYTES, to += 8 * RAW_BYTES) {
            uint4 codes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) codes[j] = lds128(slice_of(from, j, first));
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint4 low, high;
                e2m1_to_small_e4m3(codes[j].x, low.x, low.y), e2m1_to_small_e4m3(codes[j].y, low.z, low.w);
                e2m1_to_small_e4m3(codes[j].z, high.x, high.y), e2m1_to_small_e4m3(codes[j].w, high.z, high.w);
                sts128(to + 128 * j, low), sts128((to ^ 16) + 128 * j, high);
            }
        }
    }

    __device__ void run() {
        int tile_blocks = upcoming.tile_blocks;  // of the tile whose blocks are copied; 0 after the last one
        if (tile_blocks) index = upcoming.fetch_index(half);
        for (;;) {
            // The next tile is scheduled once the tile before this one is scored, whose blocks must have been delivered for that.
            if (tile_blocks && !upcoming.more() && ahead <= tile_blocks) {
                upcoming.tile_blocks = 1, upcoming.next_block();
                tile_blocks = upcoming.tile_blocks;
                if (tile_blocks) index = upcoming.fetch_index(half);
            }
            if (upcoming.more() && ahead < AHEAD) copy();
            else if (ahead) deliver();
            else break;
        }
    }
};
