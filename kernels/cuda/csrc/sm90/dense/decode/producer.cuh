// The producer of sm90/dense/decode/decode.cu.
#pragma once
#include "sm90/dense/decode/memory.cuh"

constexpr uint32 ABSENT = ~0u;

struct RowProducer {
    LatentCache cache;
    const TensorMap& map;
    int box_rows;
    int request, first_block, keys;
    uint32 window;

    // ---- boxes

    // First row of this lane's box of a block; absent if one of its rows is, or if a block has fewer boxes.
    __device__ PageRow box(int i) const {
        int row = threadIdx.x % 32 * box_rows, position = (first_block + i) * KEYS + row;
        if (!box_rows || row >= KEYS || position + box_rows > keys) return {-1, 0};
        return lookup_page_row(cache.table, request, position, cache.block_size, cache.num_slots);
    }
    // Whether all boxes of a block are present.
    __device__ bool is_whole(PageRow box) const { return __all_sync(~0u, int(threadIdx.x % 32) * box_rows >= KEYS || box.page >= 0); }
    // One warp copies a block.
    __device__ void copy_boxes(int buffer, PageRow box, uint32 parity) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            Barrier ready = k_ready[buffer][piece].in(window);
            k_free[buffer][piece].in(window).wait(parity);
            if (lane == 0) {
                if (piece == 0) sts128(window + PRESENT_AT + 16 * buffer, {0x0f0f0f0f, 0x0f0f0f0f, 0x0f0f0f0f, 0x0f0f0f0f});
                ready.arrive_expecting(tile_count(piece) * TILE_BYTES);
                ready.arrive(PRODUCERS - 1);  // for all other producer threads
            }
            if (box.page >= 0) {
#pragma unroll
                for (int tile = first_tile(piece); tile < first_tile(piece) + tile_count(piece); ++tile) {
                    uint32 to = window + K_AT + buffer * K_BYTES + tile * TILE_BYTES + lane * box_rows * 128;
                    tma_load(to, map, 64 * tile, box.row, int(box.page), ready);
                }
            }
        }
    }

    // ---- rows

    // All four warps copy a block.
    __device__ void copy_rows(int buffer, int i, uint32 parity) const {
        int thread = threadIdx.x % PRODUCERS, warp = thread / 32, lane = thread % 32, row = thread / 8, chunk = thread % 8;
        uint32 swizzled = row * 128 + ((chunk ^ (row & 7)) << 4);
        uint32 rows[4];  // in units of 16 bytes, which take one register
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            int position = (first_block + i) * KEYS + 16 * r + row;
            int slot = position < keys ? cache.slot(request, position) : -1;
            rows[r] = slot < 0 ? ABSENT : uint32(cache.offset(slot, 2 * LATENT_DIM) >> 4);
        }
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            Barrier ready = k_ready[buffer][piece].in(window);
            uint32 to = window + K_AT + buffer * K_BYTES + swizzled;
            if (warp == 0) k_free[buffer][piece].in(window).wait(parity);
            warpgroup_sync(4);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                bool present = rows[r] != ABSENT;
                const uint8* from = cache.pages + (present ? uint64(rows[r]) << 4 : 0) + 16 * chunk;
                asm volatile("" : "+l"(from), "+r"(to));  // otherwise the compiler keeps every derived address in a register
#pragma unroll
                for (int tile = first_tile(piece); tile < first_tile(piece) + tile_count(piece); ++tile)
                    copy_async<16>(to + tile * TILE_BYTES + 2048 * r, from + 128 * tile, present);
                if (piece == 0) {  // a byte for the rows of lanes 0, 8, 16 and 24
                    uint32 there = __ballot_sync(~0u, present) & 0x01010101;
                    uint32 bits = (there | there >> 7 | there >> 14 | there >> 21) & 15;
                    if (lane == 0)
                        asm volatile("st.shared.u8 [%0], %1;" ::"r"(window + PRESENT_AT + 16 * buffer + 4 * r + warp), "r"(bits)
                                     : "memory");
                }
            }
            copies_commit();
            if (piece) copies_wait<1>(), fence_proxy_async(), Barrier{ready.address - 8}.arrive();  // of the previous piece
            if (piece == PIECES - 1) copies_wait<0>(), fence_proxy_async(), ready.arrive();
        }
    }
};
