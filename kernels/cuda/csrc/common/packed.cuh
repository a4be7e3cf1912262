// Packed sequences (queries and keys of all sequences are concatenated) and their tiles of queries.
#pragma once
#include "common/device.cuh"

[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct PackedTile {
    int first_query;  // in the packed rows
    int queries;      // of this tile; 0: no such tile
    int first_key, keys;
    int last_key;  // last key that the tile's first query sees under a causal mask, relative to first_key; may be < 0
};

__device__ inline int clamped(int x, int high) { return min(max(x, 0), high); }

// Tile `index` of the tiles of ROWS queries of all sequences. The tiles of a sequence are in descending order, because
// under a causal mask the last ones have the most keys. Every warp computes this for itself.
template <int ROWS>
__device__ inline PackedTile find_tile(const int* cu_seqlens_q, const int* cu_seqlens_k, int sequences, int num_queries, int num_keys,
                                       int index) {
    int lane = threadIdx.x % 32;
    for (int base = 0; base < sequences; base += 32) {
        int i = base + lane, first = 0, count = 0;
        if (i < sequences) {
            first = clamped(cu_seqlens_q[i], num_queries);
            count = max(clamped(cu_seqlens_q[i + 1], num_queries) - first, 0);
        }
        int tiles = (count + ROWS - 1) / ROWS, end = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(~0u, end, step);
            if (lane >= step) end += before;
        }
        uint32 later = __ballot_sync(~0u, end > index);
        if (!later) {
            index -= __shfl_sync(~0u, end, 31);
            continue;
        }
        int owner = __ffs(later) - 1;
        int tile = __shfl_sync(~0u, end, owner) - 1 - index;
        first = __shfl_sync(~0u, first, owner);
        count = __shfl_sync(~0u, count, owner);
        int first_key = clamped(cu_seqlens_k[base + owner], num_keys);
        int keys = max(clamped(cu_seqlens_k[base + owner + 1], num_keys) - first_key, 0);
        return {first + tile * ROWS, min(count - tile * ROWS, ROWS), first_key, keys, tile * ROWS + keys - count};
    }
    return {0, 0, 0, 0, 0};
}

// Two neighbouring values. ALIGNED: whether one access may read or write both.
__device__ inline float2 load_pair(const float* p) {
#if ALIGNED
    return *reinterpret_cast<const float2*>(p);
#else
    return {p[0], p[1]};
#endif
}
__device__ inline void store_pair(float* p, float x, float y) {
#if ALIGNED
    *reinterpret_cast<float2*>(p) = {x, y};
#else
    p[0] = x, p[1] = y;
#endif
}
template <class T> __device__ inline void store_pair(T* p, float x, float y) {
    uint32 pair = pack(T{}, x, y);
#if ALIGNED
    *reinterpret_cast<uint32*>(p) = pair;
#else
    p[0].bits = uint16(pair), p[1].bits = uint16(pair >> 16);
#endif
}

// Initialises a softmax with the attention over earlier keys, from `out` and `lse` of a head: the maximum is `lse`, and
// the total is 1 in one lane of each row. For rows `row` and `row` + 8, if they had keys, it calls put(half, n, ...) with
// the values 8 n + 2 (lane % 4) and 8 n + 2 (lane % 4) + 1.
template <int VALUES, class Put>
__device__ inline void begin_onto(const PackedTile& tile, int row, const float* out, int64 out_stride_t, const float* lse,
                                  int64 lse_stride_t, float (&top)[2], float (&total)[2], Put put) {
    int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= tile.queries) continue;
        int64 query = tile.first_query + row + 8 * half;
        float before = lse[query * lse_stride_t];
        if (before == infinity() || before == -infinity()) continue;
        top[half] = before * LOG2_E, total[half] = c == 0 ? 1.0f : 0.0f;
        const float* from = out + query * out_stride_t + 2 * c;
#pragma unroll
        for (int n = 0; n < VALUES / 8; ++n) put(half, n, load_pair(from + 8 * n));
    }
}
