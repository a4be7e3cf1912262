// Indexer scores of float32 queries for the positions of their candidate blocks, in a paged cache: logits = scale * sum
// of weights * relu(q . k).
//
// Grid: (tiles of 64 candidate positions, queries), both strided. Block: 128 threads; a thread has 4 positions and 4 heads, 16
// threads have the tile's positions, and 8 groups of them 32 heads.
// Shared memory: 28 KiB, static: half of the values of the tile's keys and of 32 heads, as float32, and the keys' addresses.
//
// Float32 arithmetic: each value read from shared memory enters four products. Queries and keys of at most 16 bits use
// tensor cores (sm80/index_scores.cu).
//
// Macros: LAYOUT (INDEXER_F32 or INDEXER_MXFP4).
#include "common/pages.cuh"
#include "common/device.cuh"

constexpr int DIM = 128, HALF = 64, KEYS = 64, HEADS = 32, THREADS = 128, CHUNK = 16;
constexpr int KEY_STRIDE = KEYS + 4, HEAD_STRIDE = HEADS + 4;

// CHUNK values of a key from value d on; e2m1 values are scaled.
__device__ inline void read_chunk(const Token& token, int d, float (&x)[CHUNK]) {
    if constexpr (LAYOUT::e2m1_values) {
        float scale = ue8m0_scale(token.scales[d / LAYOUT::scale_tile]);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            uint32 e4m3[2];
            e2m1_to_e4m3(read_at<uint32>(token.row + d / 2 + 4 * word), e4m3[0], e4m3[1]);
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                float low, high;
                e4m3x2_to_float(e4m3[i / 4] >> 8 * (i % 4) & 0xffff, low, high);
                x[8 * word + i] = low * scale, x[8 * word + i + 1] = high * scale;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) x[i] = read_at<float>(token.row + (d + i) * int(sizeof(float)));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    candidate_logits(const float* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int heads, const float* weights,
                     int64 weights_stride, const int* lens, int64 lens_stride, int per_query, int next_n, int num_queries,
                     const int* candidates, int64 candidates_stride, int block, int columns, float fill, const int* block_table,
                     int64 table_stride, int table_rows, int table_columns, uint8* pages, int64 page_stride, int64 num_slots,
                     int block_size, float* logits, int64 logits_stride) {
    alignas(16) __shared__ float key[HALF][KEY_STRIDE];
    alignas(16) __shared__ float query_head[HALF][HEAD_STRIDE];
    __shared__ float sums[THREADS / 32][KEYS];
    __shared__ Token tokens[KEYS];  // a null row: absent
    __shared__ bool is_seen[KEYS];
    pdl_wait();
    BlockTable table{block_table, table_stride, table_rows, table_columns};
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int own_keys = threadIdx.x % 16 * 4, own_heads = threadIdx.x / 16 * 4;
    for (int query = blockIdx.y; query < num_queries; query += gridDim.y) {
        int entry = query / next_n, j = query - entry * next_n;
        int64 length = per_query ? lens[entry * lens_stride + j] : int64(lens[entry * lens_stride]) - (next_n - 1 - j);
        length = min(length, table.covered(block_size));
        for (int64 start = int64(blockIdx.x) * KEYS; start < columns; start += int64(gridDim.x) * KEYS) {
            if (threadIdx.x < KEYS) {
                int64 column = start + threadIdx.x;
                bool seen = false;
                Token token{};
                if (column < columns) {
                    int i = uint32(column) / uint32(block), candidate = candidates[query * candidates_stride + i];
                    int64 position = int64(candidate) * block + (column - int64(i) * block);
                    seen = candidate >= 0 && position < length;
                    if (seen) {
                        PageRow at = lookup_page_row(table, entry, position, block_size, num_slots);
                        if (at.page >= 0) token = token_at<LAYOUT>(pages, page_stride, block_size, at);
                    }
                }
                tokens[threadIdx.x] = token, is_seen[threadIdx.x] = seen;
            }
            float sum[4] = {};
            for (int first_head = 0; first_head < heads; first_head += HEADS) {
                float product[4][4] = {};  // [head][key]
                for (int first = 0; first < DIM; first += HALF) {
                    __syncthreads();  // the addresses are written, or the previous values read
                    for (int i = threadIdx.x; i < KEYS * HALF / CHUNK; i += THREADS) {
                        int at = i % KEYS, d = i / KEYS * CHUNK;
                        float x[CHUNK] = {};
                        if (tokens[at].row) read_chunk(tokens[at], first + d, x);
#pragma unroll
                        for (int n = 0; n < CHUNK; ++n) key[d + n][at] = x[n];
                    }
                    const float* from = q + entry * q_stride_b + j * q_stride_s + first;
                    for (int i = threadIdx.x; i < HEADS * HALF; i += THREADS) {
                        int d = i % HALF, head = first_head + i / HALF;
                        query_head[d][i / HALF] = head < heads ? from[head * q_stride_h + d] : 0.0f;
                    }
                    __syncthreads();
#pragma unroll 4
                    for (int d = 0; d < HALF; ++d) {
                        float4 k = *reinterpret_cast<const float4*>(&key[d][own_keys]);
                        float4 h = *reinterpret_cast<const float4*>(&query_head[d][own_heads]);
                        float ks[4] = {k.x, k.y, k.z, k.w}, hs[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
                        for (int a = 0; a < 4; ++a)
#pragma unroll
                            for (int b = 0; b < 4; ++b) product[a][b] = fmaf(hs[a], ks[b], product[a][b]);
                    }
                }
#pragma unroll
                for (int a = 0; a < 4; ++a) {
                    int head = first_head + own_heads + a;
                    if (head >= heads) continue;  // otherwise the product of NaN keys and an absent query would be NaN
                    float weight = weights[query * weights_stride + head];
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        float x = product[a][b] < 0 ? 0 : product[a][b];  // NaN stays NaN
                        sum[b] = fmaf(x, weight, sum[b]);
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                sum[b] += __shfl_xor_sync(~0u, sum[b], 16);
                if (lane < 16) sums[warp][own_keys + b] = sum[b];
            }
            __syncthreads();
            int64 column = start + threadIdx.x;
            if (threadIdx.x < KEYS && column < columns) {
                float total = sums[0][threadIdx.x];
                for (int other = 1; other < THREADS / 32; ++other) total += sums[other][threadIdx.x];
                Token token = tokens[threadIdx.x];
                if (!token.row) total = is_seen[threadIdx.x] ? -infinity() : fill;
                logits[query * logits_stride + column] = total;
            }
            __syncthreads();  // sums and addresses are read
        }
    }
}
