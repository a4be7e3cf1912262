// Prepares a prefill over gathered rows in one launch: gathers the compressed rows and windows of its requests to a
// workspace, and writes the list of rows of each token. Each part takes little time compared with a launch.
//
// Grid: CTAs of the tokens' lists first, a warp a token, because they wait for their loads in turn; then of windows, then of
// compressed rows, a warp per TOKENS rows of a request. Block: 128 threads. No shared memory.
//
// Macros: LAYOUT (of windows), EXTRA_LAYOUT (of compressed rows), COMPACT, OUTPUT (bf16, f16 or float), TOKENS, ALIGNED, STREAM,
// WIDE_ENTRIES.
#include "common/combined_rows.cuh"
#include "common/gathered_rows.cuh"
#include "common/device.cuh"

constexpr int WARPS = 4;

// A part of the grid that has `blocks_of_request` CTAs for each request.
template <class Layout> __device__ inline void gather(const GatheredRows& rows, int block, int blocks_of_request) {
    const int request = block / blocks_of_request;
    const int first_row = ((block - request * blocks_of_request) * WARPS + threadIdx.x / 32) * TOKENS;
    gather_rows<Layout>(rows, request, first_row);
}

// Number of CTAs for lists, for the window of a request, and for its compressed rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS) prefill_rows(CombinedRows lists, GatheredRows windows, GatheredRows compressed,
                                                                      int list_blocks, int window_blocks, int compressed_blocks) {
    pdl_wait();
    int block = blockIdx.x;
    if (block < list_blocks) {
        const int token = block * WARPS + threadIdx.x / 32;
        if (token >= lists.num_tokens) return;
        if (COMPACT) combine_compact(lists, token);
        else combine(lists, token);
        return;
    }
    block -= list_blocks;
    const int of_windows = window_blocks * windows.requests;
    if (block < of_windows) gather<LAYOUT>(windows, block, window_blocks);
    else gather<EXTRA_LAYOUT>(compressed, block - of_windows, compressed_blocks);
}
