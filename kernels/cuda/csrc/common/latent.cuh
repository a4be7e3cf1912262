// Decode over the paged rows of a dense MLA cache: addresses of rows, and the split of the portable kernel's work (Hopper's is in
// sm90/dense/decode/work.cuh).
//
// A *tile* is a query token and a group of its heads. The keys of a tile are divided into blocks, and these evenly into
// `splits`; each CTA takes one split and stores a partial result, or the result if there is only one split.
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

struct DenseWorkRange {
    int request, query, group, split;
    int keys;                     // visible to the query
    int first_block, last_block;  // of this CTA

    // For CTA `index`: groups of heads are neighbours, then splits of a tile, then queries of a request.
    __device__ static DenseWorkRange of(int index, int splits, int groups, int s_q, const int* lens, int64 capacity, bool causal,
                               int block_keys) {
        DenseWorkRange share;
        share.group = index % groups, index /= groups;
        share.split = index % splits, index /= splits;
        share.query = index % s_q, share.request = index / s_q;
        int64 keys = int64(lens[share.request]) - (causal ? s_q - 1 - share.query : 0);
        share.keys = int(max(min(keys, capacity), int64(0)));
        int64 blocks = (int64(share.keys) + block_keys - 1) / block_keys;
        share.first_block = int(blocks * share.split / splits);
        share.last_block = int(blocks * (share.split + 1) / splits);
        return share;
    }
};
