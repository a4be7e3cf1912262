// The rows of a gathered prefill workspace that a token attends to: first its top-k, then its window. A warp per token.
//
// Macro: WIDE_ENTRIES (index_rows.cuh).
#pragma once
#include "common/index_rows.cuh"

struct CombinedRows {
    const int* topk_indices;
    int64 topk_stride;
    const int* query_start_loc;
    const int* seq_lens;
    const int* gather_lens;
    int* combined_indices;
    int64 combined_stride;
    int* combined_lens;
    int num_tokens;
    int requests;
    int window_size;
    int compress_ratio;
    int topk;
    int row_stride;  // rows of a request
    int swa_start;   // the first row of the window
    int width;
};

// A token's request, and the rows of its window.
struct Gathered {
    int base = 0;         // first row of the request
    uint32 complete = 0;  // compressed rows that the token sees
    int num_swa = 0;      // entries of the window; those from `swa_first` to `swa_end` are in the workspace
    int swa_first = 0, swa_end = 0;
    int swa_base = 0;  // row of the window's first entry

    __device__ Gathered(const CombinedRows& x, int token) {
        QueryPositions batch{x.query_start_loc, x.seq_lens, x.requests};
        int64 query = int64(token) + batch.query_start_loc[0];
        // Number of entries of query_start_loc[1:] that are at most `query`.
        int request = 0;
        for (int r = lane_id(); r - lane_id() < batch.count; r += 32)
            request += __popc(__ballot_sync(~0u, r < batch.count && batch.query_start_loc[r + 1] <= query));
        if (request >= batch.count) return;
        int64 position = batch.position(request, query);
        if (position < 0) return;
        base = x.row_stride * request;
        complete = complete_rows(position, x.compress_ratio);
        num_swa = int(min(position + 1, int64(x.window_size)));
        int64 gathered = position - num_swa + 1 - (int64(batch.seq_lens[request]) - x.gather_lens[request]);
        swa_first = int(min(max(-gathered, int64(0)), int64(num_swa)));
        swa_end = int(min(max(x.row_stride - x.swa_start - gathered, int64(0)), int64(num_swa)));
        swa_base = int(base + x.swa_start + gathered);
    }

    // The row of entry `rank` of the window, or -1.
    __device__ int window_row(int rank) const { return rank >= swa_first && rank < swa_end ? swa_base + rank : -1; }
};

// Write the first num_topk entries of a row, of which the lane has loaded its first entries, and its window.
__device__ inline void write_combined(const CombinedRows& x, int token, const Gathered& rows, int num_topk,
                                      LoadedIndices (&entries)[STEPS]) {
    const int* local = x.topk_indices + token * x.topk_stride;
    int* row = x.combined_indices + token * x.combined_stride;
    int first = lane_id() * WIDTH;
    while (first < x.width) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            int j = first + step * STEP;
            if (j >= x.width) break;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                int rank = j + i - num_topk, entry = rows.window_row(rank);
                if (rank < 0 && uint32(entries[step].at[i]) < uint32(x.swa_start)) entry = rows.base + entries[step].at[i];
                entries[step].at[i] = entry;
            }
            store_entries(row + j, entries[step]);
        }
        first += STEPS * STEP;
        load_steps(entries, local, first, num_topk);
    }
    if (lane_id() == 0) x.combined_lens[token] = num_topk + rows.num_swa;
}

__device__ inline void combine(const CombinedRows& x, int token) {
    LoadedIndices entries[STEPS];
    // Loaded before the number of valid entries is known.
    load_steps(entries, x.topk_indices + token * x.topk_stride, lane_id() * WIDTH, x.topk);
    Gathered rows(x, token);
    write_combined(x, token, rows, int(min(rows.complete, uint32(x.topk))), entries);
}

// The same with the present entries of any columns, in order. Usually they are the first entries of the row, and are
// written as above.
__device__ inline void combine_compact(const CombinedRows& x, int token) {
    const int* local = x.topk_indices + token * x.topk_stride;
    int* row = x.combined_indices + token * x.combined_stride;
    LoadedIndices entries[STEPS];
    load_steps(entries, local, lane_id() * WIDTH, x.topk);
    Gathered rows(x, token);
    const uint32 seen = min(rows.complete, uint32(x.swa_start));
    if (x.topk <= STEPS * STEP) {
        int present = 0, last = 0;  // number of present entries, and one past the last one
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                int j = lane_id() * WIDTH + step * STEP + i;
                if (j < x.topk && uint32(entries[step].at[i]) < seen) ++present, last = j + 1;
            }
        present = __reduce_add_sync(~0u, present), last = __reduce_max_sync(~0u, last);
        if (present == last) {
            write_combined(x, token, rows, present, entries);
            return;
        }
    }
    int written = 0;
    for (int j = 0; j < x.topk; j += 32) {
        int entry = j + lane_id() < x.topk ? local[j + lane_id()] : -1;
        uint32 present = __ballot_sync(~0u, uint32(entry) < seen);
        if (uint32(entry) < seen) row[written + __popc(present & (1u << lane_id()) - 1)] = rows.base + entry;
        written += __popc(present);
    }
    for (int j = written + lane_id(); j < x.width; j += 32) row[j] = rows.window_row(j - written);
    if (lane_id() == 0) x.combined_lens[token] = written + rows.num_swa;
}
