// Gather the last rows of each request from a paged FP8 cache into a dense workspace.
//
// A warp takes TOKENS neighbouring positions of one request. Each lane holds 8 neighbouring values of a row
// in each of its rounds, so that a row is written in contiguous 512-byte pieces.
//
// Macros: LAYOUT, OUTPUT (bf16, f16 or float), TOKENS, ALIGNED.
#include "pages.cuh"
#include "vectors.cuh"

constexpr int ROUNDS = (LAYOUT::head_dim + 255) / 256;

struct Chunk {
    uint4 bytes;  // 8 e4m3 values in the low half, or 8 bfloat16 values
    float scale;
};

__device__ inline Chunk load_chunk(Token token, int first) {
    if (first >= LAYOUT::quantized_dim)
        return {load16(token.row + LAYOUT::rope_offset + 2 * (first - LAYOUT::quantized_dim)), 1.0f};
    uint2 bytes = load8(token.row + first);
    int tile = first / LAYOUT::scale_tile;
    float scale;
    if (LAYOUT::ue8m0) {
        scale = ue8m0_scale(token.scales[tile]);
    } else {
#if ALIGNED
        scale = reinterpret_cast<const float*>(token.scales)[tile];
#else
        uint32 bits = 0;
        for (int i = 0; i < 4; ++i) bits |= uint32(token.scales[4 * tile + i]) << 8 * i;
        scale = __uint_as_float(bits);
#endif
    }
    return {{bytes.x, bytes.y, 0, 0}, scale};
}

extern "C" __global__ void __launch_bounds__(256)
dequantize_and_gather_k_cache(OUTPUT* out, int64 request_stride, int64 token_stride, int num_rows, uint8* pages,
                              int64 page_stride, int64 num_slots, int block_size, const int* seq_lens,
                              const int* gather_lens, const int* block_table, int64 table_stride, int requests,
                              int table_columns, int blocks_per_request) {
    int request = blockIdx.x / blocks_per_request;
    int block = blockIdx.x % blocks_per_request;
    int lane = threadIdx.x % 32;
    int seq_len = seq_lens[request];
    int gathered = min(gather_lens ? gather_lens[request] : seq_len, seq_len);
    int rows = min(gathered, num_rows);
    int first_row = (block * (blockDim.x / 32) + threadIdx.x / 32) * TOKENS;
    if (first_row >= rows) return;

    BlockTable table{block_table, table_stride, requests, table_columns};
    int slots[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        int64 position = int64(seq_len) - gathered + first_row + t;
        int slot = first_row + t < rows ? lookup_slot(table, request, position, block_size) : -1;
        slots[t] = slot < num_slots ? slot : -1;
    }
    Chunk chunks[TOKENS][ROUNDS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int first = 8 * (32 * round + lane);
            chunks[t][round] = {};  // an absent token is a row of zeros
            if (slots[t] >= 0 && first < LAYOUT::head_dim)
                chunks[t][round] = load_chunk(token_at<LAYOUT>(pages, page_stride, block_size, slots[t]), first);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (first_row + t >= rows) break;
        OUTPUT* row = out + request * request_stride + int64(first_row + t) * token_stride;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int first = 8 * (32 * round + lane);
            if (first >= LAYOUT::head_dim) continue;
            Chunk chunk = chunks[t][round];
            float x[8];
            if (first < LAYOUT::quantized_dim) dequantize8({chunk.bytes.x, chunk.bytes.y}, chunk.scale, x);
            else unpack8(Raw8<bf16>{chunk.bytes}, x);
            store_values8(row + first, x);
        }
    }
}
