// The producers of sm90/few_heads/prefill.cu.
#pragma once
#include "sm90/few_heads/memory.cuh"

// A warp, which copies one piece of each block: 16 bytes a lane, so four rows of 128 bytes at a time. It says that a block is
// there when it has begun to copy the next one, so that there is always one under way.
struct Producer {
    const SparseProblem& problem;
    int piece, lane;
    uint32 to, from;  // where this lane's first 16 bytes go in a piece, and where they come from in a row

    __device__ explicit Producer(const SparseProblem& p) : problem(p), piece(threadIdx.x / 32 % PIECES), lane(threadIdx.x % 32) {
        int row = lane / 8, chunk = lane % 8;
        to = row * 128 + ((chunk ^ row) << 4);
        from = piece * (PIECE_TILES * 128) + chunk * 16;
    }

    // Start to copy a piece; zeros where there is no row.
    __device__ void copy(uint32 target, const List& list, LaneRows rows) const {
#pragma unroll
        for (int i = 0; i < BLOCK / 4; ++i) {
            int row = rows.at(4 * i, lane);
            const uint8* source = list.pages + (row < 0 ? 0 : row * list.page_stride) + from;
            uint32 at = target + (to ^ i % 2 * 64) + i * 512;  // every other four rows' chunks lie 4 chunks away
            copy_async<16>(at, source, row >= 0);
            copy_async<16>(at + TILE_BYTES, source + 128, row >= 0);
        }
    }
    __device__ void copy_rope(uint32 target, const List& list, LaneRows rows) const {
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            int first = 16 * piece + 4 * i, row = rows.at(first, lane), chunk = lane % 8;
            const uint8* source = list.pages + (row < 0 ? 0 : row * list.page_stride) + (TILES - 1) * 128 + chunk * 16;
            copy_async<16>(target + (first + lane / 8) * 128 + ((chunk ^ lane / 8 ^ i % 2 * 4) << 4), source, row >= 0);
        }
    }

    // Say that what was copied is there, but for the last PENDING blocks.
    template <int PENDING> __device__ void tell(uint32 slot, uint32 rope) const {
        copies_wait<PENDING>();
        fence_proxy_async();
        warp_arrive(READY + 8 * slot);
        if (HAS_ROPE) warp_arrive(ROPE_READY + 8 * rope);
    }

    __device__ void run() const {
        const List& list = problem.lists[0];
        BlockWalk walk(problem);
        if (!walk.more()) return;
        LaneRows next = listed_rows(walk, lane);
        Place<SLOTS> place(piece);
        Place<ROPES> rope;
        uint32 before = 0, rope_before = 0;
        for (uint32 n = 0; walk.more(); ++n) {
            LaneRows rows = rows_there(list, next);
            walk.advance();
            if (walk.more()) next = listed_rows(walk, lane);
            barrier_wait(FREE + 8 * place.slot, place.phase ^ 1);
            copy(RING_AT + place.slot * PIECE_BYTES, list, rows);
            if (HAS_ROPE) {
                barrier_wait(ROPE_FREE + 8 * rope.slot, rope.phase ^ 1);
                copy_rope(ROPE_AT + rope.slot * TILE_BYTES, list, rows);
            }
            copies_commit();
            uint32 low = __ballot_sync(~0u, rows.low >= 0), high = __ballot_sync(~0u, rows.high >= 0);
            if (piece + lane == 0) sts32(PRESENT_AT + 8 * (n % PRESENTS), low), sts32(PRESENT_AT + 8 * (n % PRESENTS) + 4, high);
            if (n) tell<1>(before, rope_before);
            before = place.slot, rope_before = rope.slot;
            place.advance(PIECES);
            if (HAS_ROPE) rope.advance();
        }
        tell<0>(before, rope_before);
    }
};
