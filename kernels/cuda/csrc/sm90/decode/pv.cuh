// The PV warpgroups of sm90/decode/decode.cu.
#pragma once
#include "sm90/decode/expand.cuh"

// One warpgroup computes half of the values; a warp has 64 of them. Sums are transposed: rows are values, columns are heads.
// Lane 4 g + c has its warp's values 8 g to 8 g + 7: two of every 4 elements of each of sums[4].
struct Pv {
    const SparseProblem& problem;
    int half, warp, lane;
    PipelineState<RING> raw;
    PipelineState<P_SLOTS> p_slot;
    // Addresses of this lane's raw values in slot 0: for the tokens at positions 2 c + b of a group of 16, the values 8
    // g .. 8 g + 7 of this warp's 64. Position + 8, the next group and the next slot are at constant distances.
    uint32 row_at[2], factor_at, columns_at;
    bool last;  // whether this warp has the last values, which may be RoPE
    Expander expander;
    uint32 seen;  // bitwise or of a tile's raw values; for RoPE the largest magnitudes

    __device__ Pv(const SparseProblem& p, int h)
        : problem(p), half(h), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), expander(4 * h + warp, lane) {
        int g = lane / 4, c = lane % 4, slice = 4 * half + warp;
        last = ROPE_IN_V && !BF16_ROWS && __any_sync(~0u, half == 1 && warp == 3);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            int n = 2 * c + b;
            row_at[b] = is_bf16() ? ROPE_AT + (BF16_ROWS ? slice * (2 * HALF * 128) : 0) + n * 128 + ((g ^ n) << 4)
                                  : RAW_AT + raw_offset(token_at_permuted(n), 4 * slice + g / 2) + 8 * (g % 2);
        }
        factor_at = FACTOR_AT + (64 * slice + 8 * g) / FACTOR_TILE * FACTOR_STRIDE + c * 8;
        columns_at = 2 * c * 4;
        // Keeps the compiler from rematerialising these from threadIdx, which is slower.
        asm volatile("" : "+r"(row_at[0]), "+r"(row_at[1]), "+r"(factor_at), "+r"(columns_at));
    }

    // Whether this warp's values are bfloat16; known to the compiler except where some of V's values are RoPE.
    __device__ bool is_bf16() const { return BF16_ROWS || (ROPE_IN_V && last); }

    // A lane's raw values of a group of 16 tokens: one load returns all 8 values, or 4 RoPE values.
    struct ValueRows {
        uint2 values[4];  // [b + 2 h]: the token at position 2 c + b + 8 h
        uint2 factors;
        uint2 others[4];  // of bfloat16 rows the last four values
    };
    // Part i of a block: 16 tokens from 16 (i / 2) on, half i % 2 of the values.
    __device__ void load(ValueRows& rows, int i) {
        int stage = i / 4, group = i / 2 % 2;
        if (BF16_ROWS) {
            if (i % 2) return;
            uint32 at = raw.slot * TAIL_BYTES + stage * (HALF * 128) + group * 2048;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                uint4 x = lds128(row_at[t % 2] + at + t / 2 * 1024);
                rows.values[t] = {x.x, x.y}, rows.others[t] = {x.z, x.w};
            }
        } else if (is_bf16()) {
            uint32 at = raw.slot * TAIL_BYTES + stage * (HALF * 128) + group * 2048 + i % 2 * 8;
#pragma unroll
            for (int t = 0; t < 4; ++t) rows.values[t] = lds64(row_at[t % 2] + at + t / 2 * 1024);
        } else if (i % 2 == 0) {
            uint32 at = raw.slot * (2 * HALF * RAW_BYTES) + stage * (HALF * RAW_BYTES) + group * 16 * RAW_BYTES;
#pragma unroll
            for (int t = 0; t < 4; ++t) rows.values[t] = lds64(row_at[t % 2] + at + t / 2 * 8 * RAW_BYTES);
            rows.factors = lds64(factor_at + raw.slot * (2 * FACTORS_BYTES) + stage * FACTORS_BYTES + group * 32);
        }
    }

    // Fragments of V^T: fragment j has values 4 * (i % 2) + 2 j and + 1 of each 8.
    __device__ void convert(uint32 (&a)[2][4], const ValueRows& rows, int i) {
        const uint2(&x)[4] = BF16_ROWS && i % 2 ? rows.others : rows.values;
        if (is_bf16()) {
#pragma unroll
            for (int t = 0; t < 4; ++t) raise_to_bf16(seen, x[t].x), raise_to_bf16(seen, x[t].y);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                a[0][2 * h] = to_f16_saturated(__byte_perm(x[2 * h].x, x[2 * h + 1].x, 0x5410));
                a[0][2 * h + 1] = to_f16_saturated(__byte_perm(x[2 * h].x, x[2 * h + 1].x, 0x7632));
                a[1][2 * h] = to_f16_saturated(__byte_perm(x[2 * h].y, x[2 * h + 1].y, 0x5410));
                a[1][2 * h + 1] = to_f16_saturated(__byte_perm(x[2 * h].y, x[2 * h + 1].y, 0x7632));
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32 factor = h ? rows.factors.y : rows.factors.x;
                uint32 first = i % 2 ? x[2 * h].y : x[2 * h].x, second = i % 2 ? x[2 * h + 1].y : x[2 * h + 1].x;
                seen |= first | second;
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

    // Wait for the weights of a block.
    __device__ void await_weights(float (&sums)[4][HEADS / 2], bool fresh) {
        p_full[p_slot.slot].wait(p_slot.phase);
        fence_proxy_async();
        if (!fresh && __any_sync(~0u, lds32(RAISED_AT + 4 * p_slot.slot))) rescale(sums);
    }

    // Free a part of the block, which this warp has in registers.
    __device__ void free_part(int part) { raw_empty[raw.slot][part].arrive_warp(); }

    // Add a block's values, converted a quarter of 16 tokens ahead of the products.
    __device__ void add_block(float (&sums)[4][HEADS / 2], bool fresh) {
        uint32 a[2][2][4];
        ValueRows rows;
        raw_full[raw.slot].wait(raw.phase);
        load(rows, 0);
        convert(a[0], rows, 0);
        if (BF16_ROWS) free_part(0);
        load(rows, 1);
        await_weights(sums, fresh);
        uint64 p = tile_descriptor(P_AT + p_slot.slot * Q_TILE_BYTES);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int k = i / 2, w = i % 2;
            wgmma_fence();
            wgmma_rows(f16{}, sums[2 * w], a[w][0], p + 2 * k, k != 0 || !fresh);
            wgmma_rows(f16{}, sums[2 * w + 1], a[w][1], p + 2 * k, k != 0 || !fresh);
            wgmma_commit();
            if (i == 7) break;
            if (i > 0) wgmma_wait<1>();
            convert(a[1 - w], rows, i + 1);
            if (i < 6) load(rows, i + 2);
            if (BF16_ROWS ? i % 2 && i < 6 : i % 4 == 2) free_part(BF16_ROWS ? (i + 1) / 2 : i / 4);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < 4; ++j) pin(sums[j]);
    }

    // The same for tiles of fewer heads. Their sums take fewer registers, so a block's values fit in registers and are
    // converted before the weights are ready.
    __device__ void add_narrow_block(float (&sums)[4][HEADS / 2], bool fresh) {
        uint32 a[8][2][4];
        ValueRows rows[2];
        raw_full[raw.slot].wait(raw.phase);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            load(rows[i / 2 % 2], i);
            convert(a[i], rows[i / 2 % 2], i);
            if (i == 3) free_part(0);
        }
        free_part(1);
        await_weights(sums, fresh);
        uint64 p = tile_descriptor(P_AT + p_slot.slot * Q_TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int k = i / 2, w = i % 2;
            wgmma_rows(f16{}, sums[2 * w], a[i][0], p + 2 * k, k != 0 || !fresh);
            wgmma_rows(f16{}, sums[2 * w + 1], a[i][1], p + 2 * k, k != 0 || !fresh);
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < 4; ++j) pin(sums[j]);
    }

    __device__ void run() {
        PipelineState<SCHEDULED_TILES> ring;
        int parity = 0;
        uint32 inv_sum_round = 0;
        float sums[4][HEADS / 2];
        pdl_wait();
        while (int left = ScheduledTile(ring).summary().y) {
            bool fresh = true;
            seen = 0;
            int added = -1, fp8_blocks = EXPANDS ? Expander::fp8_blocks(ScheduledTile(ring)) : 0;
            left += EXPANDS;
#pragma unroll 1
            for (; left; --left) {
                if constexpr (EXPANDS) {
                    // Expand the block that QK-softmax scores next; before the first block is added, the first block.
                    if (fp8_blocks-- <= 0 && left > 1) {
                        PipelineState<RING> next = raw;
                        if (added >= 0) next.advance();
                        expander.expand(next);
                    }
                    if (added++ < 0) continue;
                    fresh = added == 1;
                }
                if constexpr (HEADS == 64) add_block(sums, fresh);
                else add_narrow_block(sums, fresh);
                fresh = false;
                raw.advance();
                if (left > 1) {
                    p_empty[p_slot.slot].arrive_warp();
                    p_slot.advance();
                }
            }
            pdl_release();  // the epilogue kernel is launched while results are stored
            inv_sum_full[parity].wait(inv_sum_round);
            uint4 summary = ScheduledTile(ring).summary();
            if constexpr (PARTS > 1) store_combined(ScheduledTile(ring), summary, sums);
            else if (summary.w & ScheduledTile::WHOLE) store<true>(ScheduledTile(ring), summary, sums, parity);
            else store<false>(ScheduledTile(ring), summary, sums, parity);
            if (ONE_TILE) return;
            p_empty[p_slot.slot].arrive_warp();  // only now: this also frees ScheduledTile and INV_SUM
            p_slot.advance();
            ring.advance();
            parity ^= 1;
            if (parity == 0) inv_sum_round ^= 1;
        }
    }

    // Heads are columns: 8 i + 2 c + e in elements 4 i + e and 4 i + 2 + e.
    __device__ void rescale(float (&sums)[4][HEADS / 2]) {
#pragma unroll
        for (int i = 0; i < HEADS / 8; ++i) {
            float2 alpha = lds_float2(ALPHA_AT + columns_at + (p_slot.slot * HEADS + 8 * i) * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[j][4 * i] *= alpha.x, sums[j][4 * i + 1] *= alpha.y;
                sums[j][4 * i + 2] *= alpha.x, sums[j][4 * i + 3] *= alpha.y;
            }
        }
    }

    // Each lane has 8 neighbouring values of a quarter of the heads: 8 i + 2 c + e.
    template <bool WHOLE> __device__ void store(ScheduledTile scheduled, uint4 summary, const float (&sums)[4][HEADS / 2], int parity) {
        uint4 addresses = scheduled.query_and_result();
        uint64 to = joined(addresses.z, addresses.w);
        int head = 2 * (lane % 4), value = (4 * half + warp) * 64 + 8 * (lane / 4), heads = summary.z;
        bf16* out = reinterpret_cast<bf16*>(to) + head * problem.out_stride_h + value;
        float4* partial = reinterpret_cast<float4*>(to) + partial_at(head, value);
        float magnitudes = 0.0f;
#pragma unroll
        for (int i = 0; i < HEADS / 8; ++i) {
            float2 inv_sum = lds_float2(INV_SUM_AT + columns_at + (parity * HEADS + 8 * i) * 4);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float factor = e ? inv_sum.y : inv_sum.x;
                float x[8];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    x[2 * j] = sums[j][4 * i + e] * factor;
                    x[2 * j + 1] = sums[j][4 * i + 2 + e] * factor;
                    magnitudes += fabsf(x[2 * j]) + fabsf(x[2 * j + 1]);
                }
                if (WHOLE) {
                    uint4 packed = {pack(bf16{}, x[0], x[1]), pack(bf16{}, x[2], x[3]), pack(bf16{}, x[4], x[5]), pack(bf16{}, x[6], x[7])};
                    if (head < heads) *reinterpret_cast<uint4*>(out) = packed;
                    int by = e ? 7 : 1;
                    head += by, out += by * problem.out_stride_h;
                } else {
                    float4* line = partial + (2 * i + e) * 2 * PLANE;
                    line[0] = make_float4(x[0], x[1], x[2], x[3]), line[PLANE] = make_float4(x[4], x[5], x[6], x[7]);
                }
            }
        }
        check<WHOLE>(summary.x, magnitudes);
    }

    // Flag a tile with results out of range: infinite or NaN (a sum of finite magnitudes is finite), nearly 0 while V is
    // not (float16 may have underflowed), or RoPE values that float16 cannot represent. NaN in the RoPE values makes all
    // scores of a tile NaN; such a tile keeps its NaN results. The warp votes, so that one lane flags the tile.
    template <bool WHOLE> __device__ void check(int tile, float magnitudes) {
        uint32 largest = is_bf16() ? max(seen & 0x7fff, seen >> 16 & 0x7fff) : 0;
        bool nan = WHOLE && largest > INFINITE_BF16, again = largest >= TOO_LARGE && !nan;
        again |= !(magnitudes < infinity()) || (magnitudes < MIN_RESULT && seen & (is_bf16() ? 0x7fff7fff : 0x7f7f7f7f));
        int reason = (__any_sync(~0u, nan) ? ALL_NAN : 0) | (__any_sync(~0u, again) ? RECOMPUTE : 0);
        if (reason && lane == 0) problem.mark(tile, reason);
    }

    // The lines of 8 values that CTA PART of a cluster combines. All factors are read before the first line is sent;
    // otherwise each line would wait for its factor.
    template <int PART> struct Lines {
        static constexpr int FIRST = PART * PART_LINES < LINES ? PART * PART_LINES : LINES;
        static constexpr int COUNT = FIRST + PART_LINES < LINES ? PART_LINES : LINES - FIRST;
        float x[COUNT ? COUNT : 1][8];

        // Scaled for the combine. Adds the magnitudes of this CTA's unscaled results to `magnitudes`.
        __device__ Lines(const Pv& pv, const float (&sums)[4][HEADS / 2], float& magnitudes) {
            float inv_sum[COUNT ? COUNT : 1], weight[COUNT ? COUNT : 1];
#pragma unroll
            for (int n = 0; n < COUNT; ++n) {
                uint32 at = pv.columns_at + column(n) * 4;
                inv_sum[n] = lds_float(INV_SUM_AT + at), weight[n] = lds_float(WEIGHT_AT + at);
            }
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    float result = sums[j / 2][(FIRST + n) / 2 * 4 + (FIRST + n) % 2 + 2 * (j % 2)] * inv_sum[n];
                    magnitudes += fabsf(result);
                    x[n][j] = result * weight[n];
                }
        }

        // Head of line n, relative to the lane's first head.
        __device__ static constexpr int column(int n) { return (FIRST + n) / 2 * 8 + (FIRST + n) % 2; }

        // Send to an address and a barrier in the cluster.
        __device__ void send(uint32 to, Barrier barrier) const {
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
                store_async(to + n * LINE_BYTES,
                            uint4{pack_saturated(x[n][0], x[n][1]), pack_saturated(x[n][2], x[n][3]), pack_saturated(x[n][4], x[n][5]),
                                  pack_saturated(x[n][6], x[n][7])},
                            barrier);
        }

        // Add the lines that the other CTAs sent.
        __device__ void receive(uint32 from) {
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int step = 1; step < PARTS; ++step) {
                    uint4 packed = lds128(from + (step - 1) * PART_BYTES + n * LINE_BYTES);
                    uint32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                    for (int j = 0; j < 8; ++j) x[n][j] += to_float(f16{uint16(words[j / 2] >> 16 * (j % 2))});
                }
        }
    };

    // Store the results of a cluster's tile. Each CTA combines some of the lines: it sends the lines of the other CTAs,
    // to its next neighbour first, and adds the received lines to its own ones in a fixed order. Lines are sent in
    // float16: the values were checked to be in its range. Down to 2^-14 the error of float16 is an eighth of the error
    // of bfloat16, the type of results.
    __device__ void store_combined(ScheduledTile scheduled, uint4 summary, const float (&sums)[4][HEADS / 2]) {
        int rank = blockIdx.x % PARTS;
        float magnitudes = 0.0f;
        uint32 received = PARTS_AT + (threadIdx.x - 128) * 16;
#pragma unroll 1
        for (int step = 1; step < PARTS; ++step) {
            int to = (rank + step) % PARTS;
            uint32 at = cluster_address(received + (step - 1) * PART_BYTES, to);
            Barrier barrier = cluster_barrier(parts_full, to);
            of_part(to, [&](auto part) { Lines<part.number>(*this, sums, magnitudes).send(at, barrier); });
        }
        uint4 addresses = scheduled.query_and_result();
        int first_head = 2 * (lane % 4), value = (4 * half + warp) * 64 + 8 * (lane / 4), heads = summary.z;
        bf16* out = reinterpret_cast<bf16*>(joined(addresses.z, addresses.w)) + value;
        of_part(rank, [&](auto part) {
            using Mine = Lines<part.number>;
            Mine lines(*this, sums, magnitudes);
            check<true>(summary.x, magnitudes);
            parts_full.wait_for_cluster(0);
            lines.receive(received);
#pragma unroll
            for (int n = 0; n < Mine::COUNT; ++n) {
                int head = first_head + Mine::column(n);
                float sink_factor = lds_float(SINK_FACTOR_AT + columns_at + Mine::column(n) * 4), *x = lines.x[n];
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] *= sink_factor;
                if (head < heads)
                    *reinterpret_cast<uint4*>(out + head * problem.out_stride_h) = {pack(bf16{}, x[0], x[1]), pack(bf16{}, x[2], x[3]),
                                                                                    pack(bf16{}, x[4], x[5]), pack(bf16{}, x[6], x[7])};
            }
        });
    }

    // Dispatch a run-time part to a template constant, because registers cannot be indexed at run time.
    template <int PART> struct Part { static constexpr int number = PART; };
    template <int PART = 0, class Act> __device__ static void of_part(int number, Act act) {
        if (number == PART) act(Part<PART>{});
        else if constexpr (PART + 1 < PARTS) of_part<PART + 1>(number, act);
    }
};
