// What the roles of sm90/few_heads/prefill.cu share: who has which registers, and what lies where in shared memory.
#pragma once
#include "sm90/gathered_rows.cuh"
#include "sm90/wgmma.cuh"
#include "common/pdl.cuh"

constexpr float MAX_PRECISE_SCORE = 1024.0f;  // base 2; float32 sums of products are off by 2^-10 there
constexpr int PRODUCERS = 4;  // warps
constexpr int THREADS = 384, PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 216;

// Tiles of 64 values: of keys 64 rows, of Q and of weights HEADS. A *piece* is two tiles of a block of keys; pieces lie in a
// ring, in the order of their values. Of 576 values the last tile, RoPE, has a ring of its own; it comes with the last piece.
constexpr int TILES = LAYOUT::head_dim / 64, PIECES = 4, PIECE_TILES = 2;
constexpr bool HAS_ROPE = TILES > PIECES * PIECE_TILES;
constexpr int ROPES = HAS_ROPE ? 3 : 0, MOST_SLOTS = 12;
constexpr uint32 PIECE_BYTES = PIECE_TILES * TILE_BYTES, HEAD_TILE_BYTES = HEADS * 128;
constexpr int VALUE_TILES = V_DIM / 64;

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 READY = 1024, FREE = READY + 8 * MOST_SLOTS;   // of each slot of the ring
constexpr uint32 ROPE_FREE = FREE + 8 * MOST_SLOTS;
constexpr uint32 Q_READY = ROPE_FREE + 24;
constexpr uint32 WEIGHTS_READY = Q_READY + 8, WEIGHTS_FREE = WEIGHTS_READY + 16;  // of every other block
constexpr uint32 TOTALS_READY = WEIGHTS_FREE + 16;              // of every other tile
constexpr uint32 PRESENT_AT = TOTALS_READY + 16, PRESENTS = 4;  // of so many blocks: a bit for each key
constexpr uint32 HIGHEST_AT = PRESENT_AT + 8 * PRESENTS;        // of every other block: [4 warps][HEADS]
constexpr uint32 REFERENCE_AT = HIGHEST_AT + 2 * 4 * HEADS * 4; // of every other block: [HEADS]
constexpr uint32 TOTALS_AT = REFERENCE_AT + 2 * HEADS * 4;      // of every other tile: [4 warps][HEADS]
constexpr uint32 WEIGHTS_AT = (TOTALS_AT + 2 * 4 * HEADS * 4 + 1023) / 1024 * 1024;  // of every other block
constexpr uint32 Q_AT = WEIGHTS_AT + 2 * HEAD_TILE_BYTES;
constexpr uint32 ROPE_AT = Q_AT + TILES * HEAD_TILE_BYTES;
constexpr uint32 RING_AT = ROPE_AT + ROPES * TILE_BYTES;
constexpr int SHARED_BYTES = 232448, ROOM = (SHARED_BYTES + 1024 - RING_AT) / PIECE_BYTES;
constexpr int SLOTS = ROOM < MOST_SLOTS ? ROOM : MOST_SLOTS;
static_assert(SLOTS >= 2 * PIECES && PRESENT_AT % 8 == 0 && HIGHEST_AT % 8 == 0);

// Places of a ring, one after another: which, and the parity of its present use.
template <int SIZE> struct Place {
    uint32 slot = 0, phase = 0;

    __device__ void advance() {
        if (++slot == SIZE) slot = 0, phase ^= 1;
    }
};
