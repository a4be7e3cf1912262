// The gatherer of decode_sm90.cu.
#pragma once
#include "decode_sm90_walk.cuh"

// One warp. 4 lanes copy a row, 8 rows at a time.
struct Gatherer : Walk {
    using Walk::Walk;

    // A stage whose rows are on their way.
    struct Pending {
        uint4 scales;
        bool present;
        int tile;
    };

    __device__ Pending gather(const List& list, int stage, int slot, int of_tile) {
        bool here = uint32(slot) < uint32(list.num_slots);
        int page = list.block_shift >= 0 ? slot >> list.block_shift : int(uint32(slot) / uint32(list.block_size));
        int row = slot - page * list.block_size;
        const uint8* base = list.pages + page * list.page_stride;
        int scale_at = LAYOUT::scale_start + list.block_size * LAYOUT::scale_start_per_token + row * LAYOUT::scale_stride;
        const uint8* zeros = reinterpret_cast<const uint8*>(absent_row);
        const uint8* source = here ? base + row * LAYOUT::row_bytes : zeros;
        const uint8* scales = here ? base + scale_at : zeros;
        Pending pending{{}, here, of_tile};
        if (LAYOUT::ue8m0)
            asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(pending.scales.x), "=r"(pending.scales.y) : "l"(scales));
        else
            asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(pending.scales.x), "=r"(pending.scales.y), "=r"(pending.scales.z), "=r"(pending.scales.w) : "l"(scales));
        uint64 address = reinterpret_cast<uint64>(source);
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
        copies_commit();
        return pending;
    }

    // Complete a stage whose rows have arrived: factors, bias, and word to the others.
    __device__ void publish(int stage, const Pending& pending) {
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
        float absent = problem.softmax_scale < 0.0f ? infinity() : -infinity();
        sts_float(BIAS_AT + (stage * STAGE + n) * 4, pending.present ? 0.0f : absent);
        bool any_absent = __any_sync(~0u, !pending.present);
        if (lane == 0) sts32(ABSENT_AT + stage * 4, any_absent);
        warp_arrive(RAW_FULL + 8 * stage);
        if (pending.present && bad) problem.unsafe[pending.tile] = 1;
    }

    __device__ void run() {
        if (!more) return;
        Ring<STAGES> at;
        Pending pending[2];  // of the block before, which is published as this one is gathered
        int index[2] = {fetch_index(0), fetch_index(1)};
        bool published = true;
        while (more) {
            const List& list = problem.lists[second];
            int of_tile = tile, slot[2] = {index[0], index[1]};
            next_block();
            if (more) index[0] = fetch_index(0), index[1] = fetch_index(1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!published) {
                    copies_wait<1>();
                    publish(before(at.slot), pending[half]);
                }
                barrier_wait(RAW_EMPTY + 8 * at.slot, at.round ^ 1);
                pending[half] = gather(list, at.slot, slot[half], of_tile);
                at.advance();
            }
            published = false;
        }
        copies_wait<0>();
        publish(before(at.slot), pending[0]);
        at.advance();
        publish(before(at.slot), pending[1]);
    }

    // The stage two before.
    static __device__ int before(int stage) { return stage >= 2 ? stage - 2 : stage + STAGES - 2; }
};
