// What the roles of sm90/dense/decode/decode.cu share: sizes, and what lies where in shared memory.
#pragma once
#define ALIGNED 1
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"
#include "common/latent.cuh"
#include "common/pdl.cuh"

constexpr int HEADS = 64, KEYS = 64, THREADS = 384, PRODUCERS = 128;
constexpr int TILES = LATENT_DIM / 64, ROPE_TILE = TILES - 1;
constexpr int PRODUCER_REGISTERS = 64, CONSUMER_REGISTERS = 216;
constexpr int PIECES = 5;

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 BARRIERS_AT = 1024;
constexpr uint32 READY = BARRIERS_AT, FREE = READY + 16 * PIECES;  // of each piece: [2 buffers][PIECES]
constexpr uint32 WEIGHTS_READY = FREE + 16 * PIECES;               // of each consumer
constexpr uint32 TOTALS_READY = WEIGHTS_READY + 16;                // of each consumer
constexpr uint32 Q_READY = TOTALS_READY + 16;
constexpr uint32 PRESENT_AT = Q_READY + 16;                        // of each buffer: a byte for every four rows
constexpr uint32 REFERENCE_AT = PRESENT_AT + 32;                   // of each consumer's weights, [64 heads]
constexpr uint32 TOTALS_AT = REFERENCE_AT + 2 * 64 * 4;            // of each consumer, [64 heads]
constexpr uint32 Q_AT = 4096;
constexpr uint32 K_AT = Q_AT + TILES * TILE_BYTES;                 // [2 buffers][9 tiles]
constexpr uint32 K_BYTES = TILES * TILE_BYTES;
constexpr uint32 WEIGHTS_AT = K_AT + 2 * K_BYTES;                  // of one block at a time
static_assert(PRESENT_AT % 16 == 0 && TOTALS_AT + 2 * 64 * 4 <= Q_AT);

// To be added to these: in a cluster, a thread block's rank is in the upper bits of its addresses.
__device__ inline uint32 shared_window() {
#if PAIRED
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    rank <<= 24;
    asm volatile("" : "+r"(rank));  // or it is found again wherever it is used
    return rank;
#else
    return 0;
#endif
}

constexpr int first_tile(int piece) { return piece == 0 ? ROPE_TILE : piece % 2 ? piece - 1 : piece + 2; }
constexpr int tile_count(int piece) { return piece ? 2 : 1; }
