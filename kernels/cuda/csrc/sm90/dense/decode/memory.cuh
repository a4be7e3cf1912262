// Constants that all roles of sm90/dense/decode/decode.cu use: sizes, barriers and the layout of shared memory.
#pragma once
#define ALIGNED 1
#include "sm90/hopper.cuh"
#include "common/latent.cuh"
#include "common/device.cuh"

constexpr int HEADS = 64, KEYS = 64, THREADS = 384, PRODUCERS = 128;
constexpr int TILES = LATENT_DIM / 64, ROPE_TILE = TILES - 1;
constexpr int PRODUCER_REGISTERS = 64, CONSUMER_REGISTERS = 216;
constexpr int PIECES = 5;

// Barriers. One lane arrives for its warp, after all lanes (with -DEVERY_LANE_ARRIVES every lane: 32 times the count).
//
//     barrier                 arrivals of a phase                     waits                      guards
//     k_ready[buffer][piece]  128: row by row: each producer thread,  the consumer that scores   rows of a piece; with piece 0 PRESENT
//                             when its copies have landed; by boxes:  the block: all pieces;
//                             lane 0 of warp 0 for all threads, and   the other one: its two (1
//                             the bytes of the boxes                  + consumer, 3 + consumer)
//     k_free[buffer][piece]   4: piece 0: warps of the consumer that  producer warp 0            rows of a piece until their products
//                             scores the block; others: of the one                               have ended; with piece 0 PRESENT
//                             with the piece's values, after its PV
//     weights_ready[c]        4: warps of consumer c                  the other consumer         WEIGHTS and REFERENCE[c] of c's block
//     totals_ready[c]         4: warps of consumer c; once a token    the other consumer         TOTALS[c]; Q and WEIGHTS, which the
//                                                                                                next token overwrites
//     q_ready                 8: warps of both consumers; once a      both consumers             Q, of which each copies half; TOTALS,
//                             token                                                              which were read before
//     named 2, 3              128: consumer 0; consumer 1             the same consumer          WEIGHTS: its products with the last
//                                                                                                weights end before new ones are stored
//     named 4                 128: producers, row by row              producers                  warps 1 to 3 after warp 0's k_free
//
// The consumer that scores a block arrives at weights_ready when it has scored all pieces. It does not arrive at k_free of
// the other consumer's two pieces: the other consumer frees these after it has waited at weights_ready. No barrier frees
// WEIGHTS: consumers score blocks alternately, and a consumer adds the other's block before it stores its own weights.
//
// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 BARRIERS_AT = 1024;
constexpr Barriers<2, PIECES> k_ready{BARRIERS_AT}, k_free{k_ready.end()};  // [buffer]
constexpr Barriers<2> weights_ready{k_free.end()};                          // [consumer]
constexpr Barriers<2> totals_ready{weights_ready.end()};                    // [consumer]
constexpr Barrier q_ready{totals_ready.end()};
constexpr uint32 PRESENT_AT = q_ready.address + 16;      // of each buffer: a byte for every four rows
constexpr uint32 REFERENCE_AT = PRESENT_AT + 32;         // of each consumer's weights, [64 heads]
constexpr uint32 TOTALS_AT = REFERENCE_AT + 2 * 64 * 4;  // of each consumer, [64 heads]
constexpr uint32 Q_AT = 4096;
constexpr uint32 K_AT = Q_AT + TILES * TILE_BYTES;  // [2 buffers][9 tiles]
constexpr uint32 K_BYTES = TILES * TILE_BYTES;
constexpr uint32 WEIGHTS_AT = K_AT + 2 * K_BYTES;   // of one block at a time
constexpr uint32 WORK_AT = TOTALS_AT + 2 * 64 * 4;  // DenseWork
[[maybe_unused]] constexpr uint32 SHARED_BYTES = WEIGHTS_AT + TILE_BYTES - BARRIERS_AT;
static_assert(PRESENT_AT % 16 == 0 && WORK_AT % 16 == 0 && WORK_AT + 16 <= Q_AT);

// Added to all of these addresses: in a cluster, a CTA's rank is in the upper bits of its shared addresses.
__device__ inline uint32 shared_window() {
#if PAIRED
    uint32 window = cluster_rank() << 24;
    asm volatile("" : "+r"(window));  // keeps the compiler from rematerialising it at every use
    return window;
#else
    return 0;
#endif
}

constexpr int first_tile(int piece) { return piece == 0 ? ROPE_TILE : piece % 2 ? piece - 1 : piece + 2; }
constexpr int tile_count(int piece) { return piece ? 2 : 1; }
