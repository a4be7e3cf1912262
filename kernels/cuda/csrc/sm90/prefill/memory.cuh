// What the roles of sm90/prefill/prefill.cu share: who has which registers, and what lies where in shared memory.
#pragma once
#include "common/sparse/work.cuh"
#include "sm90/wgmma.cuh"
#include "common/pdl.cuh"

constexpr float MAX_PRECISE_SCORE = 1024.0f;  // base 2; float32 sums of products are off by 2^-10 there
constexpr int PRODUCERS = 4;  // warps
constexpr int THREADS = 256 + 32 * PRODUCERS, PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 216;

// Tiles of 64 values, of Q and of a block of keys. A *piece* is two of them, which is copied and told as a whole, and free when
// the consumer that has these values of the result has used them. The order is that of their use, and they come in it:
//
//     0  values 0..127 (consumer 0)      1  values 256..383 (consumer 1)
//     2  values 128..255 (consumer 0)    3  values 384..511 (consumer 1)
//
// Of 576 values the last tile, RoPE, comes with the last piece.
constexpr int TILES = LAYOUT::head_dim / 64, PIECES = 4, PIECE_TILES = 2;
constexpr bool HAS_ROPE = TILES > PIECES * PIECE_TILES;
constexpr int first_tile(int piece) { return piece % 2 * 4 + piece / 2 * 2; }

// Barriers. A warp arrives by one lane, after all its lanes (with -DEVERY_LANE_ARRIVES by each of them: 32 times the count).
//
//     barrier               arrivals of a phase                  waits                              guards
//     READY[buffer][piece]  4: producer warps, when their rows   the consumer that scores the       rows of a piece; PRESENT, written
//                           of the piece are there               block: all pieces; the other one:  before the first
//                                                                its two (CONSUMER, CONSUMER + 2)
//     FREE[buffer][piece]   4: warps of the consumer that has    producer warps                     rows of a piece until their products
//                           the piece's values, after its PV                                        have ended; PRESENT
//     Q_READY[piece]        with a map 1: producer warp `piece`, both consumers, before each block  Q's tiles of a piece
//                           and the bytes of its boxes; else     that they score
//                           4: producer warps
//     Q_FREE[piece]         8: warps of both consumers, after    the warp that loads the piece;     Q's tiles until their products have
//                           their last block of a tile is        without a map all producer warps   ended
//                           scored; at once if they score none
//     WEIGHTS_READY[c]      4: warps of consumer c               the other consumer                 WEIGHTS and REFERENCE[c] of c's block
//     TOTALS_READY[t % 2][c]  4: warps of consumer c             the other consumer                 TOTALS of tile t
//     named 2, 3            128: consumer 0; consumer 1          those that arrive                  WEIGHTS: before a block's are stored,
//                                                                                                   all have ended products with the last
//
// The consumer that scores a block does not arrive at FREE of the other's two pieces: these are freed behind WEIGHTS_READY, at
// which it arrives when it has scored them. WEIGHTS has no barrier that frees it: consumers score blocks in turn, and add up
// the other's block before they store weights of their own. Neither consumer is more than a tile ahead: it waits for the
// other's TOTALS_READY of a tile before it begins the next, so no phase of Q_FREE has two arrivals of a warp.
// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 READY = 1024, FREE = READY + 16 * PIECES;    // of each piece: [2 buffers][PIECES]
constexpr uint32 Q_READY = FREE + 16 * PIECES;                // of each piece
constexpr uint32 Q_FREE = Q_READY + 8 * PIECES;
constexpr uint32 WEIGHTS_READY = Q_FREE + 8 * PIECES;         // of each consumer
constexpr uint32 TOTALS_READY = WEIGHTS_READY + 16;           // of two tiles and each consumer
constexpr uint32 PRESENT_AT = TOTALS_READY + 32;              // of each buffer: a bit for each key
constexpr uint32 REFERENCE_AT = PRESENT_AT + 16;              // of each consumer's weights, [HEADS]
constexpr uint32 TOTALS_AT = REFERENCE_AT + 2 * HEADS * 4;    // of two tiles and each consumer: [HEADS] of (sum, maximum)
constexpr uint32 Q_AT = 4096;
constexpr uint32 K_AT = Q_AT + TILES * TILE_BYTES, K_BYTES = TILES * TILE_BYTES;  // [2 buffers][TILES]
constexpr uint32 WEIGHTS_AT = K_AT + 2 * K_BYTES;             // of one block at a time
constexpr uint32 SHARED_END = WEIGHTS_AT + TILE_BYTES;
static_assert(PRESENT_AT % 16 == 0 && TOTALS_AT + 2 * 2 * HEADS * 8 <= Q_AT && SHARED_END - 1024 <= 232448);
