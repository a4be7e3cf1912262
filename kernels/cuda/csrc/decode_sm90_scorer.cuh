// The scorer of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

// One warpgroup. The products of a block have a warp's 16 heads as rows and its tokens as columns.
struct Scorer {
    const Problem& problem;
    int warp, lane;
    Turn turn;

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

    // Wait for Q and turn all but RoPE to float16 in place, in the order of decode_sm90_rows.cuh. A thread has half of a row's
    // slice, which is a group, at a time.
    __device__ void convert_q(int tile) {
        copies_wait<0>();
        sync();  // a thread converts what others copied
        int row = threadIdx.x % 128 / 2;
        uint32 largest = 0, at = Q_AT + row * 128 + ((threadIdx.x % 2 * 4 ^ (row & 7)) << 4);
#pragma unroll 1
        for (int slice = 0; slice < SLICES; ++slice, at += TILE_BYTES) {
            uint4 x[4];  // chunk c has the group's words 4 c to 4 c + 3
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                x[c] = lds128(at ^ c << 4);
                largest = __vmaxu2(largest, largest_of_8(x[c]));
                x[c] = bf16x8_to_f16x8(x[c]);
            }
            sts128(at, {x[0].x, x[1].x, x[2].x, x[3].x});
            sts128(at ^ 1 << 4, {x[0].y, x[1].y, x[2].y, x[3].y});
            sts128(at ^ 2 << 4, {x[0].z, x[1].z, x[2].z, x[3].z});
            sts128(at ^ 3 << 4, {x[0].w, x[1].w, x[2].w, x[3].w});
        }
        fence_for_matrix();
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        // Zero is exact; what is small otherwise would lose its last bits.
        if (largest > MAX_F16 || (largest && largest < MIN_Q)) problem.unsafe[tile] = 1;
        sync();
    }

    // Scores of a block into x: column n is token n.
    __device__ void score(float (&x)[32]) {
        uint32 k_at = K_AT + turn.k() * K_BYTES;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            barrier_wait(K_FULL + 8 * (PARTS * turn.k() + part), turn.k_round());
            matrix_begin();
#pragma unroll
            for (int slice = 2 * part; slice < min(2 * part + 2, SLICES); ++slice)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    matrix_f16(x, tile_descriptor(Q_AT + slice * TILE_BYTES) + 2 * i,
                               tile_descriptor(k_at + slice * TILE_BYTES) + 2 * i, slice || i);
            if (part == PARTS - 1) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    matrix_bf16(x, tile_descriptor(Q_AT + SLICES * TILE_BYTES) + 2 * i,
                                tile_descriptor(k_at + K_ROPE * TILE_BYTES) + 2 * i, 1);
            }
            matrix_commit();
        }
        matrix_wait<0>();
        pin(x);
        uint4 absent = lds128(ABSENT_AT + turn.k() * 16);
        if (__any_sync(~0u, absent.x | absent.y | absent.z | absent.w)) mask_absent(x);
    }

    // Minus infinity for absent tokens, or plus infinity where softmax() is to negate the scores. Elements 4 j and 4 j + 1
    // are columns 8 j + 2 c and + 1 of row g, those after them of row g + 8.
    __device__ void mask_absent(float (&x)[32]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 bias = lds_float2(BIAS_AT + (turn.k() * BLOCK + 8 * j + 2 * (lane % 4)) * 4);
            x[4 * j] += bias.x, x[4 * j + 1] += bias.y, x[4 * j + 2] += bias.x, x[4 * j + 3] += bias.y;
        }
    }

    // Raise the maxima of this warp's rows to `highest` of their lanes, and tell the mixers by how much.
    __device__ void raise(float (&highest)[2], float (&top)[2], float (&total)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
            highest[r] = fmaxf(fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 2)), top[r]);
            float alpha = exp2_fast(top[r] - highest[r]);
            top[r] = highest[r];
            total[r] *= alpha;
            if (lane % 4 == 0) sts_float(ALPHA_AT + (turn.p() * HEADS + 16 * warp + lane / 4 + 8 * r) * 4, alpha);
        }
    }

    // The softmax of a block: P = 2^(scale x - top) to shared memory; `total` is this lane's part of the rows' sums. The scale
    // is positive, so that the maximum of x can be looked for before it is scaled; scores of a negative one are negated.
    // The maximum is looked for before any weight is written, so that this code is there once: twice, it spills.
    __device__ void softmax(float (&x)[32], float (&top)[2], float (&total)[2], float scale) {
        if (problem.softmax_scale < 0.0f)
#pragma unroll
            for (int i = 0; i < 32; ++i) x[i] = -x[i];
        float highest[2] = {x[0], x[2]};
#pragma unroll
        for (int i = 0; i < 32; ++i) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], x[i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) highest[r] *= scale;
        bool raised = __any_sync(~0u, highest[0] > top[0] + LAZY || highest[1] > top[1] + LAZY);
        barrier_wait(P_EMPTY + 8 * turn.p(), turn.p_round() ^ 1);
        if (raised) raise(highest, top, total);
        if (lane == 0) sts32(RAISED_AT + turn.p() * 16 + warp * 4, raised);
        int row = 16 * warp + lane % 16;
        uint32 at = P_AT + turn.p() * TILE_BYTES + row * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32 p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // columns 16 k + 8 (i / 2), rows + 8 (i % 2)
                int from = 8 * k + 4 * (i / 2) + 2 * (i % 2);
                float low = exp2_fast(fmaf(x[from], scale, -top[i % 2]));
                float high = exp2_fast(fmaf(x[from + 1], scale, -top[i % 2]));
                total[i % 2] += low + high;
                p[i] = pack(f16{}, low, high);
            }
            stmatrix4(at + (((2 * k + lane / 16) ^ (row & 7)) << 4), p[0], p[1], p[2], p[3]);
        }
        warp_arrive(P_FULL + 8 * turn.p());
        ++turn.n;
    }

    __device__ void run() {
        Share share = whole_share();
        Work work;
        // A negative scale's sign is softmax()'s. One of 0 would make NaN of an absent token's infinite score.
        float scale = problem.softmax_scale == 0.0f ? 1e-30f : fabsf(problem.softmax_scale) * LOG2_E;
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
                softmax(x, top, total, scale);
            }
            finish(tile, whole, from_start, top, total, parity);
            parity ^= 1;
            share = share_after(tile);  // read again rather than kept: registers are dear here
            pending = share.next(problem, work);
        }
    }

    // What the mixers multiply their sums by, and the logarithm of the rows' sums.
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
            float factor = 1.0f / sum;
            if (lane % 4 == 0) {
                if (!whole) {
                    problem.partial_lse[partial_slot(blockIdx.x, from_start) * HEADS + row] = empty ? -infinity() : lse2;
                } else if (head < problem.heads) {
                    float lse = lse2 * LN_2;
                    if (problem.attn_sink) factor *= 1.0f / (1.0f + expf(problem.attn_sink[head] - lse));
                    problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
                        empty ? infinity() : lse;
                }
                sts_float(FACTORS_AT + (parity * HEADS + row) * 4, empty ? 0.0f : factor);
            }
        }
        warp_arrive(FACTORS_FULL + 8 * parity);
    }
};
