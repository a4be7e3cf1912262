// Attention over packed sequences with K and V per head (MHA), on Hopper (sm_90a): out = softmax(scale Q K^T) V, and the LSE.
//
// Grid: (tiles of 128 queries, as many as sequences can have, heads); CTAs without queries exit. Keys are processed 128 at a
// time, a *block*.
// Block: 384 threads.
//
//     warps    role        registers  work
//     0..3     producer    40         copies K and V into two stages each (cp.async; zeros for absent keys)
//     4..7     consumer 0  232        queries 0..63. Scores of a block are computed while the previous block's values are added
//                                     up; the softmax overlaps the latter
//     8..11    consumer 1  232        queries 64..127
//
//     shared memory  KiB
//     barriers       1
//     Q              48   three tiles of 64 values for each consumer
//     K, 2 stages    96   192 values are three tiles of 128 rows; the last one is RoPE, which all heads share
//     V, 2 stages    64   two halves of 64 rows, two tiles each
//     in all         209
//
// Barriers. One lane arrives for its warp, after all lanes (with -DEVERY_LANE_ARRIVES every lane: 32 times the count).
//
//     barrier         arrivals of a phase                                  waits              guards
//     k_full[stage]   128: producer threads, when copies have landed       both consumers     K of a block
//     k_empty[stage]  8: warps of both consumers                           producer threads   K until its products have ended
//     v_full[stage]   128: producer threads, when copies have landed       both consumers     V of a block
//     v_empty[stage]  8: warps of both consumers; none for the last block  producer threads   V until its products have ended
//     named 1, 2      128: consumer 0; consumer 1                          the same consumer  its 64 queries, copied by all its threads
//
// Limits: 192 values of Q and K, 64 of them RoPE, and 128 of V; all arrays aligned to 16 bytes.
//
// Macros: VALUE (bf16 or f16), OUTPUT (VALUE or float), CAUSAL, ACCUMULATE (whether `out`, of float, and `lse` hold attention
// over earlier keys, to which these keys are added).
#define ALIGNED 1
#include "sm90/hopper.cuh"
#include "common/packed.cuh"

constexpr int QUERIES = 128, KEYS = 128, THREADS = 384;
constexpr int FEEDER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

struct SharedMemory {
    uint64 k_full[2], k_empty[2], v_full[2], v_empty[2];  // barriers [stage]
    alignas(1024) uint8 q[2][3][TILE_BYTES];              // [consumer][tile]
    uint8 k[2][3][2 * TILE_BYTES];                        // [stage][tile of 128 rows]
    uint8 v[2][2][2][TILE_BYTES];                         // [stage][half of the keys][tile]
};
constexpr int SHARED_BYTES = 1024 + 26 * TILE_BYTES;
static_assert(sizeof(SharedMemory) == SHARED_BYTES && SHARED_BYTES <= MOST_SHARED_BYTES);
constexpr Barriers<2> k_full{SHARED_AT(k_full)}, k_empty{SHARED_AT(k_empty)}, v_full{SHARED_AT(v_full)}, v_empty{SHARED_AT(v_empty)};
constexpr uint32 Q_AT = SHARED_AT(q), K_AT = SHARED_AT(k), V_AT = SHARED_AT(v);
constexpr uint32 K_BYTES = 6 * TILE_BYTES, V_BYTES = 4 * TILE_BYTES;

// Softmax of a thread's two rows of scores: replaces scores by weights, and returns the factors that rescale the sums
// of earlier blocks.
struct Softmax {
    float top[2] = {-infinity(), -infinity()}, total[2] = {};

    __device__ inline float2 weights(float (&x)[64], float scale_log2) {
        float rescale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float new_top = -infinity();
#pragma unroll
            for (int i = 2 * half; i < 64; i += 4) new_top = fmaxf(new_top, fmaxf(x[i], x[i + 1]));
            new_top = quad_max(new_top);
            new_top = fmaxf(top[half], new_top * scale_log2);
            float base = new_top == -infinity() ? 0.0f : new_top, sum = 0.0f;
            rescale[half] = exp2_approx(top[half] - base);
            top[half] = new_top;
            float scale = scale_log2;
            if (__any_sync(~0u, fabsf(base) >= LARGE_LOGIT)) {
#pragma unroll
                for (int i = 2 * half; i < 64; i += 4) x[i] = mul(x[i], scale) - base, x[i + 1] = mul(x[i + 1], scale) - base;
                scale = 1.0f, base = 0.0f;
            }
#pragma unroll
            for (int i = 2 * half; i < 64; i += 4) {
                x[i] = exp2_approx(fmaf(x[i], scale, -base));
                x[i + 1] = exp2_approx(fmaf(x[i + 1], scale, -base));
                sum += x[i] + x[i + 1];
            }
            total[half] = fmaf(total[half], rescale[half], sum);
        }
        return {rescale[0], rescale[1]};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mha_varlen_sm90(const VALUE* q, int64 q_stride_t, int64 q_stride_h, const VALUE* k, int64 k_stride_t, int64 k_stride_h,
                    const VALUE* k_pe, int64 k_pe_stride_t, const VALUE* v, int64 v_stride_t, int64 v_stride_h, const int* cu_seqlens_q,
                    const int* cu_seqlens_k, int sequences, int num_queries, int num_keys, float scale_log2, OUTPUT* out,
                    int64 out_stride_t, int64 out_stride_h, float* lse, int64 lse_stride_h, int64 lse_stride_t) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != SHARED_START) __trap();
    PackedTile tile = find_tile<QUERIES>(cu_seqlens_q, cu_seqlens_k, sequences, num_queries, num_keys, blockIdx.x);
    if (!tile.queries) return;
    int head = blockIdx.y, group = threadIdx.x / 128, thread = threadIdx.x % 128;
    int keys = tile.keys;
    if (CAUSAL) keys = min(keys, max(tile.last_key + tile.queries, 0));
    int blocks = (keys + KEYS - 1) / KEYS;
    if (ACCUMULATE && !blocks) return;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            k_full[stage].init(128), k_empty[stage].init(8 * WARP_ARRIVALS);
            v_full[stage].init(128), v_empty[stage].init(8 * WARP_ARRIVALS);
        }
        fence_barrier_init();
    }
    __syncthreads();

    // Eight threads copy 128 bytes of a row. The rows of a thread are 16 apart, so its chunk has the same swizzle in
    // all of them.
    int lane_row = thread / 8, chunk = thread % 8;
    uint32 swizzled = lane_row * 128 + ((chunk ^ (lane_row & 7)) << 4);
    if (group == 0) {
        warpgroup_reg_dealloc<FEEDER_REGISTERS>();
        const VALUE* k_row = k + head * k_stride_h + (int64(tile.first_key) + lane_row) * k_stride_t + 8 * chunk;
        const VALUE* pe_row = k_pe + (int64(tile.first_key) + lane_row) * k_pe_stride_t + 8 * chunk;
        const VALUE* v_row = v + head * v_stride_h + (int64(tile.first_key) + lane_row) * v_stride_t + 8 * chunk;
        for (int block = 0; block < blocks; ++block) {
            int stage = block % 2, left = tile.keys - block * KEYS - lane_row;  // rows below `left` are present
            uint32 parity = block / 2 % 2 ^ 1, at = K_AT + stage * K_BYTES + swizzled;
            k_empty[stage].wait(parity);
#pragma unroll
            for (int r = 0; r < KEYS / 16; ++r) {
                bool present = 16 * r < left;
                const VALUE* row = present ? k_row + 16 * r * k_stride_t : k;
                copy_async<16>(at + 2048 * r, row, present);
                copy_async<16>(at + 2 * TILE_BYTES + 2048 * r, row + (present ? 64 : 0), present);
                copy_async<16>(at + 4 * TILE_BYTES + 2048 * r, present ? pe_row + 16 * r * k_pe_stride_t : k_pe, present);
            }
            k_full[stage].arrive_after_copies();
            at = V_AT + stage * V_BYTES + swizzled;
            v_empty[stage].wait(parity);
#pragma unroll
            for (int r = 0; r < KEYS / 16; ++r) {
                bool present = 16 * r < left;
                const VALUE* row = present ? v_row + 16 * r * v_stride_t : v;
                uint32 to = at + r / 4 * 2 * TILE_BYTES + 2048 * (r % 4);
                copy_async<16>(to, row, present);
                copy_async<16>(to + TILE_BYTES, row + (present ? 64 : 0), present);
            }
            v_full[stage].arrive_after_copies();
            k_row += KEYS * k_stride_t, pe_row += KEYS * k_pe_stride_t, v_row += KEYS * v_stride_t;
        }
        copies_wait<0>();
        return;
    }

    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    int consumer = group - 1, warp = thread / 32, lane = thread % 32;
    uint32 q_at = Q_AT + consumer * 3 * TILE_BYTES;
    const VALUE* q_rows = q + (int64(tile.first_query) + 64 * consumer) * q_stride_t + head * q_stride_h + 8 * chunk;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        bool present = 64 * consumer + lane_row + 16 * r < tile.queries;
        const VALUE* row = present ? q_rows + (lane_row + 16 * r) * q_stride_t : q;
#pragma unroll
        for (int t = 0; t < 3; ++t) copy_async<16>(q_at + t * TILE_BYTES + 2048 * r + swizzled, row + (present ? 64 * t : 0), present);
    }
    copies_commit();

    float sums[64] = {}, scores[64];
    uint32 weights[8][4];
    Softmax softmax;
    int row = 64 * consumer + 16 * warp + lane / 4;  // of the tile; and row + 8
#if ACCUMULATE
    begin_onto<128>(tile, row, out + head * out_stride_h, out_stride_t, lse + head * lse_stride_h, lse_stride_t, softmax.top, softmax.total,
                    [&](int half, int n, float2 pair) { sums[4 * n + 2 * half] = pair.x, sums[4 * n + 2 * half + 1] = pair.y; });
#endif
    copies_wait<0>();
    fence_proxy_async();
    warpgroup_sync(1 + consumer);
    uint64 q_tile = tile_descriptor(q_at);

    auto score = [&](int stage) {
        uint64 k_tile = tile_descriptor(K_AT + stage * K_BYTES);
#pragma unroll
        for (int step = 0; step < 12; ++step)
            wgmma_rows(VALUE{}, scores, q_tile + step / 4 * (TILE_BYTES >> 4) + step % 4 * 2,
                       k_tile + step / 4 * (2 * TILE_BYTES >> 4) + step % 4 * 2, step > 0);
        wgmma_commit();
    };
    auto add_products = [&](int stage) {
        uint64 v_tile = transposed_descriptor(V_AT + stage * V_BYTES);
#pragma unroll
        for (int step = 0; step < 8; ++step)
            wgmma_columns(VALUE{}, sums, weights[step], v_tile + step / 4 * (2 * TILE_BYTES >> 4) + step % 4 * 128, 1);
        wgmma_commit();
    };
    auto mask = [&](int block) {
        if ((block + 1) * KEYS <= tile.keys && (!CAUSAL || (block + 1) * KEYS - 1 <= tile.last_key + 64 * consumer)) return;
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            int column = block * KEYS + i / 4 * 8 + lane % 4 * 2 + i % 2;
            bool seen = column < tile.keys && (!CAUSAL || column <= tile.last_key + row + i % 4 / 2 * 8);
            if (!seen) scores[i] = -infinity();
        }
    };
    auto rescale_sums = [&](float2 rescale) {
#pragma unroll
        for (int i = 0; i < 64; i += 4) sums[i] *= rescale.x, sums[i + 1] *= rescale.x, sums[i + 2] *= rescale.y, sums[i + 3] *= rescale.y;
    };
    auto to_weights = [&]() {
#pragma unroll
        for (int i = 0; i < 32; ++i) weights[i / 4][i % 4] = pack(VALUE{}, scores[2 * i], scores[2 * i + 1]);
    };

    if (blocks) {
        k_full[0].wait(0);
        fence_proxy_async();
        pin(scores);
        wgmma_fence();
        score(0);
        wgmma_wait<0>();
        pin(scores);
        k_empty[0].arrive_warp();
        mask(0);
        float2 rescale = softmax.weights(scores, scale_log2);
        if (ACCUMULATE) rescale_sums(rescale);
        to_weights();
    }
    for (int block = 1; block < blocks; ++block) {
        int stage = block % 2, before = stage ^ 1;
        k_full[stage].wait(block / 2 % 2);
        v_full[before].wait((block - 1) / 2 % 2);
        fence_proxy_async();
        pin(scores);
        pin(sums);
        wgmma_fence();
        score(stage);
        add_products(before);
        wgmma_wait<1>();
        pin(scores);
        k_empty[stage].arrive_warp();
        mask(block);
        float2 rescale = softmax.weights(scores, scale_log2);
        wgmma_wait<0>();
        pin(sums);
        v_empty[before].arrive_warp();
        rescale_sums(rescale);
        to_weights();
    }
    if (blocks) {
        int last = (blocks - 1) % 2;
        v_full[last].wait((blocks - 1) / 2 % 2);
        fence_proxy_async();
        pin(sums);
        wgmma_fence();
        add_products(last);
        wgmma_wait<0>();
        pin(sums);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = softmax.total[half];
        total = quad_sum(total);
        if (row + 8 * half >= tile.queries) continue;
        int64 query = tile.first_query + row + 8 * half;
        bool empty = softmax.top[half] == -infinity() && total == 0.0f;  // a row of only NaN scores is not empty
        float inv_sum = empty ? 0.0f : 1.0f / total;
        OUTPUT* to = out + query * out_stride_t + head * out_stride_h + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 16; ++n) store_pair(to + 8 * n, sums[4 * n + 2 * half] * inv_sum, sums[4 * n + 2 * half + 1] * inv_sum);
        if (lane % 4 == 0) lse[head * lse_stride_h + query * lse_stride_t] = empty ? infinity() : (softmax.top[half] + log2f(total)) * LN_2;
    }
}
