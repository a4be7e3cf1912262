// Constants that all roles of sm90/prefill_fp8/prefill.cu use: registers, barriers and the layout of shared memory.
#pragma once
#include "common/sparse/work.cuh"
#include "sm90/hopper.cuh"
#include "common/device.cuh"

constexpr float MAX_PRECISE_SCORE = 1024.0f;  // base 2; float32 sums of products are off by 2^-10 there
constexpr int COPIERS = 2, CONVERTERS = 2, TRANSPOSERS = 4;  // warps
constexpr int THREADS = 512, PRODUCER_REGISTERS = 48, CONSUMER_REGISTERS = 208;
static_assert(THREADS == 256 + 32 * (COPIERS + CONVERTERS + TRANSPOSERS), "and two warpgroups of consumers");

// Q and a block of keys are stored as tiles of 64 rows of 128 values, swizzled as wgmma operands; such a tile is a
// *piece*. A piece of V^T has 128 rows of 64 bytes: row v has value v of all keys of the block (products.cuh). Consumer
// c has the pieces 2 c and 2 c + 1 of each block; its j-th piece is piece j % 2 of block j / 2. Weights have 64 rows of
// 64 bytes.
constexpr int PIECES = 4, K_SLOTS = 3, VALUE_SLOTS = 3, SCALE_SLOTS = 8;
constexpr uint32 OPERAND_BYTES = PIECES * TILE_BYTES, VALUES_BYTES = 128 * BLOCK, WEIGHT_BYTES = HEADS * BLOCK;

// Barriers. One lane arrives for its warp, after all lanes (with -DEVERY_LANE_ARRIVES every lane: 32 times the count).
// Waits are by parity: when a warp waits for a phase, the previous phase has completed and the next one cannot
// complete.
//
//     barrier                 arrivals of a phase               waits                            guards
//     landed[n % 3]           64: threads of the copiers, when  the consumer that scores the     K and SCALES of block n
//                             their copies have landed          block; transposers
//     k_free[n % 3]           4: that consumer, when its        copiers                          K of block n
//                             products have ended; 4:
//                             transposers, when they have read
//     values_ready[c][j % 3]  2: transposers of c               consumer c                       V^T of its piece j
//     values_free[c][j % 3]   4: consumer c, when its products  transposers of c                 the same
//                             have ended
//     weights_ready[c]        4: warps of consumer c            the other consumer               WEIGHTS[c] and REFERENCE[c]
//     q_ready[t % 2]          2: converters                     both consumers, before each      Q and Q_SCALE of tile t
//                                                               block that they score
//     q_free[t % 2]           8: warps of both consumers, when  converters, before they convert  the same; results of tile t, which
//                             their results have been stored    queries of tile t + 2            replace Q
//     totals_ready[t % 2][c]  4: warps of consumer c            the other consumer               TOTALS of tile t
//     named 2, 3              128: consumer 0; consumer 1       the same consumer                nothing: the end of a tile
//
// WEIGHTS and REFERENCE have no barrier that frees them: a consumer stores its weights of block n + 2 after it has
// received the weights of block n + 1, which the other consumer stores after its products with block n. SCALES of block
// n + 8 are copied after k_free of block n + 5, long after the softmax of block n. Neither consumer is more than a tile
// ahead: it waits for totals_ready of the other one before it begins the next tile, so no phase of q_free has two
// arrivals of a warp.

struct SharedMemory {
    uint64 landed[K_SLOTS], k_free[K_SLOTS];
    uint64 values_ready[2][VALUE_SLOTS], values_free[2][VALUE_SLOTS];  // [consumer]
    uint64 q_ready[2], q_free[2];                                      // [tile % 2]
    uint64 weights_ready[2];                                           // [consumer]
    uint64 totals_ready[2][2];                                         // [tile % 2][consumer]
    alignas(16) uint32 scales[SCALE_SLOTS][BLOCK];                     // [block % 8]; 0: no key
    float q_scale[2][HEADS];
    float reference[2][HEADS];   // [consumer]: reference of its weights
    float2 totals[2][2][HEADS];  // [tile % 2][consumer]: sum and maximum
    alignas(1024) uint8 q[2][OPERAND_BYTES];
    uint8 k[K_SLOTS][OPERAND_BYTES];
    uint8 values[2][VALUE_SLOTS][VALUES_BYTES];  // [consumer]
    uint8 weights[2][WEIGHT_BYTES];              // [consumer]
};
constexpr uint32 SHARED_BYTES = sizeof(SharedMemory);
static_assert(SHARED_BYTES <= MOST_SHARED_BYTES);
constexpr Barriers<K_SLOTS> landed{SHARED_AT(landed)}, k_free{SHARED_AT(k_free)};
constexpr Barriers<2, VALUE_SLOTS> values_ready{SHARED_AT(values_ready)}, values_free{SHARED_AT(values_free)};
constexpr Barriers<2> q_ready{SHARED_AT(q_ready)}, q_free{SHARED_AT(q_free)}, weights_ready{SHARED_AT(weights_ready)};
constexpr Barriers<4> totals_ready{SHARED_AT(totals_ready)};
constexpr uint32 SCALES_AT = SHARED_AT(scales), Q_SCALE_AT = SHARED_AT(q_scale), REFERENCE_AT = SHARED_AT(reference),
                 TOTALS_AT = SHARED_AT(totals);
constexpr uint32 Q_AT = SHARED_AT(q), K_AT = SHARED_AT(k), VALUES_AT = SHARED_AT(values), WEIGHTS_AT = SHARED_AT(weights);
