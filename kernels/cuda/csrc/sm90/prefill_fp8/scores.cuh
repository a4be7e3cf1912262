// The scores warpgroup of sm90/prefill_fp8/prefill.cu.
#pragma once
#include "common/f16.cuh"
#include "sm90/gathered_rows.cuh"
#include "sm90/prefill_fp8/memory.cuh"
#include "sm90/prefill_fp8/products.cuh"

// Weights of V are exp2(score + e - reference + HEADROOM), where 2^e is the scale of a key's row: they are rounded to e4m3, of at
// most 448. The reference is raised to the largest such sum when that is larger by more than RAISE.
constexpr float HEADROOM = 5.0f, RAISE = 3.75f;

// A block of a tile.
struct BlockOfTile {
    int tile;
    uint32 tiles;  // of the CTA that were begun before
    bool first, last;
};

// Lane 4 g + c of warp w has rows (heads) 16 w + g + 8 r of products: column 8 j + 2 c + e in element 4 j + 2 r + e.
struct Scores {
    const SparseProblem& problem;
    int warp, lane, head;
    float reference[2], total[2];  // total: of this lane's keys
    float highest[2];              // of this lane's keys, without `factor`
    BlockWalk walk;
    uint32 tiles = 0;
    Place<K_SLOTS> place, used;

    __device__ explicit Scores(const SparseProblem& p) : problem(p), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), walk(p) {
        head = 16 * warp + lane / 4;
    }

    __device__ BlockOfTile next_block() {
        BlockOfTile of{uniform(walk.tile), tiles, uniform(walk.block) == 0, (uniform(walk.block) + 1) * BLOCK >= uniform(walk.length)};
        tiles += of.last;
        walk.advance();
        return of;
    }

    // Start the products of the CTA's n-th block. Rows have landed by copies of other threads, which are visible to products once
    // this thread, which has seen them, has passed a fence.
    __device__ __forceinline__ void start(float (&scores)[32], const BlockOfTile& of) {
        if (of.first) barrier_wait(Q_READY + 8 * (of.tiles % 2), of.tiles / 2 % 2);
        barrier_wait(LANDED + 8 * place.slot, place.phase);
        fence_proxy_async();
        uint64 q = tile_descriptor(Q_AT) + of.tiles % 2 * (OPERAND_BYTES >> 4), k = tile_descriptor(K_AT) + place.slot * (OPERAND_BYTES >> 4);
        place.advance();
        pin(scores);
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
            for (int step = 0; step < 4; ++step)
                wgmma_e4m3(scores, q + piece * (TILE_BYTES >> 4) + 2 * step, k + piece * (TILE_BYTES >> 4) + 2 * step, piece + step > 0);
        wgmma_commit();
    }

    __device__ void read_factors(float (&factor)[2], const BlockOfTile& of) const {
        uint32 at = Q_SCALE_AT + 4 * HEADS * (of.tiles % 2) + 4 * head;
        factor[0] = lds_float(at), factor[1] = lds_float(at + 32);
    }

    __device__ void begin() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            reference[r] = highest[r] = -infinity();
            total[r] = 0.0f;
        }
    }

    // Keys of one scale, all present, as nearly all blocks have. `largest` becomes that of this lane's scores, `scores` stay as they are.
    __device__ void score_alike(const float (&scores)[32], float (&largest)[2], const float (&factor)[2], float scale, float exponent) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = scores[2 * r];
#pragma unroll
            for (int i = 2 * r; i < 32; i += 4) most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
            highest[r] = fmaxf(highest[r], most * scale);
            largest[r] = fmaf(most, factor[r], exponent);
        }
    }

    // Keys of any scales; -inf for absent ones. `scores` become those in units of the softmax, with the scales' exponents added.
    __device__ void score_each(float (&scores)[32], float (&largest)[2], const float (&factor)[2], uint32 scales_at) {
        largest[0] = largest[1] = -infinity();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            uint2 words = lds64(scales_at + 32 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = scores[4 * j + i];
                uint32 word = i % 2 ? words.y : words.x;
                x = word ? x * __uint_as_float(word & 0xffff0000) : -infinity();
                highest[i / 2] = fmaxf(highest[i / 2], x);
                x = fmaf(x, factor[i / 2], __uint_as_float(word << 16));
                largest[i / 2] = fmaxf(largest[i / 2], x);
            }
        }
    }

    // Weights of scores of either kind, and their sums without the keys' scales.
    __device__ void weigh_alike(float (&scores)[32], float (&sum)[2], const float (&factor)[2], const float (&base)[2], float exponent, float inverse) {
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
    __device__ void weigh_each(float (&scores)[32], float (&sum)[2], const float (&base)[2], uint32 scales_at) {
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

    // The softmax of a block whose products have ended; weights in e4m3 to shared memory.
    __device__ __forceinline__ void finish_block(float (&scores)[32], const BlockOfTile& of, uint32 n) {
        pin(scores);
        warp_arrive(K_FREE + 8 * used.slot);
        used.advance();
        if (of.first) begin();
        uint32 scales = SCALES_AT + n % SCALE_SLOTS * (4 * BLOCK), scales_at = scales + 8 * (lane % 4), word = lds32(scales);
        uint2 some = lds64(scales + 8 * lane);
        bool alike = __all_sync(~0u, word && some.x == word && some.y == word);
        float scale = __uint_as_float(word & 0xffff0000), exponent = __uint_as_float(word << 16);
        float factor[2], largest[2];  // of scores
        read_factors(factor, of);
        if (alike) {
            factor[0] *= scale, factor[1] *= scale;
            score_alike(scores, largest, factor, scale, exponent);
        } else {
            score_each(scores, largest, factor, scales_at);
        }
        float lower[2], base[2], sum[2];
        bool raised = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
            lower[r] = 1.0f;
            if (largest[r] > reference[r] + RAISE) {
                lower[r] = exp2_approx(reference[r] - largest[r]);
                reference[r] = largest[r];
                raised = true;
            }
            base[r] = reference[r] == -infinity() ? 0.0f : reference[r] - HEADROOM;
        }
        if (alike) weigh_alike(scores, sum, factor, base, exponent, inverse_of(word));
        else weigh_each(scores, sum, base, scales_at);
        total[0] = fmaf(total[0], lower[0], sum[0]), total[1] = fmaf(total[1], lower[1], sum[1]);
        uint32 slot = n % WEIGHT_SLOTS;
        raised = __any_sync(~0u, raised);
        barrier_wait(WEIGHTS_FREE + 8 * slot, n / WEIGHT_SLOTS % 2 ^ 1);
        if (lane == 0) sts32(RAISED_AT + 16 * slot + 4 * warp, raised);
        if (raised && lane % 4 == 0) {
            sts_float(LOWER_AT + 4 * HEADS * slot + 4 * head, lower[0]);
            sts_float(LOWER_AT + 4 * HEADS * slot + 4 * head + 32, lower[1]);
        }
        uint32 words[4][2];  // [16 keys][r]
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float* x = scores + 8 * i + 2 * r;
                words[i][r] = float_to_e4m3x2(x[0], x[1]) | float_to_e4m3x2(x[4], x[5]) << 16;
            }
        int row = 16 * warp + lane % 16;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            stmatrix4(WEIGHTS_AT + slot * WEIGHT_BYTES + row * 64 + (((2 * i + lane / 16) ^ (row / 2 % 4)) << 4), words[2 * i][0],
                      words[2 * i][1], words[2 * i + 1][0], words[2 * i + 1][1]);
        fence_proxy_async();
        warp_arrive(WEIGHTS_READY + 8 * slot);
        if (of.last) {
            finish_tile(of);
            warp_arrive(Q_FREE + 8 * (of.tiles % 2));  // only now: this also frees Q_SCALE
        }
    }

    // Publish the factors 1/l of a tile, and store max_logits and lse.
    __device__ void finish_tile(const BlockOfTile& of) {
        TileCoord at(problem, of.tile);
        float factor[2];
        read_factors(factor, of);
        float check = 0.0f;  // not 0 if results are not to be trusted
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            total[r] += __shfl_xor_sync(~0u, total[r], 1);
            total[r] += __shfl_xor_sync(~0u, total[r], 2);
            highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
            highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 2));
            check = fmaf(total[r], 0.0f, check);
            // Scores so large that float32 cannot resolve their differences.
            if (fabsf(highest[r] * factor[r]) > MAX_PRECISE_SCORE && reference[r] != -infinity()) check = 1.0f;
        }
        bool bad = __any_sync(~0u, check != 0.0f);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int own_head = at.first_head + head + 8 * r;
            bool here = own_head < problem.heads, empty = reference[r] == -infinity();
            float lse2 = reference[r] - HEADROOM + log2_approx(total[r]);
            float inv_sum = empty ? 0.0f : reciprocal_fast(total[r]);
            if (here && problem.attn_sink && !empty)  // without keys, a sink of -inf would give NaN
                inv_sum *= reciprocal_fast(1.0f + exp2_approx(fmaf(problem.attn_sink[own_head], LOG2_E, -lse2)));
            if (lane % 4 == 0) {
                sts_float(INV_SUM_AT + 4 * HEADS * (of.tiles % 2) + 4 * head + 32 * r, inv_sum);
                if (here) {
                    float most = empty ? -infinity() : highest[r] * factor[r] * LN_2, lse = empty ? infinity() : lse2 * LN_2;
                    problem.max_logits[at.b * problem.max_stride_b + own_head * problem.max_stride_h] = bad ? __uint_as_float(UNSAFE_BITS) : most;
                    problem.lse[at.b * problem.lse_stride_b + own_head * problem.lse_stride_h] = lse;
                }
            }
        }
        warp_arrive(RESULT_READY + 8 * (of.tiles % 2));
    }

    __device__ __forceinline__ void run() {
        if (!walk.more()) return;
        float even[32], odd[32];
        BlockOfTile now = next_block(), next = now;
        start(even, now);
        for (uint32 n = 0;; n += 2) {
            if (!uniform(walk.more())) {
                wgmma_wait<0>();
                return finish_block(even, now, n);
            }
            next = next_block();
            start(odd, next);
            wgmma_wait<1>();
            finish_block(even, now, n);
            if (!uniform(walk.more())) {
                wgmma_wait<0>();
                return finish_block(odd, next, n + 1);
            }
            now = next_block();
            start(even, now);
            wgmma_wait<1>();
            finish_block(odd, next, n + 1);
        }
    }
};
