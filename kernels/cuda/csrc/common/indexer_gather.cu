// Gather the indexer's keys from a paged cache, values and scales unchanged.
//
// Grid: CTAs that stride over the rows, because only the device knows their number and a workspace may have many more. Block:
// 128 threads; 8 lanes take a row of 128 bytes (4 one of 64), 16 bytes each, and the first of them also the 4 bytes of scales.
// No shared memory.
//
// Macros: LAYOUT (INDEXER_FP8 or INDEXER_MXFP4), ALIGNED.
#include "common/pdl.cuh"
#include "common/requests.cuh"
#include "common/row_format.cuh"

using Layout = LAYOUT;
static_assert(Layout::scale_bytes == 4, "read and written as one word");
constexpr int THREADS = 128, LANES = LAYOUT::row_bytes / 16;
[[maybe_unused]] constexpr int ROWS = THREADS / LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
cp_gather_indexer_k_quant_cache(uint8* pages, int64 page_stride, int64 num_slots, int block_size, uint8* dst_k,
                                int64 k_stride, uint8* dst_scale, int64 scale_stride, int num_rows,
                                const int* block_table, int64 table_stride, int table_columns, const int* cu_seq_lens,
                                int requests) {
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
            values = load16(token.row + 16 * lane);
            if (lane == 0) scale = load4(token.scales);
        }
        store16(dst_k + row * k_stride + 16 * lane, values);
        if (lane == 0) store4(dst_scale + row * scale_stride, scale);
    }
}
