// What the roles of sm90/few_heads/prefill.cu share: who has which registers, and what lies where in shared memory.
#pragma once
#include "common/sparse/work.cuh"
#include "sm90/bulk_copy.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"
#include "common/pdl.cuh"

constexpr float MAX_PRECISE_SCORE = 1024.0f;  // base 2; float32 sums of products are off by 2^-10 there
constexpr int PRODUCERS = 4;                  // warps
constexpr int THREADS = 512;
constexpr int SCORES_REGISTERS = 128, VALUES_REGISTERS = 176, PRODUCER_REGISTERS = 32;  // all 512 of four warpgroups

// Q and weights are tiles of HEADS rows of 64 values, or keys, as products want them. Rows of keys lie as they come, 16 in a
// *slot*, 16 bytes further apart than they are long, so that what one instruction reads of eight rows lies in different banks.
constexpr int TILES = LAYOUT::head_dim / 64, VALUE_TILES = V_DIM / 64;
constexpr int Q_PIECES = 4, Q_PIECE_TILES = VALUE_TILES / Q_PIECES;  // the last piece has RoPE's tile, too
constexpr int SLOT_ROWS = 16, BLOCK_SLOTS = BLOCK / SLOT_ROWS;
constexpr uint32 HEAD_TILE_BYTES = HEADS * 128, ROW_BYTES = LAYOUT::head_dim * 2, PITCH = ROW_BYTES + 16, SLOT_BYTES = SLOT_ROWS * PITCH;
constexpr int WEIGHT_SLOTS = 2, MOST_SLOTS = 12;

// Barriers. A warp arrives by one lane, after all its lanes (with -DEVERY_LANE_ARRIVES by each of them: 32 times the count).
//
//     barrier              arrivals of a phase                    waits                               guards
//     READY[slot]          4: producer warps, and the bytes of    warp w of the scores: slot w of a   rows of a slot; PRESENT
//                          four rows each                         block; both values: all four
//     FREE[slot]           8: warps of both values, when they     producer warps                      rows of a slot and PRESENT until they
//                          have it in registers; of a tile's                                          were read; results that are put in
//                          last block, when results are stored                                        order where they were
//     Q_READY[piece]       1: producer warp `piece`, and the      scores, in a tile's first block     Q's tiles of a piece
//                          bytes of its boxes
//     Q_FREE[piece]        4: warps of the scores, in a tile's    producer warp `piece`               Q's tiles until their products have
//                          last block                                                                 ended
//     WEIGHTS_READY[n % 2] 4: warps of the scores                 both values                         WEIGHTS, RAISED and LOWER of block n
//     WEIGHTS_FREE[n % 2]  8: warps of both values, when their    scores, before they write those of  the same; of a tile's last block also
//                          products with block n have ended; of   block n + 2                         SHARE and LOGITS
//                          a tile's last, when results are stored
//     RESULT_READY[t % 2]  4: warps of the scores                 both values                         SHARE and LOGITS of tile t
//     named 1              128: scores                            those that arrive                   HIGHEST, TOTALS, REFERENCE, LOWER
//     named 2, 3           128: values 0; values 1                those that arrive                   a vote: whether results are finite
//
// The scores do not arrive at FREE: values do so only behind WEIGHTS_READY of the block, at which the scores arrive when they have
// read its rows. RESULT_READY has no barrier that frees SHARE and LOGITS: those of tile t + 2 are written behind the weights of
// its blocks, and so behind WEIGHTS_FREE of tile t's last one, as a tile that comes here has at least one block.
// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 READY = 1024, FREE = READY + 8 * MOST_SLOTS;     // of each slot of rows
constexpr uint32 Q_READY = FREE + 8 * MOST_SLOTS, Q_FREE = Q_READY + 8 * Q_PIECES;  // of each piece
constexpr uint32 WEIGHTS_READY = Q_FREE + 8 * Q_PIECES, WEIGHTS_FREE = WEIGHTS_READY + 8 * WEIGHT_SLOTS;
constexpr uint32 RESULT_READY = WEIGHTS_FREE + 8 * WEIGHT_SLOTS;  // of every other tile: what makes its sums results
constexpr uint32 RAISED_AT = RESULT_READY + 16;                   // of each slot of weights: whether they lower the sums before
constexpr uint32 PRESENT_AT = RAISED_AT + 4 * WEIGHT_SLOTS;       // of each slot of rows: a bit for each, see Producer
constexpr uint32 REFERENCE_AT = (PRESENT_AT + 4 * MOST_SLOTS + 15) / 16 * 16;  // [HEADS]
constexpr uint32 LOWER_AT = REFERENCE_AT + HEADS * 4;             // of each slot of weights: by how much, [HEADS]
constexpr uint32 HIGHEST_AT = LOWER_AT + WEIGHT_SLOTS * HEADS * 4;  // [4 warps][HEADS]
constexpr uint32 TOTALS_AT = HIGHEST_AT + 4 * HEADS * 4;          // [4 warps][HEADS]
constexpr uint32 SHARE_AT = TOTALS_AT + 4 * HEADS * 4;            // of every other tile: what sums are multiplied by, [HEADS]
constexpr uint32 LOGITS_AT = SHARE_AT + 2 * HEADS * 4;            // of every other tile: [max_logits, lse][HEADS]
constexpr uint32 WEIGHTS_AT = (LOGITS_AT + 4 * HEADS * 4 + 1023) / 1024 * 1024;
constexpr uint32 Q_AT = WEIGHTS_AT + WEIGHT_SLOTS * HEAD_TILE_BYTES;
constexpr uint32 RING_AT = Q_AT + TILES * HEAD_TILE_BYTES;
constexpr int SHARED_BYTES = 232448, ROOM = (SHARED_BYTES + 1024 - RING_AT) / SLOT_BYTES;
constexpr int SLOTS = ROOM < MOST_SLOTS ? ROOM : MOST_SLOTS;
static_assert(SLOTS >= 2 * BLOCK_SLOTS, "a block is loaded while another is attended to");
static_assert(RING_AT % 16 == 0 && ROW_BYTES % 16 == 0);

// A place of a ring, and the parity of its present use.
template <int SIZE> struct Place {
    uint32 slot = 0, phase = 0;

    __device__ void advance(uint32 by = 1) {
        slot += by;
        if (slot >= SIZE) slot -= SIZE, phase ^= 1;
    }
};

__device__ inline uint32 slot_at(uint32 slot) { return RING_AT + slot * SLOT_BYTES; }

// The same number from all lanes, such that the compiler knows that it is.
__device__ inline int uniform(uint32 x) { return int(__reduce_max_sync(~0u, x)); }
