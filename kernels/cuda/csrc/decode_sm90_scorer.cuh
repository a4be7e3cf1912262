// The scorer of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

struct Scorer {
    const Problem& problem;
    int warp, lane;
    Ring<STAGES> raw;
    uint32 k = 0;  // slices taken, over all blocks
    Ring<P_SLOTS> p_slot;

    __device__ Scorer(const Problem& p) : problem(p), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // All threads of the scorer.
    __device__ void sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

    // Start copying a tile's Q, as bfloat16.
    __device__ void copy_q(int tile) {
        TilePlace at(problem, tile);
        int thread = threadIdx.x % 128, chunk = thread % 8;
        const bf16* q = problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s + chunk * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = thread / 8 + 16 * i;
            bool here = at.first_head + row < problem.heads;
            const bf16* from = q + (here ? at.first_head + row : 0) * problem.q_stride_h;
            uint32 to = Q_AT + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
            for (int slice = 0; slice <= SLICES; ++slice) copy_async<16>(to + slice * TILE_BYTES, from + slice * 64, here);
        }
        copies_commit();
    }

    // Wait for Q and turn all but RoPE to float16 in place. Each thread has the chunks that it copied.
    __device__ void convert_q(int tile) {
        copies_wait<0>();
        int thread = threadIdx.x % 128, chunk = thread % 8;
        uint32 largest = 0;
        uint32 at = Q_AT + thread / 8 * 128 + ((chunk ^ (thread / 8 & 7)) << 4);
#pragma unroll 1
        for (int slice = 0; slice < SLICES; slice += 2, at += 2 * TILE_BYTES) {
            uint4 x[8];  // rows 16 further and the next slice (of seven the last has none)
            int count = slice + 1 < SLICES ? 8 : 4;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < count) x[i] = lds128(at + i / 4 * TILE_BYTES + i % 4 * 2048);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i >= count) break;
                largest = __vmaxu2(largest, largest_of_8(x[i]));
                sts128(at + i / 4 * TILE_BYTES + i % 4 * 2048, bf16x8_to_f16x8(x[i]));
            }
        }
        fence_for_matrix();
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        // Zero is exact; what is small otherwise would lose its last bits.
        if (largest > MAX_F16 || (largest && largest < MIN_Q)) problem.unsafe[tile] = 1;
        sync();
    }

    // Scores of a block into x: column n is the token at place n.
    __device__ void score(float (&x)[32]) {
        barrier_wait(RAW_FULL + 8 * raw.slot, raw.round);
        barrier_wait(RAW_FULL + 8 * (raw.slot + 1), raw.round);
        fence_for_matrix();
        matrix_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            matrix_bf16(x, tile_descriptor(Q_AT + SLICES * TILE_BYTES) + 2 * i,
                        tile_descriptor(ROPE_AT + raw.slot * (STAGE * 128)) + 2 * i, i != 0);
        matrix_commit();
#pragma unroll
        for (int slice = 0; slice < SLICES; slice += 2) {
            int pair = slice + 1 < SLICES ? 2 : 1;
            int slots[2] = {int(k % K_SLOTS), int((k + 1) % K_SLOTS)};
            barrier_wait(K_FULL + 8 * slots[0], k / K_SLOTS & 1);
            if (pair == 2) barrier_wait(K_FULL + 8 * slots[1], (k + 1) / K_SLOTS & 1);
            fence_for_matrix();
            matrix_begin();
#pragma unroll
            for (int i = 0; i < 4 * pair; ++i)
                matrix_f16(x, tile_descriptor(Q_AT + (slice + i / 4) * TILE_BYTES) + 2 * (i % 4),
                           tile_descriptor(K_AT + slots[i / 4] * TILE_BYTES) + 2 * (i % 4), 1);
            matrix_commit();
            if (slice) {  // the pair before is done with
                matrix_wait<1>();
                warp_arrive(K_EMPTY + 8 * int((k - 2) % K_SLOTS));
                warp_arrive(K_EMPTY + 8 * int((k - 1) % K_SLOTS));
            }
            k += pair;
        }
        matrix_wait<0>();
        pin(x);
#pragma unroll
        for (int i = SLICES % 2 ? 1 : 2; i; --i) warp_arrive(K_EMPTY + 8 * int((k - i) % K_SLOTS));
        uint2 absent = lds64(ABSENT_AT + raw.slot * 4);
        if (__any_sync(~0u, absent.x | absent.y)) hide_absent(x);
        warp_arrive(RAW_EMPTY + 8 * raw.slot);
        warp_arrive(RAW_EMPTY + 8 * (raw.slot + 1));
        raw.advance(2);
    }

    // Columns 8 j + 2 c and + 1 of rows g are elements 4 j and 4 j + 1, of rows g + 8 those after them.
    __device__ void hide_absent(float (&x)[32]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 bias = lds_float2(BIAS_AT + (raw.slot * STAGE + 8 * j + 2 * (lane % 4)) * 4);
            x[4 * j] += bias.x, x[4 * j + 1] += bias.y, x[4 * j + 2] += bias.x, x[4 * j + 3] += bias.y;
        }
    }

    // P = 2^(scale x - top) to shared memory, its row sums to `sums`; whether a weight is above LAZY.
    __device__ bool write_weights(const float (&x)[32], float scale, const float (&top)[2], float (&sums)[2]) {
        int row = 16 * warp + lane % 16;
        uint32 at = P_AT + p_slot.slot * TILE_BYTES + row * 128;
        uint32 largest = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) sums[r] = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32 p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // columns 16 k + 8 (i / 2), rows + 8 (i % 2)
                int from = 8 * k + 4 * (i / 2) + 2 * (i % 2);
                float low = exp2_fast(fmaf(x[from], scale, -top[i % 2]));
                float high = exp2_fast(fmaf(x[from + 1], scale, -top[i % 2]));
                sums[i % 2] += low + high;
                p[i] = pack(f16{}, low, high);
                largest = __vmaxu2(largest, p[i]);
            }
            stmatrix4(at + (((2 * k + lane / 16) ^ (row & 7)) << 4), p[0], p[1], p[2], p[3]);
        }
        return largest >> 16 > LAZY || (largest & 0xffff) > LAZY;
    }

    // The softmax of a block; `total` is this lane's part of the rows' sums.
    __device__ void weigh(const float (&x)[32], float (&top)[2], float (&total)[2], float scale) {
        float sums[2];
        barrier_wait(P_EMPTY + 8 * p_slot.slot, p_slot.round ^ 1);
        bool raise = __any_sync(~0u, write_weights(x, scale, top, sums));
        if (raise) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float highest = top[r];
#pragma unroll
                for (int i = 0; i < 16; ++i) highest = fmaxf(highest, x[4 * (i / 2) + 2 * r + i % 2] * scale);
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
                float alpha = exp2_fast(top[r] - highest);
                top[r] = highest;
                total[r] *= alpha;
                if (lane % 4 == 0) sts_float(ALPHA_AT + (p_slot.slot * HEADS + 16 * warp + lane / 4 + 8 * r) * 4, alpha);
            }
            write_weights(x, scale, top, sums);
        }
        if (lane == 0) sts32(RAISED_AT + p_slot.slot * 16 + warp * 4, raise);
        total[0] += sums[0], total[1] += sums[1];
        warp_arrive(P_FULL + 8 * p_slot.slot);
        p_slot.advance();
    }

    __device__ void run() {
        Share share(problem);
        Work work;
        // A scale of 0 would make NaN of an absent token's infinite score.
        float scale = problem.softmax_scale == 0.0f ? 1e-30f : problem.softmax_scale * LOG2_E;
        int parity = 0;
        bool pending = share.next(problem, work);
        if (pending) copy_q(work.tile);
        while (pending) {
            int tile = work.tile, blocks = work.last - work.first;
            bool whole = work.whole(), from_start = work.first == 0, another = share.more();
            convert_q(tile);
            float top[2] = {NO_MAX, NO_MAX}, total[2] = {};
#pragma unroll 1
            for (; blocks; --blocks) {
                float x[32];
                score(x);
                if (blocks == 1 && another) {
                    sync();  // all have read Q
                    copy_q(tile + 1);
                }
                weigh(x, top, total, scale);
            }
            finish(tile, whole, from_start, top, total, parity);
            parity ^= 1;
            // Found again rather than kept: registers are dear here.
            share = Share(problem);
            share.tile = tile + 1, share.first = 0;
            pending = share.next(problem, work);
        }
    }

    // What the mixers multiply their sums by, and the logarithm of the sum.
    __device__ void finish(int tile, bool whole, bool from_start, const float (&top)[2], const float (&total)[2], int parity) {
        TilePlace at(problem, tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = 16 * warp + lane / 4 + 8 * r;
            int head = at.first_head + row;
            float sum = total[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            bool empty = sum == 0.0f;
            float lse2 = top[r] + log2f(sum);
            float share = 1.0f / sum;
            if (lane % 4 == 0) {
                if (!whole) {
                    problem.partial_lse[partial_slot(blockIdx.x, from_start) * HEADS + row] = empty ? -infinity() : lse2;
                } else if (head < problem.heads) {
                    float lse = lse2 * LN_2;
                    if (problem.attn_sink) share *= 1.0f / (1.0f + expf(problem.attn_sink[head] - lse));
                    problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
                        empty ? infinity() : lse;
                }
                sts_float(SHARE_AT + (parity * HEADS + row) * 4, empty ? 0.0f : share);
            }
        }
        warp_arrive(SHARE_FULL + 8 * parity);
    }
};
