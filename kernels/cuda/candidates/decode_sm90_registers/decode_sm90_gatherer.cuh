// The gatherer and the scaler of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

__device__ uint4 absent_row[64];  // zeros: what a token that is not there reads

// Whether float16 has the scale whose float32 bits these are, at least to its own precision: powers of two may be
// subnormal there.
__device__ inline bool fits_f16(uint32 bits) {
    uint32 exponent = bits >> 23, least = bits & 0x7fffff ? F16_NORMAL : MIN_SCALE;
    return exponent >= least && exponent <= MAX_SCALE;
}

// A warp's way through the indices of its thread block's share. A lane looks after the token of its number in a stage.
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

    // Where the token of a slot is: its row, and its scales.
    __device__ Token token_at(int slot) {
        const List& list = problem.lists[second];
        if (uint32(slot) >= uint32(list.num_slots)) {
            uint8* zeros = reinterpret_cast<uint8*>(absent_row);
            return {zeros, zeros};
        }
        int page = list.block_shift >= 0 ? slot >> list.block_shift : int(uint32(slot) / uint32(list.block_size));
        int row = slot - page * list.block_size;
        uint8* base = list.pages + page * list.page_stride;
        return {base + row * LAYOUT::row_bytes,
                base + LAYOUT::scale_start + list.block_size * LAYOUT::scale_start_per_token + row * LAYOUT::scale_stride};
    }
};

// One warp copies rows into the ring: 4 lanes a row, 8 rows at a time. It says that a stage is full when the copies
// have ended, without waiting for them.
struct Gatherer {
    Walk walk;
    int lane;

    __device__ Gatherer(const Problem& problem) : walk(problem), lane(threadIdx.x % 32) {}

    __device__ void gather(int stage, uint64 address) {
        int first = lane / 4, part = lane % 4;  // of 8 rows, and of a row's 4 parts of 16 bytes in each slice
        uint32 raw = RAW_AT + stage * (STAGE * RAW_BYTES) + raw_offset(first, part);
        uint32 rope = ROPE_AT + stage * (STAGE * 128) + place(first) * 128 + ((part ^ place(first)) << 4);
#pragma unroll
        for (int i = 0; i < STAGE / 8; ++i) {  // 8 rows further are 8 places further
            const uint8* from = reinterpret_cast<const uint8*>(__shfl_sync(~0u, address, first + 8 * i)) + 16 * part;
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice)
                copy_async<16>(slice_of(raw, slice, first) + i * 8 * RAW_BYTES, from + 64 * slice, true);
            copy_async<16>(rope + i * 1024, from + LAYOUT::rope_offset, true);
            copy_async<16>((rope ^ 64) + i * 1024, from + LAYOUT::rope_offset + 64, true);
        }
        copies_arrive(RAW_FULL + 8 * stage);
    }

    __device__ void run() {
        Ring<STAGES> at;
        int index[2] = {walk.more ? walk.fetch_index(0) : 0, walk.more ? walk.fetch_index(1) : 0};
        while (walk.more) {
            uint64 rows[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) rows[half] = reinterpret_cast<uint64>(walk.token_at(index[half]).row);
            walk.next_block();
            if (walk.more) index[0] = walk.fetch_index(0), index[1] = walk.fetch_index(1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                barrier_wait(RAW_EMPTY + 8 * at.slot, at.round ^ 1);
                gather(at.slot, rows[half]);
                at.advance();
            }
        }
    }
};

// One warp brings the tokens' scales, a block ahead, and leaves them as float16, and whether tokens are absent.
struct Scaler {
    Walk walk;
    int lane;

    // Scales on their way.
    struct Pending {
        uint4 scales;
        bool present;
    };

    __device__ Scaler(const Problem& problem) : walk(problem), lane(threadIdx.x % 32) {}

    __device__ Pending fetch(int slot) {
        const uint8* scales = walk.token_at(slot).scales;
        Pending pending{{}, uint32(slot) < uint32(walk.problem.lists[walk.second].num_slots)};
        if (LAYOUT::ue8m0)
            asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(pending.scales.x), "=r"(pending.scales.y) : "l"(scales));
        else
            asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(pending.scales.x), "=r"(pending.scales.y), "=r"(pending.scales.z), "=r"(pending.scales.w) : "l"(scales));
        return pending;
    }

    __device__ void publish(int stage, const Pending& pending, int tile) {
        int n = (lane & 16) + place(lane & 15);
        int b = n & 1, c = n >> 1 & 3, h = n >> 3 & 1;
        uint32 at = FACTOR_AT + stage * (SLICES * STAGE * 2) + (lane & 16) * 2 + c * 8 + (b + 2 * h) * 2;
        bool bad = false;
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            uint32 bits;  // of the scale as float32
            if (LAYOUT::ue8m0) bits = ((i < 4 ? pending.scales.x : pending.scales.y) >> 8 * (i % 4) & 0xff) << 23;
            else bits = i < 2 ? pending.scales.x : i < 4 ? pending.scales.y : i < 6 ? pending.scales.z : pending.scales.w;
            bad |= !fits_f16(bits);
            sts16(at + i * (STAGE * 2), pack(f16{}, __uint_as_float(bits), 0.0f));
        }
        float absent = walk.problem.softmax_scale < 0.0f ? infinity() : -infinity();
        sts_float(BIAS_AT + (stage * STAGE + n) * 4, pending.present ? 0.0f : absent);
        bool any_absent = __any_sync(~0u, !pending.present);
        if (lane == 0) sts32(ABSENT_AT + stage * 4, any_absent);
        warp_arrive(RAW_FULL + 8 * stage);
        if (pending.present && bad) walk.problem.unsafe[tile] = 1;
    }

    __device__ void run() {
        Ring<STAGES> at;
        int index[2] = {walk.more ? walk.fetch_index(0) : 0, walk.more ? walk.fetch_index(1) : 0};
        while (walk.more) {
            int tile = walk.tile;
            Pending pending[2] = {fetch(index[0]), fetch(index[1])};
            walk.next_block();
            if (walk.more) index[0] = walk.fetch_index(0), index[1] = walk.fetch_index(1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                barrier_wait(RAW_EMPTY + 8 * at.slot, at.round ^ 1);
                publish(at.slot, pending[half], tile);
                at.advance();
            }
        }
    }
};
