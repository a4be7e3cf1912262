// The scorer of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

struct Scorer {
    const Problem& problem;
    int warp, lane, g, c;
    Ring<STAGES> raw;
    Ring<P_SLOTS> p_slot;
    uint32 q_round = 0;
    // Where this lane's raw values are, of a block whose first stage is 0: of the token at place g of its warp's 16,
    // 16 of the first slice's 64. The token at place g + 8 is 8 rows further.
    uint32 row_at, rope_at, factor_at;

    __device__ Scorer(const Problem& p) : problem(p), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
        g = lane / 4, c = lane % 4;
        int token = token_at_place(g), group = warp % 2 * 16;
        row_at = RAW_AT + warp / 2 * (STAGE * RAW_BYTES) + raw_offset(group + token, c);
        rope_at = ROPE_AT + warp / 2 * (STAGE * 128) + (group + g) * 128 + ((2 * c ^ g) << 4);
        factor_at = FACTOR_AT + warp / 2 * (SLICES * STAGE * 2) + group * 2 + g / 2 * 8;
    }

    // All threads of the scorer.
    __device__ void sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

    // Whether any thread of the scorer says so.
    __device__ bool any(bool x) {
        uint32 y;
        asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 1, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                     : "=r"(y) : "r"(uint32(x)) : "memory");
        return y;
    }

    // Raw values of a slice, of the tokens at places g and g + 8. Word i of each is for product i, its low half for
    // positions 2 c and + 1, its high half for 2 c + 8 and + 9: so the values of Q are ordered, too.
    __device__ void load(uint4 (&rows)[2], uint2& factors, int slice) {
        uint32 at = slice_of(row_at, slice, token_at_place(g)) + raw.slot * (STAGE * RAW_BYTES);
        rows[0] = lds128(at), rows[1] = lds128(at + 8 * RAW_BYTES);
        factors = lds64(factor_at + raw.slot * (SLICES * STAGE * 2) + slice * (STAGE * 2));
    }

    __device__ void convert(uint32 (&a)[4][4], const uint4 (&rows)[2], uint2 factors) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32 words[4] = {rows[r].x, rows[r].y, rows[r].z, rows[r].w};
            uint32 factor = __byte_perm(r ? factors.y : factors.x, 0, g & 1 ? 0x3232 : 0x1010);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32 low, high;
                to_f16(words[i], low, high);
                a[i][r] = multiply(low, factor), a[i][2 + r] = multiply(high, factor);
            }
        }
    }

    __device__ void load_rope(uint32 (&a)[4][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 x = lds128((rope_at ^ half << 4) + raw.slot * (STAGE * 128) + r * 1024);
                a[2 * half][r] = x.x, a[2 * half][2 + r] = x.y, a[2 * half + 1][r] = x.z, a[2 * half + 1][2 + r] = x.w;
            }
    }

    // Scores of a block into x, transposed: rows are tokens at their places, columns are heads.
    __device__ void score(float (&x)[32], bool first, bool last) {
        uint32 a[2][4][4];
        uint4 rows[2];
        uint2 factors;
        int stage = raw.slot + warp / 2;
        barrier_wait(RAW_FULL + 8 * stage, raw.round);
        load_rope(a[0]);
        load(rows, factors, 0);
        if (first) barrier_wait(Q_FULL + 8 * SLICES, q_round);
        matrix_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) matrix_bf16(x, a[0][i], tile_descriptor(Q_AT + SLICES * TILE_BYTES) + 2 * i, i != 0);
        matrix_commit();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            convert(a[(slice + 1) % 2], rows, factors);
            if (slice + 1 < SLICES) load(rows, factors, slice + 1);
            if (first) barrier_wait(Q_FULL + 8 * slice, q_round);
            matrix_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                matrix_f16(x, a[(slice + 1) % 2][i], tile_descriptor(Q_AT + slice * TILE_BYTES) + 2 * i, 1);
            matrix_commit();
            matrix_wait<1>();
            if (last) warp_arrive(Q_EMPTY + 8 * (slice ? slice - 1 : SLICES));
        }
        matrix_wait<0>();
        pin(x);
        if (last) warp_arrive(Q_EMPTY + 8 * (SLICES - 1));
        if (__any_sync(~0u, lds32(ABSENT_AT + stage * 4))) hide_absent(x, stage);
        warp_arrive(RAW_EMPTY + 8 * stage);
        raw.advance(2);
    }

    // Rows g and g + 8 are elements 4 j, + 1 and 4 j + 2, + 3; columns are 8 j + 2 c and + 1.
    __device__ void hide_absent(float (&x)[32], int stage) {
        uint32 at = BIAS_AT + (stage * STAGE + warp % 2 * 16 + g) * 4;
        float bias[2] = {lds_float(at), lds_float(at + 32)};
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] += bias[i / 2 % 2];
    }

    // Weights 2^(scale x - top) as float16 to shared memory, and their sums over this lane's two tokens; whether a
    // weight is above LAZY.
    __device__ bool write_weights(float (&sums)[16], const float (&x)[32], float scale) {
        uint32 largest = 0, p[4];
        int head = lane / 16 * 8 + lane % 8;
        uint32 at = P_AT + p_slot.slot * TILE_BYTES + head * 128 + ((2 * warp + lane / 8 % 2 ^ (head & 7)) << 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 top = lds_float2(TOP_AT + (8 * j + 2 * c) * 4);
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i] = exp2_fast(fmaf(x[4 * j + i], scale, i % 2 ? -top.y : -top.x));
            sums[2 * j] = weights[0] + weights[2], sums[2 * j + 1] = weights[1] + weights[3];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                p[j % 2 * 2 + r] = pack(f16{}, weights[2 * r], weights[2 * r + 1]);
                largest = __vmaxu2(largest, p[j % 2 * 2 + r]);
            }
            if (j % 2) stmatrix4_transposed(at + j / 2 * 2048, p[0], p[1], p[2], p[3]);
        }
        return largest >> 16 > LAZY || (largest & 0xffff) > LAZY;
    }

    // This lane's parts of the sums of heads 8 j + 2 c and + 1, for j = 2 i and 2 i + 1: in shared memory, as registers
    // are dear here.
    __device__ uint32 total_at(int i) { return TOTAL_AT + i * 2048 + threadIdx.x % 128 * 16; }

    // Raise the maxima to what x has, and tell the mixers by how much; the sums with them.
    __device__ void raise(const float (&x)[32], float scale) {
        float highest[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            int from = i / 2 * 4 + i % 2;
            highest[i] = fmaxf(x[from] * scale, x[from + 2] * scale);
#pragma unroll
            for (int by = 4; by < 32; by *= 2) highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0u, highest[i], by));
        }
        if (g == 0)
#pragma unroll
            for (int j = 0; j < 8; ++j) sts_float2(WARPS_AT + (warp * HEADS + 8 * j + 2 * c) * 4, make_float2(highest[2 * j], highest[2 * j + 1]));
        sync();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            uint32 at = (8 * j + 2 * c) * 4;
            float2 before = lds_float2(TOP_AT + at), top = before;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float2 of_warp = lds_float2(WARPS_AT + w * HEADS * 4 + at);
                top.x = fmaxf(top.x, of_warp.x), top.y = fmaxf(top.y, of_warp.y);
            }
            float2 alpha = make_float2(exp2_fast(before.x - top.x), exp2_fast(before.y - top.y));
            float2 total = lds_float2(total_at(j / 2) + j % 2 * 8);
            sts_float2(total_at(j / 2) + j % 2 * 8, make_float2(total.x * alpha.x, total.y * alpha.y));
            highest[2 * j] = top.x, highest[2 * j + 1] = top.y;
            if (warp == 0 && g == 0) sts_float2(ALPHA_AT + p_slot.slot * (HEADS * 4) + at, alpha);
        }
        sync();
        if (warp == 0 && g == 0)
#pragma unroll
            for (int j = 0; j < 8; ++j) sts_float2(TOP_AT + (8 * j + 2 * c) * 4, make_float2(highest[2 * j], highest[2 * j + 1]));
        sync();
    }

    // The softmax of a block.
    __device__ void weigh(const float (&x)[32], float scale, bool first) {
        float sums[16];
        barrier_wait(P_EMPTY + 8 * p_slot.slot, p_slot.round ^ 1);
        bool raised = first || any(write_weights(sums, x, scale));
        if (raised) {
            raise(x, scale);
            write_weights(sums, x, scale);
        }
        if (lane == 0) sts32(RAISED_AT + p_slot.slot * 16 + warp * 4, raised);
        warp_arrive(P_FULL + 8 * p_slot.slot);
        p_slot.advance();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 bits = lds128(total_at(i));
            bits.x = __float_as_uint(__uint_as_float(bits.x) + sums[4 * i]);
            bits.y = __float_as_uint(__uint_as_float(bits.y) + sums[4 * i + 1]);
            bits.z = __float_as_uint(__uint_as_float(bits.z) + sums[4 * i + 2]);
            bits.w = __float_as_uint(__uint_as_float(bits.w) + sums[4 * i + 3]);
            sts128(total_at(i), bits);
        }
    }

    __device__ void run() {
        // A scale of 0 would make NaN of an absent token's infinite score.
        float scale = problem.softmax_scale == 0.0f ? 1e-30f : problem.softmax_scale * LOG2_E;
        int parity = 0, tile = Share(problem).tile;
        Work work;
        while (part_of(tile, work)) {
            int left = work.last - work.first;
            bool first = true;
            if (threadIdx.x % 128 < HEADS) sts_float(TOP_AT + threadIdx.x % 128 * 4, NO_MAX);
#pragma unroll
            for (int i = 0; i < 4; ++i) sts128(total_at(i), {});
#pragma unroll 1
            for (; left; --left) {
                float x[32];
                score(x, first, left == 1);
                weigh(x, scale, first);
                first = false;
            }
            part_of(tile, work);
            finish(tile, work, parity);
            parity ^= 1, q_round ^= 1, ++tile;
        }
    }

    // This thread block's part of a tile, if it has one. Found again rather than kept: registers are dear here.
    __device__ bool part_of(int tile, Work& work) {
        Share share(problem);
        if (tile != share.tile) share.tile = tile, share.first = 0;
        return share.next(problem, work);
    }

    // What the mixers multiply their sums by, and the logarithm of the sum.
    __device__ void finish(int tile, const Work& work, int parity) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 total = lds_float2(total_at(j / 2) + j % 2 * 8);
#pragma unroll
            for (int by = 4; by < 32; by *= 2) {
                total.x += __shfl_xor_sync(~0u, total.x, by);
                total.y += __shfl_xor_sync(~0u, total.y, by);
            }
            if (g == 0) sts_float2(WARPS_AT + (warp * HEADS + 8 * j + 2 * c) * 4, total);
        }
        sync();
        if (warp < 2) {
            TilePlace at(problem, tile);
            int row = threadIdx.x % 128, head = at.first_head + row;
            float sum = 0.0f, top = lds_float(TOP_AT + row * 4);
#pragma unroll
            for (int w = 0; w < 4; ++w) sum += lds_float(WARPS_AT + (w * HEADS + row) * 4);
            bool empty = sum == 0.0f;
            float lse2 = top + log2f(sum), share = 1.0f / sum;
            if (!work.whole()) {
                problem.partial_lse[partial_slot(blockIdx.x, work.first == 0) * HEADS + row] = empty ? -infinity() : lse2;
            } else if (head < problem.heads) {
                float lse = lse2 * LN_2;
                if (problem.attn_sink) share *= 1.0f / (1.0f + expf(problem.attn_sink[head] - lse));
                problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
                    empty ? infinity() : lse;
            }
            sts_float(SHARE_AT + (parity * HEADS + row) * 4, empty ? 0.0f : share);
            warp_arrive(SHARE_FULL + 8 * parity);
        }
        sync();  // the sums are read before the next tile's maxima are written
    }
};
