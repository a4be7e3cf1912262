// Constants that all roles of sm90/few_heads/prefill.cu use: registers, barriers and the layout of shared memory.
#pragma once
#include "common/sparse/work.cuh"
#include "sm90/hopper.cuh"
#include "common/device.cuh"

constexpr float MAX_PRECISE_SCORE = 1024.0f;  // base 2; beyond it, float32 sums of products have an error of more than 2^-10
constexpr int PRODUCERS = 4;                  // warps
constexpr int THREADS = 512;
constexpr int SCORES_REGISTERS = 128, VALUES_REGISTERS = 176, PRODUCER_REGISTERS = 32;  // all 512 of four warpgroups

// Q and weights are stored as tiles of HEADS rows of 64 values, or keys, swizzled as wgmma operands. Rows of keys are
// stored unswizzled, 16 in a *slot*. Their pitch is 16 bytes longer than a row, so that an instruction that reads eight
// rows has no bank conflicts.
constexpr int TILES = LAYOUT::head_dim / 64, VALUE_TILES = V_DIM / 64;
constexpr int Q_PIECES = 4, Q_PIECE_TILES = VALUE_TILES / Q_PIECES;  // the last piece also has RoPE's tile
constexpr int SLOT_ROWS = 16, BLOCK_SLOTS = BLOCK / SLOT_ROWS;
constexpr uint32 HEAD_TILE_BYTES = HEADS * 128, ROW_BYTES = LAYOUT::head_dim * 2, PITCH = ROW_BYTES + 16, SLOT_BYTES = SLOT_ROWS * PITCH;
constexpr int WEIGHT_SLOTS = 2, MOST_SLOTS = 12;

// Barriers. One lane arrives for its warp, after all lanes (with -DEVERY_LANE_ARRIVES every lane: 32 times the count).
//
//     barrier               arrivals of a phase                     waits                            guards
//     rows_ready[slot]      4: producer warps, and the bytes of     warp w of the scores: slot w of  rows of a slot; PRESENT
//                           four rows each                          a block; both values: all four
//     rows_free[slot]       8: warps of both values, when they      producer warps                   rows of a slot and PRESENT until they
//                           have it in registers; for a tile's                                       were read; results, transposed in
//                           last block, when results are stored                                      place of the rows
//     q_ready[piece]        1: producer warp `piece`, and the       scores, in a tile's first block  Q's tiles of a piece
//                           bytes of its boxes
//     q_free[piece]         4: warps of the scores, in a tile's     producer warp `piece`            Q's tiles until their products have
//                           last block                                                               ended
//     weights_ready[n % 2]  4: warps of the scores                  both values                      WEIGHTS, RAISED and LOWER of block n
//     weights_free[n % 2]   8: warps of both values, when their     scores, before they write those  the same; for a tile's last block
//                           products with block n have ended; for   of block n + 2                   also INV_SUM and LOGITS
//                           a tile's last, when results are stored
//     result_ready[t % 2]   4: warps of the scores                  both values                      INV_SUM and LOGITS of tile t
//     named 1               128: scores                             scores                           HIGHEST, TOTALS, REFERENCE, LOWER
//     named 2, 3            128: values 0; values 1                 the same warpgroup               a vote: whether results are finite
//
// The scores do not arrive at rows_free: the values arrive there only after weights_ready of the block, at which the
// scores arrive when they have read its rows. No barrier frees INV_SUM and LOGITS: they are written for tile t + 2
// after the weights of its blocks, and so after weights_free of the last block of tile t, because every processed tile
// has at least one block.

// The ring of slots takes the rest of shared memory.
struct SharedMemory {
    uint64 rows_ready[MOST_SLOTS], rows_free[MOST_SLOTS];  // barriers [slot of rows]
    uint64 q_ready[Q_PIECES], q_free[Q_PIECES];
    uint64 weights_ready[WEIGHT_SLOTS], weights_free[WEIGHT_SLOTS];
    uint64 result_ready[2];       // [tile % 2]
    uint32 flagged;               // non-zero once a tile of this CTA was flagged
    uint32 raised[WEIGHT_SLOTS];  // whether a block raised a reference
    uint32 present[MOST_SLOTS];   // [slot of rows]: a bit for each row, see Producer
    alignas(16) float reference[HEADS];
    float lower[WEIGHT_SLOTS][HEADS];           // factors that rescale earlier sums
    float highest[4][HEADS], totals[4][HEADS];  // [warp of the scores]
    float inv_sum[2][HEADS];                    // [tile % 2]: scales sums by 1/l, sink included
    float logits[2][2][HEADS];                  // [tile % 2][max_logits, lse]
    alignas(1024) uint8 weights[WEIGHT_SLOTS][HEAD_TILE_BYTES];
    uint8 q[TILES][HEAD_TILE_BYTES];
};
constexpr Barriers<MOST_SLOTS> rows_ready{SHARED_AT(rows_ready)}, rows_free{SHARED_AT(rows_free)};
constexpr Barriers<Q_PIECES> q_ready{SHARED_AT(q_ready)}, q_free{SHARED_AT(q_free)};
constexpr Barriers<WEIGHT_SLOTS> weights_ready{SHARED_AT(weights_ready)}, weights_free{SHARED_AT(weights_free)};
constexpr Barriers<2> result_ready{SHARED_AT(result_ready)};
constexpr uint32 RAISED_AT = SHARED_AT(raised), PRESENT_AT = SHARED_AT(present);
constexpr uint32 REFERENCE_AT = SHARED_AT(reference), LOWER_AT = SHARED_AT(lower), HIGHEST_AT = SHARED_AT(highest);
constexpr uint32 TOTALS_AT = SHARED_AT(totals), INV_SUM_AT = SHARED_AT(inv_sum), LOGITS_AT = SHARED_AT(logits),
                 FLAGGED = SHARED_AT(flagged);
constexpr uint32 WEIGHTS_AT = SHARED_AT(weights), Q_AT = SHARED_AT(q), RING_AT = Q_AT + sizeof(SharedMemory::q);
constexpr int SHARED_BYTES = MOST_SHARED_BYTES, FITTING_SLOTS = (SHARED_BYTES + 1024 - RING_AT) / SLOT_BYTES;
constexpr int SLOTS = FITTING_SLOTS < MOST_SLOTS ? FITTING_SLOTS : MOST_SLOTS;
static_assert(SLOTS >= 2 * BLOCK_SLOTS, "a block is loaded while another is processed");
static_assert(RING_AT % 16 == 0 && ROW_BYTES % 16 == 0);

__device__ inline uint32 slot_at(uint32 slot) { return RING_AT + slot * SLOT_BYTES; }
