// The paged rows of a dense MLA cache.
#pragma once
#include "common/packed.cuh"
#include "common/pages.cuh"

[[maybe_unused]] constexpr int LATENT_DIM = 576, LATENT_V = 512;

struct LatentCache {
    const uint8* pages;
    int64 page_stride;
    int64 num_slots;
    int block_size;
    BlockTable table;

    // The slot of a position of a request, or -1 if it is absent.
    __device__ int slot(int request, int position) const {
        int slot = lookup_slot(table, request, position, block_size);
        return slot < num_slots ? slot : -1;
    }
    // Byte offset of the row in a slot from the start of the cache.
    __device__ int64 offset(int slot, int row_bytes) const {
        uint32 page = uint32(slot) / uint32(block_size);
        return page * page_stride + int64(slot - page * block_size) * row_bytes;
    }
};
