// Indexer scores of prompts by tensor cores of any device: logits = scale * sum of weights * relu(q . k) over packed
// e4m3 keys. Neighbouring queries share the keys.
//
// Grid: (groups of QUERIES queries * parts of a group's keys), the last queries first, because under a causal mask they
// see the most keys. Block: 256 threads. A warp has a query, whose heads stay in registers. Keys 64 at a time, a
// *tile*: copied ahead by cp.async, expanded to float16 by the threads that copied them, and multiplied by all warps.
// Shared memory: SHARED_BYTES, dynamic: a ring of tiles as stored, and two expanded tiles.
//
// Macros: HEADS (64), QUERY (uint8), LAYOUT (INDEXER_FP8), ALIGNED (1).
#include "common/device.cuh"
#include "sm80/index_operands.cuh"
#include "sm80/operands.cuh"

constexpr int QUERIES = 8, THREADS = 32 * QUERIES, KEYS = 64, STAGES = 3;
constexpr int ROW_STRIDE = 2 * DIM + 16;           // of expanded rows
constexpr int CHUNKS = KEYS * DIM / 16 / THREADS;  // of 16 bytes, of a thread in a tile
[[maybe_unused]] constexpr int SHARED_BYTES = STAGES * KEYS * DIM + 2 * KEYS * ROW_STRIDE;

struct PromptShared {
    uint4 stored[STAGES][CHUNKS][THREADS];  // of each thread
    alignas(16) uint8 rows[2][KEYS][ROW_STRIDE];
};
static_assert(sizeof(PromptShared) == SHARED_BYTES);

// Sixteen e4m3 bytes as float16, in the order of the operands of a step: the first pair of each four, then the second
// pairs.
__device__ inline void expand(uint4 stored, uint4 (&to)[2]) {
    uint32 words[4] = {stored.x, stored.y, stored.z, stored.w}, low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32 nan = 0;
        e4m3_key_pairs(words[i], low[i], high[i], nan);
        if (nan) {
            float x[4];
            e4m3x2_to_float(words[i] & 0xffff, x[0], x[1]), e4m3x2_to_float(words[i] >> 16, x[2], x[3]);
            low[i] = pack(f16{}, x[0] / 256, x[2] / 256), high[i] = pack(f16{}, x[1] / 256, x[3] / 256);
        }
    }
    to[0] = uint4{low[0], low[1], low[2], low[3]}, to[1] = uint4{high[0], high[1], high[2], high[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_scores(const QUERY* q, int64 q_stride, int64 q_stride_h, const float* weights, int64 weights_stride, const int* starts,
                  const int* ends, int num_queries, int count, int compressed_width, const uint8* keys, int64 stride, const float* scales,
                  float* logits, int64 logits_stride, int parts) {
    extern __shared__ uint4 memory[];
    PromptShared& shared = *reinterpret_cast<PromptShared*>(memory);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int groups = (num_queries + QUERIES - 1) / QUERIES, group = groups - 1 - blockIdx.x / parts, part = blockIdx.x % parts;
    pdl_wait();
    // The keys, and the range that each query sees.
    auto range = [&](int query, int& first, int& end) {
        first = min(max(starts[query], 0), count), end = min(max(ends[query], first), count);
        if (compressed_width) end = int(min(int64(end), int64(first) + compressed_width));
    };
    int query = group * QUERIES + warp, first = 0, end = 0, least = count, most = 0;
    if (query < num_queries) range(query, first, end);
    for (int i = group * QUERIES; i < min(num_queries, (group + 1) * QUERIES); ++i) {
        int low, high;
        range(i, low, high);
        if (low < high) least = min(least, low), most = max(most, high);
    }
    int tiles = most > least ? (most - least + KEYS - 1) / KEYS : 0;
    int begin = int(int64(tiles) * part / parts), last = int(int64(tiles) * (part + 1) / parts);
    if (begin == last) return;
    float* row = logits + query * logits_stride - (compressed_width ? first : 0);

    auto copy = [&](int tile) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            int at = i * THREADS + threadIdx.x, key = least + tile * KEYS + at / (DIM / 16);
            bool here = tile < last && key < most;
            copy_async<16>(&shared.stored[tile % STAGES][i][threadIdx.x], keys + (here ? key : 0) * stride + at % (DIM / 16) * 16, here);
        }
        copies_commit();
    };
    for (int i = 0; i < STAGES - 1; ++i) copy(begin + i);
    Heads<STEPS> of_query;
    if (query < num_queries) of_query.read(q + query * q_stride, q_stride_h, weights + query * weights_stride, 0, HEADS);
    for (int tile = begin; tile < last; ++tile) {
        copies_wait<STAGES - 2>();
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            int at = i * THREADS + threadIdx.x;
            uint4 halves[2];
            expand(shared.stored[tile % STAGES][i][threadIdx.x], halves);
            uint4* to = reinterpret_cast<uint4*>(shared.rows[tile % 2][at / (DIM / 16)] + at % (DIM / 16) * 32);
            to[0] = halves[0], to[1] = halves[1];
        }
        copy(tile + STAGES - 1);
        __syncthreads();  // a warp is at most one tile ahead, where it expands to the other buffer
        int position = least + tile * KEYS;
        if (position >= end || position + KEYS <= first) continue;
#pragma unroll 1
        for (int block = 0; block < KEYS; block += 32) {
            int key = position + block + 8 * c + g;
            float scale = key >= first && key < end ? scales[key] : 0.0f, sums[4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x[HEADS / 8][4] = {};
                const uint8* rows = a_row(shared.rows[tile % 2][block + 16 * half], ROW_STRIDE, 0, 0);
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    uint32 a[4];
                    load_matrices(a, rows + 32 * step);
#pragma unroll
                    for (int n = 0; n < HEADS / 8; ++n) mma(Product{}, x[n], a, of_query.b[n][step]);
                }
#pragma unroll
                for (int n = 0; n < HEADS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums[2 * half + i / 2] = fmaf(positive(x[n][i]), of_query.weights[n][i % 2], sums[2 * half + i / 2]);
            }
            float score = sum_of_four(sums) * UNIT * scale;
            if (key >= first && key < end) row[key] = score;
        }
    }
}
