// Constants that all roles of sm90/prefill/prefill.cu use: registers, barriers and the layout of shared memory.
#pragma once
#include "common/sparse/work.cuh"
#include "sm90/hopper.cuh"
#include "common/device.cuh"

constexpr float MAX_PRECISE_SCORE = 1024.0f;  // base 2; beyond it, float32 sums of products have an error of more than 2^-10
constexpr int PRODUCERS = 4;  // warps
constexpr int THREADS = 384, PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 216;
static_assert(THREADS == 256 + 32 * PRODUCERS, "and two warpgroups of consumers");

// Q and a block of keys are stored as tiles of 64 values. A *piece* is two tiles: it is copied and signalled as a
// whole, and freed after the PV products of the consumer that computes these values of the result. Pieces are loaded in
// the order of their use:
//
//     0  values 0..127 (consumer 0)      1  values 256..383 (consumer 1)
//     2  values 128..255 (consumer 0)    3  values 384..511 (consumer 1)
//
// With 576 values, the last tile (RoPE) belongs to the last piece.
constexpr int TILES = LAYOUT::head_dim / 64, PIECES = 4, PIECE_TILES = 2;
constexpr bool HAS_ROPE = TILES > PIECES* PIECE_TILES;
constexpr int first_tile(int piece) { return piece % 2 * 4 + piece / 2 * 2; }

// Barriers. One lane arrives for its warp, after all lanes (with -DEVERY_LANE_ARRIVES every lane: 32 times the count).
//
//     barrier                 arrivals of a phase                 waits                             guards
//     k_ready[buffer][piece]  4: producer warps, when their rows  the consumer that scores the      rows of a piece; PRESENT, written
//                             of the piece have landed            block: all pieces; the other      before the first
//                                                                 one: its two (CONSUMER, CONSUMER
//                                                                 + 2)
//     k_free[buffer][piece]   4: warps of the consumer that has   producer warps                    rows of a piece until their products
//                             the piece's values, after its PV                                      have ended; PRESENT
//     q_ready[piece]          with a map 1: producer warp         both consumers, before each       Q's tiles of a piece
//                             `piece`, and the bytes of its       block that they score
//                             boxes; else 4: producer warps
//     q_free[piece]           8: warps of both consumers, after   the warp that loads the piece;    Q's tiles until their products have
//                             their last block of a tile is       without a map all producer warps  ended
//                             scored; at once if they score none
//     weights_ready[c]        4: warps of consumer c              the other consumer                WEIGHTS and REFERENCE[c] of c's block
//     totals_ready[t % 2][c]  4: warps of consumer c              the other consumer                TOTALS of tile t
//     named 2, 3              128: consumer 0; consumer 1         the same consumer                 WEIGHTS: its products with the last
//                                                                                                   weights end before new ones are stored
//
// The consumer that scores a block does not arrive at k_free of the other's two pieces: these are freed after weights_ready, at
// which it arrives when it has scored them. WEIGHTS has no barrier that frees it: consumers score blocks alternately, and add up
// the other's block before they store weights of their own. Neither consumer is more than a tile ahead: it waits for the
// other's totals_ready of a tile before it begins the next, so no phase of q_free has two arrivals of a warp.

struct SharedMemory {
    uint64 k_ready[2][PIECES], k_free[2][PIECES];  // barriers [buffer][piece]
    uint64 q_ready[PIECES], q_free[PIECES];
    uint64 weights_ready[2];     // [consumer]
    uint64 totals_ready[2][2];   // [tile % 2][consumer]
    uint2 present[2];            // [buffer]: a bit for each key
    float reference[2][HEADS];   // [consumer]: reference of its weights
    float2 totals[2][2][HEADS];  // [tile % 2][consumer]: sum and maximum
    uint32 flagged;              // non-zero once a tile of this CTA was flagged
    alignas(1024) uint8 q[TILES][TILE_BYTES];
    uint8 k[2][TILES][TILE_BYTES];  // [buffer]
    uint8 weights[TILE_BYTES];      // of one block at a time
};
constexpr uint32 SHARED_BYTES = sizeof(SharedMemory);
static_assert(SHARED_BYTES <= MOST_SHARED_BYTES);
constexpr Barriers<2, PIECES> k_ready{SHARED_AT(k_ready)}, k_free{SHARED_AT(k_free)};
constexpr Barriers<PIECES> q_ready{SHARED_AT(q_ready)}, q_free{SHARED_AT(q_free)};
constexpr Barriers<2> weights_ready{SHARED_AT(weights_ready)};
constexpr Barriers<4> totals_ready{SHARED_AT(totals_ready)};
constexpr uint32 PRESENT_AT = SHARED_AT(present), REFERENCE_AT = SHARED_AT(reference), TOTALS_AT = SHARED_AT(totals),
                 FLAGGED = SHARED_AT(flagged);
constexpr uint32 Q_AT = SHARED_AT(q), K_AT = SHARED_AT(k), K_BYTES = TILES * TILE_BYTES, WEIGHTS_AT = SHARED_AT(weights);
