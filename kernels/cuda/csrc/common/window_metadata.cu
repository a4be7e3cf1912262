// Builds the metadata of a step that all sparse layers use, in one kernel.
//
// Grid: `token_blocks` CTAs with one row (a token) per warp, and one CTA for the prefill requests. Block: 128 threads.
// No shared memory. Unused rows and columns are cleared as far as the previous build wrote them. All lanes search for a
// row's request together: 32 boundaries of the search range at a time.
//
// Macros: SLOT (int64 or int).
#include "common/device.cuh"
#include "common/pages.cuh"

constexpr int C128A_RATIO = 128;
constexpr int WARPS = 4;

// The largest r in [0, requests) with query_start_loc[r] <= token and query_start_loc[r + 1] > token.
__device__ inline int find_request(const int* query_start_loc, int requests, int token, int lane) {
    int low = 0, high = requests;  // the answer is in [low, high)
    while (high - low > 1) {
        int step = (high - low + 31) / 32;
        int probe = low + lane * step;
        uint32 not_after = __ballot_sync(~0u, probe < high && query_start_loc[probe] <= token);
        int last = max(31 - __clz(not_after), 0);
        low += last * step;
        high = min(high, low + step);
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    build_sparse_swa(const int* query_start_loc, const int* seq_lens, int requests, int num_decodes, int num_decode_tokens, int num_tokens,
                     int rows, int rows_before, const SLOT* slot_mapping, const int* block_table, int64 table_stride, int table_columns,
                     int block_size, int window_size, const int* c128a_block_table, int64 c128a_table_stride, int c128a_table_columns,
                     int c128a_block_size, int c128a_width, int width_before, int64 c128a_stride, int* token_to_req_indices,
                     bool* is_valid_token, int* positions, int* swa_indices, int* swa_lens, int* prefill_gather_lens, int max_prefills,
                     int* c128a_indices, int* c128a_lens, int token_blocks, const int* replay_start, int noncausal, int swa_width) {
    pdl_wait();
    if (blockIdx.x == token_blocks) {
        for (int prefill = threadIdx.x; prefill < max_prefills; prefill += blockDim.x) {
            int request = num_decodes + prefill;
            int64 gather_len = 0;
            if (request < requests) {
                int64 query_len = int64(query_start_loc[request + 1]) - query_start_loc[request];
                int64 first_valid = replay_start ? max(replay_start[request], 0) : 0;
                int64 before = min(max(seq_lens[request] - query_len - first_valid, int64(0)), int64(window_size - 1));
                gather_len = max(min(int64(seq_lens[request]), query_len + before), int64(0));
            }
            prefill_gather_lens[prefill] = int(gather_len);
        }
        return;
    }
    int lane = threadIdx.x % 32;
    int token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= max(rows, rows_before)) return;
    bool valid = token < rows && slot_mapping[token] >= 0;
    bool real = token < num_tokens;
    int request = real ? find_request(query_start_loc, requests, token, lane) : 0;

    int64 position = -1;
    if (valid && real) position = max(int64(seq_lens[request]) - query_start_loc[request + 1] + token, int64(-1));
    int64 start = max(position - window_size + 1, int64(0));
    if (replay_start && position >= 0) start = max(start, int64(replay_start[request]));
    int length = int(max(position + 1 - start, int64(0)));
    if (noncausal && position >= 0 && token < num_decode_tokens) {  // the same for all tokens of a request
        int64 seq_len = seq_lens[request], query_len = int64(query_start_loc[request + 1]) - query_start_loc[request];
        start = max(seq_len - query_len - window_size, int64(0));
        length = int(min(seq_len - start, int64(swa_width)));
    }
    BlockTable table{block_table, table_stride, requests, table_columns};
    int* window = swa_indices + int64(token) * swa_width;
    for (int j = lane; j < swa_width; j += 32) window[j] = j < length ? lookup_slot(table, request, start + j, block_size) : -1;

    if (c128a_width) {
        int compressed = int(min((position + 1) / C128A_RATIO, int64(c128a_width)));
        BlockTable c128a_table{c128a_block_table, c128a_table_stride, requests, c128a_table_columns};
        int* row = c128a_indices + token * c128a_stride;
        for (int j = lane; j < max(c128a_width, width_before); j += 32) {
            int slot = -1;
            if (j < compressed && token < num_decode_tokens) slot = lookup_slot(c128a_table, request, j, c128a_block_size);
            else if (j < compressed) slot = j;
            row[j] = slot;
        }
        if (lane == 0) c128a_lens[token] = compressed;
    }
    if (lane == 0) {
        token_to_req_indices[token] = request;
        is_valid_token[token] = valid;
        positions[token] = int(min(position, int64(INT32_LIMIT)));
        swa_lens[token] = length;
    }
}
