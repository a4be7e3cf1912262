// The producers of sm90/few_heads/prefill.cu.
#pragma once
#include "sm90/few_heads/memory.cuh"

// A warp, which copies a quarter of the rows of each block, piece after piece: 16 bytes a lane, so four rows of 128 bytes at a time.
struct Producer {
    static constexpr int ROWS = BLOCK / PRODUCERS, STEPS = ROWS / 4;

    const SparseProblem& problem;
    int warp, lane;
    uint32 to;  // where this lane's first 16 bytes go in a tile

    __device__ explicit Producer(const SparseProblem& p) : problem(p), warp(threadIdx.x / 32 % PRODUCERS), lane(threadIdx.x % 32) {
        int row = lane / 8, chunk = lane % 8;
        to = (warp * ROWS + row) * 128 + ((chunk ^ row) << 4);
    }

    // Start to copy this warp's rows of a tile; zeros where there is no row.
    __device__ void copy(uint32 target, const RowSources<STEPS>& sources, int tile) const {
#pragma unroll
        for (int i = 0; i < STEPS; ++i)  // every other four rows' chunks lie 4 chunks away
            copy_async<16>(target + (to ^ i % 2 * 64) + i * 512, sources.at[i] + tile * 128, sources.here[i]);
    }

    // Say that all but the last PENDING pieces are there.
    template <int PENDING> __device__ void tell(uint32 barrier) const {
        copies_wait<PENDING>();
        fence_proxy_async();
        warp_arrive(barrier);
    }

    __device__ void run() const {
        const List& list = problem.lists[0];
        BlockWalk walk(problem);
        if (!walk.more()) return;
        LaneRows next = listed_rows(walk, lane);
        Place<SLOTS> place;
        Place<ROPES> rope;
        for (uint32 n = 0; walk.more(); ++n) {
            LaneRows rows = rows_there(list, next);
            RowSources<STEPS> sources(list.pages, list.page_stride, rows, warp * ROWS, lane);
            walk.advance();
            if (walk.more()) next = listed_rows(walk, lane);
            uint32 slots[PIECES];
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                slots[piece] = place.slot;
                barrier_wait(FREE + 8 * place.slot, place.phase ^ 1);
#pragma unroll
                for (int i = 0; i < PIECE_TILES; ++i)
                    copy(RING_AT + place.slot * PIECE_BYTES + i * TILE_BYTES, sources, PIECE_TILES * piece + i);
                if (HAS_ROPE && piece == PIECES - 1) {
                    barrier_wait(ROPE_FREE + 8 * rope.slot, rope.phase ^ 1);
                    copy(ROPE_AT + rope.slot * TILE_BYTES, sources, TILES - 1);
                }
                copies_commit();
                place.advance();
            }
            uint32 low = __ballot_sync(~0u, rows.low >= 0), high = __ballot_sync(~0u, rows.high >= 0);
            if (warp + lane == 0) sts32(PRESENT_AT + 8 * (n % PRESENTS), low), sts32(PRESENT_AT + 8 * (n % PRESENTS) + 4, high);
            tell<3>(READY + 8 * slots[0]);
            tell<2>(READY + 8 * slots[1]);
            tell<1>(READY + 8 * slots[2]);
            tell<0>(READY + 8 * slots[3]);
            if (HAS_ROPE) rope.advance();
        }
    }
};
