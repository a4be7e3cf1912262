// Index maps: from positions and local top-k entries to cache slots.
//
// One thread block a token. Rows are handled four entries at a time where they are aligned (16-byte loads
// and stores), so a row of 512 entries is one step of 128 threads.
//
// Macros: ALIGNED (rows start at multiples of 16 bytes and their widths are multiples of 4).
#include "pages.cuh"

constexpr int WIDTH = ALIGNED ? 4 : 1;  // entries a thread handles at a time

struct Entries {
    int at[WIDTH];
};

__device__ inline Entries load_entries(const int* p) {
    Entries x;
#if ALIGNED
    int4 four = *reinterpret_cast<const int4*>(p);
    x.at[0] = four.x, x.at[1] = four.y, x.at[2] = four.z, x.at[3] = four.w;
#else
    x.at[0] = *p;
#endif
    return x;
}

__device__ inline void store_entries(int* p, Entries x) {
#if ALIGNED
    *reinterpret_cast<int4*>(p) = make_int4(x.at[0], x.at[1], x.at[2], x.at[3]);
#else
    *p = x.at[0];
#endif
}

struct Requests {
    const int* query_start_loc;
    const int* seq_lens;
    int count;

    // Position of a query token in its sequence; the last query token is the sequence's last.
    __device__ int64 position(int request, int64 token) const {
        return int64(seq_lens[request]) - query_start_loc[request + 1] + token;
    }
};

// The slot in a numbering where pages are `span` tokens apart instead of `block_size`.
__device__ inline int to_span(int slot, int block_size, int span) {
    if (slot < 0) return -1;
    if (span == block_size) return slot;
    int64 moved = int64(slot / block_size) * span + slot % block_size;
    return moved <= INT32_LIMIT ? int(moved) : -1;
}

// How many threads of the block have `found` set, added up over the calls; every thread gets the sum.
__device__ inline int block_sum(int value) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
#pragma unroll
    for (int lane = 16; lane; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    if (threadIdx.x % 32 == 0 && value) atomicAdd(&total, value);
    __syncthreads();
    return total;
}

extern "C" __global__ void __launch_bounds__(128)
compute_swa_indices_and_lens(const int* query_start_loc, const int* seq_lens, int requests,
                             const int* token_to_req_indices, const bool* is_valid_token, const int* block_table,
                             int64 table_stride, int table_rows, int table_columns, int block_size, int window_size,
                             int token_offset, int* swa_indices, int64 indices_stride, int* swa_lens) {
    int token = blockIdx.x + token_offset;
    int request = token_to_req_indices[token];
    int64 start = 0;
    int length = 0;
    if (is_valid_token[token] && request >= 0 && request < requests) {
        int64 position = Requests{query_start_loc, seq_lens, requests}.position(request, token);
        start = max(position - window_size + 1, int64(0));
        length = int(max(position + 1 - start, int64(0)));
    }
    BlockTable table{block_table, table_stride, table_rows, table_columns};
    int* row = swa_indices + blockIdx.x * indices_stride;
    for (int j = threadIdx.x * WIDTH; j < window_size; j += blockDim.x * WIDTH) {
        Entries slots;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            slots.at[i] = j + i < length ? lookup_slot(table, request, start + j + i, block_size) : -1;
        store_entries(row + j, slots);
    }
    if (threadIdx.x == 0) swa_lens[blockIdx.x] = length;
}

extern "C" __global__ void __launch_bounds__(128)
compute_global_topk_indices_and_lens(const int* topk_indices, int64 topk_stride, int topk,
                                     const int* token_to_req_indices, const int* block_table, int64 table_stride,
                                     int table_rows, int table_columns, int block_size, const bool* is_valid_token,
                                     int* global_topk_indices, int64 global_stride, int* topk_lens) {
    int token = blockIdx.x;
    BlockTable table{block_table, table_stride, table_rows, table_columns};
    int request = token_to_req_indices[token];
    const int* local = topk_indices + token * topk_stride;
    int* row = global_topk_indices + token * global_stride;
    int found = 0;
    for (int j = threadIdx.x * WIDTH; j < topk; j += blockDim.x * WIDTH) {
        Entries entries = load_entries(local + j);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            entries.at[i] = lookup_slot(table, request, entries.at[i], block_size);
            found += entries.at[i] >= 0;
        }
        store_entries(row + j, entries);
    }
    int total = block_sum(found);
    if (threadIdx.x == 0) topk_lens[token] = is_valid_token[token] ? total : 0;
}

// The same with what is present moved to the left of each row, in order. One warp a token.
extern "C" __global__ void __launch_bounds__(32)
compute_compact_topk_indices_and_lens(const int* topk_indices, int64 topk_stride, int topk,
                                      const int* token_to_req_indices, const int* block_table, int64 table_stride,
                                      int table_rows, int table_columns, int block_size, const bool* is_valid_token,
                                      int* global_topk_indices, int64 global_stride, int* topk_lens) {
    int token = blockIdx.x;
    BlockTable table{block_table, table_stride, table_rows, table_columns};
    int request = token_to_req_indices[token];
    const int* local = topk_indices + token * topk_stride;
    int* row = global_topk_indices + token * global_stride;
    int kept = 0;
    for (int j = 0; j < topk; j += 32) {
        int entry = j + int(threadIdx.x);
        int slot = entry < topk ? lookup_slot(table, request, local[entry], block_size) : -1;
        uint32 present = __ballot_sync(~0u, slot >= 0);
        if (slot >= 0) row[kept + __popc(present & (1u << threadIdx.x) - 1)] = slot;
        kept += __popc(present);
    }
    for (int j = kept + threadIdx.x; j < topk; j += 32) row[j] = -1;
    if (threadIdx.x == 0) topk_lens[token] = is_valid_token[token] ? kept : 0;
}

extern "C" __global__ void __launch_bounds__(128)
combine_topk_swa_indices(const int* topk_indices, int64 topk_stride, const int* query_start_loc, const int* seq_lens,
                         int requests, const int* gather_lens, int window_size, int compress_ratio, int topk,
                         int row_stride, int swa_start, int* combined_indices, int64 combined_stride, int width,
                         int* combined_lens) {
    int token = blockIdx.x;
    int64 query = int64(token) + query_start_loc[0];
    // The token's request: how many of query_start_loc[1:] are at most `query`.
    int passed = 0;
    for (int r = threadIdx.x; r < requests; r += blockDim.x) passed += query_start_loc[r + 1] <= query;
    int request = block_sum(passed);

    int num_topk = 0, num_swa = 0;
    int64 base = int64(row_stride) * request, first_gathered = 0;
    if (request < requests) {
        int64 position = Requests{query_start_loc, seq_lens, requests}.position(request, query);
        if (position >= 0) {
            num_topk = int(min((position + 1) / compress_ratio, int64(topk)));
            num_swa = int(min(position + 1, int64(window_size)));
            first_gathered = position - num_swa + 1 - (int64(seq_lens[request]) - gather_lens[request]);
        }
    }
    const int* local = topk_indices + token * topk_stride;
    int* row = combined_indices + token * combined_stride;
    for (int j = threadIdx.x * WIDTH; j < width; j += blockDim.x * WIDTH) {
        Entries entries;
        bool whole = j + WIDTH <= num_topk;
        if (whole) entries = load_entries(local + j);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            int64 entry = -1;
            if (j + i < num_topk) {
                int index = whole ? entries.at[i] : local[j + i];
                if (index >= 0 && index < swa_start) entry = base + index;
            } else if (j + i < num_topk + num_swa) {
                int64 gathered = first_gathered + (j + i - num_topk);
                if (gathered >= 0 && swa_start + gathered < row_stride) entry = base + swa_start + gathered;
            }
            entries.at[i] = int(entry);
        }
        store_entries(row + j, entries);
    }
    if (threadIdx.x == 0) combined_lens[token] = num_topk + num_swa;
}

extern "C" __global__ void __launch_bounds__(128)
build_flashinfer_mixed_sparse_indices(
    const int* decode_swa_indices, int64 decode_swa_stride, int num_decode_tokens,
    const int* decode_compressed_indices, int64 decode_compressed_stride, int decode_topk,
    const int* decode_compressed_topk_lens, const int* prefill_topk_indices, int64 prefill_topk_stride,
    const int* query_start_loc, const int* seq_lens, int requests, const int* token_to_req_indices,
    const int* swa_block_table, int64 swa_table_stride, int swa_table_rows, int swa_table_columns, int swa_block_size,
    const int* compressed_block_table, int64 compressed_table_stride, int compressed_table_rows,
    int compressed_table_columns, int compressed_block_size, int window_size, int compress_ratio, int topk,
    int decode_indices_are_local, const bool* decode_is_valid_token, int swa_block_span, int compressed_block_span,
    int* sparse_indices, int64 sparse_stride, int width, int* sparse_topk_lens) {
    int token = blockIdx.x;
    int request = token_to_req_indices[token];
    BlockTable swa_table{swa_block_table, swa_table_stride, swa_table_rows, swa_table_columns};
    BlockTable compressed_table{compressed_block_table, compressed_table_stride, compressed_table_rows,
                                compressed_table_columns};
    bool decode = token < num_decode_tokens;
    bool has_request = request >= 0 && request < requests;
    int64 position = has_request ? Requests{query_start_loc, seq_lens, requests}.position(request, token) : -1;
    int64 start = max(position - window_size + 1, int64(0));
    int num_compressed = decode ? decode_topk
                         : compressed_block_table && position >= 0 ? int(min((position + 1) / compress_ratio, int64(topk)))
                                                                   : 0;
    const int* decode_swa = decode_swa_indices + token * decode_swa_stride;
    const int* compressed = decode ? decode_compressed_indices + token * decode_compressed_stride
                                   : prefill_topk_indices + (token - num_decode_tokens) * prefill_topk_stride;
    bool map_compressed = !decode || decode_indices_are_local;

    int* row = sparse_indices + token * sparse_stride;
    int found = 0;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        int slot = -1;
        if (j < window_size) {
            if (decode) slot = decode_swa[j];
            else if (start + j <= position) slot = lookup_slot(swa_table, request, start + j, swa_block_size);
            slot = to_span(slot, swa_block_size, swa_block_span);
        } else if (j - window_size < num_compressed) {
            slot = compressed[j - window_size];
            if (map_compressed) slot = lookup_slot(compressed_table, request, slot, compressed_block_size);
            found += slot >= 0;
            slot = to_span(slot, compressed_block_size, compressed_block_span);
        }
        row[j] = slot;
    }
    int total = block_sum(found);
    if (threadIdx.x) return;
    int used = num_compressed;
    if (decode && decode_indices_are_local) {
        used = decode_is_valid_token == nullptr || decode_is_valid_token[token] ? total : 0;
    } else if (decode && decode_compressed_topk_lens) {
        used = min(max(decode_compressed_topk_lens[token], 0), decode_topk);
    }
    sparse_topk_lens[token] = window_size + used;
}
