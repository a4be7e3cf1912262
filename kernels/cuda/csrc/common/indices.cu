// Index maps: from positions and local top-k entries to cache slots.
//
// Grid: a warp per token. Warps never wait for each other, and values of a row are computed once for many entries.
// Block: 64 threads. No shared memory. Aligned rows are handled four entries per lane at a time (16-byte loads and
// stores), with several loads in flight before the first is used.
//
// Macros: ALIGNED (rows start at multiples of 16 bytes; their widths, top-k and window are multiples of 4).
#define WIDE_ENTRIES ALIGNED
#include "common/combined_rows.cuh"
#include "common/device.cuh"

constexpr int AT_ONCE = 16;  // loads of a lane in flight where slots are compacted: each entry needs a lookup

extern "C" __global__ void __launch_bounds__(THREADS)
    compute_swa_indices_and_lens(int num_tokens, const int* query_start_loc, const int* seq_lens, int requests,
                                 const int* token_to_req_indices, const bool* is_valid_token, const int* block_table, int64 table_stride,
                                 int table_rows, int table_columns, int block_size, uint32 block_multiplier, int block_shift,
                                 int window_size, int token_offset, int* swa_indices, int64 indices_stride, int* swa_lens) {
    pdl_wait();
    if (warp_id() >= num_tokens) return;
    int token = warp_id() + token_offset;
    int request = token_to_req_indices[token];
    QueryPositions batch{query_start_loc, seq_lens, requests};
    int64 position = is_valid_token[token] && batch.has(request) ? batch.position(request, token) : -1;
    Window window(position, window_size);
    TableRow table({block_table, table_stride, table_rows, table_columns}, request, {block_size, block_multiplier, block_shift});
    int* row = swa_indices + warp_id() * indices_stride;
    for (int j = lane_id() * WIDTH; j < window_size; j += 32 * WIDTH)
        store_entries(row + j, table.slots(range(window.start, j, window.lookups)));
    if (lane_id() == 0) swa_lens[warp_id()] = window.length;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    compute_global_topk_indices_and_lens(int num_tokens, const int* topk_indices, int64 topk_stride, int topk,
                                         const int* token_to_req_indices, const int* block_table, int64 table_stride, int table_rows,
                                         int table_columns, int block_size, uint32 block_multiplier, int block_shift,
                                         const bool* is_valid_token, const int* positions, int compress_ratio, int* global_topk_indices,
                                         int64 global_stride, int* topk_lens) {
    pdl_wait();
    int token = warp_id();
    if (token >= num_tokens) return;
    bool valid = is_valid_token[token];
    TableRow table({block_table, table_stride, table_rows, table_columns}, token_to_req_indices[token],
                   {block_size, block_multiplier, block_shift});
    if (positions) table.see(complete_rows(positions[token], compress_ratio));
    const int* local = topk_indices + token * topk_stride;
    int* row = global_topk_indices + token * global_stride;
    int found = 0;
    for (int first = lane_id() * WIDTH; first < topk; first += STEPS * STEP) {
        LoadedIndices entries[STEPS];
        load_steps(entries, local, first, topk);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (first + step * STEP >= topk) break;
            LoadedIndices slots = table.slots(entries[step]);
            found += count_present(slots);
            store_entries(row + first + step * STEP, slots);
        }
    }
    found = warp_sum(found);
    if (lane_id() == 0) topk_lens[token] = valid ? found : 0;
}

// Entries as slots, the present ones compacted to the left of the row, in order; POOLED: an entry is `pool` positions, whose
// slots are written, and table.block_size counts such entries. Returns the number of slots. Called by a warp.
template <bool POOLED> __device__ inline int compact_slots(const int* local, int topk, TableRow table, int* row, int pool) {
    int written = 0;
    for (int first = 0; first < topk; first += 32 * AT_ONCE) {
        LoadedIndices entries[AT_ONCE];  // one per lane; all are loaded before the first is used
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int j = first + 32 * i + lane_id();
            entries[i].at[0] = j < topk ? local[j] : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) entries[i] = table.slots(entries[i]);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int slot = entries[i].at[0];
            if (POOLED && slot >= int((INT32_LIMIT + 1ll) / pool)) slot = -1;
            uint32 present = __ballot_sync(~0u, slot >= 0);
            int to = written + __popc(present & (1u << lane_id()) - 1);
            if (slot >= 0)
                for (int k = 0; k < (POOLED ? pool : 1); ++k) row[POOLED ? to * pool + k : to] = POOLED ? slot * pool + k : slot;
            written += __popc(present);
        }
    }
    return POOLED ? written * pool : written;
}

// ALIGNED is 0: a lane has one entry at a time.
extern "C" __global__ void __launch_bounds__(THREADS)
    compute_compact_topk_indices_and_lens(int num_tokens, const int* topk_indices, int64 topk_stride, int topk,
                                          const int* token_to_req_indices, const int* block_table, int64 table_stride, int table_rows,
                                          int table_columns, int block_size, uint32 block_multiplier, int block_shift,
                                          const bool* is_valid_token, const int* positions, int compress_ratio, int* global_topk_indices,
                                          int64 global_stride, int* topk_lens) {
    pdl_wait();
    int token = warp_id();
    if (token >= num_tokens) return;
    bool valid = is_valid_token[token];
    TableRow table({block_table, table_stride, table_rows, table_columns}, token_to_req_indices[token],
                   {block_size, block_multiplier, block_shift});
    if (positions) table.see(complete_rows(positions[token], compress_ratio));
    int* row = global_topk_indices + token * global_stride;
    int written = compact_slots<false>(topk_indices + token * topk_stride, topk, table, row, 1);
    for (int j = written + lane_id(); j < topk; j += 32) row[j] = -1;
    if (lane_id() == 0) topk_lens[token] = valid ? written : 0;
}

// Slots of the positions of pools, then of the open pool; rows of the table's blocks are pools.
extern "C" __global__ void __launch_bounds__(THREADS)
    compute_pooled_topk_indices_and_lens(int num_tokens, const int* topk_indices, int64 topk_stride, int topk,
                                         const int* token_to_req_indices, const int* block_table, int64 table_stride, int table_rows,
                                         int table_columns, int block_size, uint32 block_multiplier, int block_shift,
                                         const bool* is_valid_token, const int* positions, int compress_ratio, int* global_topk_indices,
                                         int64 global_stride, int* topk_lens, int pool) {
    pdl_wait();
    int token = warp_id();
    if (token >= num_tokens) return;
    bool valid = is_valid_token[token];
    TableRow table({block_table, table_stride, table_rows, table_columns}, token_to_req_indices[token],
                   {block_size, block_multiplier, block_shift});
    int seen = max(positions[token], -1) + 1, complete = seen / pool;
    LoadedIndices open;
    open.at[0] = complete;
    int open_slot = table.slots(open).at[0], tail = open_slot >= 0 && open_slot < (INT32_LIMIT + 1ll) / pool ? seen % pool : 0;
    table.see(complete);
    int* row = global_topk_indices + token * global_stride;
    int written = compact_slots<true>(topk_indices + token * topk_stride, topk, table, row, pool);
    for (int j = lane_id(); j < topk * pool + pool - 1 - written; j += 32) row[written + j] = j < tail ? open_slot * pool + j : -1;
    if (lane_id() == 0) topk_lens[token] = valid ? written + tail : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_topk_swa_indices(CombinedRows rows) {
    pdl_wait();
    if (warp_id() < rows.num_tokens) combine(rows, warp_id());
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_compact_topk_swa_indices(CombinedRows rows) {
    pdl_wait();
    if (warp_id() < rows.num_tokens) combine_compact(rows, warp_id());
}

extern "C" __global__ void __launch_bounds__(THREADS) build_flashinfer_mixed_sparse_indices(
    int num_tokens, const int* decode_swa_indices, int64 decode_swa_stride, int num_decode_tokens, const int* decode_compressed_indices,
    int64 decode_compressed_stride, int decode_topk, const int* decode_compressed_topk_lens, const int* prefill_topk_indices,
    int64 prefill_topk_stride, const int* query_start_loc, const int* seq_lens, int requests, const int* token_to_req_indices,
    const int* swa_block_table, int64 swa_table_stride, int swa_table_rows, int swa_table_columns, int swa_block_size,
    uint32 swa_block_multiplier, int swa_block_shift, const int* compressed_block_table, int64 compressed_table_stride,
    int compressed_table_rows, int compressed_table_columns, int compressed_block_size, uint32 compressed_block_multiplier,
    int compressed_block_shift, int window_size, int compress_ratio, int topk, int decode_indices_are_local,
    const bool* decode_is_valid_token, int swa_block_span, int compressed_block_span, int* sparse_indices, int64 sparse_stride, int width,
    int* sparse_topk_lens) {
    pdl_wait();
    int token = warp_id();
    if (token >= num_tokens) return;
    bool decode = token < num_decode_tokens;
    const int* window_slots = decode_swa_indices + token * decode_swa_stride;
    const int* compressed = decode ? decode_compressed_indices + token * decode_compressed_stride
                                   : prefill_topk_indices + (token - num_decode_tokens) * prefill_topk_stride;
    int num_compressed = decode ? decode_topk : compressed_block_table ? topk : 0;
    int num_columns = width - window_size;
    int first = lane_id() * WIDTH;
    LoadedIndices entries[STEPS];
    load_steps(entries, compressed, first, num_compressed);  // for prefill, before the number of valid entries is known
    LoadedIndices slots{};
    if (decode && first < window_size) slots = load_entries(window_slots + first);

    int request = token_to_req_indices[token];
    bool counted = decode && decode_indices_are_local;
    bool valid = !counted || decode_is_valid_token == nullptr || decode_is_valid_token[token];
    int given_length = decode && decode_compressed_topk_lens ? decode_compressed_topk_lens[token] : decode_topk;
    BlockSize swa_size{swa_block_size, swa_block_multiplier, swa_block_shift};
    BlockSize compressed_size{compressed_block_size, compressed_block_multiplier, compressed_block_shift};
    TableRow swa_table({swa_block_table, swa_table_stride, swa_table_rows, swa_table_columns}, request, swa_size);
    TableRow compressed_table({compressed_block_table, compressed_table_stride, compressed_table_rows, compressed_table_columns}, request,
                              compressed_size);
    int64 position = -1;
    if (!decode) {
        QueryPositions batch{query_start_loc, seq_lens, requests};
        if (batch.has(request)) position = batch.position(request, token);
        if (compressed_block_table) num_compressed = compressed_entries(position, compress_ratio, topk);
    }
    Window window(position, window_size);
    int* row = sparse_indices + token * sparse_stride;
    for (int j = first; j < window_size; j += STEP) {
        if (!decode) slots = swa_table.slots(range(window.start, j, window.lookups));
        store_entries(row + j, to_span(slots, swa_size, swa_block_span));
        if (decode && j + STEP < window_size) slots = load_entries(window_slots + j + STEP);
    }
    int found = 0;
    row += window_size;
    while (first < num_columns) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            int j = first + step * STEP;
            if (j >= num_columns) break;
            slots = entries[step];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (j + i >= num_compressed) slots.at[i] = -1;
            if (!decode || decode_indices_are_local) slots = compressed_table.slots(slots);
            found += count_present(slots);
            store_entries(row + j, to_span(slots, compressed_size, compressed_block_span));
        }
        first += STEPS * STEP;
        load_steps(entries, compressed, first, num_compressed);
    }
    found = warp_sum(found);
    int used = counted ? (valid ? found : 0) : decode ? min(max(given_length, 0), decode_topk) : num_compressed;
    if (lane_id() == 0) sparse_topk_lens[token] = window_size + used;
}
