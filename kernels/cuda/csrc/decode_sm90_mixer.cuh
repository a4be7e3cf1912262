// The mixers of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

struct Mixer {
    const Problem& problem;
    int half, warp, lane;
    Ring<STAGES> raw;
    Ring<P_SLOTS> p_slot;

    __device__ Mixer(const Problem& p, int h) : problem(p), half(h), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // Where this lane's raw values are: in stage 0, of the tokens at places 2 c + b of a 16-token group, the
    // values 8 g .. 8 g + 7 of this warp's 64. Places 8 further, groups and stages are constant distances away.
    uint32 row_at[2], factor_at;

    __device__ void find_rows() {
        int g = lane / 4, c = lane % 4, slice = 4 * half + warp;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            int n = 2 * c + b, token = token_at_place(n);
            row_at[b] = mixes_rope() ? ROPE_AT + n * 128 + ((g ^ n) << 4)
                                     : RAW_AT + raw_offset(token, 4 * slice + g / 2) + 8 * (g % 2);
        }
        factor_at = FACTOR_AT + slice * (STAGE * 2) + c * 8;
    }

    // Whether this warp's 64 values are those that stay bfloat16.
    __device__ bool mixes_rope() const { return ROPE_IN_V && half == 1 && warp == 3; }

    // Raw values of the tokens at places 2 c + b + 8 h into rows[b + 2 h]: all 8, but of RoPE only the 4 of
    // `half_of_8`, which are as many bytes.
    __device__ void load_rows(uint2 (&rows)[4], uint2& factors, int stage, int group, int half_of_8, bool rope) {
        if (rope) {
            uint32 at = stage * (STAGE * 128) + group * 2048 + 8 * half_of_8;
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = lds64(row_at[i % 2] + at + i / 2 * 1024);
        } else if (half_of_8 == 0) {
            uint32 at = stage * (STAGE * RAW_BYTES) + group * 16 * RAW_BYTES;
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = lds64(row_at[i % 2] + at + i / 2 * 8 * RAW_BYTES);
            factors = lds64(factor_at + stage * (SLICES * STAGE * 2) + group * 32);
        }
    }

    // A fragments of V^T: fragment j has values 4 * half_of_8 + 2 j and + 1 of each 8.
    __device__ void convert(uint32 (&a)[2][4], const uint2 (&rows)[4], uint2 factors, int half_of_8, bool rope) {
        if (rope) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                a[0][2 * h] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].x, rows[2 * h + 1].x, 0x5410));
                a[0][2 * h + 1] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].x, rows[2 * h + 1].x, 0x7632));
                a[1][2 * h] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].y, rows[2 * h + 1].y, 0x5410));
                a[1][2 * h + 1] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].y, rows[2 * h + 1].y, 0x7632));
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32 factor = h ? factors.y : factors.x;
                uint32 first = half_of_8 ? rows[2 * h].y : rows[2 * h].x;
                uint32 second = half_of_8 ? rows[2 * h + 1].y : rows[2 * h + 1].x;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    uint32 low, high;
                    to_f16(__byte_perm(first, second, j ? 0x7362 : 0x5140), low, high);
                    a[j][2 * h] = multiply(low, factor);
                    a[j][2 * h + 1] = multiply(high, factor);
                }
            }
        }
    }

    __device__ void run() {
        Share share(problem);
        Work work;
        int parity = 0;
        uint32 share_round = 0;
        float sums[4][32];
        find_rows();
        bool rope = __any_sync(~0u, mixes_rope());
        while (share.next(problem, work)) {
            for (int block = work.first; block < work.last; ++block) {
                barrier_wait(RAW_FULL + 8 * raw.slot, raw.round);
                barrier_wait(RAW_FULL + 8 * (raw.slot + 1), raw.round);
                uint32 a[2][2][4];
                uint2 rows[4], factors;
                load_rows(rows, factors, raw.slot, 0, 0, rope);
                convert(a[0], rows, factors, 0, rope);
                barrier_wait(P_FULL + 8 * p_slot.slot, p_slot.round);
                fence_for_matrix();
                bool fresh = block == work.first;
                if (!fresh) rescale(sums);
                uint64 p = tile_descriptor(P_AT + p_slot.slot * TILE_BYTES);
#pragma unroll
                for (int i = 0; i < 8; ++i) {  // 16 tokens and half of the values at a time
                    int k = i / 2, w = i % 2;
                    matrix_begin();
                    matrix_f16(sums[2 * w], a[w][0], p + 2 * k, k != 0 || !fresh);
                    matrix_f16(sums[2 * w + 1], a[w][1], p + 2 * k, k != 0 || !fresh);
                    matrix_commit();
                    if (i == 7) break;
                    int next = (i + 1) / 2;
                    load_rows(rows, factors, raw.slot + next / 2, next % 2, 1 - w, rope);
                    if (i == 3) warp_arrive(RAW_EMPTY + 8 * raw.slot);
                    if (i == 6) warp_arrive(RAW_EMPTY + 8 * (raw.slot + 1));
                    if (i > 0) matrix_wait<1>();
                    convert(a[1 - w], rows, factors, 1 - w, rope);
                }
                matrix_wait<0>();
#pragma unroll
                for (int j = 0; j < 4; ++j) pin(sums[j]);
                raw.advance(2);
                if (block + 1 < work.last) {
                    warp_arrive(P_EMPTY + 8 * p_slot.slot);
                    p_slot.advance();
                }
            }
            barrier_wait(SHARE_FULL + 8 * parity, share_round);
            store(work, sums, parity);
            warp_arrive(P_EMPTY + 8 * p_slot.slot);  // only now: it also says that the shares were read
            p_slot.advance();
            parity ^= 1;
            if (parity == 0) share_round ^= 1;
        }
    }

    // Heads are columns: 8 i + 2 c + e in elements 4 i + e and 4 i + 2 + e.
    __device__ void rescale(float (&sums)[4][32]) {
        uint4 raised = lds128(RAISED_AT + p_slot.slot * 16);
        uint32 by_warp[4] = {raised.x, raised.y, raised.z, raised.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (!__any_sync(~0u, by_warp[w] != 0)) continue;
#pragma unroll
            for (int i = 2 * w; i < 2 * w + 2; ++i) {
                float2 alpha = lds_float2(ALPHA_AT + (p_slot.slot * HEADS + 8 * i + 2 * (lane % 4)) * 4);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sums[j][4 * i] *= alpha.x, sums[j][4 * i + 1] *= alpha.y;
                    sums[j][4 * i + 2] *= alpha.x, sums[j][4 * i + 3] *= alpha.y;
                }
            }
        }
    }

    // Each lane has 8 neighbouring values of 16 heads.
    __device__ void store(const Work& work, float (&sums)[4][32], int parity) {
        int g = lane / 4, c = lane % 4;
        int value = (4 * half + warp) * 64 + 8 * g;
        TilePlace at(problem, work.tile);
        bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + value;
        float4* partial = reinterpret_cast<float4*>(problem.partial_out) +
                          int64(partial_slot(blockIdx.x, work.first == 0)) * (HEADS * V_DIM / 4) + partial_at(2 * c, value);
        bool whole = work.whole();
        float worst = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float2 share = lds_float2(SHARE_AT + (parity * HEADS + 8 * i + 2 * c) * 4);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int row = 8 * i + 2 * c + e, head = at.first_head + row;
                float factor = e ? share.y : share.x;
                float x[8];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    x[2 * j] = sums[j][4 * i + e] * factor;
                    x[2 * j + 1] = sums[j][4 * i + 2 + e] * factor;
                    worst += x[2 * j] * 0.0f + x[2 * j + 1] * 0.0f;
                }
                if (whole) {
                    if (head < problem.heads)
                        *reinterpret_cast<uint4*>(out + head * problem.out_stride_h) =
                            uint4{pack(bf16{}, x[0], x[1]), pack(bf16{}, x[2], x[3]), pack(bf16{}, x[4], x[5]),
                                  pack(bf16{}, x[6], x[7])};
                } else {
                    float4* to = partial + (2 * i + e) * 2 * PLANE;  // heads 8 i + 2 c + e
                    to[0] = make_float4(x[0], x[1], x[2], x[3]), to[PLANE] = make_float4(x[4], x[5], x[6], x[7]);
                }
            }
        }
        if (worst != 0.0f) problem.unsafe[work.tile] = 1;  // NaN: something left the range
    }
};
