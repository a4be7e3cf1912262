// The mixers of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"
#include "hopper_products.cuh"

struct Mixer {
    const Problem& problem;
    int half, warp, lane;
    Turn turn;

    __device__ Mixer(const Problem& p, int h) : problem(p), half(h), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    __device__ void run() {
        Share share = whole_share();
        Work work;
        int parity = 0;
        uint32 factors_round = 0;
        float sums[2][64];
        while (share.next(problem, work)) {
            bool fresh = true;
            float factors[2];
#pragma unroll 1
            for (int left = work.last - work.first; left; --left) {
                barrier_wait(P_FULL + 8 * turn.p(), turn.p_round());
                fence_for_matrix();
                if (!fresh) rescale(sums);
                uint64 p = tile_descriptor(P_AT + turn.p() * TILE_BYTES);
                uint64 v = transposed_descriptor(K_AT + turn.k() * K_BYTES + 4 * half * TILE_BYTES);
                matrix_begin();
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    multiply_columns(f16{}, sums[0], p + 2 * i, v + 128 * i, i != 0 || !fresh);
                    multiply_columns(f16{}, sums[1], p + 2 * i, v + 128 * i + 2 * (TILE_BYTES >> 4), i != 0 || !fresh);
                }
                matrix_commit();
                fresh = false;
                if (left == 1) {
                    barrier_wait(FACTORS_FULL + 8 * parity, factors_round);
                    uint32 at = FACTORS_AT + (parity * HEADS + 16 * warp + lane / 4) * 4;
                    factors[0] = lds_float(at), factors[1] = lds_float(at + 32);
                }
                matrix_wait<0>();
                pin(sums[0]), pin(sums[1]);
                warp_arrive(K_EMPTY + 8 * turn.k());
                warp_arrive(P_EMPTY + 8 * turn.p());  // of the last block it also says that the factors were read
                ++turn.n;
            }
            store(work, sums, factors);
            parity ^= 1;
            if (parity == 0) factors_round ^= 1;
        }
    }

    // Elements 4 i, + 1 are columns 8 i + 2 c, + 1 of head 16 w + g, and elements 4 i + 2, + 3 those of head 16 w + g + 8
    // (lane 4 g + c of warp w).
    __device__ void rescale(float (&sums)[2][64]) {
        if (!__any_sync(~0u, lds32(RAISED_AT + turn.p() * 16 + warp * 4) != 0)) return;
        uint32 at = ALPHA_AT + (turn.p() * HEADS + 16 * warp + lane / 4) * 4;
        float alpha[2] = {lds_float(at), lds_float(at + 32)};
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i / 64][i % 64] *= alpha[i / 2 % 2];
    }

    // Columns are in the order of decode_sm90_rows.cuh: of every 32 values a lane has 8 neighbours, for two heads.
    __device__ void store(const Work& work, float (&sums)[2][64], const float (&factors)[2]) {
        int row = 16 * warp + lane / 4, value = 256 * half + 8 * (lane % 4);
        TilePlace at(problem, work.tile);
        bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + value;
        float4* partial = reinterpret_cast<float4*>(problem.partial_out) +
                          int64(partial_slot(blockIdx.x, work.first == 0)) * (HEADS * V_DIM / 4) + partial_at(row, value);
        bool whole = work.whole();
        float worst = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int head = at.first_head + row + 8 * r;
#pragma unroll
            for (int group = 0; group < 8; ++group) {
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    x[i] = sums[group / 4][16 * (group % 4) + 4 * (i / 2) + 2 * r + i % 2] * factors[r];
                    worst += x[i];
                }
                if (whole) {
                    if (head < problem.heads)
                        *reinterpret_cast<uint4*>(out + head * problem.out_stride_h + 32 * group) =
                            uint4{pack(bf16{}, x[0], x[1]), pack(bf16{}, x[2], x[3]), pack(bf16{}, x[4], x[5]),
                                  pack(bf16{}, x[6], x[7])};
                } else {
                    float4* to = partial + partial_at(8 * r, 32 * group);
                    to[0] = make_float4(x[0], x[1], x[2], x[3]), to[PLANE] = make_float4(x[4], x[5], x[6], x[7]);
                }
            }
        }
        // Infinite or NaN: something left the range. Finite results are too small for their sum to do so.
        if (!(fabsf(worst) < infinity())) problem.unsafe[work.tile] = 1;
    }
};
