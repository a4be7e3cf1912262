// The consumers of sm90/dense/decode/decode.cu.
#pragma once
#include "sm90/dense/decode/work.cuh"

constexpr int EARLY_PIECES = 2;  // pieces that are scored before the other consumer's block is added

// Weights are exp2(score - reference). The reference is raised to the running maximum when the maximum exceeds it by
// more than RAISE, which is rare after the first blocks.
constexpr float RAISE = 8.0f;

template <bool VALUE_> struct Yes { static constexpr bool value = VALUE_; };

// Arguments of a launch, except the cache.
struct DenseProblem {
    const VALUE* q;
    int64 q_stride_b, q_stride_s, q_stride_h;
    int s_q, heads;
    float scale_log2;
    VALUE* out;
    int64 out_stride_b, out_stride_s, out_stride_h;
    float* lse;
    int64 lse_stride_b, lse_stride_h, lse_stride_s;
    float *partial_out, *partial_lse;
};

// Process a token, or its part in this range. `phases`: bit c is the parity of the number of blocks of consumer c so
// far, bit 2 the parity of the number of tokens. Returns the phases after this token.
template <int CONSUMER>
__device__ inline uint32 consume_token(const DenseProblem& problem, const DenseTokens& tokens, int token, uint32 phases) {
    constexpr int consumer = CONSUMER;
    int thread = threadIdx.x % 128, cta = blockIdx.x, groups = (problem.heads + HEADS - 1) / HEADS;
    asm volatile(""
                 : "+r"(thread), "+r"(cta),
                   "+r"(token));  // values derived from these are recomputed for every token instead of kept in registers
    int range = cta / groups, group = cta % groups, warp = thread / 32, lane = thread % 32, row = thread / 8, chunk = thread % 8;
    uint32 swizzled = row * 128 + ((chunk ^ (row & 7)) << 4);
    int first_head = group * HEADS, request = token / problem.s_q, query = token % problem.s_q;
    uint32 window = shared_window();
    int blocks = load_work(window).blocks_here(token, uniform(tokens.blocks(token)));
    {
        const VALUE* from_q = problem.q + request * problem.q_stride_b + query * problem.q_stride_s + 8 * chunk;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int head = 32 * consumer + 16 * r + row;
            bool present = first_head + head < problem.heads;
            const VALUE* from = present ? from_q + (first_head + head) * problem.q_stride_h : problem.q;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                copy_async<16>(window + Q_AT + t * TILE_BYTES + 2048 * (2 * consumer + r) + swizzled, from + (present ? 64 * t : 0),
                               present);
        }
        copies_commit();
        copies_wait<0>();
        fence_proxy_async();
        q_ready.in(window).arrive_warp();
        q_ready.in(window).wait(phases >> 2);
        warpgroup_sync(2 + consumer);  // otherwise the compiler treats the following code as divergent, and serialises the products
    }
    float scale_log2 = problem.scale_log2;
    // The buffer of the other consumer's blocks; this consumer's pieces of every block.
    constexpr uint32 other = consumer ^ 1, low_piece = 1 + consumer, high_piece = 3 + consumer;
    uint64 q_tile = tile_descriptor(Q_AT);
    uint64 own_k = tile_descriptor(K_AT + consumer * K_BYTES);
    uint64 own_columns = transposed_descriptor(K_AT + consumer * K_BYTES + 4 * consumer * TILE_BYTES);
    uint64 other_columns = transposed_descriptor(K_AT + (consumer ^ 1) * K_BYTES + 4 * consumer * TILE_BYTES);
    uint64 weights_tile = tile_descriptor(WEIGHTS_AT);
    int head = 16 * warp + lane / 4;  // and head + 8

    float low[64] = {}, high[64] = {};  // sums of 128 values each
    float reference[2] = {-infinity(), -infinity()}, total[2] = {};
    pin(low), pin(high);

    // Raise the references to `now`, and rescale the sums of earlier blocks.
    auto raise_to = [&](const float (&raised)[2]) {
        if (!__any_sync(~0u, raised[0] != reference[0] || raised[1] != reference[1])) return;
        float rescale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rescale[half] = raised[half] == reference[half] ? 1.0f : exp2_approx(reference[half] - raised[half]);
            reference[half] = raised[half];
            total[half] *= rescale[half];
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) low[i] *= rescale[i / 2 % 2], high[i] *= rescale[i / 2 % 2];
    };
    // Start the PV products of block `block` of the other consumer (among its blocks of this token), with its weights.
    auto add_other = [&](int block) {
        uint32 parity = ((phases >> (consumer ^ 1)) + block) % 2;
        weights_ready[other].in(window).wait(parity);
        float raised[2] = {lds_float(window + REFERENCE_AT + 256 * (consumer ^ 1) + 4 * head),
                           lds_float(window + REFERENCE_AT + 256 * (consumer ^ 1) + 4 * head + 32)};
        raise_to(raised);
        k_ready[other][low_piece].in(window).wait(parity);
        k_ready[other][high_piece].in(window).wait(parity);
        pin(low), pin(high);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_columns(VALUE{}, low, weights_tile + 2 * step, other_columns + 128 * step, 1);
        wgmma_commit();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_columns(VALUE{}, high, weights_tile + 2 * step, other_columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
        wgmma_commit();
    };

    auto take = [&](auto has_other, int block) {
        constexpr bool WITH_OTHER = decltype(has_other)::value;
        uint32 parity = ((phases >> consumer) + block / 2) % 2;
        float scores[32];
        auto score = [&](int piece) {
            k_ready[consumer][piece].in(window).wait(parity);
            wgmma_fence();  // repeated, because the compiler treats the code after a wait as divergent
#pragma unroll
            for (int step = 0; step < 4 * tile_count(piece); ++step) {
                int tile = (first_tile(piece) + step / 4) * (TILE_BYTES >> 4);
                wgmma_rows(VALUE{}, scores, q_tile + tile + step % 4 * 2, own_k + tile + step % 4 * 2, piece + step > 0);
            }
        };
        pin(scores);
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < EARLY_PIECES; ++piece) score(piece);
        wgmma_commit();
        if constexpr (WITH_OTHER) add_other((block - 1) / 2);
#pragma unroll
        for (int piece = EARLY_PIECES; piece < PIECES; ++piece) {
            score(piece);
            wgmma_commit();
            if (WITH_OTHER && piece == EARLY_PIECES) wgmma_wait<2>(), k_free[other][low_piece].in(window).arrive_warp();
            if (WITH_OTHER && piece == EARLY_PIECES + 1) wgmma_wait<2>(), k_free[other][high_piece].in(window).arrive_warp();
        }
        wgmma_wait<0>();
        pin(scores), pin(low), pin(high);

        uint4 present = lds128(window + PRESENT_AT + 16 * consumer);
        k_free[consumer][0].in(window).arrive_warp();
        if ((present.x & present.y & present.z & present.w) != 0x0f0f0f0f) {
            uint32 words[4] = {present.x, present.y, present.z, present.w};
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                // Column 8 (i / 4) + 2 (lane % 4) + i % 2: word column / 16, byte column / 4 % 4, bit column % 4.
                int bit = 16 * (i / 4 % 2) + 8 * (lane % 4 / 2) + 2 * (lane % 2) + i % 2;
                if (!(words[i / 8] >> bit & 1)) scores[i] = -infinity();
            }
        }
        float raised[2], sum[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = -infinity();
#pragma unroll
            for (int i = 2 * half; i < 32; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
            largest = quad_max(largest) * scale_log2;
            raised[half] = largest > reference[half] + RAISE ? largest : reference[half];
            if (lane % 4 == 0) sts_float(window + REFERENCE_AT + 256 * consumer + 4 * head + 32 * half, raised[half]);
            float base = raised[half] == -infinity() ? 0.0f : raised[half], scale = scale_log2;
            if (__any_sync(~0u, fabsf(base) >= LARGE_LOGIT)) {
#pragma unroll
                for (int i = 2 * half; i < 32; i += 4)
                    scores[i] = mul(scores[i], scale) - base, scores[i + 1] = mul(scores[i + 1], scale) - base;
                scale = 1.0f, base = 0.0f;
            }
#pragma unroll
            for (int i = 2 * half; i < 32; i += 4) {
                scores[i] = exp2_approx(fmaf(scores[i], scale, -base));
                scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale, -base));
                sum[half] += scores[i] + scores[i + 1];
            }
        }
        uint32 weights[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) weights[i / 4][i % 4] = pack(VALUE{}, scores[2 * i], scores[2 * i + 1]);
        warpgroup_sync(2 + consumer);  // all warps of this consumer have used the previous weights
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            int at = 16 * warp + lane % 16;
            stmatrix4(window + WEIGHTS_AT + at * 128 + (((2 * step + lane / 16) ^ (at & 7)) << 4), weights[step][0], weights[step][1],
                      weights[step][2], weights[step][3]);
        }
        fence_proxy_async();
        weights_ready[consumer].in(window).arrive_warp();

        raise_to(raised);
        total[0] += sum[0], total[1] += sum[1];
        pin(low), pin(high);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_columns(VALUE{}, low, weights[step], own_columns + 128 * step, 1);
        wgmma_commit();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_columns(VALUE{}, high, weights[step], own_columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
        wgmma_commit();
        wgmma_wait<1>();
        k_free[consumer][low_piece].in(window).arrive_warp();
        wgmma_wait<0>();
        pin(low), pin(high);
        k_free[consumer][high_piece].in(window).arrive_warp();
    };
    if (consumer == 0 && blocks) take(Yes<false>{}, 0);
    for (int block = 2 - consumer; block < blocks; block += 2) take(Yes<true>{}, block);
    if (blocks && (blocks - 1) % 2 != consumer) {
        add_other((blocks - 1) / 2);
        wgmma_wait<0>();
        pin(low), pin(high);
        k_free[other][low_piece].in(window).arrive_warp(), k_free[other][high_piece].in(window).arrive_warp();
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] = quad_sum(total[half]);
        if (lane % 4 == 0) sts_float(window + TOTALS_AT + 256 * consumer + 4 * (head + 8 * half), total[half]);
    }
    DenseWork work = load_work(window);  // reloaded: the products use its registers
    if (token == work.last_token()) pdl_release();  // the kernel that combines parts is launched while they are stored
    totals_ready[consumer].in(window).arrive_warp();
    totals_ready[other].in(window).wait(phases >> 2);
    int part = work.part(token, range);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int own_head = first_head + head + 8 * half;
        if (own_head >= problem.heads) continue;
        total[half] += lds_float(window + TOTALS_AT + 256 * (consumer ^ 1) + 4 * (head + 8 * half));
        bool empty = reference[half] == -infinity() && total[half] == 0.0f;  // a row of only NaN scores is not empty
        float inv_sum = empty ? 0.0f : 1.0f / total[half];
        float log_sum = (reference[half] + log2f(total[half])) * LN_2;
        int column = 256 * consumer + 2 * (lane % 4);
        if (part >= 0) {
            int64 row_of_part = int64(part) * problem.heads + own_head;
            float* to = problem.partial_out + row_of_part * LATENT_V + column;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                int i = 4 * n + 2 * half;
                store_pair(to + 8 * n, low[i] * inv_sum, low[i + 1] * inv_sum);
                store_pair(to + 128 + 8 * n, high[i] * inv_sum, high[i + 1] * inv_sum);
            }
            if (consumer == 0 && lane % 4 == 0) problem.partial_lse[row_of_part] = empty ? -infinity() : log_sum;
        } else {
            VALUE* to =
                problem.out + request * problem.out_stride_b + query * problem.out_stride_s + own_head * problem.out_stride_h + column;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                int i = 4 * n + 2 * half;
                store_pair(to + 8 * n, low[i] * inv_sum, low[i + 1] * inv_sum);
                store_pair(to + 128 + 8 * n, high[i] * inv_sum, high[i + 1] * inv_sum);
            }
            if (consumer == 0 && lane % 4 == 0)
                problem.lse[request * problem.lse_stride_b + own_head * problem.lse_stride_h + query * problem.lse_stride_s] =
                    empty ? infinity() : log_sum;
        }
    }
    return phases ^ ((blocks + 1) / 2 % 2 | blocks / 2 % 2 << 1 | 4);
}

template <int CONSUMER>
__device__ inline void consume(const DenseProblem& problem, const DenseTokens& tokens) {
    uint32 phases = 0;
    for (int token = load_work(shared_window()).begin.token; token <= load_work(shared_window()).last_token(); ++token)
        phases = consume_token<CONSUMER>(problem, tokens, token, phases);
}
