// The consumers of sm90/prefill_fp8/prefill.cu.
#pragma once
#include "common/device.cuh"
#include "sm90/hopper.cuh"
#include "sm90/prefill_fp8/memory.cuh"
#include "sm90/prefill_fp8/products.cuh"
#include "sm90/prefill_consumer.cuh"

// Weights of V are exp2(score + e - reference + HEADROOM), where 2^e is the scale of the key's row. They are rounded to
// e4m3, whose largest value is 448. The reference is raised to the largest score + e when that exceeds it by more than
// RAISE.
constexpr float HEADROOM = 5.0f, RAISE = 3.75f;

constexpr uint32 ROW_BYTES = 128 * sizeof(bf16);  // bytes of a row of results in shared memory: half of the consumer's values

// The block of keys that a consumer scores.
struct OwnBlock {
    uint32 n, tiles;  // its number in the CTA; number of earlier tiles with keys
    bool last;        // the last block of the tile that this consumer scores
};

// Consumer CONSUMER computes values 256 CONSUMER .. + 255 of the result. Scores: column 8 j + 2 c + e in element 4 j + 2 r + e. Sums:
// element 4 j + 2 r + e of `low` has value 16 (2 c + e) + j, that of `high` 128 further (see Transposer). `highest` of a row lacks
// the row's factor until a tile's last block.
template <int CONSUMER> struct Consumer : PrefillConsumer {
    static constexpr uint32 OTHER = CONSUMER ^ 1;

    PipelineState<VALUE_SLOTS> piece;  // the next of this consumer's pieces of V^T

    __device__ explicit Consumer(const SparseProblem& p) : PrefillConsumer(p) { head = 16 * warp + lane / 4; }

    // Wait for the next piece of V^T of this consumer, and return its descriptor.
    __device__ uint64 next_piece() {
        values_ready[CONSUMER][piece.slot].wait(piece.phase);
        uint64 values = narrow_descriptor(VALUES_AT + CONSUMER * VALUE_SLOTS * VALUES_BYTES) + piece.slot * (VALUES_BYTES >> 4);
        piece.advance(1);
        return values;
    }
    // Free the last two pieces, whose products have ended.
    __device__ void free_pieces() const {
        values_free[CONSUMER][(piece.slot + 1) % VALUE_SLOTS].arrive_warp();
        values_free[CONSUMER][(piece.slot + 2) % VALUE_SLOTS].arrive_warp();
    }

    // Start the PV products of block n with the other consumer's weights.
    __device__ void add_other(uint32 n) {
        weights_ready[OTHER].wait(n / 2 % 2);
        uint32 at = REFERENCE_AT + 4 * HEADS * OTHER + 4 * head;
        float raised[2] = {lds_float(at), lds_float(at + 32)};
        raise_to(raised);
        pin(low), pin(high);
        uint64 weights = narrow_descriptor(WEIGHTS_AT + OTHER * WEIGHT_BYTES);
        uint64 values = next_piece();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) wgmma_rows(e4m3{}, low, weights + 2 * step, values + 2 * step, 1);
        values = next_piece();
        wgmma_fence();  // repeated, because the compiler treats the code after a wait as divergent
#pragma unroll
        for (int step = 0; step < 2; ++step) wgmma_rows(e4m3{}, high, weights + 2 * step, values + 2 * step, 1);
        wgmma_commit();
    }

    // Start the PV products with this consumer's weights.
    __device__ void add_own(const uint32 (&weights)[2][4]) {
        pin(low), pin(high);
        uint64 values = next_piece();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) wgmma_rows(e4m3{}, low, weights[step], values + 2 * step, 1);
        values = next_piece();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) wgmma_rows(e4m3{}, high, weights[step], values + 2 * step, 1);
        wgmma_commit();
    }

    // Start the products of Q and K. Other threads copied the rows; the fence of this thread makes their writes, which
    // the barrier made visible to it, visible to the products.
    __device__ void score(float (&scores)[32], const OwnBlock& of) {
        q_ready[of.tiles % 2].wait(of.tiles / 2 % 2);
        landed[of.n % K_SLOTS].wait(of.n / K_SLOTS % 2);
        fence_proxy_async();
        uint64 q = tile_descriptor(Q_AT) + of.tiles % 2 * (OPERAND_BYTES >> 4),
               k = tile_descriptor(K_AT) + of.n % K_SLOTS * (OPERAND_BYTES >> 4);
        pin(scores);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int step = 0; step < 4; ++step)
                wgmma_rows(e4m3{}, scores, q + i * (TILE_BYTES >> 4) + 2 * step, k + i * (TILE_BYTES >> 4) + 2 * step, i + step > 0);
        wgmma_commit();
    }

    __device__ void read_factors(float (&factor)[2], uint32 tiles) const {
        uint32 at = Q_SCALE_AT + 4 * HEADS * (tiles % 2) + 4 * head;
        factor[0] = lds_float(at), factor[1] = lds_float(at + 32);
    }

    // Fast path: all keys present, one scale. Sets `largest` to the maxima of this lane's scores; `scores` are
    // unchanged.
    __device__ void scale_uniform(const float (&scores)[32], float (&largest)[2], const float (&factor)[2], float scale, float exponent) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = scores[2 * r];
#pragma unroll
            for (int i = 2 * r; i < 32; i += 4) most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
            rows[r].highest = fmaxf(rows[r].highest, most * scale);
            largest[r] = fmaf(most, factor[r], exponent);
        }
    }

    // General path: scores times the factors, plus the exponents of the key scales; -inf for absent keys. Sets
    // `largest` to the maxima of this lane.
    __device__ void scale_general(float (&scores)[32], float (&largest)[2], const float (&factor)[2], uint32 scales_at) {
        largest[0] = largest[1] = -infinity();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            uint2 words = lds64(scales_at + 32 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = scores[4 * j + i];
                uint32 word = i % 2 ? words.y : words.x;
                x = word ? x * __uint_as_float(word & 0xffff0000) : -infinity();
                rows[i / 2].highest = fmaxf(rows[i / 2].highest, x);
                x = fmaf(x, factor[i / 2], __uint_as_float(word << 16));
                largest[i / 2] = fmaxf(largest[i / 2], x);
            }
        }
    }

    // Weights after scale_uniform and after scale_general, and their sums divided by the key scales.
    __device__ void softmax_uniform(float (&scores)[32], float (&sum)[2], const float (&factor)[2], const float (&base)[2], float exponent,
                                    float inverse) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float shift = exponent - base[r];
            sum[r] = 0.0f;
#pragma unroll
            for (int i = 2 * r; i < 32; i += 4) {
                scores[i] = exp2_approx(fmaf(scores[i], factor[r], shift));
                scores[i + 1] = exp2_approx(fmaf(scores[i + 1], factor[r], shift));
                sum[r] += scores[i] + scores[i + 1];
            }
            sum[r] *= inverse;
        }
    }
    __device__ void softmax_general(float (&scores)[32], float (&sum)[2], const float (&base)[2], uint32 scales_at) {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            uint2 words = lds64(scales_at + 32 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = scores[4 * j + i];
                x = exp2_approx(x - base[i / 2]);
                sum[i / 2] = fmaf(x, inverse_of(i % 2 ? words.y : words.x), sum[i / 2]);
            }
        }
    }

    // 2^-e of a scale 2^e.
    __device__ static float inverse_of(uint32 word) { return __uint_as_float(0x7f000000 - (word & 0xffff0000)); }

    // The softmax of a block. Stores the weights in e4m3 in registers for this consumer, and in shared memory for the
    // other one. Waits for the products of the other consumer's block, which run meanwhile.
    template <bool FIRST> __device__ __forceinline__ void softmax(float (&scores)[32], uint32 (&weights)[2][4], float (&raised)[2],
                                                                  float (&sum)[2], const OwnBlock& of) {
        uint32 scales = SCALES_AT + of.n % SCALE_SLOTS * (4 * BLOCK), scales_at = scales + 8 * (lane % 4), word = lds32(scales);
        uint2 some = lds64(scales + 8 * lane);
        bool alike = __all_sync(~0u, word && some.x == word && some.y == word);
        float scale = __uint_as_float(word & 0xffff0000), exponent = __uint_as_float(word << 16);
        float factor[2], largest[2], base[2];
        read_factors(factor, of.tiles);
        if (alike) {
            factor[0] *= scale, factor[1] *= scale;
            scale_uniform(scores, largest, factor, scale, exponent);
        } else {
            scale_general(scores, largest, factor, scales_at);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = quad_max(largest[r]);
            raised[r] = largest[r] > rows[r].reference + RAISE ? largest[r] : rows[r].reference;
            base[r] = raised[r] == -infinity() ? 0.0f : raised[r] - HEADROOM;
        }
        if (!FIRST) {
            wgmma_wait<0>();
            free_pieces();
        }
        if (alike) softmax_uniform(scores, sum, factor, base, exponent, inverse_of(word));
        else softmax_general(scores, sum, base, scales_at);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float* x = scores + 8 * i + 2 * r;
                weights[i / 2][i % 2 * 2 + r] = float_to_e4m3x2(x[0], x[1]) | float_to_e4m3x2(x[4], x[5]) << 16;
            }
        if (lane % 4 == 0) {
            sts_float(REFERENCE_AT + 4 * HEADS * CONSUMER + 4 * head, raised[0]);
            sts_float(REFERENCE_AT + 4 * HEADS * CONSUMER + 4 * head + 32, raised[1]);
        }
        int row = 16 * warp + lane % 16;
#pragma unroll
        for (int step = 0; step < 2; ++step)
            stmatrix4(WEIGHTS_AT + CONSUMER * WEIGHT_BYTES + row * 64 + (((2 * step + lane / 16) ^ (row / 2 % 4)) << 4), weights[step][0],
                      weights[step][1], weights[step][2], weights[step][3]);
        fence_proxy_async();
        weights_ready[CONSUMER].arrive_warp();
    }

    // Process a block that this consumer scores. Unless it is the FIRST of a tile, the PV products of the previous
    // block, which the other consumer scored, start after the QK products and run during the softmax.
    template <bool FIRST> __device__ __forceinline__ void take(const OwnBlock& of) {
        float scores[32];
        score(scores, of);
        if (!FIRST) {
            add_other(of.n - 1);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        pin(scores);
        k_free[of.n % K_SLOTS].arrive_warp();
        uint32 weights[2][4];
        float raised[2], sum[2];
        softmax<FIRST>(scores, weights, raised, sum, of);
        pin(low), pin(high);
        raise_to(raised);
        rows[0].total += sum[0], rows[1].total += sum[1];
        if (of.last) {
            float factor[2];
            read_factors(factor, of.tiles);
            rows[0].highest *= factor[0], rows[1].highest *= factor[1];
        }
        add_own(weights);
        wgmma_wait<0>();
        pin(low), pin(high);
        free_pieces();
    }

    // Add the last block of the `tiles`-th tile, which the other consumer scored.
    __device__ __forceinline__ void add_last_of_other(uint32 n, uint32 tiles) {
        add_other(n);
        publish(tiles);
        wgmma_wait<0>();
        pin(low), pin(high);
        free_pieces();
    }

    // Epilogue: combine both consumers' sums, and store the results of a tile.
    __device__ void finish(int tile, uint32 tiles) {
        uint32 slot = 2 * (tiles % 2) + OTHER;
        float checks[4] = {};  // NaN if a value is not finite; several accumulators shorten the dependent chains
#pragma unroll
        for (int i = 0; i < 64; ++i) checks[i % 4] = fmaf(low[i], 0.0f, fmaf(high[i], 0.0f, checks[i % 4]));
        float check = (checks[0] + checks[1]) + (checks[2] + checks[3]);
        totals_ready[slot].wait(tiles / 2 % 2);
        TileCoord at(problem, tile);
        float sum[2], highest[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float2 others = lds_float2(TOTALS_AT + slot * (HEADS * 8) + 8 * head + 64 * r);
            sum[r] = rows[r].total + others.x, highest[r] = fmaxf(rows[r].highest, others.y);
            check = fmaf(sum[r], 0.0f, check);
            // Scores so large that float32 cannot resolve their differences.
            if (fabsf(highest[r]) > MAX_PRECISE_SCORE && rows[r].reference != -infinity()) check = 1.0f;
        }
        bool bad = __any_sync(~0u, check != 0.0f);
        int own_head = at.first_head + head;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            bool here = own_head + 8 * r < problem.heads, empty = rows[r].reference == -infinity();
            float lse2 = rows[r].reference - HEADROOM + log2_approx(sum[r]);
            float most = empty ? -infinity() : highest[r] * LN_2, lse = empty ? infinity() : lse2 * LN_2;
            sum[r] = empty ? 0.0f : reciprocal_fast(sum[r]);
            if (here && problem.attn_sink && !empty)  // without keys, a sink of -inf would give NaN
                sum[r] *= reciprocal_fast(1.0f + exp2_approx(fmaf(problem.attn_sink[own_head + 8 * r], LOG2_E, -lse2)));
            if (!here || lane % 4) continue;
            if (CONSUMER == 0)
                problem.max_logits[at.b * problem.max_stride_b + (own_head + 8 * r) * problem.max_stride_h] =
                    bad ? __uint_as_float(UNSAFE_BITS) : most;
            else
                problem.lse[at.b * problem.lse_stride_b + (own_head + 8 * r) * problem.lse_stride_h] =
                    bad ? __uint_as_float(UNSAFE_BITS) : lse;
        }
        uint32 to = Q_AT + tiles % 2 * OPERAND_BYTES + CONSUMER * (OPERAND_BYTES / 2) + 16 * warp * ROW_BYTES;
        bf16* out = problem.out + at.b * problem.out_stride_b + (at.first_head + 16 * warp + lane) * problem.out_stride_h + 256 * CONSUMER;
        bool stores = lane < 16 && at.first_head + 16 * warp + lane < problem.heads;  // each lane stores one row of the warp
        stage_row(to, low, 0, sum[0]), stage_row(to, low, 1, sum[1]);
        store_rows(out, to, stores);
        bulk_stores_read<0>();
        __syncwarp();
        stage_row(to, high, 0, sum[0]), stage_row(to, high, 1, sum[1]);
        store_rows(out + 128, to, stores);
    }

    // Write this lane's 32 values of row r to shared memory: 4 chunks of 16 bytes, in an order without bank conflicts.
    __device__ void stage_row(uint32 to, const float (&x)[64], int r, float factor) {
        uint4 chunks[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int k = 8 * (4 * (i % 2) + j) + 2 * r + i / 2;
                words[j] = pack(bf16{}, x[k] * factor, x[k + 4] * factor);
            }
            chunks[i] = {words[0], words[1], words[2], words[3]};
        }
        int order = lane / 4 % 4;
        exchange(chunks[0], chunks[1], order & 1), exchange(chunks[2], chunks[3], order & 1);
        exchange(chunks[0], chunks[2], order & 2), exchange(chunks[1], chunks[3], order & 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) sts128(to + (lane / 4 + 8 * r) * ROW_BYTES + lane % 4 * 64 + ((i ^ order) << 4), chunks[i]);
    }
    __device__ static void exchange(uint4& a, uint4& b, bool really) {
        uint4 before = a;
        a = {really ? b.x : a.x, really ? b.y : a.y, really ? b.z : a.z, really ? b.w : a.w};
        b = {really ? before.x : b.x, really ? before.y : b.y, really ? before.z : b.z, really ? before.w : b.w};
    }
    // Start bulk stores of a warp's rows.
    __device__ void store_rows(bf16* out, uint32 from, bool stores) {
        fence_proxy_async();
        __syncwarp();
        if (stores) bulk_store(out, from + lane * ROW_BYTES, ROW_BYTES);
        bulk_stores_commit();
    }

    __device__ void publish(uint32 tiles) { publish_totals<CONSUMER, true>(tiles); }
    __device__ __forceinline__ uint32 take_first(uint32 n, uint32 end, uint32 tiles) {
        uint32 own = n;
        if (n % 2 == CONSUMER) {
            take<true>({n, tiles, n + 2 >= end});
            own += 2;
        } else if (++own < end) {
            take<false>({own, tiles, own + 2 >= end});
            own += 2;
        }
        if (tiles) {  // by now the bulk stores have read the results of the previous tile
            bulk_stores_read<0>();
            q_free[(tiles - 1) % 2].arrive_warp();
        }
        return own;
    }
    __device__ void trace_tile(uint32) {}
    __device__ void end() { bulk_stores_read<0>(); }
    __device__ __forceinline__ void run() { process_tiles<CONSUMER, true, uint32>(*this); }
};
