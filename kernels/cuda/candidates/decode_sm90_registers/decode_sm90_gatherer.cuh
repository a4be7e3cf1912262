// The gatherer and the scaler of decode_sm90.cu.
#pragma once
#include "decode_sm90_walk.cuh"

// Where the token in a slot is: its row, and its scales.
__device__ inline Token token_in(const List& list, int slot) {
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
            for (int half = 0; half < 2; ++half) rows[half] = reinterpret_cast<uint64>(token_in(walk.problem.lists[walk.second], index[half]).row);
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
        const uint8* scales = token_in(walk.problem.lists[walk.second], slot).scales;
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
