// The QK-softmax warpgroup of sm90/decode/decode.cu.
#pragma once
#include "sm90/decode/memory.cuh"

// One warpgroup. The products of a block are transposed: rows are tokens in the permuted order, 16 a warp, columns are heads.
// In each warp, lane 4 g + c has rows g and g + 8 of column 8 j + 2 c + e in elements 4 j + e and 4 j + 2 + e.
struct QkSoftmax {
    const SparseProblem& problem;
    int warp, lane;
    PipelineState<RING> raw;
    PipelineState<P_SLOTS> p_slot;
    uint32 seen = 0;  // non-zero once a present bfloat16 row of the tile was scored
    // Addresses for a block in slot 0: this lane's 16 of the first slice's 64 raw values, the RoPE and the scales of the token
    // at position g of its warp's 16 (the token at position g + 8 is 8 rows further), and the destination of its weights.
    uint32 row_at, rope_at, factor_at, p_at;

    // Offset of this lane's columns in an array of one float per head.
    __device__ uint32 columns_at() const { return lane % 4 * 8; }

    __device__ QkSoftmax(const SparseProblem& p) : problem(p), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
        int g = lane / 4, c = lane % 4, token = token_at_permuted(g), group = warp % 2 * 16, head = lane / 16 * 8 + lane % 8;
        row_at = RAW_AT + warp / 2 * (HALF * RAW_BYTES) + raw_offset(group + token, c);
        rope_at = ROPE_AT + warp / 2 * (HALF * 128) + (group + g) * 128 + ((2 * c ^ g) << 4);
        factor_at = FACTOR_AT + warp / 2 * FACTORS_BYTES + 16 * c / FACTOR_TILE * FACTOR_STRIDE + group * 2 + g / 2 * 8;
        p_at = P_AT + head * 128 + ((2 * warp + lane / 8 % 2 ^ (head & 7)) << 4);
        // Keeps the compiler from rematerialising these from threadIdx, which is slower.
        asm volatile("" : "+r"(row_at), "+r"(rope_at), "+r"(factor_at), "+r"(p_at), "+r"(lane));
    }

    // All threads of the QK-softmax warpgroup.
    __device__ void sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

    // Whether x is true for any thread of the QK-softmax warpgroup.
    __device__ bool any(bool x) {
        uint32 y;
        asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 1, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                     : "=r"(y)
                     : "r"(uint32(x))
                     : "memory");
        return y;
    }

    // Raw values of a slice, for the tokens at positions g and g + 8, and their scales. Word i of each is for product i: its low
    // half for columns 2 c and + 1, its high half for 2 c + 8 and + 9. The values of Q are stored in the same order.
    struct KeyRows {
        uint4 values[2];
        uint2 factors;
    };
    __device__ void load(KeyRows& rows, int slice) {
        uint32 at = slice_of(row_at, slice, token_at_permuted(lane / 4)) + raw.slot * (2 * HALF * RAW_BYTES);
        rows.factors = lds64(factor_at + raw.slot * (2 * FACTORS_BYTES) + slice * (64 / FACTOR_TILE * FACTOR_STRIDE));
        rows.values[0] = lds128(at), rows.values[1] = lds128(at + 8 * RAW_BYTES);
    }

    __device__ void convert(uint32 (&a)[4][4], const KeyRows& rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32 words[4] = {rows.values[r].x, rows.values[r].y, rows.values[r].z, rows.values[r].w};
            uint32 factor = permuted(r ? rows.factors.y : rows.factors.x, lane & 4 ? 0x3232 : 0x1010);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32 low, high;
                to_f16(words[i], low, high);
                a[i][r] = multiply(low, factor), a[i][2 + r] = multiply(high, factor);
            }
        }
    }

    // Load the operands of RoPE, which is not converted.
    __device__ void load_rope(uint32 (&a)[4][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 x = lds128((rope_at ^ half << 4) + raw.slot * (2 * HALF * 128) + r * 1024);
                a[2 * half][r] = x.x, a[2 * half][2 + r] = x.y, a[2 * half + 1][r] = x.z, a[2 * half + 1][2 + r] = x.w;
            }
    }

    // Start the products of a slice, and load the next slice. Products of the previous slice may still be in flight.
    __device__ void multiply_slice(float (&x)[HEADS / 2], uint32 (&a)[4][4], KeyRows& rows, int slice) {
        convert(a, rows);
        if (slice + 1 < SLICES) load(rows, slice + 1);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_rows(f16{}, x, a[i], tile_descriptor(Q_AT + slice * Q_TILE_BYTES) + 2 * i, 1);
        wgmma_commit();
        wgmma_wait<1>();
    }

    // Compute a block's scores x, -inf for absent tokens, and load the columns' running maxima. While the last products run,
    // wait until the PV warpgroups have freed the slot for the weights.
    __device__ void score(float (&x)[HEADS / 2], float2 (&top)[HEADS / 8], int parity) {
        uint32 a[2][4][4];  // must stay in registers until the products have ended
        raw_full[raw.slot].wait(raw.phase);
        if constexpr (BF16_ROWS) multiply_bf16_rows(x);
        else multiply_slices(x, a);
        p_empty[p_slot.slot].wait(p_slot.phase ^ 1);
        wgmma_wait<0>();
        pin(x);
        load_top(top, parity);
        raw_empty[raw.slot][warp * FREED_PARTS / 4].arrive_warp();
        raw.advance();
    }

    // bfloat16 rows are multiplied directly from shared memory.
    template <int N> __device__ void multiply_bf16_rows(float (&x)[N]) {
        fence_proxy_async();
        uint32 present = lds32(BIAS_AT + (2 * raw.slot + warp / 2) * 4), mine = present >> (warp % 2 * 16 + lane / 4);
        seen |= present;
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = mine >> i / 2 % 2 * 8 & 1 ? 0.0f : -infinity();
        uint64 k = tile_descriptor(ROPE_AT + raw.slot * TAIL_BYTES), q = tile_descriptor(Q_AT);
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < Q_SLICES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                wgmma_rows(bf16{}, x, k + (tile * (2 * HALF * 128) >> 4) + 2 * i, q + (tile * Q_TILE_BYTES >> 4) + 2 * i, 1);
        wgmma_commit();
    }

    // FP8 rows are converted slice by slice.
    __device__ void multiply_slices(float (&x)[HEADS / 2], uint32 (&a)[2][4][4]) {
        KeyRows rows;
        if constexpr (TAIL) load_rope(a[0]);
        uint32 bias_at = BIAS_AT + raw.slot * (BLOCK * 4) + (16 * warp + lane / 4) * 4;
        float bias[2] = {lds_float(bias_at), lds_float(bias_at + 32)};
        load(rows, 0);
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i) x[i] = bias[i / 2 % 2];
        if constexpr (TAIL) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_rows(bf16{}, x, a[0][i], tile_descriptor(Q_AT + SLICES * Q_TILE_BYTES) + 2 * i, 1);
            wgmma_commit();
        }
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) multiply_slice(x, a[(slice + 1) % 2], rows, slice);
    }

    __device__ void load_top(float2 (&top)[HEADS / 8], int parity) {
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) top[j] = lds_float2(TOP_AT + columns_at() + (parity * HEADS + 8 * j) * 4);
    }

    // Start copying a tile's Q, as bfloat16.
    __device__ void copy_q(ScheduledTile scheduled) {
        uint4 query = scheduled.query_and_result();
        int thread = threadIdx.x % 128, chunk = thread % 8, row = thread / 8, heads = scheduled.summary().z;
        const bf16* from = reinterpret_cast<const bf16*>(joined(query.x, query.y)) + chunk * 8;
        uint32 to = Q_AT + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
        for (int i = 0; i < HEADS / 16; ++i, row += 16) {
            bool here = row < heads;
            const bf16* head = from + (here ? row : 0) * problem.q_stride_h;
#pragma unroll
            for (int slice = 0; slice < Q_SLICES; ++slice) copy_async<16>(to + slice * Q_TILE_BYTES + i * 2048, head + slice * 64, here);
        }
        copies_commit();
    }

    // Wait for the copies of Q, and apply the sign of a negative softmax scale. For bfloat16 rows Q is not converted.
    __device__ void finish_q() {
        int thread = threadIdx.x % 128, chunk = thread % 8, row = thread / 8;
        uint32 at = Q_AT + row * 128 + ((chunk ^ (row & 7)) << 4);
        if (problem.softmax_scale < 0.0f)
#pragma unroll 1
            for (int i = 0; i < Q_SLICES * (HEADS / 16); ++i, at += 2048) {  // the next 16 rows, and then the next tile
                uint4 x = lds128(at);
                sts128(at, {x.x ^ SIGNS, x.y ^ SIGNS, x.z ^ SIGNS, x.w ^ SIGNS});
            }
        fence_proxy_async();
        sync();
    }

    // Wait for Q and store it in the order of the products, as float16 except for RoPE: word 8 j + 2 i + h of a slice's
    // 32 words goes to product i, half h, position j (see load). Two threads share a row: one has the words with i < 2,
    // the other one the rest. They read alternate chunks and write neighbouring chunks. Rows are assigned to lanes so
    // that reads have no bank conflicts. A warp has 16 rows; with fewer than 64 rows, the slices are distributed over
    // warps.
    __device__ void arrange_q(ScheduledTile scheduled) {
        copies_wait<0>();
        if constexpr (BF16_ROWS) return finish_q();
        sync();  // a thread arranges words that other threads copied
        constexpr int ROW_WARPS = HEADS / 16, TURN = 4 / ROW_WARPS;
        int part = lane % 2, row = 16 * (warp % ROW_WARPS) + (lane & 6) + lane / 8 % 2 + lane / 16 * 8;
        bool negative = problem.softmax_scale < 0.0f;
        uint32 from = Q_AT + row * 128 + ((part ^ (row & 7)) << 4), to = Q_AT + row * 128 + ((4 * part ^ (row & 7)) << 4);
        uint32 largest = 0, bits = 0;
        int slice = warp / ROW_WARPS;
        from += slice * Q_TILE_BYTES, to += slice * Q_TILE_BYTES;
        uint4 next[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) next[j] = lds128(from ^ j << 5);
#pragma unroll 1
        for (; slice < Q_SLICES; slice += TURN, to += TURN * Q_TILE_BYTES) {
            uint4 x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = next[j];
            if (negative)
#pragma unroll
                for (int j = 0; j < 4; ++j) x[j].x ^= SIGNS, x[j].y ^= SIGNS, x[j].z ^= SIGNS, x[j].w ^= SIGNS;
            __syncwarp();  // all lanes have read their words, which are overwritten now
            from += TURN * Q_TILE_BYTES;
            if (slice + TURN < Q_SLICES)
#pragma unroll
                for (int j = 0; j < 4; ++j) next[j] = lds128(from ^ j << 5);
            if (slice < SLICES)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    bits |= x[j].x | x[j].y | x[j].z | x[j].w;
                    x[j] = bf16x8_to_f16x8(x[j]);
                    raise_to_magnitude(largest, x[j].x), raise_to_magnitude(largest, x[j].y);
                    raise_to_magnitude(largest, x[j].z), raise_to_magnitude(largest, x[j].w);
                }
            sts128(to, {x[0].x, x[1].x, x[2].x, x[3].x});
            sts128(to ^ 1 << 4, {x[0].y, x[1].y, x[2].y, x[3].y});
            sts128(to ^ 2 << 4, {x[0].z, x[1].z, x[2].z, x[3].z});
            sts128(to ^ 3 << 4, {x[0].w, x[1].w, x[2].w, x[3].w});
        }
        fence_proxy_async();
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        bool zero = !__any_sync(~0u, bits & ~SIGNS);
        // Zero is exact; other values below MIN_Q would lose their last bits.
        if (largest >= INFINITE_F16 || (!zero && largest < MIN_Q) || fabsf(problem.softmax_scale) >= MAX_SOFTMAX_SCALE)
            problem.mark(scheduled.summary().x);
        sync();
    }

    // Raise the running maxima to the maxima of x, rescale the sums, and store the factors (ALPHA) for the PV
    // warpgroups.
    __device__ void raise(const float (&x)[HEADS / 2], float2 (&top)[HEADS / 8], float (&sums)[HEADS / 4], float scale, bool first,
                          int parity) {
        float highest[HEADS / 4];
#pragma unroll
        for (int i = 0; i < HEADS / 4; ++i) highest[i] = fmaxf(x[2 * i - i % 2], x[2 * i - i % 2 + 2]) * scale;
        reduce_rows<HEADS>(HIGHEST_AT + warp * HEADS * 4, highest, lane, [](float a, float b) { return fmaxf(a, b); });
        sync();
        if (HEADS >= 32 ? warp < HEADS / 32 : warp == 0 && lane < HEADS) {
            uint32 at = threadIdx.x % HEADS * 4;
            float before = first ? NO_MAX : lds_float(TOP_AT + parity * (HEADS * 4) + at), after = before;
#pragma unroll
            for (int w = 0; w < 4; ++w) after = fmaxf(after, lds_float(HIGHEST_AT + w * (HEADS * 4) + at));
            sts_float(TOP_AT + parity * (HEADS * 4) + at, after);
            sts_float(ALPHA_AT + p_slot.slot * (HEADS * 4) + at, exp2_approx(before - after));
        }
        sync();
        load_top(top, parity);
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float2 alpha = lds_float2(ALPHA_AT + columns_at() + (p_slot.slot * HEADS + 8 * j) * 4);
            sums[2 * j] *= alpha.x, sums[2 * j + 1] *= alpha.y;
        }
    }

    // The softmax of a block: stores weights 2^(scale x - top) as float16 to shared memory, and adds them to this lane's sums.
    __device__ void softmax(const float (&x)[HEADS / 2], float2 (&top)[HEADS / 8], float (&sums)[HEADS / 4], float scale, bool first,
                            int parity) {
        float above = -infinity();  // log2 of the largest weight
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            above = fmaxf(above, fmaf(fmaxf(x[4 * j], x[4 * j + 2]), scale, -top[j].x));
            above = fmaxf(above, fmaf(fmaxf(x[4 * j + 1], x[4 * j + 3]), scale, -top[j].y));
        }
        bool raised = any(first || above > LAZY);
        sts32(RAISED_AT + 4 * p_slot.slot, raised);
        if (raised) raise(x, top, sums, scale, first, parity);
        uint32 p[4], at = p_at + p_slot.slot * Q_TILE_BYTES;
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i] = exp2_approx(fmaf(x[4 * j + i], scale, i % 2 ? -top[j].y : -top[j].x));
            sums[2 * j] += weights[0] + weights[2], sums[2 * j + 1] += weights[1] + weights[3];
#pragma unroll
            for (int r = 0; r < 2; ++r) p[j % 2 * 2 + r] = pack(f16{}, weights[2 * r], weights[2 * r + 1]);
            if (j % 2) stmatrix4_transposed(at + j / 2 * 2048, p[0], p[1], p[2], p[3]);
        }
        p_full[p_slot.slot].arrive_warp();
        p_slot.advance();
    }

    __device__ void run() {
        // The sign of a negative scale was applied to Q. A scale of 0 would turn the -inf score of a masked token into
        // NaN.
        float scale = problem.softmax_scale == 0.0f ? 1e-30f : fabsf(problem.softmax_scale) * LOG2_E;
        PipelineState<SCHEDULED_TILES> ring;
        int parity = 0;
        uint32 scored = 0;  // tiles
        int blocks = uniform(ScheduledTile(ring).summary().y);
        pdl_wait();
        if (blocks) copy_q(ScheduledTile(ring));
        while (blocks) {
            arrange_q(ScheduledTile(ring));
            float sums[HEADS / 4] = {};
            bool first = true;
#pragma unroll 1
            for (bool last = false; !last;) {
                float x[HEADS / 2];
                float2 top[HEADS / 8];
                score(x, top, parity);
                last = --blocks == 0;
                if (last && !ONE_TILE) {
                    ring.advance();
                    blocks = uniform(ScheduledTile(ring).summary().y);
                    if (blocks) {
                        sync();  // all threads have read Q
                        copy_q(ScheduledTile(ring));
                    }
                }
                softmax(x, top, sums, scale, first, parity);
                first = false;
            }
            if (SUM_SLOTS == 1 && scored)
                inv_sum_full[parity ^ 1].wait(scored - 1 >> 1 & 1);  // the scheduler has read the last tile's sums
            if (BF16_ROWS) {
                sts32(SEEN_AT + (parity * 4 + warp) * 4, seen);
                seen = 0, ++scored;
            }
            reduce_rows<HEADS>(SUMS_AT + (sums_slot(parity) * 4 + warp) * HEADS * 4, sums, lane, [](float a, float b) { return a + b; });
            sums_full[parity].arrive_warp();
            parity ^= 1;
        }
    }
};
