// A warp's way through the indices of its thread block's share, for decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

__device__ uint4 absent_row[64];  // zeros: what a token that is not there reads

// Whether float16 has the scale whose float32 bits these are, at least to its own precision: powers of two may be
// subnormal there.
__device__ inline bool fits_f16(uint32 bits) {
    uint32 exponent = bits >> 23, least = bits & 0x7fffff ? F16_NORMAL : MIN_SCALE;
    return exponent >= least && exponent <= MAX_SCALE;
}

// A lane looks after the token of its number in a stage.
struct Walk {
    const Problem& problem;
    int lane;
    // The block to gather next: where this lane's indices are, how many of its list are left from there, how many
    // blocks of the list and of the tile.
    const int* cursor;
    int tile, left, list_blocks, tile_blocks;
    bool second, more;

    __device__ Walk(const Problem& p) : problem(p), lane(threadIdx.x % 32) { open_tile(Share(problem)); }

    __device__ void open_tile(Share share) {
        Work work;
        more = share.next(problem, work);
        if (!more) return;
        tile = work.tile, tile_blocks = work.last - work.first;
        int blocks0 = blocks_of(work.lengths0);
        second = work.first >= blocks0;
        open_list(work.first - (second ? blocks0 : 0));
    }

    // Point at the indices of a block of the list.
    __device__ void open_list(int block) {
        const List& list = problem.lists[second];
        TilePlace at(problem, tile);
        int position = block * BLOCK + lane, length = list.length(at.b, at.s);
        cursor = list.indices + at.b * list.indices_stride_b + at.s * list.indices_stride_s + position;
        left = length - position;
        list_blocks = blocks_of(length) - block;
    }

    // Volatile, or the compiler would load where the index is used.
    __device__ int fetch_index(int half) {
        int index = -1;
        if (left > STAGE * half) asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(index) : "l"(cursor + STAGE * half));
        return index;
    }

    __device__ void next_block() {
        if (--tile_blocks == 0) {
            Share share(problem);
            share.tile = tile + 1, share.first = 0;
            open_tile(share);
        } else if (--list_blocks == 0 && !second) {
            second = true;
            open_list(0);
        } else {
            cursor += BLOCK, left -= BLOCK;
        }
    }
};
