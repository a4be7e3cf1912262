// Decode over a paged cache of dense MLA rows, with mma.sync (sm_80 and later).
//
// Grid: one CTA per split of 32 heads of a query token.
// Block: 256 threads. Keys 32 at a time: rows to shared memory, S = Q K^T (16 heads and 8 keys per warp), softmax (eight threads
// per head), O += P V (64 values of all heads per warp).
// Shared memory: 80 KiB, dynamic: Q, a block of keys, P, scores, and addresses of rows.
//
// FP8 rows are converted when loaded, which is exact; their scale multiplies the softmax
// scale and the result. With several splits, partial results go to common/dense_decode_merge.cu.
//
// Macros: VALUE (bf16 or f16), CACHE (VALUE or e4m3), ALIGNED.
#include "common/latent.cuh"
#include "sm80/operands.cuh"
#include "common/pdl.cuh"
#include "common/vectors.cuh"

constexpr int HEADS = 32, KEYS = 32, THREADS = 256;
constexpr int STRIDE = row_stride(LATENT_DIM), P_STRIDE = row_stride(KEYS);

struct e4m3 { uint8 bits; };

struct DenseShared {
    uint4 q[HEADS][STRIDE / 16];
    uint4 k[KEYS][STRIDE / 16];
    uint4 p[HEADS][P_STRIDE / 16];
    float scores[HEADS][KEYS + 1];
    float rescale[HEADS];
    const uint8* rows[KEYS];
};
constexpr int SHARED_BYTES = (HEADS + KEYS) * STRIDE + HEADS * (P_STRIDE + 4 * (KEYS + 1) + 4) + 8 * KEYS;
static_assert(sizeof(DenseShared) == SHARED_BYTES);

// Eight values of a row.
__device__ inline uint4 load_values(const VALUE* row, int first) { return load16(row + first); }
__device__ inline uint4 load_values(const e4m3* row, int first) {
    float x[8];
    dequantize8(load8(row + first), 1.0f, x);
    return {pack(VALUE{}, x[0], x[1]), pack(VALUE{}, x[2], x[3]), pack(VALUE{}, x[4], x[5]), pack(VALUE{}, x[6], x[7])};
}

extern "C" __global__ void __launch_bounds__(THREADS)
mla_decode(const VALUE* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int s_q, int heads, uint8* pages,
           int64 page_stride, int64 num_slots, int block_size, const int* block_table, int64 table_stride, int columns,
           int requests, const int* lens, int causal, int splits, float softmax_scale, const float* scale,
           float scale_value, VALUE* out, int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse,
           int64 lse_stride_b, int64 lse_stride_h, int64 lse_stride_s, float* partial_out, float* partial_lse) {
    pdl_wait();
    extern __shared__ uint4 memory[];
    DenseShared& shared = *reinterpret_cast<DenseShared*>(memory);
    int groups = (heads + HEADS - 1) / HEADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    DenseWorkRange range = DenseWorkRange::of(blockIdx.x, splits, groups, s_q, lens, int64(columns) * block_size, causal, KEYS);
    LatentCache cache{pages, page_stride, num_slots, block_size, {block_table, table_stride, requests, columns}};
    if (scale) scale_value = *scale;
    float scale_log2 = softmax_scale * scale_value * LOG2_E;
    int first_head = range.group * HEADS;

    const VALUE* token = q + range.request * q_stride_b + range.query * q_stride_s;
    for (int i = threadIdx.x; i < HEADS * (LATENT_DIM / 8); i += THREADS) {
        int head = first_head + i / (LATENT_DIM / 8), chunk = i % (LATENT_DIM / 8);
        shared.q[i / (LATENT_DIM / 8)][chunk] = head < heads ? load16(token + head * q_stride_h + 8 * chunk) : uint4{};
    }

    // For head threadIdx.x / 8: the running maximum in log2, and this thread's partial sum.
    float top = -infinity(), total = 0.0f;
    float sums[2][8][4] = {};
    const uint8* q_at = reinterpret_cast<const uint8*>(shared.q);
    const uint8* k_at = reinterpret_cast<const uint8*>(shared.k);
    const uint8* p_at = reinterpret_cast<const uint8*>(shared.p);
    for (int block = range.first_block; block < range.last_block; ++block) {
        __syncthreads();
        if (threadIdx.x < KEYS) {
            int position = block * KEYS + threadIdx.x;
            int slot = position < range.keys ? cache.slot(range.request, position) : -1;
            shared.rows[threadIdx.x] = slot < 0 ? nullptr : pages + cache.offset(slot, LATENT_DIM * int(sizeof(CACHE)));
        }
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * (LATENT_DIM / 8); i += THREADS) {
            const CACHE* row = reinterpret_cast<const CACHE*>(shared.rows[i / (LATENT_DIM / 8)]);
            int chunk = i % (LATENT_DIM / 8);
            shared.k[i / (LATENT_DIM / 8)][chunk] = row ? load_values(row, 8 * chunk) : uint4{};
        }
        __syncthreads();

        float scores[4] = {};
#pragma unroll 4
        for (int step = 0; step < LATENT_DIM / 32; ++step) {
            uint32 a[4], b[4];
            // Two steps of eight keys: rows are keys, the four matrices are 32 consecutive values.
            load_matrices(b, k_at + (warp % 4 * 8 + lane % 8) * STRIDE + 2 * (32 * step + lane / 8 * 8));
            load_matrices(a, a_row(q_at, STRIDE, warp / 4 * 16, 32 * step));
            multiply_add(VALUE{}, scores, a, b[0], b[1]);
            load_matrices(a, a_row(q_at, STRIDE, warp / 4 * 16, 32 * step + 16));
            multiply_add(VALUE{}, scores, a, b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            shared.scores[warp / 4 * 16 + lane / 4 + i / 2 * 8][warp % 4 * 8 + lane % 4 * 2 + i % 2] = scores[i];
        __syncthreads();

        int head = threadIdx.x / 8, key = threadIdx.x % 8 * 4;
        float x[4], now = -infinity();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = shared.rows[key + i] ? shared.scores[head][key + i] * scale_log2 : -infinity();
            now = fmaxf(now, x[i]);
        }
        for (int other = 1; other < 8; other *= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, other));
        now = fmaxf(now, top);
        float base = now == -infinity() ? 0.0f : now, rescale = exp2_approx(top - base);
        top = now;
        total *= rescale;
#pragma unroll
        for (int i = 0; i < 4; ++i) total += x[i] = exp2_approx(x[i] - base);
        uint2* p = reinterpret_cast<uint2*>(reinterpret_cast<uint8*>(shared.p[head]) + 2 * key);
        *p = {pack(VALUE{}, x[0], x[1]), pack(VALUE{}, x[2], x[3])};
        if (key == 0) shared.rescale[head] = rescale;
        __syncthreads();

#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float low = shared.rescale[16 * m + lane / 4], high = shared.rescale[16 * m + lane / 4 + 8];
#pragma unroll
            for (int n = 0; n < 8; ++n) sums[m][n][0] *= low, sums[m][n][1] *= low, sums[m][n][2] *= high, sums[m][n][3] *= high;
        }
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            uint32 a[2][4], b[4];
            load_matrices(a[0], a_row(p_at, P_STRIDE, 0, 16 * step));
            load_matrices(a[1], a_row(p_at, P_STRIDE, 16, 16 * step));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                load_transposed(b, a_row(k_at, STRIDE, 16 * step, 64 * warp + 16 * n));
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply_add(VALUE{}, sums[m][2 * n], a[m], b[0], b[1]);
                    multiply_add(VALUE{}, sums[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // From here on `rescale` holds the factor of each head's sums.
    for (int other = 1; other < 8; other *= 2) total += __shfl_xor_sync(~0u, total, other);
    bool empty = top == -infinity() && total == 0.0f;  // a row of NaN is not empty
    int head = threadIdx.x / 8;
    __syncthreads();
    if (threadIdx.x % 8 == 0) {
        shared.rescale[head] = empty ? 0.0f : scale_value / total;
        float log_sum = (top + log2f(total)) * LN_2;
        if (first_head + head < heads) {
            if (splits > 1) {
                int64 part = ((int64(range.request) * s_q + range.query) * splits + range.split) * heads;
                partial_lse[part + first_head + head] = empty ? -infinity() : log_sum;
            } else {
                lse[range.request * lse_stride_b + (first_head + head) * lse_stride_h + range.query * lse_stride_s] =
                    empty ? infinity() : log_sum;
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = 16 * m + 8 * half + lane / 4;
            if (first_head + row >= heads) continue;
            float factor = shared.rescale[row];
            int column = 64 * warp + lane % 4 * 2;
            if (splits > 1) {
                int64 part = ((int64(range.request) * s_q + range.query) * splits + range.split) * heads;
                float* to = partial_out + (part + first_head + row) * LATENT_V + column;
#pragma unroll
                for (int n = 0; n < 8; ++n) store_pair(to + 8 * n, sums[m][n][2 * half] * factor, sums[m][n][2 * half + 1] * factor);
            } else {
                VALUE* to = out + range.request * out_stride_b + range.query * out_stride_s +
                            (first_head + row) * out_stride_h + column;
#pragma unroll
                for (int n = 0; n < 8; ++n) store_pair(to + 8 * n, sums[m][n][2 * half] * factor, sums[m][n][2 * half + 1] * factor);
            }
        }
}
