// The producer of sm90/prefill/prefill.cu.
#pragma once
#include "sm90/gathered_rows.cuh"
#include "sm90/prefill/memory.cuh"
#include "sm90/tma.cuh"

// A warp, which copies one piece of everything, or some of its rows: 16 bytes a lane, so four rows of 128 bytes at a time.
struct Producer {
    static constexpr int ROWS = 64 * PIECES / PRODUCERS;  // of 64, that are this warp's

    const SparseProblem& problem;
    const TensorMap& q_map;
    int piece, first_row, lane;
    uint32 to, from;  // where this lane's first 16 bytes go in a block of tiles, and where they come from in a row

    __device__ Producer(const SparseProblem& p, const TensorMap& q) : problem(p), q_map(q), piece(threadIdx.x / 32 % PIECES), lane(threadIdx.x % 32) {
        int row = lane / 8, chunk = lane % 8;
        first_row = threadIdx.x / 32 % PRODUCERS / PIECES * ROWS;
        to = first_tile(piece) * TILE_BYTES + (first_row + row) * 128 + ((chunk ^ row) << 4);
        from = first_tile(piece) * 128 + chunk * 16;
    }

    __device__ LaneRows heads(int tile) const {
        int first = tile % problem.groups * HEADS + lane;
        return {first < problem.heads ? first : -1, first + 32 < problem.heads ? first + 32 : -1};
    }

    // Start to copy this warp's part of 64 rows to the tiles at `block`; zeros where there is no row.
    __device__ void copy(uint32 block, const uint8* array, int64 stride, LaneRows rows) const {
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            int row = rows.at(first_row + 4 * i, lane);
            const uint8* source = array + (row < 0 ? 0 : row * stride) + from;
            uint32 target = block + (to ^ i % 2 * 64) + i * 512;  // every other row's chunks lie 4 chunks away
            copy_async<16>(target, source, row >= 0);
            copy_async<16>(target + TILE_BYTES, source + 128, row >= 0);
        }
        if (HAS_ROPE)
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i) {
                int first = 16 * piece + first_row / 4 + 4 * i, row = rows.at(first, lane), chunk = lane % 8;
                const uint8* source = array + (row < 0 ? 0 : row * stride) + (TILES - 1) * 128 + chunk * 16;
                uint32 target = block + (TILES - 1) * TILE_BYTES + (first + lane / 8) * 128;
                copy_async<16>(target + ((chunk ^ lane / 8 ^ i % 2 * 4) << 4), source, row >= 0);
            }
        copies_commit();
    }

    // Start to copy this warp's piece of a tile's Q by boxes, which say themselves when they are there.
    __device__ void load_q(int tile) const {
        int token = tile / problem.groups, head = tile % problem.groups * HEADS;
        int rope = HAS_ROPE && piece == PIECES - 1;
        if (lane == 0) {
            barrier_arrive_expecting(Q_READY + 8 * piece, (PIECE_TILES + rope) * TILE_BYTES);
            for (int i = 0; i < PIECE_TILES + rope; ++i) {
                int tile_of_q = i < PIECE_TILES ? first_tile(piece) + i : TILES - 1;
                tma_load(Q_AT + tile_of_q * TILE_BYTES, q_map, 64 * tile_of_q, head, token, Q_READY + 8 * piece);
            }
        } else if (WARP_ARRIVALS > 1) {
            barrier_arrive(Q_READY + 8 * piece);
        }
    }

    // Say that what was copied is there, but for the last PENDING copies.
    template <int PENDING> __device__ void tell(uint32 barrier) const {
        copies_wait<PENDING>();
        fence_proxy_async();
        warp_arrive(barrier + 8 * piece);
    }

    __device__ void run() const {
        const List& list = problem.lists[0];
        BlockWalk walk(problem);
        if (!walk.more()) return;
        LaneRows next = listed_rows(walk, lane);
        uint32 tiles = 0;
        for (uint32 n = 0; walk.more(); ++n) {
            LaneRows rows = rows_there(list, next);
            int tile = walk.tile;
            bool first = walk.block == 0;
            walk.advance();
            if (walk.more()) next = listed_rows(walk, lane);
            uint32 buffer = n % 2;
            barrier_wait(FREE + 8 * (PIECES * buffer + piece), n / 2 % 2 ^ 1);
            copy(K_AT + buffer * K_BYTES, list.pages, list.page_stride, rows);
            uint32 low = __ballot_sync(~0u, rows.low >= 0), high = __ballot_sync(~0u, rows.high >= 0);
            if (piece + first_row + lane == 0) sts32(PRESENT_AT + 8 * buffer, low), sts32(PRESENT_AT + 8 * buffer + 4, high);
            if (first) {
                barrier_wait(Q_FREE + 8 * piece, tiles++ % 2 ^ 1);
                if (q_map.start) {
                    load_q(tile);
                } else {
                    const bf16* q = problem.q + tile / problem.groups * problem.q_stride_b;
                    copy(Q_AT, reinterpret_cast<const uint8*>(q), 2 * problem.q_stride_h, heads(tile));
                    tell<1>(READY + 8 * PIECES * buffer);
                    tell<0>(Q_READY);
                    continue;
                }
            }
            tell<0>(READY + 8 * PIECES * buffer);
        }
    }
};
