// Copies of rows to the ring of sm80/sparse/heads64.cu, and their expansion to 16 bits.
//
// Each warp of the sums copies the values that it multiplies, 128 bytes of a row in the ring, and a part of the tails
// (RoPE). So it needs no barrier to know that these have arrived, or that their place is free. Quantised values arrive
// at the end of their place; the warp expands them there to float16, times their scale, LEAD steps before the sums.
// Rows of absent keys and heads are zeros.
#pragma once
#include "sm80/sparse/heads64_steps.cuh"

// Range of scales for which a value times its scale is precise in float16: of powers of two and e4m3 numbers, and of
// other scales, which are rounded to float16. Tiny scales, as in rows that were never written, turn values into zero;
// where that matters, results are too small (sm80/sparse/results.cuh).
template <class Layout> __device__ inline bool is_imprecise(float scale) {
    float least = Layout::scale_tile == 128 ? 1.0f / 16384.0f : 0x1p-22f;
    return !(scale >= least && scale <= 128.0f) && !(fabsf(scale) <= 0x1p-87f);
}

// Bytes of quantised values of a row in a place.
template <class Layout> constexpr int code_bytes() {
    return Layout::quantized_dim ? Layout::quantized_bytes * VALUES / Layout::quantized_dim : 16;
}

struct RowLoader {
    StepRing& ring;

    __device__ explicit RowLoader(StepRing& r) : ring(r) {}

    // Record for a tile that a value of this warp is not zero, and that a scale is imprecise or a value NaN.
    __device__ void find(int parity, bool value, bool bad) {
        int warp = sum_thread() / 32;
        if (value) ring.has_value[parity][warp] = 1;
        if (bad) ring.is_unsafe[parity][warp] = 1;
    }
    // Reset the record, after a tile.
    __device__ void forget(int parity) {
        int warp = sum_thread() / 32;
        __syncwarp();
        ring.has_value[parity][warp] = ring.is_unsafe[parity][warp] = 0;
    }

    // Start copying BYTES of each row, from `offset` on to `to`. A lane reads the addresses of all its rows first: the
    // compiler does not move a read before a copy, so each read would wait for shared memory.
    template <int BYTES> __device__ void copy_places(uint32 number, uint32 present, int to, int offset) {
        constexpr int LANES = BYTES / 16, ROWS = 32 / LANES,
                      COUNT = KEYS >= ROWS ? KEYS / ROWS : 1;  // lanes of a row; rows at a time; rows of a lane
        int lane = sum_thread() % 32, first = lane / LANES;
        const uint64* sources = ring.sources[number % ROWS_LISTED] + first;
        uint64 from[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) from[i] = sources[i * ROWS];
        uint32 target = shared_address(ring.rows[number % STAGES][first]) + place_in_row(first, to + lane % LANES * 16);
        present >>= first;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            copy_async_part((target ^ place_in_row(i * ROWS, 0)) + i * ROWS * ROW_STRIDE,
                            reinterpret_cast<const uint8*>(from[i] + (offset + lane % LANES * 16)), present >> i * ROWS << 4 & 16);
    }

    // The same for the tails: each warp copies a part of the rows.
    __device__ void copy_tails(uint32 number, uint32 present, int offset) {
        constexpr int ROWS = KEYS / SUM_WARPS;
        int thread = sum_thread(), lane = thread % 32, row = ROWS * (thread / 32) + lane / 8;
        if (lane < 8 * ROWS)
            copy_async_part(shared_address(ring.rows[number % STAGES][row]) + place_in_row(row, 2 * V_DIM + lane % 8 * 16),
                            reinterpret_cast<const uint8*>(ring.sources[number % ROWS_LISTED][row] + (offset + lane % 8 * 16)),
                            present >> row << 4 & 16);
    }

    template <class Layout> __device__ void copy_keys(uint32 number, uint32 present) {
        constexpr int CODES = code_bytes<Layout>();
        int warp = sum_thread() / 32;
        if (VALUES * warp < Layout::quantized_dim) copy_places<CODES>(number, present, PLACE * warp + PLACE - CODES, CODES * warp);
        else copy_places<PLACE>(number, present, PLACE * warp, Layout::rope_offset + 2 * (VALUES * warp - Layout::quantized_dim));
        if (Layout::head_dim > V_DIM) copy_tails(number, present, Layout::rope_offset + 2 * (V_DIM - Layout::quantized_dim));
    }

    // Start copying this warp's part of a step, as one group of copies that is empty after the end of the range.
    __device__ void copy(uint32 number) {
        Step step = ring.step(number);
        if (step.kind() == QUERIES) {
            int at = PLACE * (sum_thread() / 32);
            copy_places<PLACE>(number, step.present, at, at);
            if (LAYOUT::head_dim > V_DIM) copy_tails(number, step.present, 2 * V_DIM);
        } else if (TWO_FORMATS && step.kind() == SECOND) {
            copy_keys<EXTRA_LAYOUT>(number, step.present);
        } else if (step.has_keys()) {
            copy_keys<LAYOUT>(number, step.present);
        }
        copies_commit();
    }

    // Convert the e4m3 or e2m1 values of a step, which have arrived, to float16.
    template <class Layout> __device__ void expand_keys(uint32 number, int parity) {
        constexpr int CODES = code_bytes<Layout>();
        constexpr int TILES = Layout::scale_tile >= VALUES ? 1 : VALUES / Layout::scale_tile;  // of scales in a place
        constexpr bool BYTES = Layout::ue8m0 || Layout::e4m3_scales;
        int thread = sum_thread(), lane = thread % 32, warp = thread / 32;
        int first = VALUES * warp / (Layout::scale_tile ? Layout::scale_tile : 1) * (BYTES ? 1 : 4);  // byte of the place's first scale
        uint32 word = *reinterpret_cast<const uint32*>(ring.scales[number % ROWS_LISTED][lane % KEYS] + first / 4 * 4);
        uint32 factors[TILES > 2 ? 2 : 1];  // of this lane's row, as float16
        bool bad = false;
        float values[TILES + TILES % 2];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            uint32 stored = BYTES ? word >> (first + i) % 4 * 8 & 0xff : word;
            float scale = Layout::ue8m0 ? __uint_as_float(stored << 23) : stored_scale<Layout>(stored);
            bad |= is_imprecise<Layout>(scale);
            values[i] = scale * CODE_UNIT;
        }
        if (TILES == 1) {  // the rest of the scale, which float16 cannot represent
            values[1] = values[0] - to_float(f16{uint16(pack(f16{}, values[0], 0.0f))});
        }
#pragma unroll
        for (int i = 0; i < TILES + TILES % 2; i += 2) factors[i / 2] = pack(f16{}, values[i], values[i + 1]);
        uint32 any = 0, codes[KEYS / 8][4];
        int chunk = lane / 8;  // of 16 values
        uint8* place = ring.rows[number % STAGES][lane % 8] + PLACE * warp;  // row + 8 has its chunks at the same bytes
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
            const uint8* from = place + 8 * i * ROW_STRIDE + place_in_row(lane, PLACE - CODES + CODES / 4 * chunk);
            if constexpr (Layout::e2m1_values) {
                uint2 v = *reinterpret_cast<const uint2*>(from);
                codes[i][0] = v.x, codes[i][1] = v.y;
            } else {
                uint4 v = *reinterpret_cast<const uint4*>(from);
                codes[i][0] = v.x, codes[i][1] = v.y, codes[i][2] = v.z, codes[i][3] = v.w;
            }
        }
        __syncwarp();  // all lanes have read the bytes that are overwritten next
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
            int row = 8 * i + lane % 8;
            if constexpr (Layout::e2m1_values) {
                uint32 low = codes[i][0], high = codes[i][1];
                e2m1_to_e4m3(low, codes[i][0], codes[i][1]), e2m1_to_e4m3(high, codes[i][2], codes[i][3]);
            }
            uint32 pair = __shfl_sync(~0u, factors[0], row);
            if (TILES > 2) {
                uint32 other = __shfl_sync(~0u, factors[TILES > 2], row);
                if (chunk >= 2) pair = other;
            }
            // The scale of this chunk, and its rest.
            bool high = TILES == 2 ? chunk >= 2 : TILES > 2 && chunk % 2;
            uint32 factor = __byte_perm(pair, 0, high ? 0x3232 : 0x1010), rest = __byte_perm(pair, 0, 0x3232);
            uint32 words[8];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                any |= codes[i][j] & 0x7f7f7f7f, bad |= has_nan(codes[i][j]);
                codes_to_f16(codes[i][j], words[2 * j], words[2 * j + 1]);
#pragma unroll
                for (int e = 2 * j; e < 2 * j + 2; ++e) {
                    if (TILES == 1 && !Layout::ue8m0) words[e] = multiply_add_f16(words[e], factor, multiply(words[e], rest));
                    else words[e] = multiply(words[e], factor);
                }
            }
            uint8* to = place + 8 * i * ROW_STRIDE;
            *reinterpret_cast<uint4*>(to + place_in_row(lane, 32 * chunk)) = uint4{words[0], words[1], words[2], words[3]};
            *reinterpret_cast<uint4*>(to + place_in_row(lane, 32 * chunk + 16)) = uint4{words[4], words[5], words[6], words[7]};
        }
        find(parity, any, bad);
    }

    __device__ void expand(uint32 number) {
        if constexpr (LAYOUT::quantized_dim != 0) {
            Step step = ring.step(number);
            if (!step.has_keys() || VALUES * (sum_thread() / 32) >= LAYOUT::quantized_dim) return;
            if (TWO_FORMATS && step.kind() == SECOND) expand_keys<EXTRA_LAYOUT>(number, step.parity());
            else expand_keys<LAYOUT>(number, step.parity());
        }
    }

    // Wait for the copies of a step, expand its rows, and signal their arrival to the scores.
    __device__ void publish(uint32 number) {
        copies_wait<AHEAD - LEAD>();
        __syncwarp();
        expand(number);
        ring.barriers.arrive_arrived(number);
    }
};
