// The consumers of sm90/prefill/prefill.cu.
#pragma once
#include "common/device.cuh"
#include "sm90/prefill/trace.cuh"
#include "sm90/prefill_consumer.cuh"

// Weights are exp2(score - reference). The reference is raised to the running maximum when the maximum exceeds it by
// more than RAISE, which is rare after the first blocks.
constexpr float RAISE = 8.0f;

// The block of keys that a consumer scores.
struct OwnBlock {
    uint32 n, tiles;  // its number in the CTA; number of earlier tiles with keys
    bool last;        // the last block of the tile that this consumer scores
};

// Consumer CONSUMER computes values 256 CONSUMER .. + 255 of the result. Column 8 j + 2 c + e of products is in element 4 j + 2 r + e.
template <int CONSUMER> struct Consumer : PrefillConsumer {
    // The buffer of the other consumer's blocks; this consumer's pieces of every block.
    static constexpr uint32 OTHER = CONSUMER ^ 1, LOW = CONSUMER, HIGH = 2 + CONSUMER;
    static constexpr uint32 OWN_K = K_AT + CONSUMER * K_BYTES, OTHER_K = K_AT + OTHER * K_BYTES;
    static constexpr uint32 COLUMNS = 4 * CONSUMER * TILE_BYTES;

    float scale_log2;  // of the scores' magnitude
    uint32 seen;       // non-zero once a present key was scored
    Trace trace;

    __device__ explicit Consumer(const SparseProblem& p) : PrefillConsumer(p) {
        head = 16 * warp + lane / 4;
        // A scale of 0 would turn the -inf score of a masked key into NaN.
        scale_log2 = problem.softmax_scale == 0.0f ? 1e-30f : fabsf(problem.softmax_scale) * LOG2_E;
    }

    __device__ void begin() {
        PrefillConsumer::begin();
        seen = 0;
    }

    // Start the PV products of block n, which the other consumer scored, with its weights.
    __device__ void add_other(uint32 n) {
        weights_ready[OTHER].wait(n / 2 % 2);
        trace.note(WEIGHTS_ARRIVED);
        uint32 at = REFERENCE_AT + 4 * HEADS * OTHER + 4 * head;
        float raised[2] = {lds_float(at), lds_float(at + 32)};
        raise_to(raised);
        k_ready[OTHER][LOW].wait(n / 2 % 2);
        k_ready[OTHER][HIGH].wait(n / 2 % 2);
        pin(low), pin(high);
        uint64 weights = tile_descriptor(WEIGHTS_AT), columns = transposed_descriptor(OTHER_K + COLUMNS);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_columns(bf16{}, low, weights + 2 * step, columns + 128 * step, 1);
        wgmma_commit();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_columns(bf16{}, high, weights + 2 * step, columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
        wgmma_commit();
        trace.note(OTHER_STARTED);
    }

    // Start the products of one tile of Q and K.
    template <int TILE> __device__ void score_tile(float (&scores)[32]) {
        uint64 q = tile_descriptor(Q_AT + TILE * TILE_BYTES), k = tile_descriptor(OWN_K + TILE * TILE_BYTES);
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rows(bf16{}, scores, q + 2 * step, k + 2 * step, TILE + step > 0);
    }
    template <int PIECE> __device__ void score_piece(float (&scores)[32], uint32 n, uint32 tiles) {
        q_ready[PIECE].wait(tiles % 2);
        trace.note(Q_ARRIVED);
        k_ready[CONSUMER][PIECE].wait(n / 2 % 2);
        trace.note(ROWS_ARRIVED);
        wgmma_fence();  // repeated, because the compiler treats the code after a wait as divergent
        score_tile<first_tile(PIECE)>(scores);
        score_tile<first_tile(PIECE) + 1>(scores);
    }

    // Set the scores of absent keys to -inf.
    __device__ void mask(float (&scores)[32]) {
        if (problem.softmax_scale < 0.0f)
#pragma unroll
            for (int i = 0; i < 32; ++i) scores[i] = -scores[i];
        uint2 present = lds64(PRESENT_AT + 8 * CONSUMER);
        seen |= present.x | present.y;
        if ((present.x & present.y) == ~0u) return;
        uint32 words[2] = {present.x >> 2 * (lane % 4), present.y >> 2 * (lane % 4)};
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (!(words[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1)) scores[i] = -infinity();
    }

    // The softmax of a block. Stores the weights in bfloat16 in registers for this consumer, and in shared memory for
    // the other one.
    __device__ void softmax(float (&scores)[32], uint32 (&weights)[4][4], float (&raised)[2], float (&sum)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = -infinity();
#pragma unroll
            for (int i = 2 * r; i < 32; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
            largest = quad_max(largest) * scale_log2;
            rows[r].highest = fmaxf(rows[r].highest, largest);
            raised[r] = largest > rows[r].reference + RAISE ? largest : rows[r].reference;
            if (lane % 4 == 0) sts_float(REFERENCE_AT + 4 * HEADS * CONSUMER + 4 * head + 32 * r, raised[r]);
            float base = raised[r] == -infinity() ? 0.0f : raised[r];
            sum[r] = 0.0f;
#pragma unroll
            for (int i = 2 * r; i < 32; i += 4) {
                scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -base));
                scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale_log2, -base));
                sum[r] += scores[i] + scores[i + 1];
            }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) weights[i / 4][i % 4] = pack(bf16{}, scores[2 * i], scores[2 * i + 1]);
        warpgroup_sync(2 + CONSUMER);  // all warps of this consumer have used the previous weights
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            int row = 16 * warp + lane % 16;
            stmatrix4(WEIGHTS_AT + row * 128 + (((2 * step + lane / 16) ^ (row & 7)) << 4), weights[step][0], weights[step][1],
                      weights[step][2], weights[step][3]);
        }
        fence_proxy_async();
        weights_ready[CONSUMER].arrive_warp();
    }

    // Add the last block of the `tiles`-th tile, which the other consumer scored, and wait for the products.
    __device__ __forceinline__ void add_last_of_other(uint32 n, uint32 tiles) {
        trace.note(LAST_BEGIN);
        add_other(n);
        publish(tiles);
        wgmma_wait<1>();
        k_free[OTHER][LOW].arrive_warp();
        wgmma_wait<0>();
        pin(low), pin(high);
        k_free[OTHER][HIGH].arrive_warp();
        trace.note(LAST_DONE);
    }

    // Process a block that this consumer scores. Unless it is the FIRST of a tile, the PV products of the previous
    // block, which the other consumer scored, start first, so that its rows are freed early.
    template <bool FIRST> __device__ __forceinline__ void take(const OwnBlock& of) {
        float scores[32];
        pin(scores);
        trace.note(SCORES_BEGIN);
        if (!FIRST) add_other(of.n - 1);
        score_piece<0>(scores, of.n, of.tiles);
        wgmma_commit();
        if (!FIRST) {
            wgmma_wait<2>();
            k_free[OTHER][LOW].arrive_warp();
            wgmma_wait<1>();
            k_free[OTHER][HIGH].arrive_warp();
            trace.note(OTHER_DONE);
        }
        score_piece<1>(scores, of.n, of.tiles);
        score_piece<2>(scores, of.n, of.tiles);
        score_piece<3>(scores, of.n, of.tiles);
        if (HAS_ROPE) score_tile<TILES - 1>(scores);
        wgmma_commit();
        trace.note(SCORES_STARTED);
        wgmma_wait<0>();
        pin(scores), pin(low), pin(high);
        trace.note(SCORES_DONE);
        if (of.last) free_q();
        mask(scores);
        uint32 weights[4][4];
        float raised[2], sum[2];
        softmax(scores, weights, raised, sum);
        trace.note(WEIGHTS_STORED);

        raise_to(raised);
        rows[0].total += sum[0], rows[1].total += sum[1];
        pin(low), pin(high);
        uint64 columns = transposed_descriptor(OWN_K + COLUMNS);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_columns(bf16{}, low, weights[step], columns + 128 * step, 1);
        wgmma_commit();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_columns(bf16{}, high, weights[step], columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
        wgmma_commit();
        trace.note(OWN_STARTED);
        wgmma_wait<1>();
        k_free[CONSUMER][LOW].arrive_warp();
        wgmma_wait<0>();
        pin(low), pin(high);
        k_free[CONSUMER][HIGH].arrive_warp();
        trace.note(OWN_DONE);
    }

    __device__ void free_q() {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) q_free[piece].arrive_warp();
    }

    // Epilogue: combine both consumers' sums, and store the results of a tile.
    __device__ void finish(int tile, uint32 tiles) {
        trace.note(FINISH_BEGIN);
        uint32 slot = 2 * (tiles % 2) + OTHER;
        float checks[8] = {};  // NaN if a value is not finite; several accumulators shorten the dependent chains
#pragma unroll
        for (int i = 0; i < 64; ++i)
            checks[i % 4] = fmaf(low[i], 0.0f, checks[i % 4]), checks[4 + i % 4] = fmaf(high[i], 0.0f, checks[4 + i % 4]);
        float check = (checks[0] + checks[1]) + (checks[2] + checks[3]) + (checks[4] + checks[5]) + (checks[6] + checks[7]);
        totals_ready[slot].wait(tiles / 2 % 2);
        TileCoord at(problem, tile);
        float sum[2];
        float2 others[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            others[r] = lds_float2(TOTALS_AT + slot * (HEADS * 8) + 8 * head + 64 * r);
            sum[r] = rows[r].total + others[r].x;
            check = fmaf(sum[r], 0.0f, check);
            // All scores are -inf although keys are present: the scores overflowed.
            if (seen && rows[r].reference == -infinity()) check = 1.0f;
            // Scores so large that float32 cannot resolve their differences.
            if (fabsf(rows[r].reference) > MAX_PRECISE_SCORE && rows[r].reference != -infinity()) check = 1.0f;
        }
        bool bad = __any_sync(~0u, check != 0.0f);
        if (bad && lane == 0) sts32(FLAGGED, 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int own_head = at.first_head + head + 8 * r;
            bool here = own_head < problem.heads, empty = rows[r].reference == -infinity();
            float lse2 = rows[r].reference + log2_approx(sum[r]);
            float factor = empty ? 0.0f : reciprocal_fast(sum[r]);
            if (here && problem.attn_sink && !empty)  // without keys, a sink of -inf would give NaN
                factor *= reciprocal_fast(1.0f + exp2_approx(fmaf(problem.attn_sink[own_head], LOG2_E, -lse2)));
            if (here && lane % 4 == 0) {
                if (CONSUMER == 0) {
                    float most = fmaxf(rows[r].highest, others[r].y) * LN_2;
                    problem.max_logits[at.b * problem.max_stride_b + own_head * problem.max_stride_h] =
                        bad ? __uint_as_float(UNSAFE_BITS) : most;
                } else {
                    float lse = empty ? infinity() : lse2 * LN_2;
                    problem.lse[at.b * problem.lse_stride_b + own_head * problem.lse_stride_h] = bad ? __uint_as_float(UNSAFE_BITS) : lse;
                }
            }
            bf16* out = problem.out + at.b * problem.out_stride_b + own_head * problem.out_stride_h + 256 * CONSUMER + 8 * (lane % 4);
            store_row(out, low, r, factor, here);
            store_row(out + 128, high, r, factor, here);
        }
        trace.note(FINISH_END);
    }

    // Store 128 values of row r. Four lanes transpose their words, so that each stores one of four neighbouring chunks
    // of 8 values, at `out` + 32 i.
    __device__ void store_row(bf16* out, const float (&x)[64], int r, float factor, bool here) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int k = 4 * (4 * i + j) + 2 * r;
                words[j] = pack(bf16{}, x[k] * factor, x[k + 1] * factor);
            }
            transpose_words(words, lane);
            if (here) store16(out + 32 * i, {words[0], words[1], words[2], words[3]});
        }
    }

    __device__ void publish(uint32 tiles) { publish_totals<CONSUMER, false>(tiles); }
    __device__ __forceinline__ uint32 take_first(uint32 n, uint32 end, uint32 tiles) {
        if (n % 2 == CONSUMER) {
            take<true>({n, tiles, n + 2 >= end});
            return n + 2;
        }
        if (n + 1 >= end) free_q();
        return n + 1;
    }
    __device__ void trace_tile(uint32 tiles) { trace.of_tile(tiles); }
    __device__ void end() { trace.store(); }
    __device__ __forceinline__ void run() { process_tiles<CONSUMER, false, int>(*this); }
};
