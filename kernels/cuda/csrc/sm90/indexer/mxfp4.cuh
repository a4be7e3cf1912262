// Consumers of MXFP4 keys (sm90/indexer/logits.cu).
//
// Keys are converted to e5m2 in registers, as the first operand of products, once for all queries: PASSES products of
// PASS queries. Values times scales of 2^-13 to 2^13 are e5m2 numbers, so products are exact. Where the 16 keys of a
// warp have other scales, each key is multiplied by a power of two that makes its largest scale 2^13, and keys with a
// scale more than 2^26 below that are scored in float32 (score_of_key). A lane has 32 values of two keys, which share
// one scale for each key. Queries are permuted to the same order as they are loaded: values 32 c + 8 s + 4 o to + 3
// become the four values of lane c at 16 o of step s. The keys of the next tile are expanded while the last product of
// a tile runs.
#pragma once
#include "common/pages.cuh"
#include "sm90/indexer/products.cuh"

#if MXFP4

constexpr int LOWEST = 127 - 13, SPAN = 26;  // scale bytes from LOWEST to LOWEST + SPAN: e5m2 can represent the values
constexpr uint32 SPECIAL = 0x8000;

__device__ inline uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
    uint32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selector));  // __byte_perm would mask the selector again
    return y;
}

// This lane's values of keys g and g + 8 of a stage as operands of four steps. Returns 0 in the usual case. For a warp
// with scales far from 1 or absent keys it returns SPECIAL, for all lanes, and 16 bits for each key: its largest scale,
// and whether this lane's scale is too far below it.
__device__ inline uint32 expand_keys(uint32 row, uint32 scales, uint32 present, uint32 (&a)[4][4]) {
    uint32 found = 0, own[2] = {lds8(scales), lds8(scales + 8 * 4)};
    if (__any_sync(~0u, max(own[0] - LOWEST, own[1] - LOWEST) > SPAN || lds32(present) != 0xff)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int most = own[i];
#pragma unroll
            for (int by = 1; by <= 2; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
            int below = int(own[i]) - most;
            bool rare = below < -SPAN || (most && !own[i]);
            found |= uint32(most | rare << 8) << 16 * i;
            own[i] = max(below, -SPAN) + LOWEST + SPAN;
        }
        found |= SPECIAL;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // e5m2 numbers times 2^shift, without borrows: 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
        uint32 small = own[i] * 0x04040400 + (0x3e3c3800u - 127 * 0x04040400u);
        uint32 large = own[i] * 0x04040404 + (0x46444240u - 127 * 0x04040404u);
        uint4 codes = lds128(row + 8 * i * ROW_BYTES);
        uint32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            uint32 magnitudes = words[step] & 0x77777777, even = words[step] << 4;
            a[step][i] = permute_bytes(small, large, magnitudes) | (__byte_perm(even, words[step], 0x5140) & 0x80808080);
            a[step][2 + i] = permute_bytes(small, large, magnitudes >> 16) | (__byte_perm(even, words[step], 0x7362) & 0x80808080);
        }
    }
    return found;
}

// A UE8M0 scale; 2^-127 counts as 0.
__device__ inline float scale_of(uint32 byte) { return __uint_as_float(byte == 255 ? 0x7fc00000 : byte << 23); }

// The score of a key whose scales are far apart, in float32. Called by a warp; the lanes divide the heads.
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
        sum = fmaf(relu(product), lds_float(weights + 4 * weight_at(head)), sum);
    }
#pragma unroll
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    return sum;
}

// Replaces the scores of keys whose scales are far apart, for all queries of a pass; `at` is the first of them in
// shared memory.
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

// A warp of a warpgroup that scores every RINGS-th 64 keys of the tiles. Lane 4 g + c has keys row and row + 8 of its warp's 16; after
// the reduction over lanes, one of them for one query of a pass.
struct Consumer {
    const Problem& problem;
    uint32 place;  // 4 row + c
    int stage;
    uint32 parity;
    // The group in q_stage:
    int q_stage, key, tiles, first_row;

    __device__ uint32 row() const { return place / 4; }
    __device__ uint32 own_query() const { return PASS == 2 ? place & 1 : 0; }
    __device__ uint32 upper() const { return PASS == 2 ? place >> 1 & 1 : place & 1; }
    __device__ void next_stage() {
        if ((stage += RINGS) >= RINGS * K_STAGES) stage -= RINGS * K_STAGES, parity ^= 1;
    }
    // Wait for the keys of this stage and expand them.
    __device__ uint32 expand(uint32 (&a)[4][4]) {
        k_ready[stage].wait(parity);
        return expand_keys(K_AT + stage * K_BYTES + 16 * place, SCALES_AT + stage * RING_KEYS * 4 + place, PRESENT_AT + 4 * stage, a);
    }
    __device__ void start(float (&x)[COLUMNS], uint32 (&a)[4][4], int pass) const {
        uint64 q_tile = tile_descriptor(Q_AT + (q_stage * QUERIES + pass * PASS) * Q_BYTES);
        pin(x);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < DIM / 32; ++step) wgmma_rows(e5m2{}, x, a[step], q_tile + 2 * step, step > 0);
        wgmma_commit();
    }
    __device__ void finish(float (&x)[COLUMNS]) const {
        wgmma_wait<0>();
        pin(x);
    }
    // A lane's weights of a query, from shared memory.
    __device__ void load_weights(float (&weights)[HEADS / 4], int query) const {
#pragma unroll
        for (int i = 0; i < HEADS / 4; i += 4) {
            uint4 four = lds128(WEIGHTS_AT + ((q_stage * QUERIES + query) * HEADS + place % 4 * (HEADS / 4) + i) * 4);
            weights[i] = __uint_as_float(four.x), weights[i + 1] = __uint_as_float(four.y);
            weights[i + 2] = __uint_as_float(four.z), weights[i + 3] = __uint_as_float(four.w);
        }
    }
    // `weights`, `logits` and `end` belong to the only pass; with more passes each reads its own.
    __device__ void store(const float (&x)[COLUMNS], float (&weights)[PASS][HEADS / 4], int pass, int of_stage, uint32 found, float* logits,
                          int end) const {
        float score, low, high;
        uint32 c = place % 4;
        if (PASSES > 1) load_weights(weights[0], pass * PASS);
        sum_heads(x, 0, weights[0], low, high);
        if constexpr (PASS == 2) {
            float other_low, other_high;
            if (PASSES > 1) load_weights(weights[1], pass * PASS + 1);
            sum_heads(x, HEADS / 2, weights[1], other_low, other_high);
            float sums[4] = {low, other_low, high, other_high};
            score = sum_of_four(sums, c);
        } else {
            score = (c & 1 ? high : low) + __shfl_xor_sync(~0u, c & 1 ? low : high, 1);
            score += __shfl_xor_sync(~0u, score, 2);
        }
        score *= 0.5f;  // sums are doubled
        if (__any_sync(~0u, found))
            score = of_special_keys(score, pass, of_stage, found);  // a vote, which is uniform for the compiler, too
        if (PASSES > 1) logits = logits_of(pass), end = end_of(pass);
        bool stores = (PASS == 2 || c < 2) && key < end;
        if (stores) logits[key] = score;
        int row = first_row + pass * PASS + own_query();
        if (MAXIMA) asm volatile("" : "+r"(row));  // otherwise the offset among maxima takes registers earlier
        store_maximum(problem, row, key, end, score, stores);
    }
    __device__ float of_special_keys(float score, int pass, int of_stage, uint32 found) const {
        uint32 present = lds32(PRESENT_AT + 4 * of_stage) >> row() / 8;  // of row, and of row + 8
        score = score * (1.0f / (1 << 13)) * scale_of(found >> 16 * upper() & 255);
        if (__any_sync(~0u, found & 0x01000100 && present & 3))
            score_rare_keys(found, of_stage, row(), q_stage * QUERIES + pass * PASS, own_query(), upper(), score);
        score = present >> upper() & 1 ? score : -infinity();
        return is_seen(of_stage, row() + 8 * upper()) ? score : problem.fill;
    }
    // Read the group in q_stage; false if there is none.
    __device__ bool begin() {
        uint32 info = INFO_AT + q_stage * sizeof(Info);
        key = int(lds32(info) + 64 * (stage % RINGS) + row() + 8 * upper());
        tiles = __shfl_sync(~0u, int(lds32(info + 4)), 0);
        first_row = lds32(info + 8 + 8 * QUERIES);
        return tiles;
    }
    __device__ int end_of(int pass) const {
        return lds32(INFO_AT + q_stage * sizeof(Info) + 8 + 4 * (QUERIES + pass * PASS + own_query()));
    }
    __device__ float* logits_of(int pass) const {
        return problem.logits + int64(first_row + pass * PASS + own_query()) * problem.logits_stride;
    }

    // With one pass: the keys of the next tile are expanded while a product runs.
    __device__ void score_group() {
        float weights[PASS][HEADS / 4], *logits = logits_of(0);
        int end = end_of(0);
#pragma unroll
        for (int i = 0; i < PASS; ++i) load_weights(weights[i], i);
        auto score_tile = [&](uint32(&a)[4][4], uint32 found, uint32(&next)[4][4], uint32& found_next) {
            float x[COLUMNS];
            int of_stage = stage;
            start(x, a, 0);
            next_stage();
            if (tiles > 1) found_next = expand(next);
            finish(x);
            store(x, weights, 0, of_stage, found, logits, end);
            k_free[of_stage].arrive_warp();
            key += KEYS, --tiles;
        };
        uint32 even[4][4], odd[4][4], found_even = expand(even), found_odd;
#pragma unroll 1
        while (true) {
            score_tile(even, found_even, odd, found_odd);
            if (!tiles) break;
            score_tile(odd, found_odd, even, found_even);
            if (!tiles) break;
        }
    }

    // With more passes: the next product runs while one is reduced.
    template <int pass>
    __device__ void score_pass(float (&x)[COLUMNS], float (&next)[COLUMNS], uint32 (&a)[4][4], uint32& found) {
        int of_stage = stage;
        uint32 of_tile = found;
        if (pass == PASSES - 1) {
            next_stage();
            if (tiles > 1) found = expand(a);
        }
        start(next, a, (pass + 1) % PASSES);  // after the last tile an unneeded product: a branch would serialise products
        float weights[PASS][HEADS / 4];
        store(x, weights, pass, of_stage, of_tile, nullptr, 0);
        if (pass == PASSES - 1) {
            k_free[of_stage].arrive_warp();
            key += KEYS, --tiles;
        }
        finish(next);
    }
    template <int pass>
    __device__ void score_passes(float (&x)[COLUMNS], float (&next)[COLUMNS], uint32 (&a)[4][4], uint32& found) {
        score_pass<pass>(x, next, a, found);
        if constexpr (pass + 1 < PASSES) score_passes<pass + 1>(next, x, a, found);
    }
    __device__ void score_group_in_passes() {
        uint32 a[4][4], found = expand(a);
        float x[COLUMNS], y[COLUMNS];
        start(x, a, 0);
        finish(x);
#pragma unroll 1
        while (true) {
            score_passes<0>(x, y, a, found);
            if (!tiles) break;
            if (PASSES % 2) {
                score_passes<0>(y, x, a, found);
                if (!tiles) break;
            }
        }
    }
};

__device__ inline void consume(const Problem& problem) {
    uint32 warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0), place = threadIdx.x % 128 / 32 * 64 + threadIdx.x % 32;
    asm volatile("" : "+r"(place));  // not recomputed
    Consumer consumer{problem, place, int(warpgroup), 0};
#pragma unroll 1
    for (uint32 count = 0;; ++count) {
        consumer.q_stage = count % Q_STAGES;
        q_ready[consumer.q_stage].wait(count / Q_STAGES % 2);
        fence_proxy_async();  // products read data that copies of the other proxy have written
        if (!consumer.begin()) return;
        if constexpr (PASSES == 1) consumer.score_group();
        else consumer.score_group_in_passes();
        q_free[consumer.q_stage].arrive_warp();
    }
}
#endif
