// Gather the last rows of each request from a paged FP8 or FP4 cache into a dense workspace.
//
// Grid: (a warp per TOKENS rows, requests, which are strided). Block: 128 threads. No shared memory. A warp takes TOKENS
// neighbouring positions of one request: its lanes look up a position each, then hold 8 neighbouring values of every row in
// each round, so that a row is written in contiguous 512-byte pieces. A row waits for its length, its block number and its
// bytes in turn, which is why a warp takes several.
//
// Macros: LAYOUT, OUTPUT (bf16, f16 or float), TOKENS, ALIGNED, STREAM.
#include "common/pdl.cuh"
#include "common/row_format.cuh"

constexpr int ROUNDS = (LAYOUT::head_dim + 255) / 256;

__device__ inline void store_chunk(OUTPUT* row, int first, const StoredValues<LAYOUT>& chunk) {
    if (first >= LAYOUT::quantized_dim) {
        store_raw8(row + first, Raw8<bf16>{chunk.bytes});
        return;
    }
    float x[8];
    dequantize8(chunk, stored_scale<LAYOUT>(chunk.scale), x);
    store_values8(row + first, x);
}

extern "C" __global__ void __launch_bounds__(128)
dequantize_and_gather_k_cache(OUTPUT* out, int64 request_stride, int64 token_stride, int num_rows, uint8* pages,
                              int64 page_stride, int64 num_slots, int block_size, const int* seq_lens,
                              const int* gather_lens, const int* block_table, int64 table_stride, int requests,
                              int table_columns, int compress_ratio) {
    pdl_wait();
    BlockTable table{block_table, table_stride, requests, table_columns};
    int lane = threadIdx.x % 32;
    int first_row = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * TOKENS;
    for (int request = blockIdx.y; request < requests; request += gridDim.y) {
        int seq_len = seq_lens[request];
        if (compress_ratio > 1) seq_len /= compress_ratio;
        int gathered = min(gather_lens ? gather_lens[request] : seq_len, seq_len);
        int rows = min(gathered, num_rows);
        PageRow at{-1, 0};
        if (lane < TOKENS) {
            // If all rows are gathered, the block number does not depend on the length.
            int64 position = (gather_lens ? int64(seq_len) - gathered : 0) + first_row + lane;
            at = lookup_page_row(table, request, int(min(position, int64(INT32_LIMIT))), block_size, num_slots);
        }
        if (first_row >= rows) continue;
        if (first_row + lane >= rows) at.page = -1;
        StoredValues<LAYOUT> chunks[TOKENS][ROUNDS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            PageRow source{__shfl_sync(~0u, int(at.page), t), __shfl_sync(~0u, at.row, t)};
            Token token = token_at<LAYOUT>(pages, page_stride, block_size, source);
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                int first = 8 * (32 * round + lane);
                chunks[t][round] = {};  // an absent token is a row of zeros
                if (source.page >= 0 && first < LAYOUT::head_dim) chunks[t][round] = load_stored<LAYOUT>(token, first);
            }
        }
        OUTPUT* row = out + request * request_stride + first_row * token_stride;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t, row += token_stride) {
            if (first_row + t >= rows) break;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                int first = 8 * (32 * round + lane);
                if (first < LAYOUT::head_dim) store_chunk(row, first, chunks[t][round]);
            }
        }
    }
}
