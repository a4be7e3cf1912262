// What the roles of decode_sm90.cu share: who has which registers, and what lies where in shared memory.
#pragma once
#include "decode_sm90_rows.cuh"
#include "hopper.cuh"

constexpr int BUFFERS = 2;                  // of K, a block each
constexpr int PARTS = 4;                    // of a buffer, two slices and a barrier each; the last has RoPE
constexpr int P_SLOTS = ROPE_IN_V ? 2 : 1;  // what there is room for

constexpr int THREADS = 512;
constexpr int SCORER_REGISTERS = ROPE_IN_V ? 72 : 80, MIXER_REGISTERS = 160, FEEDER_REGISTERS = ROPE_IN_V ? 120 : 112;
// What some give others take: of more than the launch gave (128 a thread) the takers would wait for ever.
static_assert(SCORER_REGISTERS + 2 * MIXER_REGISTERS + FEEDER_REGISTERS <= 65536 / 128);

constexpr float NO_MAX = -1e30f;
constexpr float LAZY = 8;  // a row's maximum is raised only where a weight would exceed 2 to this

// Tiles of a buffer: the 512 values that are V, as float16, then RoPE, as bfloat16.
constexpr int V_TILES = V_DIM / 64, K_ROPE = V_TILES;
constexpr uint32 K_BYTES = (V_TILES + 1) * TILE_BYTES;

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 Q_AT = 1024;
constexpr uint32 K_AT = Q_AT + (SLICES + 1) * TILE_BYTES;  // the last tile of Q is RoPE
constexpr uint32 P_AT = K_AT + BUFFERS * K_BYTES;
constexpr uint32 BIAS_AT = P_AT + P_SLOTS * TILE_BYTES;  // of each token: 0, or an infinity where it is absent
constexpr uint32 ABSENT_AT = BIAS_AT + BUFFERS * BLOCK * 4;  // of each of the feeder's warps: whether a token is absent
constexpr uint32 ALPHA_AT = ABSENT_AT + BUFFERS * 16;  // what a block's new maxima make of the sums before, by head
constexpr uint32 FACTORS_AT = ALPHA_AT + P_SLOTS * HEADS * 4;  // what makes a tile's sums results, by head; of two tiles
constexpr uint32 RAISED_AT = FACTORS_AT + 2 * HEADS * 4;  // of each of the scorer's warps: whether a maximum is new
constexpr uint32 K_FULL = RAISED_AT + P_SLOTS * 16;  // barriers, of each part
constexpr uint32 K_EMPTY = K_FULL + 8 * BUFFERS * PARTS;
constexpr uint32 P_FULL = K_EMPTY + 8 * BUFFERS;
constexpr uint32 P_EMPTY = P_FULL + 8 * P_SLOTS;
constexpr uint32 FACTORS_FULL = P_EMPTY + 8 * P_SLOTS;
constexpr uint32 LISTS_AT = FACTORS_FULL + 16;  // of each of the feeder's warps: where its tile's indices are
constexpr uint32 WORK_AT = LISTS_AT + 4 * 32;  // this thread block's share
constexpr uint32 ZERO_AT = WORK_AT + 16;  // 0, which the compiler does not know
constexpr uint32 SHARED_BYTES = ZERO_AT + 16 - 1024;
static_assert(SHARED_BYTES <= 232448, "more shared memory than there is");

// Which block of a thread block's share is worked on: where its K and P lie, and the parities of their rounds.
struct Turn {
    uint32 n = 0;
    __device__ uint32 k() const { return n % BUFFERS; }
    __device__ uint32 k_round() const { return n / BUFFERS & 1; }
    __device__ uint32 p() const { return n % P_SLOTS; }
    __device__ uint32 p_round() const { return n / P_SLOTS & 1; }
};

// This thread block's share is found once: it takes divisions.
__device__ inline void keep_share(const Share& share) {
    sts128(WORK_AT, {uint32(share.tile), uint32(share.first), uint32(share.end_tile), uint32(share.end_block)});
}
__device__ inline Share whole_share() {
    uint4 x = lds128(WORK_AT);
    return Share(x.x, x.y, x.z, x.w);
}
// What is left of it once a tile is done.
__device__ inline Share share_after(int tile) {
    uint4 x = lds128(WORK_AT);
    return Share(tile + 1, 0, x.z, x.w);
}
