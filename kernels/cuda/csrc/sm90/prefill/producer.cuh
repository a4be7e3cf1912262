// The producer of sm90/prefill/prefill.cu.
#pragma once
#include "sm90/gathered_rows.cuh"
#include "sm90/prefill/trace.cuh"
#include "sm90/hopper.cuh"

// A warp copies a quarter of the rows of a block, piece by piece. A lane copies 16 bytes, so the warp copies 128 bytes
// of four rows at a time.
struct Producer {
    static constexpr int ROWS = BLOCK / PRODUCERS, STEPS = ROWS / 4;

    const SparseProblem& problem;
    const TensorMap& q_map;
    int warp, lane;
    uint32 to;  // destination of this lane's first 16 bytes in a tile

    __device__ Producer(const SparseProblem& p, const TensorMap& q)
        : problem(p), q_map(q), warp(threadIdx.x / 32 % PRODUCERS), lane(threadIdx.x % 32) {
        int row = lane / 8, chunk = lane % 8;
        to = (warp * ROWS + row) * 128 + ((chunk ^ row) << 4);
    }

    __device__ LaneRows heads(int tile) const {
        int first = tile % problem.groups * HEADS + lane;
        return {first < problem.heads ? first : -1, first + 32 < problem.heads ? first + 32 : -1};
    }

    using Sources = RowSources<STEPS>;
    __device__ Sources sources(const uint8* array, int64 stride, LaneRows rows) const {
        return Sources(array, stride, rows, warp * ROWS, lane);
    }

    // Start copies of this warp's rows of a tile at `target`; zeros for absent rows.
    __device__ void copy_tile(uint32 target, const Sources& from, int tile) const {
#pragma unroll
        for (int i = 0; i < STEPS; ++i)  // the swizzle of row + 4 differs by 4 chunks
            copy_async<16>(target + tile * TILE_BYTES + (to ^ i % 2 * 64) + i * 512, from.at[i] + tile * 128, from.here[i]);
    }
    __device__ void copy_piece(uint32 target, const Sources& from, int piece) const {
        for (int i = 0; i < PIECE_TILES; ++i) copy_tile(target, from, first_tile(piece) + i);
        if (HAS_ROPE && piece == PIECES - 1) copy_tile(target, from, TILES - 1);
        copies_commit();
    }

    // Start TMA copies of this warp's piece of a tile's Q; there is one piece for each warp. The copies signal the
    // barrier themselves. Q is evicted from L2 first, because only rows are read again.
    __device__ void load_q(int tile) const {
        int token = tile / problem.groups, head = tile % problem.groups * HEADS;
        int rope = HAS_ROPE && warp == PIECES - 1;
        if (lane == 0) {
            q_ready[warp].arrive_expecting((PIECE_TILES + rope) * TILE_BYTES);
            for (int i = 0; i < PIECE_TILES + rope; ++i) {
                int tile_of_q = i < PIECE_TILES ? first_tile(warp) + i : TILES - 1;
                tma_load(Q_AT + tile_of_q * TILE_BYTES, q_map, 64 * tile_of_q, head, token, q_ready[warp], EVICT_FIRST);
            }
        } else if (WARP_ARRIVALS > 1) {
            q_ready[warp].arrive();
        }
    }

    // Signal the pieces one by one, as their copies land.
    template <class Row> __device__ void signal(Row ready) const {
        signal_piece<3>(ready[0]), signal_piece<2>(ready[1]), signal_piece<1>(ready[2]), signal_piece<0>(ready[3]);
    }
    template <int PENDING> __device__ void signal_piece(Barrier barrier) const {
        copies_wait<PENDING>();
        fence_proxy_async();
        barrier.arrive_warp();
    }

    // Copy Q row by row, for queries without a tensor map.
    __device__ void copy_q(int tile, uint32 tiles) const {
        const bf16* q = problem.q + tile / problem.groups * problem.q_stride_b;
        Sources from = sources(reinterpret_cast<const uint8*>(q), 2 * problem.q_stride_h, heads(tile));
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            q_free[piece].wait(tiles % 2 ^ 1);
            copy_piece(Q_AT, from, piece);
        }
        signal(q_ready);
    }

    Trace trace;

    __device__ void run() {
        const Segment& list = problem.segments[0];
        BlockWalk walk(problem);
        if (!walk.more()) return;
        LaneRows next = listed_rows(walk, lane);
        uint32 tiles = 0;
        for (uint32 n = 0; walk.more(); ++n) {
            LaneRows rows = present_rows(list, next);
            Sources from = sources(list.pages, list.page_stride, rows);
            int tile = walk.tile;
            bool first = walk.block == 0;
            walk.advance();
            if (walk.more()) next = listed_rows(walk, lane);
            uint32 buffer = n % 2;
            if (first) trace.of_tile(tiles);
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                trace.note(SPACE_BEGIN);
                k_free[buffer][piece].wait(n / 2 % 2 ^ 1);
                trace.note(SPACE_FREE);
                copy_piece(K_AT + buffer * K_BYTES, from, piece);
                trace.note(COPIES_STARTED);
            }
            uint32 low = __ballot_sync(~0u, rows.low >= 0), high = __ballot_sync(~0u, rows.high >= 0);
            if (warp + lane == 0) sts32(PRESENT_AT + 8 * buffer, low), sts32(PRESENT_AT + 8 * buffer + 4, high);
            if (first && q_map.start) {
                trace.note(Q_SPACE_BEGIN);
                q_free[warp].wait(tiles % 2 ^ 1);
                trace.note(Q_SPACE_FREE);
                load_q(tile);
            }
            signal(k_ready[buffer]);
            trace.note(COPIES_LANDED);
            if (first && !q_map.start) copy_q(tile, tiles);
            tiles += first;
        }
        trace.store();
    }
};
