// The scores warpgroup of sm90/few_heads/prefill.cu.
#pragma once
#include "common/device.cuh"
#include "sm90/gathered_rows.cuh"
#include "sm90/few_heads/memory.cuh"

constexpr float RAISE = 8.0f;  // the reference is raised to the maximum when the maximum exceeds it by more than this, base 2
constexpr float NO_REFERENCE = -1e30f;

// One warpgroup: S^T = K Q^T and the softmax. Rows are keys, 16 a warp, columns are heads: lane 4 g + c of warp w has key
// 16 w + g + 8 r, head 8 j + 2 c + e in element 4 j + 2 r + e. Arrays with a value per head have it in element 2 j + e.
// Weights are exp2(score - reference).
struct Scores {
    static constexpr int OWN = HEADS / 4;
    static constexpr int KEY_BUFFERS = 3;  // tiles of 64 values of keys that are in registers at a time

    const SparseProblem& problem;
    float scale_log2;  // factor of the scores, without its sign
    int warp, lane;
    uint32 fragment_at;  // offset of this lane's row of fragments in a slot
    uint32 weights_at, columns_at;
    float highest[OWN], totals[OWN];  // of this lane's own keys; `highest` is unscaled
    uint32 seen;                      // non-zero once a present key was scored

    __device__ explicit Scores(const SparseProblem& p) : problem(p), warp(uniform(threadIdx.x / 32 % 4)), lane(threadIdx.x % 32) {
        // A scale of 0 would turn the -inf score of a masked key into NaN.
        scale_log2 = problem.softmax_scale == 0.0f ? 1e-30f : fabsf(problem.softmax_scale) * LOG2_E;
        fragment_at = lane % 16 * PITCH + lane / 16 * 16;
        int head = lane / 16 * 8 + lane % 8;
        weights_at = WEIGHTS_AT + head * 128 + ((2 * warp + lane / 8 % 2 ^ (head & 7)) << 4);
        columns_at = lane % 4 * 8;
        // Keeps the compiler from rematerialising these from threadIdx, which is slower.
        asm volatile("" : "+r"(fragment_at), "+r"(weights_at), "+r"(columns_at), "+r"(lane));
    }

    __device__ void begin() {
#pragma unroll
        for (int i = 0; i < OWN; ++i) highest[i] = -infinity(), totals[i] = 0.0f;
        seen = 0;
    }

    // Load fragments of 64 values of this warp's keys.
    __device__ static void load(uint32 (&a)[4][4], uint32 from) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ldmatrix4(a[i], from + 32 * i);
    }

    static constexpr int piece_of_q(int tile) { return tile / Q_PIECE_TILES < Q_PIECES ? tile / Q_PIECE_TILES : Q_PIECES - 1; }

    // Compute the scores of a block; `first`, `last`: whether it is the first, or the last, block of the `tiles`-th
    // tile.
    __device__ void score(float (&x)[HEADS / 2], const PipelineState<SLOTS>& place, bool first, bool last, uint32 tiles) {
        uint32 a[KEY_BUFFERS][4][4], from = fragment_at + slot_at(place.slot);
        rows_ready[place.slot].wait(place.phase);
        load(a[0], from);
        pin(x);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {  // products of one tile, loads of the next
            if (first && (tile == 0 || piece_of_q(tile) != piece_of_q(tile - 1))) q_ready[piece_of_q(tile)].wait(tiles % 2);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                wgmma_rows(bf16{}, x, a[tile % KEY_BUFFERS][step], tile_descriptor(Q_AT + tile * HEAD_TILE_BYTES) + 2 * step,
                           tile + step > 0);
            wgmma_commit();
            if (tile + 1 == TILES) break;
            wgmma_wait<KEY_BUFFERS - 1>();
            int done = tile - (KEY_BUFFERS - 1);
            if (last && done >= 0 && piece_of_q(done) != piece_of_q(done + 1)) q_free[piece_of_q(done)].arrive_warp();
            load(a[(tile + 1) % KEY_BUFFERS], from + (tile + 1) * 128);
        }
        wgmma_wait<0>();
        pin(x);
        if (last)
#pragma unroll
            for (int piece = piece_of_q(TILES - KEY_BUFFERS); piece < Q_PIECES; ++piece) q_free[piece].arrive_warp();
    }

    // Set the scores of absent keys to -inf.
    __device__ void mask(float (&x)[HEADS / 2], const PipelineState<SLOTS>& place) {
        if (problem.softmax_scale < 0.0f)
#pragma unroll
            for (int i = 0; i < HEADS / 2; ++i) x[i] = -x[i];
        uint32 present = lds32(PRESENT_AT + 4 * place.slot);  // a byte for every four rows
        seen |= present;
        if (present == 0x0f0f0f0f) return;
        present >>= lane / 16 * 8 + lane / 4 % 4;
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i)
            if (!(present >> i / 2 % 2 * 16 & 1)) x[i] = -infinity();
    }

    // Each of the first HEADS threads has one head.
    __device__ bool has_head() const { return threadIdx.x < HEADS; }

    // Raise the references to the highest scores so far, and store the factors (LOWER) that rescale earlier sums.
    __device__ void raise(uint32 slot, bool first) {
        float most[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) most[i] = highest[i] * scale_log2;
        reduce_rows<HEADS>(HIGHEST_AT + warp * (HEADS * 4), most, lane, [](float a, float b) { return fmaxf(a, b); });
        warpgroup_sync(1);
        if (has_head()) {
            uint32 at = threadIdx.x * 4;
            float before = first ? NO_REFERENCE : lds_float(REFERENCE_AT + at), after = before;
#pragma unroll
            for (int w = 0; w < 4; ++w) after = fmaxf(after, lds_float(HIGHEST_AT + w * (HEADS * 4) + at));
            sts_float(REFERENCE_AT + at, after);
            sts_float(LOWER_AT + slot * (HEADS * 4) + at, exp2_approx(before - after));
        }
        warpgroup_sync(1);
        if (first) return;
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float2 lower = lds_float2(LOWER_AT + slot * (HEADS * 4) + columns_at + 32 * j);
            totals[2 * j] *= lower.x, totals[2 * j + 1] *= lower.y;
        }
    }
    __device__ void load_references(float2 (&reference)[HEADS / 8]) const {
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) reference[j] = lds_float2(REFERENCE_AT + columns_at + 32 * j);
    }

    // The softmax of the n-th block. Writes weights in bfloat16 to shared memory.
    __device__ void softmax(float (&x)[HEADS / 2], uint32 n, bool first) {
        uint32 slot = n % WEIGHT_SLOTS;
        float2 reference[HEADS / 8];
        load_references(reference);
        float above[4] = {-infinity(), -infinity(), -infinity(), -infinity()};  // several accumulators shorten the dependent chains
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            highest[2 * j] = fmaxf(highest[2 * j], fmaxf(x[4 * j], x[4 * j + 2]));
            highest[2 * j + 1] = fmaxf(highest[2 * j + 1], fmaxf(x[4 * j + 1], x[4 * j + 3]));
            above[j % 2] = fmaxf(above[j % 2], fmaf(highest[2 * j], scale_log2, -reference[j].x));
            above[2 + j % 2] = fmaxf(above[2 + j % 2], fmaf(highest[2 * j + 1], scale_log2, -reference[j].y));
        }
        bool raised = warpgroup_any(1, first || fmaxf(fmaxf(above[0], above[1]), fmaxf(above[2], above[3])) > RAISE);
        weights_free[slot].wait(n / WEIGHT_SLOTS % 2 ^ 1);
        if (lane == 0) sts32(RAISED_AT + 4 * slot, raised);
        if (raised) {
            raise(slot, first);
            load_references(reference);
        }
        uint32 words[4], at = weights_at + slot * HEAD_TILE_BYTES;
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i] = exp2_approx(fmaf(x[4 * j + i], scale_log2, i % 2 ? -reference[j].y : -reference[j].x));
            totals[2 * j] += weights[0] + weights[2], totals[2 * j + 1] += weights[1] + weights[3];
#pragma unroll
            for (int r = 0; r < 2; ++r) words[j % 2 * 2 + r] = pack(bf16{}, weights[2 * r], weights[2 * r + 1]);
            if (j % 2) stmatrix4_transposed(at + j / 2 * 2048, words[0], words[1], words[2], words[3]);
        }
        fence_proxy_async();
        weights_ready[slot].arrive_warp();
    }

    // Compute the factors 1/l of a tile, its max_logits and its LSE. The values warpgroups write the latter two, because they
    // may find results that are not finite.
    __device__ void finish(int tile, uint32 tiles) {
        float most[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) most[i] = highest[i] * scale_log2;
        reduce_rows<HEADS>(HIGHEST_AT + warp * (HEADS * 4), most, lane, [](float a, float b) { return fmaxf(a, b); });
        reduce_rows<HEADS>(TOTALS_AT + warp * (HEADS * 4), totals, lane, [](float a, float b) { return a + b; });
        bool any = warpgroup_any(1, seen);
        if (warp <= (HEADS - 1) / 32) {
            uint32 at = threadIdx.x % HEADS * 4;
            float top = -infinity(), total = 0.0f, reference = lds_float(REFERENCE_AT + at);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                top = fmaxf(top, lds_float(HIGHEST_AT + w * (HEADS * 4) + at));
                total += lds_float(TOTALS_AT + w * (HEADS * 4) + at);
            }
            bool empty = top == -infinity();
            // Out of range: all scores are -inf although keys are present, or scores are so large that float32 cannot resolve
            // their differences, or a score is NaN.
            bool bad = __any_sync(~0u, (empty ? any : fabsf(top) > MAX_PRECISE_SCORE) || total * 0.0f != 0.0f);
            int head = tile % problem.groups * HEADS + threadIdx.x % HEADS;
            float lse2 = reference + log2_approx(total), inv_sum = empty ? 0.0f : reciprocal_fast(total);
            if (problem.attn_sink && head < problem.heads && !empty)  // without keys, a sink of -inf would give NaN
                inv_sum *= reciprocal_fast(1.0f + exp2_approx(fmaf(problem.attn_sink[head], LOG2_E, -lse2)));
            uint32 parity = tiles % 2;
            if (has_head()) {
                sts_float(INV_SUM_AT + parity * (HEADS * 4) + at, inv_sum);
                float lse = empty ? infinity() : lse2 * LN_2, unsafe = __uint_as_float(UNSAFE_BITS);
                sts_float(LOGITS_AT + parity * (2 * HEADS * 4) + at, bad ? unsafe : top * LN_2);
                sts_float(LOGITS_AT + parity * (2 * HEADS * 4) + HEADS * 4 + at, bad ? unsafe : lse);
            }
        }
        result_ready[tiles % 2].arrive_warp();
    }

    __device__ void run() {
        TileWalk walk(problem);
        PipelineState<SLOTS> place;
        place.slot = warp;
        uint32 n = 0;
        for (uint32 tiles = 0; walk.more(); ++tiles) {
            int tile = walk.tile, left = blocks_of(uniform(walk.length));
            walk.advance();
            begin();
#pragma unroll 1
            for (bool first = true; left; first = false, --left, ++n) {
                float x[HEADS / 2];
                score(x, place, first, left == 1, tiles);
                mask(x, place);
                softmax(x, n, first);
                place.advance(BLOCK_SLOTS);
            }
            finish(tile, tiles);
        }
    }
};
