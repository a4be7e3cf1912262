// What the roles of sm90/decode/decode.cu share: who has which registers, and what lies where in shared memory.
#pragma once
#include "sm90/decode/rows.cuh"
#include "sm90/hopper.cuh"
#include "common/pdl.cuh"

constexpr int RING = 3;     // blocks of raw rows
constexpr int P_SLOTS = 2;
constexpr int SCHEDULED_TILES = 4, SCHEDULED_TILE_BYTES = 80;  // see ScheduledTile
constexpr int ROW_PRODUCERS = 2;  // warps, one for each half of a block

constexpr int THREADS = 512;
constexpr int QK_REGISTERS = 120, PV_REGISTERS = 176, PRODUCER_REGISTERS = 40;

constexpr float NO_MAX = -1e30f;
constexpr float LAZY = 8;  // the running maximum is raised when a weight exceeds 2 to this

// What lies where in shared memory. There is no such object: the kernel has 32-bit addresses (sm90/hopper.cuh), below.
struct DecodeShared {
    alignas(1024) uint8 q[SLICES + 1][TILE_BYTES];    // the last tile is RoPE
    uint8 p[P_SLOTS][TILE_BYTES];
    uint8 rope[RING][2][HALF * 128];                  // of raw rows, half a block after another
    uint8 raw[RING][2][HALF * RAW_BYTES];
    uint16 factor[RING][2][SLICES][HALF];             // scales in float16
    float bias[RING][2][HALF];                        // of each token: 0, or -inf if absent
    float top[2][HEADS];                              // the running maximum, base 2; of two tiles
    float sums[2][4][HEADS];                          // of each of the QK-softmax warps; of two tiles
    float share[2][HEADS];                            // what makes a tile's sums results; of two tiles
    float highest[4][HEADS];                          // of each of the QK-softmax warps
    float alpha[P_SLOTS][HEADS];                      // by how much a block lowers the sums before it
    alignas(16) uint8 scheduled[SCHEDULED_TILES][SCHEDULED_TILE_BYTES];  // see ScheduledTile
    uint32 raised[P_SLOTS];                           // whether a block raises the maximum
    uint64 raw_full[RING], raw_empty[RING][2];        // barriers
    uint64 p_full[P_SLOTS], p_empty[P_SLOTS];
    uint64 scheduled_full[SCHEDULED_TILES], sums_full[2], share_full[2];
};

// Addresses of the members. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
#define ADDRESS(member) uint32(1024 + __builtin_offsetof(DecodeShared, member))
constexpr uint32 Q_AT = ADDRESS(q), P_AT = ADDRESS(p), ROPE_AT = ADDRESS(rope), RAW_AT = ADDRESS(raw), FACTOR_AT = ADDRESS(factor);
constexpr uint32 BIAS_AT = ADDRESS(bias), TOP_AT = ADDRESS(top), SUMS_AT = ADDRESS(sums), SHARE_AT = ADDRESS(share);
constexpr uint32 HIGHEST_AT = ADDRESS(highest), ALPHA_AT = ADDRESS(alpha), RAISED_AT = ADDRESS(raised), SCHEDULE_AT = ADDRESS(scheduled);
constexpr uint32 RAW_FULL = ADDRESS(raw_full), RAW_EMPTY = ADDRESS(raw_empty), P_FULL = ADDRESS(p_full), P_EMPTY = ADDRESS(p_empty);
constexpr uint32 SCHEDULED_FULL = ADDRESS(scheduled_full), SUMS_FULL = ADDRESS(sums_full), SHARE_FULL = ADDRESS(share_full);
#undef ADDRESS
constexpr uint32 SHARED_BYTES = sizeof(DecodeShared);
static_assert(SHARED_BYTES <= 232448, "more shared memory than there is");

// The same number from all lanes, such that the compiler knows that it is.
__device__ inline int uniform(uint32 x) { return int(__reduce_max_sync(~0u, x)); }

// A tile of this thread block, or its part of one, as the tile scheduler puts it down for all. Tile t + 1 is put down once t - 1
// is scored. By then results of t - 3 are stored, for there are P_SLOTS blocks between QK-softmax and PV: SCHEDULED_TILES
// of them need no barrier that says which may be overwritten.
struct ScheduledTile {
    uint32 at;

    __device__ explicit ScheduledTile(const PipelineState<SCHEDULED_TILES>& ring) : at(SCHEDULE_AT + ring.slot * SCHEDULED_TILE_BYTES) {
        barrier_wait(SCHEDULED_FULL + 8 * ring.slot, ring.phase);
    }
    // Its tile, its number of blocks (0 behind the last tile), heads that there are, and flags.
    __device__ uint4 summary() const { return lds128(at); }
    static constexpr uint32 WHOLE = 1, FROM_START = 2, SECOND = 4;
    // A list's indices from the first block on (two words), the number of keys from there, and of blocks.
    __device__ uint4 list(int i) const { return lds128(at + 16 + 16 * i); }
    // Addresses of the first head: of q and of where its results go.
    __device__ uint4 query_and_result() const { return lds128(at + 48); }
    // Address of the first head's lse, and that head.
    __device__ uint4 lse_and_head() const { return lds128(at + 64); }
};

__device__ inline uint64 joined(uint32 low, uint32 high) { return uint64(high) << 32 | low; }
__device__ inline uint2 parted(const void* p) {
    uint64 x = reinterpret_cast<uint64>(p);
    return {uint32(x), uint32(x >> 32)};
}
