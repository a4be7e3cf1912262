// Consumers of MXFP4 keys (sm90/indexer/logits.cu).
//
// The keys become e4m3 in registers, as a product's first operand, once for all queries: PASSES products of PASS queries. A key's
// four scales are at most 2^11 apart in practice: its values, each times its scale over the largest one and 2^6, are e4m3
// numbers, so products are exact. Other keys are scored in float32 (score_of_key). A lane has 32 values of two keys, those of
// one scale each, in an order that queries are brought into as they are loaded: four values 32 c + 8 s + 4 o become those that
// lane c has at 16 o of step s. While a tile is multiplied, the keys of the next one are expanded.
#pragma once
#include "common/row_format.cuh"
#include "sm90/indexer/products.cuh"

#if MXFP4

constexpr int EXACT_SPAN = 11, LARGEST_SHIFT = 6;  // exponents of a key's scales; those of its values in e4m3
constexpr float UNIT = 0.5f / (1 << LARGEST_SHIFT);  // sums are doubled

// This lane's values of keys g and g + 8 as operands of four steps. Returns, for each key, 16 bits: its largest scale, and whether
// this lane's scale is too far below it.
__device__ inline uint32 expand_keys(uint32 row, uint32 scales, int c, uint32 (&a)[4][4]) {
    uint32 found = 0;
    int own[2], most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) most[i] = own[i] = lds8(scales + 8 * i * 4 + c);
#pragma unroll
    for (int by = 1; by <= 2; by *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], by));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint4 codes = lds128(row + 8 * i * ROW_BYTES + 16 * c);
        uint32 words[4] = {codes.x, codes.y, codes.z, codes.w};
        int below = own[i] - most[i], shift = max(below, -EXACT_SPAN) + LARGEST_SHIFT;
        // e4m3 numbers times 2^shift, without borrows: 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
        uint32 small = 0x3c383000 + shift * 0x08080800, large = 0x4c484440 + shift * 0x08080808;
        found |= uint32(most[i] | (below < -EXACT_SPAN) << 8) << 16 * i;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            uint32 magnitudes = words[step] & 0x77777777, even = words[step] << 4;
            asm("" : "+r"(magnitudes));  // else both halves are masked
            a[step][i] = __byte_perm(small, large, magnitudes) | (__byte_perm(even, words[step], 0x5140) & 0x80808080);
            a[step][2 + i] = __byte_perm(small, large, magnitudes >> 16) | (__byte_perm(even, words[step], 0x7362) & 0x80808080);
        }
    }
    return found;
}

// A UE8M0 scale; 2^-127 counts as 0.
__device__ inline float scale_of(uint32 byte) { return __uint_as_float(byte == 255 ? 0x7fc00000 : byte << 23); }

// The score of a key whose scales are far apart, in float32, by a warp: a lane takes heads.
__device__ inline float score_of_key(uint32 row, uint32 scales, uint32 q, uint32 weights) {
    float sum = 0;
#pragma unroll 1
    for (int head = threadIdx.x % 32; head < HEADS; head += 32) {
        float product = 0;
#pragma unroll 1
        for (int group = 0; group < 4; ++group) {
            float of_group = 0;
#pragma unroll 1
            for (int word = 0; word < 4; ++word) {
                uint32 values[2];
                e2m1_to_e4m3(lds32(row + 16 * group + 4 * word), values[0], values[1]);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32 of_query = lds32(q + head * DIM + ((2 * word + half ^ head % 8) << 4) + 4 * group);
#pragma unroll
                    for (int i = 0; i < 32; i += 16) {
                        float k0, k1, q0, q1;
                        e4m3x2_to_float(values[half] >> i & 0xffff, k0, k1), e4m3x2_to_float(of_query >> i & 0xffff, q0, q1);
                        of_group = fmaf(k0, q0, fmaf(k1, q1, of_group));
                    }
                }
            }
            product = fmaf(of_group, scale_of(lds32(scales) >> 8 * group & 255), product);
        }
        sum = fmaf(relu(product), lds_float(weights + 4 * head), sum);
    }
#pragma unroll
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    return sum;
}

// Replaces the scores of keys whose scales are far apart, for all queries of a pass, the first of which is `at` in shared memory.
__device__ inline void score_rare_keys(uint32 found, int stage, int own_row, int at, int own_query, int own_upper, float& score) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll 1
        for (uint32 rare = __ballot_sync(~0u, found >> (16 * upper + 8) & 1); rare;) {
            int from = (__ffs(rare) - 1) & ~3, row = own_row - lane / 4 + from / 4 + 8 * upper;
            rare &= ~(0xfu << from);
#pragma unroll 1
            for (int query = 0; query < PASS; ++query) {
                float exact = score_of_key(K_AT + stage * K_BYTES + row * ROW_BYTES, SCALES_AT + (stage * RING_KEYS + row) * 4,
                                           Q_AT + (at + query) * Q_BYTES, WEIGHTS_AT + (at + query) * HEADS * 4);
                if (lane / 4 == from / 4 && own_query == query && own_upper == upper) score = exact;
            }
        }
    }
}

__device__ inline void consume(const Problem& problem) {
    int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, c = lane % 4;
    int row = 16 * warp + lane / 4;  // keys row and row + 8 of the warpgroup's ring
    // After the reduction over lanes, this lane has one key of one query of a pass.
    int own_query = PASS == 2 ? c & 1 : 0, upper = PASS == 2 ? c >> 1 : c & 1, own_key = 64 * warpgroup + row + 8 * upper;
    bool stores = PASS == 2 || c < 2;
    int stage = warpgroup;
    uint32 parity = 0;
    for (uint32 q_count = 0;; ++q_count) {
        int q_stage = q_count % Q_STAGES;
        barrier_wait(Q_READY + 8 * q_stage, q_count / Q_STAGES % 2);
        fence_proxy_async();  // products read what copies of the other proxy have written
        uint32 info = INFO_AT + q_stage * sizeof(Info);
        int key = int(lds32(info)) + own_key, tiles = __shfl_sync(~0u, int(lds32(info + 4)), 0);
        if (!tiles) return;
        int first_row = lds32(info + 8 + 8 * QUERIES);
        auto keys_at = [&](int at) { return K_AT + at * K_BYTES + row * ROW_BYTES; };
        auto scales_at = [&](int at) { return SCALES_AT + (at * RING_KEYS + row) * 4; };
        // Score a tile, whose keys are `a`; meanwhile expand those of the next one.
        auto score_tile = [&](uint32 (&a)[4][4], uint32 found, uint32 (&next)[4][4], uint32& found_next) {
            uint32 present = lds32(PRESENT_AT + 4 * stage) >> row / 8;  // of row, and of row + 8
            float scale = scale_of(found >> 16 * upper & 255);
            bool rare = __any_sync(~0u, found & 0x01000100 && present & 3);
            int after = stage + RINGS >= RINGS * K_STAGES ? stage + RINGS - RINGS * K_STAGES : stage + RINGS;
            uint32 parity_after = after < stage ? parity ^ 1 : parity;
#pragma unroll 1
            for (int pass = 0; pass < PASSES; ++pass) {
                int query = pass * PASS + own_query;
                uint32 at = q_stage * QUERIES + pass * PASS;
                uint64 q_tile = tile_descriptor(Q_AT + at * Q_BYTES);
                float x[COLUMNS];
                pin(x);
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < DIM / 32; ++step) multiply(x, a[step], q_tile + 2 * step, step > 0);
                wgmma_commit();
                if (pass == PASSES - 1 && tiles > 1) {
                    barrier_wait(K_READY + 8 * after, parity_after);
                    found_next = expand_keys(keys_at(after), scales_at(after), c, next);
                }
                int first = lds32(info + 8 + 4 * query), end = lds32(info + 8 + 4 * (QUERIES + query));
                wgmma_wait<0>();
                pin(x);
                float weights[PASS][HEADS / 4];
#pragma unroll
                for (int i = 0; i < PASS; ++i)
#pragma unroll
                    for (int n = 0; n < HEADS / 8; ++n) {
                        float2 pair = lds_float2(WEIGHTS_AT + ((at + i) * HEADS + 8 * n + 2 * c) * 4);
                        weights[i][2 * n] = pair.x, weights[i][2 * n + 1] = pair.y;
                    }
                float score, low, high;
                sum_heads(x, 0, weights[0], low, high);
                if constexpr (PASS == 2) {
                    float other_low, other_high;
                    sum_heads(x, HEADS / 2, weights[1], other_low, other_high);
                    float sums[4] = {low, other_low, high, other_high};
                    score = sum_of_four(sums, c);
                } else {
                    score = (c & 1 ? high : low) + __shfl_xor_sync(~0u, c & 1 ? low : high, 1);
                    score += __shfl_xor_sync(~0u, score, 2);
                }
                score *= UNIT * scale;
                if (rare) score_rare_keys(found, stage, row, at, own_query, upper, score);
                if (!(present >> upper & 1)) score = -infinity();
                if (stores && key >= first && key < end)
                    problem.logits[int64(first_row + query) * problem.logits_stride + key] = score;
                store_maximum(problem, first_row + query, key, end, score, stores);
            }
            warp_arrive(K_FREE + 8 * stage);
            stage = after, parity = parity_after, key += KEYS, --tiles;
        };
        uint32 even[4][4], odd[4][4], found_even, found_odd;
        barrier_wait(K_READY + 8 * stage, parity);
        found_even = expand_keys(keys_at(stage), scales_at(stage), c, even);
#pragma unroll 1
        while (true) {
            score_tile(even, found_even, odd, found_odd);
            if (!tiles) break;
            score_tile(odd, found_odd, even, found_even);
            if (!tiles) break;
        }
        warp_arrive(Q_FREE + 8 * q_stage);
    }
}
#endif
