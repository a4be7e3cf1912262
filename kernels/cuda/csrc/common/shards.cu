// Lengths, block tables and slots of one rank, where tokens are sharded across ranks (kernels/types/shard.py).
//
// Grid of local_seq_lens, local_block_table and local_slot_mapping: an entry of the result per thread. Grid of
// localise_indices: a CTA per token, which compacts the rank's entries to the left. Block: 128 threads. Shared memory:
// only in localise_indices, counts per warp.
#include "common/device.cuh"
#include "common/pages.cuh"

constexpr int THREADS = 128;

// Positions and sizes are below 2^31: 32 bits suffice except for counts of rounds.
struct Shard {
    int rank, size, interleave;

    // Index of a position among the rank's tokens, or -1 if another rank has it.
    __device__ int position(int global) const {
        if (global < 0) return -1;
        uint32 turn = uint32(global) / uint32(interleave), round = turn / uint32(size);
        if (turn - round * uint32(size) != uint32(rank)) return -1;
        return int(round * uint32(interleave) + (uint32(global) - turn * uint32(interleave)));
    }

    // Number of the rank's tokens among the first `tokens`.
    __device__ int count(int tokens) const {
        if (tokens <= 0) return 0;
        int64 all = int64(size) * interleave, rounds = tokens / all;
        int64 rest = tokens - rounds * all - int64(rank) * interleave;
        return int(rounds * interleave + min(max(rest, int64(0)), int64(interleave)));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    local_seq_lens(const int* seq_lens, int s_q, int rank, int size, int interleave, int* out, int count) {
    pdl_wait();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    int request = i / s_q;
    int64 tokens = int64(seq_lens[request]) - (s_q - 1 - (i - request * s_q));
    out[i] = Shard{rank, size, interleave}.count(int(max(tokens, int64(0))));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    local_block_table(const int* block_table, int64 table_stride, int table_columns, int s_q, int first, int step, int* out,
                      int64 out_stride, int rows, int columns) {
    pdl_wait();
    int64 i = int64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= int64(rows) * columns) return;
    int row = int(i / columns), column = int(i % columns);
    int64 from = first + int64(column) * step;
    out[row * out_stride + column] = from < table_columns ? block_table[row / s_q * table_stride + from] : -1;
}

// The request that a token belongs to: the last one that starts at or before it. -1 if there is none.
__device__ inline int request_of(const int* query_start_loc, int requests, int token) {
    int low = 0, high = requests + 1;  // starts before `low` are at most `token`, those from `high` on are above it
    while (low < high) {
        int middle = (low + high) / 2;
        if (query_start_loc[middle] <= token) low = middle + 1;
        else high = middle;
    }
    return low <= requests ? low - 1 : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    local_slot_mapping(const int* query_start_loc, const int* seq_lens, int requests, const int* block_table, int64 table_stride,
                       int table_rows, int table_columns, int block_size, int compress_ratio, int rank, int size, int interleave,
                       int64* out, int count) {
    pdl_wait();
    int token = blockIdx.x * THREADS + threadIdx.x;
    if (token >= count) return;
    int64 slot = -1;
    int request = request_of(query_start_loc, requests, token);
    if (request >= 0) {
        int64 tokens = int64(seq_lens[request]) - query_start_loc[request + 1] + token + 1;
        if (tokens > 0 && tokens <= INT32_LIMIT && tokens % compress_ratio == 0) {
            int local = Shard{rank, size, interleave}.position(int(tokens) / compress_ratio - 1);
            slot = lookup_slot({block_table, table_stride, table_rows, table_columns}, request, local, block_size);
        }
    }
    out[token] = slot;
}

// Each warp takes a piece of every CHUNK entries and looks up all of it before it publishes the number of its entries:
// where they are written depends on the warps before it.
constexpr int ROUNDS = 4;  // of 32 entries in a piece
constexpr int CHUNK = THREADS * ROUNDS;

extern "C" __global__ void __launch_bounds__(THREADS)
    localise_indices(const int* indices, int64 indices_stride, int width, const int* token_to_req, const bool* is_valid_token,
                     const int* block_table, int64 table_stride, int table_rows, int table_columns, int block_size, int rank, int size,
                     int interleave, int* slots, int64 slots_stride, int* lens) {
    __shared__ int counts[2][THREADS / 32];  // double-buffered by chunk
    pdl_wait();
    int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Shard shard{rank, size, interleave};
    BlockTable table{block_table, table_stride, table_rows, table_columns};
    int request = token_to_req[token];
    const int* global = indices + token * indices_stride;
    int* row = slots + token * slots_stride;
    int written = 0;
    for (int chunk = 0; chunk * CHUNK < width; ++chunk) {
        int first = chunk * CHUNK + warp * 32 * ROUNDS + lane, found[ROUNDS], before[ROUNDS], count = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) found[i] = first + 32 * i < width ? global[first + 32 * i] : -1;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) found[i] = lookup_slot(table, request, shard.position(found[i]), block_size);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            uint32 present = __ballot_sync(~0u, found[i] >= 0);
            before[i] = count + __popc(present & (1u << lane) - 1);
            count += __popc(present);
        }
        if (lane == 0) counts[chunk % 2][warp] = count;
        __syncthreads();
        int to = written;
        for (int other = 0; other < THREADS / 32; ++other) {
            if (other < warp) to += counts[chunk % 2][other];
            written += counts[chunk % 2][other];
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            if (found[i] >= 0) row[to + before[i]] = found[i];
    }
    for (int j = written + threadIdx.x; j < width; j += THREADS) row[j] = -1;
    if (threadIdx.x == 0) lens[token] = is_valid_token == nullptr || is_valid_token[token] ? written : 0;
}
