// What the roles of decode_sm90.cu share: who has which registers, and what lies where in shared memory.
#pragma once
#include "decode_sm90_rows.cuh"
#include "hopper.cuh"

constexpr int STAGES = 6;
constexpr int P_SLOTS = 2;
constexpr int LOADERS = 2;                        // warps

constexpr int THREADS = 512;
constexpr int SCORER_REGISTERS = 112, MIXER_REGISTERS = 176, FEEDER_REGISTERS = 48;

constexpr float NO_MAX = -1e30f;
constexpr uint32 LAZY = 0x5c00;  // float16 bits of 256: the running maximum is raised when a weight exceeds this

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 Q_AT = 1024;
constexpr uint32 P_AT = Q_AT + (SLICES + 1) * TILE_BYTES;  // the last tile of Q is RoPE
constexpr uint32 ROPE_AT = P_AT + P_SLOTS * TILE_BYTES;
constexpr uint32 RAW_AT = ROPE_AT + STAGES * STAGE * 128;
constexpr uint32 FACTOR_AT = RAW_AT + STAGES * STAGE * RAW_BYTES;
constexpr uint32 BIAS_AT = FACTOR_AT + STAGES * SLICES * STAGE * 2;  // of each token: 0, or what makes its score -inf
constexpr uint32 ALPHA_AT = BIAS_AT + STAGES * STAGE * 4;
constexpr uint32 SHARE_AT = ALPHA_AT + P_SLOTS * HEADS * 4;
constexpr uint32 RAISED_AT = SHARE_AT + 2 * HEADS * 4;
constexpr uint32 TOP_AT = RAISED_AT + P_SLOTS * 16;       // of each head: the running maximum, base 2
constexpr uint32 WARPS_AT = TOP_AT + HEADS * 4;           // of each of the scorer's warps and each head: maximum or sum
constexpr uint32 TOTAL_AT = WARPS_AT + 4 * HEADS * 4;     // of each of the scorer's threads: its part of 16 heads' sums
constexpr uint32 ABSENT_AT = TOTAL_AT + 128 * 16 * 4;     // of each stage: whether a token is absent
constexpr uint32 RAW_FULL = ABSENT_AT + 8 * STAGES;
constexpr uint32 RAW_EMPTY = RAW_FULL + 8 * STAGES;
constexpr uint32 Q_FULL = RAW_EMPTY + 8 * STAGES;
constexpr uint32 Q_EMPTY = Q_FULL + 8 * (SLICES + 1);
constexpr uint32 P_FULL = Q_EMPTY + 8 * (SLICES + 1);
constexpr uint32 P_EMPTY = P_FULL + 8 * P_SLOTS;
constexpr uint32 SHARE_FULL = P_EMPTY + 8 * P_SLOTS;
constexpr uint32 SHARED_BYTES = SHARE_FULL + 16 - 1024;
static_assert(SHARED_BYTES <= 232448, "more shared memory than there is");
static_assert(STAGES % 2 == 0, "a block's two stages must be neighbours");
