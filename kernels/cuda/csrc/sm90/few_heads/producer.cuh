// The producers of sm90/few_heads/prefill.cu.
#pragma once
#include "sm90/gathered_rows.cuh"
#include "sm90/few_heads/memory.cuh"

// Rows of zeros, which are copied for absent keys. CTAs use different rows, because copies of one row by all CTAs would
// serialise in L2.
constexpr int ABSENT_ROWS = 256;
__device__ uint4 absent_rows[ABSENT_ROWS][ROW_BYTES / 16];

// A warp copies four rows of every slot, and a quarter of Q. Addresses must be uniform for the compiler: otherwise a
// copy becomes a loop over lanes, of 67 clocks an iteration.
struct Producer {
    static constexpr int ROWS = SLOT_ROWS / PRODUCERS;

    const SparseProblem& problem;
    const TensorMap& q_map;
    int warp, lane;

    __device__ Producer(const SparseProblem& p, const TensorMap& q)
        : problem(p), q_map(q), warp(uniform(threadIdx.x / 32 % PRODUCERS)), lane(threadIdx.x % 32) {}

    // The index of this lane's row in a block, or -1 after the end. Each four of lanes 0 to 15 have the rows of one
    // slot.
    __device__ int listed_row(const BlockWalk& walk) const {
        const Segment& list = problem.segments[0];
        const int* indices = list.indices + walk.tile / problem.groups * list.indices_stride_b;
        int at = walk.block * BLOCK + lane / ROWS % BLOCK_SLOTS * SLOT_ROWS + warp * ROWS + lane % ROWS;
        return at < walk.length ? indices[at] : -1;
    }

    // Start TMA copies of this warp's piece of a tile's Q.
    __device__ void load_q(int tile) const {
        int token = tile / problem.groups, head = tile % problem.groups * HEADS;
        int first = Q_PIECE_TILES * warp, end = warp + 1 < Q_PIECES ? first + Q_PIECE_TILES : TILES;
        Barrier barrier = q_ready[warp];
        if (lane == 0) {
            barrier.arrive_expecting((end - first) * HEAD_TILE_BYTES);
            for (int i = first; i < end; ++i) tma_load(Q_AT + i * HEAD_TILE_BYTES, q_map, 64 * i, head, token, barrier);
        } else if (WARP_ARRIVALS > 1) {
            barrier.arrive();
        }
    }

    __device__ void run() const {
        const Segment& list = problem.segments[0];
        BlockWalk walk(problem);
        if (!walk.more()) return;
        int next = listed_row(walk);
        const uint8* zeros = reinterpret_cast<const uint8*>(absent_rows[blockIdx.x % ABSENT_ROWS]);
        PipelineState<SLOTS> place;
        for (uint32 tiles = 0; walk.more();) {
            bool first = walk.block == 0;
            uint32 row = uint32(next) < uint32(list.num_slots) ? next + 1 : 0;  // 0: absent
            uint32 present = __ballot_sync(~0u, row > 0);
            int tile = walk.tile;
            walk.advance();
            if (walk.more()) next = listed_row(walk);
#pragma unroll
            for (int slot = 0; slot < BLOCK_SLOTS; ++slot, place.advance(1)) {
                const uint8* from[ROWS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    uint32 at = uniform(lane == slot * ROWS + i ? row : 0);
                    from[i] = at ? list.pages + (at - 1) * list.page_stride : zeros;
                }
                Barrier barrier = rows_ready[place.slot];
                uint32 to = slot_at(place.slot) + warp * ROWS * PITCH;
                rows_free[place.slot].wait(place.phase ^ 1);
                if (lane == 0) sts8(PRESENT_AT + 4 * place.slot + warp, present >> slot * ROWS & 15);
                barrier.arrive_warp_expecting(ROWS * ROW_BYTES);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) warp_copy_bulk(to + i * PITCH, from[i], ROW_BYTES, barrier);
            }
            if (first) {
                q_free[warp].wait(tiles++ % 2 ^ 1);
                load_q(tile);
            }
        }
    }
};
