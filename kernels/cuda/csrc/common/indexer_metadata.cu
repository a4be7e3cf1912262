// Metadata of a step for the indexer of DeepSeek V3.2 and V4 layers. Grid by kernel; block: 1,024 threads; shared memory: 8 KiB,
// static, for the schedule.
//
// build_indexer            one launch for all that the decode kernels need, and for a prefill chunk. CTA 0 schedules the
//                          splits, the next `element_blocks` take one element of each flat buffer per thread, the rest up
//                          to `decode_blocks` copy block tables, COLUMNS columns of an entry per warp. The last CTAs take
//                          the chunk.
// paged_mqa_logits_metadata  one CTA that schedules the splits only.
// compressed_slot_mapping  one token per thread.
// build_indexer_chunk      a prefill chunk alone: `splits` CTAs per request divide its rows and queries.
#include "common/device.cuh"
#include "common/pages.cuh"

constexpr int THREADS = 1024;  // one CTA schedules all splits
constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = 1024;
constexpr int SPLIT_PAGES = 4;  // pages in a split of the schedule

struct BatchRequests {
    const int* query_start_loc;
    const int* seq_lens;
    int count;
    int64 lens_stride = 1;

    // The request that a token belongs to: the last one that starts at or before it. -1 if there is none.
    __device__ int of(int token) const {
        if (count == 0 || token < query_start_loc[0] || token >= query_start_loc[count]) return -1;
        int low = 0, high = count;  // the answer is in [low, high)
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (query_start_loc[middle] <= token) low = middle;
            else high = middle;
        }
        return low;
    }

    // Number of positions up to and including a query token. The last query token is the last token of the sequence.
    __device__ int64 visible_to(int request, int token) const {
        return int64(seq_lens[request]) - query_start_loc[request + 1] + token + 1;
    }
};

// Number of complete rows of `positions` positions.
__device__ inline int rows_of(int64 positions, int compress_ratio) {
    return uint32(min(max(positions, int64(0)), int64(INT32_LIMIT))) / uint32(compress_ratio);
}

// The slot of the row that a token completes, or -1. Slots are 64-bit: page numbers may be large.
__device__ inline int64 compressed_slot(BatchRequests requests, BlockTable table, int token, int block_size, int compress_ratio) {
    int request = requests.of(token);
    if (request < 0 || request >= table.rows) return -1;
    int64 positions = requests.visible_to(request, token);
    int row = rows_of(positions, compress_ratio) - 1;
    bool whole = row >= 0 && int64(row + 1) * compress_ratio == positions;
    if (!whole || row / block_size >= table.columns) return -1;
    int block = table.entries[request * table.row_stride + row / block_size];
    return block >= 0 ? int64(block) * block_size + row % block_size : -1;
}

// Entries of the decode kernels: requests, or their tokens if flattened.
struct DecodeEntries {
    BatchRequests requests;
    int num_decodes, batch_size, lens_per_entry;
    bool flatten;
    int compress_ratio;

    __device__ int first_of(int request) const { return flatten ? min(max(requests.query_start_loc[request], 0), batch_size) : request; }

    // The request of an entry that is a token, or -1 for padding.
    __device__ int request_of(int entry) const {
        if (entry >= batch_size) return -1;
        int request = requests.of(entry);
        return request < num_decodes ? request : -1;
    }

    // Number of cache rows that an entry may see; the last draft token of a request sees all.
    __device__ int rows_seen(int request, int entry) const {
        return rows_of(flatten ? requests.visible_to(request, entry) : requests.seq_lens[request * requests.lens_stride], compress_ratio);
    }
};

// Assign the splits of all entries, `split_rows` rows each, to SMs: contiguous ranges of equal size, the first ones
// larger by one where they do not divide evenly. Each thread counts the splits of a run of requests; for each SM a
// thread then searches for the run in which its range starts.
__device__ inline void schedule_splits(DecodeEntries entries, int split_rows, int num_sms, int2* schedule) {
    __shared__ int64 splits_before[THREADS + 1];
    int run = (entries.num_decodes + THREADS - 1) / THREADS;
    auto splits_of = [&](int request, int entry) { return (int64(entries.rows_seen(request, entry)) + split_rows - 1) / split_rows; };

    int64 splits = 0;
    int last_request = min((int(threadIdx.x) + 1) * run, entries.num_decodes);
    for (int request = threadIdx.x * run; request < last_request; ++request)
        for (int entry = entries.first_of(request); entry < entries.first_of(request + 1); ++entry) splits += splits_of(request, entry);
    if (threadIdx.x == 0) splits_before[0] = 0;
    splits_before[threadIdx.x + 1] = splits;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        int64 left = threadIdx.x >= step ? splits_before[threadIdx.x + 1 - step] : 0;
        __syncthreads();
        splits_before[threadIdx.x + 1] += left;
        __syncthreads();
    }

    int64 total = splits_before[THREADS];
    for (int sm = threadIdx.x; sm <= num_sms; sm += THREADS) {
        int64 start = sm * (total / num_sms) + min(int64(sm), total % num_sms);
        int owner = 0;  // the last run with at most `start` splits before it
        for (int step = THREADS / 2; step; step /= 2)
            if (splits_before[owner + step] <= start) owner += step;
        int64 split = start - splits_before[owner];
        int2 found = make_int2(entries.batch_size, 0);
        int last_request = min((owner + 1) * run, entries.num_decodes);
        for (int request = owner * run; request < last_request && found.x == entries.batch_size; ++request) {
            for (int entry = entries.first_of(request); entry < entries.first_of(request + 1); ++entry) {
                int64 here = splits_of(request, entry);
                if (split < here) {
                    found = make_int2(entry, int(split));
                    break;
                }
                split -= here;
            }
        }
        schedule[sm] = found;
    }
}

// Requests of a prefill chunk and the buffers filled for them, by `splits` CTAs each.
struct Chunk {
    int* cu_seqlen_ks;
    int* cu_seqlen_ke;
    int* cu_seq_lens;
    int* token_to_seq;
    int first_request, num_reqs, splits, num_tokens, total_rows, unused;
};

// Body of CTA `block` of a chunk.
__device__ inline void build_chunk(const int* query_start_loc, const int* seq_lens, int compress_ratio, Chunk chunk, int block) {
    query_start_loc += chunk.first_request, seq_lens += chunk.first_request;
    // Where the request's rows start: after those of the chunk's earlier requests.
    __shared__ uint32 rows_before;
    if (threadIdx.x == 0) rows_before = 0;
    __syncthreads();
    int request = block / chunk.splits;
    uint32 rows = 0;
    for (int earlier = threadIdx.x; earlier < request; earlier += THREADS) rows += rows_of(seq_lens[earlier], compress_ratio);
    if (rows) atomicAdd(&rows_before, rows);
    __syncthreads();
    int row_start = int(min(rows_before, uint32(chunk.total_rows)));
    int row_end = int(min(int64(row_start) + rows_of(seq_lens[request], compress_ratio), int64(chunk.total_rows)));

    int thread = block % chunk.splits * THREADS + threadIdx.x, threads = chunk.splits * THREADS;
    for (int row = row_start + thread; row < row_end; row += threads) chunk.token_to_seq[row] = request;
    int origin = query_start_loc[0];
    int first = max(query_start_loc[request] - origin, 0);
    int last = min(query_start_loc[request + 1] - origin, chunk.num_tokens);
    BatchRequests requests{query_start_loc, seq_lens, chunk.num_reqs};
    for (int token = first + thread; token < last; token += threads) {
        chunk.cu_seqlen_ks[token] = row_start;
        chunk.cu_seqlen_ke[token] = row_start + rows_of(requests.visible_to(request, token + origin), compress_ratio);
    }
    if (thread == 0) {
        if (request == 0) chunk.cu_seq_lens[0] = 0;
        chunk.cu_seq_lens[request + 1] = row_end;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    build_indexer(const int* query_start_loc, const int* seq_lens, int num_reqs, const int* block_table, int64 table_stride,
                  int table_columns, int num_decodes, int batch_size, int flatten, int lens_per_entry, int columns, int entries_before,
                  int columns_before, int block_size, int compress_ratio, int decode_len_of_longest, int maps_slots, int* decode_lens,
                  int* out_seq_lens, int capacity, int64* slot_mapping, int* out_block_table, int64 out_table_stride, int* schedule,
                  int num_sms, int element_blocks, int decode_blocks, Chunk chunk) {
    pdl_wait();
    if (blockIdx.x >= decode_blocks) return build_chunk(query_start_loc, seq_lens, compress_ratio, chunk, blockIdx.x - decode_blocks);
    BatchRequests requests{query_start_loc, seq_lens, num_reqs};
    DecodeEntries entries{requests, num_decodes, batch_size, lens_per_entry, flatten != 0, compress_ratio};
    if (blockIdx.x == 0) {
        schedule_splits(entries, SPLIT_PAGES * block_size, num_sms, reinterpret_cast<int2*>(schedule));
        return;
    }
    if (blockIdx.x <= element_blocks) {
        int i = (blockIdx.x - 1) * THREADS + threadIdx.x;
        if (i >= capacity) return;
        int decode_len = 0, rows = 0;
        if (flatten) {
            int request = entries.request_of(i);
            decode_len = i < batch_size;
            if (request >= 0) rows = entries.rows_seen(request, i);
        } else {
            int entry = i / lens_per_entry, later = max(decode_len_of_longest - 1 - i % lens_per_entry, 0);
            if (i < batch_size) decode_len = query_start_loc[i + 1] - query_start_loc[i];
            if (entry < batch_size) rows = rows_of(int64(seq_lens[entry]) - later, compress_ratio);
        }
        decode_lens[i] = decode_len;
        out_seq_lens[i] = rows;
        if (maps_slots) {
            BlockTable table{block_table, table_stride, num_reqs, table_columns};
            slot_mapping[i] = compressed_slot(requests, table, i, block_size, compress_ratio);
        }
        return;
    }
    int copied = flatten ? batch_size : 0, width = max(columns, columns_before);
    int splits = (width + COLUMNS - 1) / COLUMNS;
    int part = blockIdx.x - 1 - element_blocks;
    int entry = part / splits * WARPS + threadIdx.x / 32;
    if (entry >= max(copied, entries_before)) return;
    int request = entry < copied ? entries.request_of(entry) : -1;
    int* row = out_block_table + entry * out_table_stride;
    int start = part % splits * COLUMNS, end = min(start + COLUMNS, width);
    for (int column = start + threadIdx.x % 32; column < end; column += 32)
        row[column] = request >= 0 && column < columns ? block_table[request * table_stride + column] : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    compressed_slot_mapping(const int* query_start_loc, const int* seq_lens, int num_reqs, const int* block_table, int64 table_stride,
                            int table_columns, int num_tokens, int block_size, int compress_ratio, int64* slot_mapping, int64 num_slots) {
    pdl_wait();
    int64 i = int64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= num_slots) return;
    BlockTable table{block_table, table_stride, num_reqs, table_columns};
    BatchRequests requests{query_start_loc, seq_lens, num_reqs};
    slot_mapping[i] = i < num_tokens ? compressed_slot(requests, table, int(i), block_size, compress_ratio) : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    build_indexer_chunk(const int* query_start_loc, const int* seq_lens, int compress_ratio, Chunk chunk) {
    pdl_wait();
    build_chunk(query_start_loc, seq_lens, compress_ratio, chunk, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_mqa_logits_metadata(const int* lens, int64 lens_stride, int count, int split_rows, int* schedule, int num_sms) {
    pdl_wait();
    BatchRequests requests{nullptr, lens, count, lens_stride};
    schedule_splits(DecodeEntries{requests, count, count, 1, false, 1}, split_rows, num_sms, reinterpret_cast<int2*>(schedule));
}
