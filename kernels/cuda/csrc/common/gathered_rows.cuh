// The last rows of each request of a paged FP8 or FP4 cache, dequantised into a dense workspace.
//
// A warp takes TOKENS neighbouring positions of one request: each lane looks up a position, then holds 8 neighbouring
// values of every row in each round, so that a row is written in contiguous 512-byte pieces. A warp takes several rows
// because each waits for its length, its block number and its bytes in turn.
//
// Macros: OUTPUT (bf16, f16 or float), TOKENS, ALIGNED, STREAM.
#pragma once
#include "common/pages.cuh"

struct GatheredRows {
    OUTPUT* out;
    int64 request_stride;
    int64 token_stride;
    uint8* pages;
    int64 page_stride;
    int64 num_slots;
    const int* seq_lens;
    const int* gather_lens;  // or null
    const int* block_table;
    int64 table_stride;
    int num_rows;
    int block_size;
    int requests;
    int table_columns;
    int compress_ratio;
    int padding;
};

template <class Layout> __device__ inline void store_chunk(OUTPUT* row, int first, const StoredValues<Layout>& chunk) {
    if (first >= Layout::quantized_dim) {
        store_raw8(row + first, Raw8<bf16>{chunk.bytes});
        return;
    }
    float x[8];
    dequantize8(chunk, stored_scale<Layout>(chunk.scale), x);
    store_values8(row + first, x);
}

// Gather TOKENS rows of a request from its `first_row`-th on. Called by all lanes of a warp.
template <class Layout> __device__ inline void gather_rows(const GatheredRows& x, int request, int first_row) {
    constexpr int ROUNDS = (Layout::head_dim + 255) / 256;
    const BlockTable table{x.block_table, x.table_stride, x.requests, x.table_columns};
    const int lane = threadIdx.x % 32;
    int seq_len = x.seq_lens[request];
    if (x.compress_ratio > 1) seq_len /= x.compress_ratio;
    int gathered = min(x.gather_lens ? x.gather_lens[request] : seq_len, seq_len);
    int rows = min(gathered, x.num_rows);
    PageRow at{-1, 0};
    if (lane < TOKENS) {
        // If all rows are gathered, the block number does not depend on the length.
        int64 position = (x.gather_lens ? int64(seq_len) - gathered : 0) + first_row + lane;
        at = lookup_page_row(table, request, int(min(position, int64(INT32_LIMIT))), x.block_size, x.num_slots);
    }
    if (first_row >= rows) return;
    if (first_row + lane >= rows) at.page = -1;
    StoredValues<Layout> chunks[TOKENS][ROUNDS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        PageRow source{__shfl_sync(~0u, int(at.page), t), __shfl_sync(~0u, at.row, t)};
        Token token = token_at<Layout>(x.pages, x.page_stride, x.block_size, source);
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int first = 8 * (32 * round + lane);
            chunks[t][round] = {};  // an absent token is a row of zeros
            if (source.page >= 0 && first < Layout::head_dim) chunks[t][round] = load_stored<Layout>(token, first);
        }
    }
    OUTPUT* row = x.out + request * x.request_stride + first_row * x.token_stride;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t, row += x.token_stride) {
        if (first_row + t >= rows) break;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int first = 8 * (32 * round + lane);
            if (first < Layout::head_dim) store_chunk<Layout>(row, first, chunks[t][round]);
        }
    }
}
