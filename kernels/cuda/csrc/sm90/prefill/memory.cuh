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
