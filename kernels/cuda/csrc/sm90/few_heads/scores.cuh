// The scores of sm90/few_heads/prefill.cu.
#pragma once
#include "common/f16.cuh"
#include "common/vectors.cuh"
#include "sm90/few_heads/memory.cuh"
#include "sm90/few_heads/products.cuh"
#include "sm90/tma.cuh"

// Weights are exp2(score - reference); the reference is raised to the running maximum when that is so much larger.
constexpr float RAISE = 8.0f;

// One warpgroup: S^T = K Q^T and the softmax. Rows are keys, 16 a warp, columns heads: of warp w, lane 4 g + c has in elements
// 4 j + 2 r + e key 16 w + g + 8 r, head 8 j + 2 c + e. Numbers of heads stand at 2 j + e; all lanes of the same c have the same.
struct Scores {
    static constexpr int OWN = HEADS / 4;

    const SparseProblem& problem;
    const TensorMap& q_map;
    float scale_log2;  // of the scores' magnitude
    int warp, lane;
    uint32 weights_at;
    float reference[OWN], highest[OWN];  // base 2
    float totals[OWN];                   // of this lane's own keys
    uint32 seen;                         // not 0 after a key that is there

    __device__ Scores(const SparseProblem& p, const TensorMap& q)
        : problem(p), q_map(q), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
        // One of 0 would make NaN of an absent key's infinite score.
        scale_log2 = problem.softmax_scale == 0.0f ? 1e-30f : fabsf(problem.softmax_scale) * LOG2_E;
        int head = lane / 16 * 8 + lane % 8;
        weights_at = WEIGHTS_AT + head * 128 + ((2 * warp + lane / 8 % 2 ^ (head & 7)) << 4);
    }

    __device__ void begin() {
#pragma unroll
        for (int i = 0; i < OWN; ++i) reference[i] = highest[i] = -infinity(), totals[i] = 0.0f;
        seen = 0;
    }

    // Start to copy a tile's Q. One thread.
    __device__ void load_q(int tile) const {
        int token = tile / problem.groups, head = tile % problem.groups * HEADS;
        barrier_arrive_expecting(Q_READY, TILES * HEAD_TILE_BYTES);
        for (int i = 0; i < TILES; ++i) tma_load(Q_AT + i * HEAD_TILE_BYTES, q_map, 64 * i, head, token, Q_READY);
    }

    // Scores are added up in CHAINS sums, tiles in turn, as products that add to the same one wait for each other.
    static constexpr int CHAINS = 2;
    using Sums = float[CHAINS][HEADS / 2];

    __device__ void score_tile(Sums& sums, uint32 keys, int tile) {
        uint64 k = tile_descriptor(keys), q = tile_descriptor(Q_AT + tile * HEAD_TILE_BYTES);
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_keys(sums[step % CHAINS], k + 2 * step, q + 2 * step, 4 * tile + step >= CHAINS);
    }

    // Start the products of a block.
    __device__ void start(Sums& sums, Place<SLOTS>& place, const Place<ROPES>& rope) {
#pragma unroll
        for (int i = 0; i < CHAINS; ++i) pin(sums[i]);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            barrier_wait(READY + 8 * place.slot, place.phase);
            wgmma_fence();
            uint32 keys = RING_AT + place.slot * PIECE_BYTES;
#pragma unroll
            for (int i = 0; i < PIECE_TILES; ++i) score_tile(sums, keys + i * TILE_BYTES, PIECE_TILES * piece + i);
            place.advance();
        }
        if (HAS_ROPE) score_tile(sums, ROPE_AT + rope.slot * TILE_BYTES, TILES - 1);
        wgmma_commit();
    }

    // Wait for them.
    __device__ void take(float (&scores)[HEADS / 2], Sums& sums, Place<ROPES>& rope) {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < CHAINS; ++i) pin(sums[i]);
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i) scores[i] = sums[0][i] + sums[1][i];
        pin(scores);
        if (HAS_ROPE) warp_arrive(ROPE_FREE + 8 * rope.slot), rope.advance();
    }

    // Minus infinity for keys that are absent.
    __device__ void mask(float (&scores)[HEADS / 2], uint32 n) {
        if (problem.softmax_scale < 0.0f)
#pragma unroll
            for (int i = 0; i < HEADS / 2; ++i) scores[i] = -scores[i];
        uint2 present = lds64(PRESENT_AT + 8 * (n % PRESENTS));
        seen |= present.x | present.y;
        if ((present.x & present.y) == ~0u) return;
        uint32 bits = (warp < 2 ? present.x : present.y) >> (16 * (warp % 2) + lane / 4);
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i)
            if (!(bits >> i / 2 % 2 * 8 & 1)) scores[i] = -infinity();
    }

    // Put numbers of a lane's own keys together with those of the warp's others, and leave them at `to`, [HEADS].
    template <class Combine> __device__ void reduce(uint32 to, float (&x)[OWN], Combine combine) {
        halve<OWN / 2, 16>(x, combine), halve<OWN / 4, 8>(x, combine);
        int column = 2 * (lane % 4);
        if constexpr (HEADS == 32) {
            halve<1, 4>(x, combine);
            sts_float(to + (lane / 8 * 8 + column + lane / 4 % 2) * 4, x[0]);
        } else {
            x[0] = combine(x[0], __shfl_xor_sync(~0u, x[0], 4));
            if (!(lane & 4)) sts_float(to + (lane / 16 * 8 + column + lane / 8 % 2) * 4, x[0]);
        }
    }
    // Give half of 2 N numbers to lane ^ BY, and take the other half from it.
    template <int N, int BY, class Combine> __device__ void halve(float (&x)[OWN], Combine combine) {
        bool upper = lane & BY;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float low = x[i], high = x[i + N];
            x[i] = combine(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, BY));
        }
    }

    // The n-th block's highest scores of this warp's keys to shared memory, and a meeting of all.
    __device__ void tell_highest(const float (&scores)[HEADS / 2], uint32 n) {
        float most[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) most[i] = fmaxf(scores[2 * i - i % 2], scores[2 * i - i % 2 + 2]);
        reduce(HIGHEST_AT + (n % 2 * 4 + warp) * (HEADS * 4), most, [](float a, float b) { return fmaxf(a, b); });
        warpgroup_sync(1);
    }

    // Raise the references to them, where they are much higher.
    __device__ void raise(uint32 n) {
        uint32 column = 8 * (lane % 4), from = HIGHEST_AT + n % 2 * (4 * HEADS * 4) + column;
        float largest[OWN];
        bool much = false;
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float2 x[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) x[w] = lds_float2(from + w * (HEADS * 4) + 32 * j);
            largest[2 * j] = fmaxf(fmaxf(x[0].x, x[1].x), fmaxf(x[2].x, x[3].x)) * scale_log2;
            largest[2 * j + 1] = fmaxf(fmaxf(x[0].y, x[1].y), fmaxf(x[2].y, x[3].y)) * scale_log2;
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            highest[i] = fmaxf(highest[i], largest[i]);
            much |= largest[i] > reference[i] + RAISE;
        }
        if (__any_sync(~0u, much))
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                float now = largest[i] > reference[i] + RAISE ? largest[i] : reference[i];
                totals[i] *= now == reference[i] ? 1.0f : exp2_approx(reference[i] - now);
                reference[i] = now;
            }
        if (threadIdx.x % 128 < 4)
#pragma unroll
            for (int j = 0; j < HEADS / 8; ++j)
                sts_float2(REFERENCE_AT + n % 2 * (HEADS * 4) + column + 32 * j, {reference[2 * j], reference[2 * j + 1]});
    }

    // Weights of the n-th block, in bfloat16 to shared memory.
    __device__ void weigh(float (&scores)[HEADS / 2], uint32 n) {
        uint32 words[4], at = weights_at + n % 2 * HEAD_TILE_BYTES;
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float base = reference[2 * j + i % 2];
                x[i] = exp2_approx(fmaf(scores[4 * j + i], scale_log2, base == -infinity() ? 0.0f : -base));
                totals[2 * j + i % 2] += x[i];
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) words[j % 2 * 2 + r] = pack(bf16{}, x[2 * r], x[2 * r + 1]);
            if (j % 2) stmatrix4_transposed(at + j / 2 * 2048, words[0], words[1], words[2], words[3]);
        }
        fence_proxy_async();
        warp_arrive(WEIGHTS_READY + 8 * (n % 2));
    }

    // What a tile's scores come to: totals for the sums, the highest ones to memory.
    __device__ void finish(int tile, uint32 tiles) {
        bool bad = false;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            // Every score minus infinity, though there are keys: they are not, but out of range. Or scores of which float32
            // has too few digits for what they differ by.
            bad |= reference[i] == -infinity() ? seen != 0 : fabsf(reference[i]) > MAX_PRECISE_SCORE;
        }
        bad = __any_sync(~0u, bad);
        reduce(TOTALS_AT + (tiles % 2 * 4 + warp) * (HEADS * 4), totals, [](float a, float b) { return a + b; });
        warp_arrive(TOTALS_READY + 8 * (tiles % 2));
        TileCoord at(problem, tile);
        if (threadIdx.x % 128 < 4)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                int head = at.first_head + i / 2 * 8 + 2 * lane + i % 2;
                if (head < problem.heads)
                    problem.max_logits[at.b * problem.max_stride_b + head * problem.max_stride_h] =
                        bad ? __uint_as_float(UNSAFE_BITS) : highest[i] * LN_2;
            }
    }

    // The softmax of the n-th block; behind the last one of a tile, `next_tile`'s Q is wanted, if not negative.
    __device__ void weigh_block(float (&scores)[HEADS / 2], uint32 n, int next_tile) {
        mask(scores, n);
        tell_highest(scores, n);
        if (next_tile >= 0 && threadIdx.x % 128 == 0) load_q(next_tile);  // all have done with the one before
        barrier_wait(WEIGHTS_FREE + 8 * (n % 2), n / 2 % 2 ^ 1);
        raise(n);
        weigh(scores, n);
    }

    __device__ void run() {
        TileWalk walk(problem);
        Place<SLOTS> place;
        Place<ROPES> rope;
        Sums sums;
        float scores[HEADS / 2];
        if (walk.more() && threadIdx.x % 128 == 0) load_q(walk.tile);
        uint32 n = 0;
        for (uint32 tiles = 0; walk.more(); ++tiles) {
            int tile = walk.tile, left = blocks_of(__reduce_max_sync(~0u, walk.length));  // the compiler knows it to be the same
            walk.advance();
            begin();
            barrier_wait(Q_READY, tiles % 2);
            start(sums, place, rope);
            for (; left > 1; --left, ++n) {
                take(scores, sums, rope);
                start(sums, place, rope);  // the next block's products beside this one's softmax
                weigh_block(scores, n, -1);
            }
            take(scores, sums, rope);
            weigh_block(scores, n++, walk.more() ? walk.tile : -1);
            finish(tile, tiles);
        }
    }
};
