// Gather the indexer's keys from a paged cache: values and scales unchanged, or MXFP4 keys as e4m3 with one float32 scale a key.
//
// Grid: CTAs that stride over the rows: only the device knows the number of rows, and a workspace may have many more.
// Block: 128 threads; 8 lanes copy a row of 128 bytes (4 lanes a row of 64), 16 bytes each, and the first of them also
// the 4 bytes of scales. No shared memory.
//
// Macros: LAYOUT (INDEXER_FP8 or INDEXER_MXFP4), TO_E4M3 (MXFP4 keys only), ALIGNED.
#include "common/device.cuh"
#include "common/requests.cuh"
#include "common/pages.cuh"

using Layout = LAYOUT;
static_assert(Layout::scale_bytes == 4, "read and written as one word");
constexpr int THREADS = 128, LANES = (TO_E4M3 ? LAYOUT::head_dim : LAYOUT::row_bytes) / 16;
[[maybe_unused]] constexpr int ROWS = THREADS / LANES;

// One scale for the four scales of an MXFP4 key, as float32 bits: 2^-6 of the largest one that is not NaN, so that 6
// becomes 384.
__device__ inline uint32 one_scale(uint32 scales) {
    int largest = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        int scale = scales >> i & 255;
        largest = scale == 255 ? largest : max(largest, scale);
    }
    return uint32(max(largest - 6, 1)) << 23;
}

// Sixteen e2m1 codes as e4m3 in units of that scale. Exact if their own scale is at least 2^-14 of the largest.
__device__ inline uint4 in_units(uint2 codes, uint32 scale, uint32 unit) {
    constexpr int GONE = -30;  // with a scale this many powers of two smaller, every value is 0 in e4m3
    float factor = scale == 255 ? __uint_as_float(0x7fffffff) : power_of_two(max(int(scale) - int(unit >> 23), GONE));
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint2 values;
        float x[8];
        e2m1_to_e4m3(i ? codes.y : codes.x, values.x, values.y);
        dequantize8(values, factor, x);
        for (int j = 0; j < 2; ++j)
            words[2 * i + j] = float_to_e4m3x2(x[4 * j], x[4 * j + 1]) | float_to_e4m3x2(x[4 * j + 2], x[4 * j + 3]) << 16;
    }
    return {words[0], words[1], words[2], words[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cp_gather_indexer_k_quant_cache(uint8* pages, int64 page_stride, int64 num_slots, int block_size, uint8* dst_k, int64 k_stride,
                                    uint8* dst_scale, int64 scale_stride, int num_rows, const int* block_table, int64 table_stride,
                                    int table_columns, const int* cu_seq_lens, int requests) {
    pdl_wait();
    BlockTable table{block_table, table_stride, requests, table_columns};
    GatheredRows rows{cu_seq_lens, requests};
    int lane = threadIdx.x % LANES;
    int64 rows_at_once = int64(gridDim.x) * (blockDim.x / LANES);
    int count = rows.count(num_rows);
    for (int64 row = blockIdx.x * int64(blockDim.x / LANES) + threadIdx.x / LANES; row < count; row += rows_at_once) {
        int request = rows.request(row);
        if (request < 0) continue;
        PageRow at = lookup_page_row(table, request, row - cu_seq_lens[request], block_size, num_slots);
        uint4 values = {};
        uint32 scale = 0;
        if (at.page >= 0) {
            Token token = token_at<Layout>(pages, page_stride, block_size, at);
            if constexpr (TO_E4M3) {
                uint32 scales = load4(token.scales);
                scale = one_scale(scales);
                values = in_units(load8(token.row + 8 * lane), scales >> 8 * (lane / 2) & 255, scale);
            } else {
                values = load16(token.row + 16 * lane);
                if (lane == 0) scale = load4(token.scales);
            }
        }
        store16(dst_k + row * k_stride + 16 * lane, values);
        if (lane == 0) store4(dst_scale + row * scale_stride, scale);
    }
}
