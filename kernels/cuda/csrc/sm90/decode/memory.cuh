// What the roles of sm90/decode/decode.cu share: who has which registers, and what lies where in shared memory.
#pragma once
#include "sm90/decode/rows.cuh"
#include "sm90/cluster.cuh"
#include "sm90/wgmma.cuh"
#include "common/pdl.cuh"

#ifndef PARTS
#define PARTS 1
#endif
constexpr bool ONE_TILE = PARTS > 1;  // is all that a thread block of a cluster has to do

constexpr int RING = 3;     // blocks of raw rows
constexpr int P_SLOTS = 2;
constexpr int Q_TILE_BYTES = HEADS * 128;  // 64 values of each head; of P as many tokens
constexpr int SCHEDULED_TILES = 4, SCHEDULED_TILE_BYTES = 80;  // see ScheduledTile
constexpr int ROW_PRODUCERS = 2;  // warps, one for each half of a block

constexpr int THREADS = 512;
constexpr int QK_REGISTERS = 120, PV_REGISTERS = 176, PRODUCER_REGISTERS = 40;

constexpr float NO_MAX = -1e30f;
constexpr float LAZY = 8;  // the running maximum is raised when a weight exceeds 2 to this

// Barriers. A warp arrives by one lane, after all its lanes (with -DEVERY_LANE_ARRIVES by each of them: 32 for each 1 of a warp).
//
//     barrier                arrivals of a phase                  waits                  guards
//     RAW_FULL[slot]         65: 64 lanes of the row producers,   QK-softmax, both PV    raw rows, RoPE, FACTOR and BIAS
//                            when their copies have ended; the                           of a block
//                            scale warp
//     RAW_EMPTY[slot][half]  10: warps of both PV, and the two    row producer `half`,   the same of half a block, until
//                            of QK-softmax that score the half    the scale warp         it is in registers
//     P_FULL[slot]           4: warps of QK-softmax               both PV                P, ALPHA and RAISED of a block
//     P_EMPTY[slot]          8: warps of both PV, when their      QK-softmax             the same; of a tile's last block
//                            products have ended; of a tile's                            also SHARE and ScheduledTile
//                            last block, when results are stored
//     SCHEDULED_FULL[t % 4]  1: lane 0 of the scheduler           all roles              ScheduledTile of tile t
//     SUMS_FULL[t % 2]       4: warps of QK-softmax               scheduler              SUMS and TOP of tile t
//     SHARE_FULL[t % 2]      1: scheduler                         both PV                SHARE of tile t; WEIGHT and KEPT
//     LOG_SUMS_FULL          1: thread 0 when it is made, and     scheduler              LOG_SUMS of all parts
//                            bytes that all parts' schedulers
//                            store
//     PARTS_FULL             1: thread 0 when it is made, and     both PV                lines from the other parts
//                            bytes of the others' lines
//     named 1                128: QK-softmax                      those that arrive      Q; HIGHEST, TOP and ALPHA
//     cluster                all threads of the cluster           schedulers             that all parts have their barriers
//
// LOG_SUMS_FULL, PARTS_FULL and the cluster's are used only where PARTS > 1, for one phase each. What no barrier frees:
//     SUMS, TOP      of tile t + 2 are written when it is scheduled: behind the scheduler's epilogue of tile t
//     SHARE          of tile t + 2 is written behind SUMS_FULL of that tile. The weights of its last block waited for P_EMPTY of
//                    tile t's last block or a later one, as each tile has at least one block and P_SLOTS is 2
//     ScheduledTile  see there
//     PARTS_AT in Q  lines come behind LOG_SUMS_FULL at the sender, for which this part has scored its last block
// Shared memory, one behind the other: not every NVRTC has offsetof. Without static shared memory the dynamic part starts at
// 1024; the kernel traps otherwise.
constexpr uint32 Q_AT = 1024;
constexpr uint32 P_AT = Q_AT + (SLICES + 1) * Q_TILE_BYTES;  // the last tile of Q is RoPE
constexpr uint32 ROPE_AT = P_AT + P_SLOTS * Q_TILE_BYTES;    // of raw rows, half a block after another
constexpr uint32 RAW_AT = ROPE_AT + 2 * RING * HALF * 128;
constexpr uint32 FACTOR_AT = RAW_AT + 2 * RING * HALF * RAW_BYTES;     // scales in float16
constexpr uint32 BIAS_AT = FACTOR_AT + 2 * RING * SLICES * HALF * 2;   // of each token: 0, or -inf if absent
constexpr uint32 TOP_AT = BIAS_AT + 2 * RING * HALF * 4;   // of each head: the running maximum, base 2; of two tiles
constexpr uint32 SUMS_AT = TOP_AT + 2 * HEADS * 4;         // of each of the QK-softmax warps and each head; of two tiles
constexpr uint32 SHARE_AT = SUMS_AT + 2 * 4 * HEADS * 4;   // what makes a tile's sums results, by head; of two tiles
constexpr uint32 HIGHEST_AT = SHARE_AT + 2 * HEADS * 4;    // of each of the QK-softmax warps and each head
constexpr uint32 ALPHA_AT = HIGHEST_AT + 4 * HEADS * 4;    // by how much a block lowers the sums before it
constexpr uint32 SCHEDULE_AT = ALPHA_AT + P_SLOTS * HEADS * 4;  // see ScheduledTile
constexpr uint32 RAISED_AT = SCHEDULE_AT + SCHEDULED_TILES * SCHEDULED_TILE_BYTES;        // whether a block does
constexpr uint32 RAW_FULL = (RAISED_AT + 4 * P_SLOTS + 7) / 8 * 8;
constexpr uint32 RAW_EMPTY = RAW_FULL + 8 * RING;          // of each half
constexpr uint32 P_FULL = RAW_EMPTY + 16 * RING;
constexpr uint32 P_EMPTY = P_FULL + 8 * P_SLOTS;
constexpr uint32 SCHEDULED_FULL = P_EMPTY + 8 * P_SLOTS;
constexpr uint32 SUMS_FULL = SCHEDULED_FULL + 8 * SCHEDULED_TILES;
constexpr uint32 SHARE_FULL = SUMS_FULL + 16;
// Where a cluster has a tile: what its thread blocks tell one another.
constexpr uint32 LOG_SUMS_FULL = SHARE_FULL + 16;
constexpr uint32 PARTS_FULL = LOG_SUMS_FULL + 8;
constexpr uint32 WEIGHT_AT = PARTS_FULL + 8;               // of this part in the whole, by head
constexpr uint32 KEPT_AT = WEIGHT_AT + HEADS * 4;          // what the sink leaves of the whole, by head
constexpr uint32 LOG_SUMS_AT = KEPT_AT + HEADS * 4;        // of all parts, by head
constexpr uint32 PARTS_END = LOG_SUMS_AT + PARTS * HEADS * 4;
constexpr int LINES = HEADS / 4;                           // of a PV lane: 8 neighbouring values of a head
constexpr int PART_LINES = (LINES + PARTS - 1) / PARTS;    // that a thread block puts together; the last ones may have fewer
constexpr int LINE_BYTES = 256 * 16;                       // of all PV lanes, as float16
constexpr int PART_BYTES = PART_LINES * LINE_BYTES;        // from each other thread block
constexpr bool PARTS_IN_Q = (PARTS - 1) * PART_BYTES <= (SLICES + 1) * Q_TILE_BYTES;  // which is not needed any more then
constexpr uint32 PARTS_AT = PARTS_IN_Q ? Q_AT : (PARTS_END + 127) / 128 * 128;
constexpr uint32 SHARED_END = PARTS == 1 ? LOG_SUMS_FULL : PARTS_IN_Q ? PARTS_END : PARTS_AT + (PARTS - 1) * PART_BYTES;
constexpr uint32 SHARED_BYTES = SHARED_END - 1024;
static_assert(SHARED_BYTES <= 232448, "more shared memory than there is");
static_assert(SCHEDULE_AT % 16 == 0, "scheduled tiles are read 16 bytes at a time");

// How many lines a thread block of a cluster puts together.
__device__ inline int lines_of(int rank) { return max(0, min(PART_LINES, LINES - rank * PART_LINES)); }

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
