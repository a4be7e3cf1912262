// Indexer scores of float32 queries: logits = scale * sum of weights * relu(q . k).
// clean_logits writes -inf where a query does not see a key.
//
// Grid: (blocks of 32 keys, queries), both strided.
// Block: 128 threads; lane i has key i, and the heads are split across the warps.
// Shared memory: 19 KiB, static: keys, a head of Q per warp, partial sums.
//
// Plain float32 arithmetic. Queries of at most 16 bits use sm80/index_scores.cu and sm90/indexer/logits.cu.
//
// Macros: LAYOUT (INDEXER_F32 or INDEXER_MXFP4), PAGED (a paged cache, or packed keys).
#include "common/pages.cuh"
#include "common/device.cuh"

constexpr int DIM = 128, KEYS = 32, WARPS = 4, THREADS = 32 * WARPS;

// Value d of a key.
__device__ inline float key_value(const uint8* row, const uint8* scales, int d) {
    if constexpr (!LAYOUT::e2m1_values) return read_at<float>(row + d * int(sizeof(float)));
    uint32 e4m3, none;
    e2m1_to_e4m3(row[d / 2] >> d % 2 * 4 & 15, e4m3, none);
    float low, high;
    e4m3x2_to_float(e4m3 & 0xffff, low, high);
    return low * ue8m0_scale(scales[d / LAYOUT::scale_tile]);
}

// Keys that each query sees.
struct Queries {
    const int *starts, *ends;  // PAGED: lengths, and null
    int64 lens_stride;
    int per_query, count;        // count: number of queries, of an entry if PAGED
    int keys, compressed_width;  // compressed_width: width of compressed rows, else 0

    __device__ void range_of(int query, int& first, int& end) const {
        if (PAGED) {
            int entry = query / count, j = query % count;
            int64 length = per_query ? starts[entry * lens_stride + j] : int64(starts[entry * lens_stride]) - (count - 1 - j);
            first = 0, end = int(min(max(length, int64(0)), int64(keys)));
        } else {
            first = min(max(starts[query], 0), keys), end = min(max(ends[query], first), keys);
            if (compressed_width) end = int(min(int64(end), int64(first) + compressed_width));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    indexer_logits(const float* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int heads, const float* weights,
                   int64 weights_stride, const int* starts, const int* ends, int64 lens_stride, int per_query, int count, int num_queries,
                   const uint8* k, int64 k_stride, const uint8* scales, int keys, int compressed_width, const int* block_table,
                   int64 table_stride, int table_rows, int table_columns, uint8* pages, int64 page_stride, int64 num_slots, int block_size,
                   float* logits, int64 logits_stride) {
    __shared__ float key[KEYS][DIM + 1];
    __shared__ float query_head[WARPS][DIM];
    __shared__ float sums[WARPS][KEYS];
    pdl_wait();
    Queries queries{starts, ends, lens_stride, per_query, count, keys, compressed_width};
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int query = blockIdx.y; query < num_queries; query += gridDim.y) {
        int first, end;
        queries.range_of(query, first, end);
        int entry = PAGED ? query / count : 0, j = PAGED ? query % count : query;
        for (int64 start = first + int64(blockIdx.x) * KEYS; start < end; start += int64(gridDim.x) * KEYS) {
            int here = int(min(int64(KEYS), end - start));
            bool present = lane < here;
#if PAGED
            BlockTable table{block_table, table_stride, table_rows, table_columns};
            for (int i = warp; i < here; i += WARPS) {
                PageRow at = lookup_page_row(table, entry, start + i, block_size, num_slots);
                if (at.page < 0) continue;
                Token token = token_at<LAYOUT>(pages, page_stride, block_size, at);
                for (int d = lane; d < DIM; d += 32) key[i][d] = key_value(token.row, token.scales, d);
            }
            if (present) present = lookup_page_row(table, entry, start + lane, block_size, num_slots).page >= 0;
#else
            for (int i = warp; i < here; i += WARPS)
                for (int d = lane; d < DIM; d += 32)
                    key[i][d] = key_value(k + (start + i) * k_stride, scales + (start + i) * LAYOUT::scale_bytes, d);
#endif
            __syncthreads();
            float sum = 0;
            for (int head = warp; head < heads; head += WARPS) {
                const float* from = q + entry * q_stride_b + j * q_stride_s + head * q_stride_h;
                for (int d = lane; d < DIM; d += 32) query_head[warp][d] = from[d];
                __syncwarp();
                float product = 0;
                for (int d = 0; d < DIM; ++d) product = fmaf(query_head[warp][d], key[lane][d], product);
                product = product < 0 ? 0 : product;  // NaN stays NaN
                sum = fmaf(product, weights[query * weights_stride + head], sum);
                __syncwarp();
            }
            sums[warp][lane] = sum;
            __syncthreads();
            if (warp == 0 && lane < here) {
                for (int other = 1; other < WARPS; ++other) sum += sums[other][lane];
                logits[query * logits_stride + start + lane - (compressed_width ? first : 0)] = present ? sum : -infinity();
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    clean_logits(const int* starts, const int* ends, int64 lens_stride, int per_query, int count, int num_queries, int keys,
                 int compressed_width, float* logits, int64 logits_stride) {
    pdl_wait();
    Queries queries{starts, ends, lens_stride, per_query, count, keys, compressed_width};
    int width = compressed_width ? compressed_width : keys, stride = gridDim.x * THREADS;
    for (int query = blockIdx.y; query < num_queries; query += gridDim.y) {
        int first, end;
        queries.range_of(query, first, end);
        if (compressed_width) end -= first, first = 0;
        float* row = logits + query * logits_stride;
        for (int64 i = blockIdx.x * THREADS + threadIdx.x; i < width; i += stride)
            if (i < first || i >= end) row[i] = -infinity();
    }
}
