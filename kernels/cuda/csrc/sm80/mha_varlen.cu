// Attention of packed sequences with a K and V for each head, with mma.sync (sm_80 and later).
//
// Grid: (tiles of 64 queries, heads); x has one spare tile per sequence.
// Block: 128 threads, 16 queries per warp. Keys 64 at a time: K is loaded during the softmax and the second product of the
// previous block, V during the first product.
// Shared memory: 64 rows of each of Q, K and V, padded by 16 bytes; dynamic.
// Limits: QK_DIM, ROPE_DIM and V_DIM are multiples of 16.
//
// Macros: VALUE (bf16 or f16), OUTPUT (VALUE or float), QK_DIM, ROPE_DIM (values of K that all heads share; 0: none), V_DIM,
// CAUSAL, ALIGNED (whether all rows start at a multiple of 16 bytes), ACCUMULATE (whether `out`, of float, and `lse` hold
// attention over earlier keys, to which these are added).
#include "sm80/operands.cuh"
#include "common/packed.cuh"

constexpr int QUERIES = 64, KEYS = 64, THREADS = 128;
constexpr int NOPE_DIM = QK_DIM - ROPE_DIM;
constexpr int QK_STRIDE = row_stride(QK_DIM), V_STRIDE = row_stride(V_DIM);
[[maybe_unused]] constexpr int SHARED_BYTES = QUERIES * QK_STRIDE + KEYS * (QK_STRIDE + V_STRIDE);

// Copies `count` of 64 rows of DIM values to rows of `stride` bytes; the other rows become zeros.
template <int DIM>
__device__ inline void load_rows(uint8* target, int stride, const VALUE* source, int64 source_stride, int count) {
    constexpr int CHUNKS = DIM / 8;
    for (int i = threadIdx.x; i < 64 * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool present = row < count;
        const VALUE* from = source + (present ? row * source_stride + 8 * chunk : 0);
        uint8* to = target + row * stride + 16 * chunk;
#if ALIGNED
        copy_async<16>(to, from, present);
#else
        uint32 words[4] = {};
        for (int j = 0; j < 8 && present; ++j) words[j / 2] |= uint32(from[j].bits) << 16 * (j % 2);
        *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mha_varlen(const VALUE* q, int64 q_stride_t, int64 q_stride_h, const VALUE* k, int64 k_stride_t, int64 k_stride_h, const VALUE* k_pe,
               int64 k_pe_stride_t, const VALUE* v, int64 v_stride_t, int64 v_stride_h, const int* cu_seqlens_q, const int* cu_seqlens_k,
               int sequences, int num_queries, int num_keys, float scale_log2, OUTPUT* out, int64 out_stride_t, int64 out_stride_h,
               float* lse, int64 lse_stride_h, int64 lse_stride_t) {
    extern __shared__ uint4 memory[];
    PackedTile tile = find_tile<QUERIES>(cu_seqlens_q, cu_seqlens_k, sequences, num_queries, num_keys, blockIdx.x);
    if (!tile.queries) return;
    int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8* q_at = reinterpret_cast<uint8*>(memory);
    uint8 *k_at = q_at + QUERIES * QK_STRIDE, *v_at = k_at + KEYS * QK_STRIDE;
    int keys = tile.keys;
    if (CAUSAL) keys = min(keys, max(tile.last_key + tile.queries, 0));
    int blocks = (keys + KEYS - 1) / KEYS;
    if (ACCUMULATE && !blocks) return;

    auto load_k = [&](int block) {
        int64 first = tile.first_key + block * KEYS;
        int count = tile.keys - block * KEYS;
        load_rows<NOPE_DIM>(k_at, QK_STRIDE, k + first * k_stride_t + head * k_stride_h, k_stride_t, count);
        if constexpr (ROPE_DIM > 0) load_rows<ROPE_DIM>(k_at + 2 * NOPE_DIM, QK_STRIDE, k_pe + first * k_pe_stride_t, k_pe_stride_t, count);
    };
    if (blocks) {
        load_rows<QK_DIM>(q_at, QK_STRIDE, q + int64(tile.first_query) * q_stride_t + head * q_stride_h, q_stride_t, tile.queries);
        load_k(0);
        copies_commit();
    }

    float sums[V_DIM / 8][4] = {}, top[2] = {-infinity(), -infinity()}, total[2] = {};
    int row = 16 * warp + lane / 4;  // and row + 8
#if ACCUMULATE
    begin_onto<V_DIM>(tile, row, out + head * out_stride_h, out_stride_t, lse + head * lse_stride_h, lse_stride_t, top, total,
                      [&](int half, int n, float2 pair) { sums[n][2 * half] = pair.x, sums[n][2 * half + 1] = pair.y; });
#endif
    for (int block = 0; block < blocks; ++block) {
        copies_wait<0>();
        __syncthreads();
        int64 first = tile.first_key + block * KEYS;
        load_rows<V_DIM>(v_at, V_STRIDE, v + first * v_stride_t + head * v_stride_h, v_stride_t, tile.keys - block * KEYS);
        copies_commit();

        float scores[KEYS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < QK_DIM / 16; ++step) {
            uint32 a[4], b[4];
            load_matrices(a, a_row(q_at, QK_STRIDE, 16 * warp, 16 * step));
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                load_matrices(b, b_row(k_at, QK_STRIDE, 16 * n, 16 * step));
                multiply_add(VALUE{}, scores[2 * n], a, b[0], b[1]);
                multiply_add(VALUE{}, scores[2 * n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
        if (block + 1 < blocks) {
            load_k(block + 1);
            copies_commit();
        }

        int first_column = block * KEYS + 2 * (lane % 4);
        bool masked = (block + 1) * KEYS > tile.keys || (CAUSAL && (block + 1) * KEYS - 1 > tile.last_key);
        if (masked) {
#pragma unroll
            for (int i = 0; i < KEYS / 8 * 4; ++i) {
                int column = first_column + i / 4 * 8 + i % 2;
                bool seen = column < tile.keys && (!CAUSAL || column <= tile.last_key + row + i % 4 / 2 * 8);
                if (!seen) scores[i / 4][i % 4] = -infinity();
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float new_top = -infinity();
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) new_top = fmaxf(new_top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            new_top = quad_max(new_top);
            new_top = fmaxf(top[half], new_top * scale_log2);
            float base = new_top == -infinity() ? 0.0f : new_top, rescale = exp2_approx(top[half] - base);
            top[half] = new_top;
            total[half] *= rescale;
            float scale = scale_log2;
            if (__any_sync(~0u, fabsf(base) >= LARGE_LOGIT)) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i) scores[n][i] = mul(scores[n][i], scale) - base;
                scale = 1.0f, base = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_approx(fmaf(scores[n][i], scale, -base));
                    total[half] += scores[n][i];
                }
#pragma unroll
            for (int n = 0; n < V_DIM / 8; ++n) sums[n][2 * half] *= rescale, sums[n][2 * half + 1] *= rescale;
        }

        if (block + 1 < blocks) copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            uint32 a[4] = {pack(VALUE{}, scores[2 * step][0], scores[2 * step][1]), pack(VALUE{}, scores[2 * step][2], scores[2 * step][3]),
                           pack(VALUE{}, scores[2 * step + 1][0], scores[2 * step + 1][1]),
                           pack(VALUE{}, scores[2 * step + 1][2], scores[2 * step + 1][3])};
            uint32 b[4];
#pragma unroll
            for (int n = 0; n < V_DIM / 16; ++n) {
                load_transposed(b, a_row(v_at, V_STRIDE, 16 * step, 16 * n));
                multiply_add(VALUE{}, sums[2 * n], a, b[0], b[1]);
                multiply_add(VALUE{}, sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] = quad_sum(total[half]);
        if (row + 8 * half >= tile.queries) continue;
        int64 query = tile.first_query + row + 8 * half;
        bool empty = top[half] == -infinity() && total[half] == 0.0f;  // a row of NaN is not empty
        float inv_sum = empty ? 0.0f : 1.0f / total[half];
        OUTPUT* to = out + query * out_stride_t + head * out_stride_h + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < V_DIM / 8; ++n) store_pair(to + 8 * n, sums[n][2 * half] * inv_sum, sums[n][2 * half + 1] * inv_sum);
        if (lane % 4 == 0) lse[head * lse_stride_h + query * lse_stride_t] = empty ? infinity() : (top[half] + log2f(total[half])) * LN_2;
    }
}
