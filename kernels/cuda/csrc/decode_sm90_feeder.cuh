// The feeder of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

__device__ uint4 absent_row[64];  // zeros: what a token that is not there reads

// Whether float16 lacks any of these scales, or has it with less than its own precision: powers of two may be subnormal
// there, other numbers may not. Of four UE8M0 bytes, and of a float32's bits.
__device__ inline bool lacks_exponents(uint32 bytes) {
    constexpr uint32 ONES = 0x01010101, TOP = 0x80808080;
    return (bytes | bytes + (127 - MAX_SCALE) * ONES | ~(bytes + (128 - MIN_SCALE) * ONES)) & TOP;
}
__device__ inline bool lacks_float(uint32 bits) {
    uint32 exponent = bits >> 23, least = bits & 0x7fffff ? F16_NORMAL : MIN_SCALE;
    return exponent < least || exponent > MAX_SCALE;
}

// One warpgroup. Four threads have two tokens of each block: of every slice of 64 values a thread has 16 of both. While it
// converts the first half of its rows the second half is on its way into registers, and while it converts that, the first
// half of the next block's rows.
struct Feeder {
    static constexpr int FIRST_HALF = 4;  // slices of the first half; RoPE is of the second

    // One of the two tokens.
    struct Token {
        bool present;
        const uint8 *from, *scales_from;  // this thread's part of the row
        uint4 raw[SLICES], rope[2], scales;
    };

    const Problem& problem;
    int thread, row, part;  // the first token, and which of its row's four parts; the other token is 32 further
    uint32 lists;           // where the tile's indices are, in shared memory: registers are dear here
    Token tokens[2];

    __device__ Feeder(const Problem& p)
        : problem(p), thread(threadIdx.x % 128), row(thread / 4), part(thread % 4), lists(LISTS_AT + thread / 32 * 32) {}

    // Volatile, or the compiler would load where the values are used.
    static __device__ uint4 load(const uint8* from) {
        uint4 x;
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
        return x;
    }
    static __device__ void load(uint32& x, const uint8* from) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(from));
    }
    static __device__ void load(uint32& x, uint32& y, const uint8* from) {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(from));
    }

    // Note where a tile's indices are, for each warp: {indices, end, the tile's first block of the second list} of both lists,
    // such that token n of the tile has indices[n] where n < end. Of blocks beyond this share's there is none.
    __device__ void open(const Work& work) {
        TilePlace at(problem, work.tile);
        int blocks0 = blocks_of(work.lengths0), second = threadIdx.x % 32;  // one lane for each list
        __syncwarp();
        if (second < 2) {
            const List& list = problem.lists[second];
            int before = second ? blocks0 * BLOCK : 0;
            const int* from = list.indices + at.b * list.indices_stride_b + at.s * list.indices_stride_s - before;
            uint64 indices = reinterpret_cast<uint64>(from);
            int end = min(second ? before + work.lengths1 : work.lengths0, work.last * BLOCK);
            sts128(lists + second * 16, {uint32(indices), uint32(indices >> 32), uint32(end), uint32(blocks0)});
        }
        __syncwarp();
    }

    // The indices of this thread's two tokens of a block; -1 where there is none.
    __device__ void fetch_indices(int (&slots)[2], int block) {
        bool second = block >= int(lds32(lists + 12));
        uint4 list = lds128(lists + second * 16);
        const int* indices = reinterpret_cast<const int*>(uint64(list.y) << 32 | list.x);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int n = block * BLOCK + row + 32 * i;
            slots[i] = -1;
            if (n < int(list.z)) asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(slots[i]) : "l"(indices + n));
        }
    }

    // Where this thread's parts of these tokens' rows are.
    __device__ void find(int block, const int (&slots)[2]) {
        const List& list = problem.lists[block >= int(lds32(lists + 12))];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Token& token = tokens[i];
            int slot = slots[i];
            token.present = uint32(slot) < uint32(list.num_slots);
            int page = list.block_shift >= 0 ? slot >> list.block_shift : int(uint32(slot) / uint32(list.block_size));
            int at = slot - page * list.block_size;
            const uint8* base = list.pages + page * list.page_stride;
            int scale_at = LAYOUT::scale_start + list.block_size * LAYOUT::scale_start_per_token + at * LAYOUT::scale_stride;
            const uint8* zeros = reinterpret_cast<const uint8*>(absent_row);
            token.from = (token.present ? base + at * LAYOUT::row_bytes : zeros) + 16 * part;
            if (LAYOUT::ue8m0) token.scales_from = token.present ? base + scale_at : zeros;
        }
    }

    __device__ void load_rope(Token& token) {
        const uint8* from = token.from + LAYOUT::rope_offset + 16 * part;
        token.rope[0] = load(from), token.rope[1] = load(from + 16);
    }

    // A slice, and with the first of a half the half's scales.
    __device__ void load_slice(Token& token, int slice) {
        if (LAYOUT::ue8m0) {
            if (slice == 0) load(token.scales.x, token.scales_from);
            if (slice == FIRST_HALF) load(token.scales.y, token.scales_from + 4);
        } else {
            const uint8* at = token.from - 16 * part + LAYOUT::scale_start;
            if (slice == 0) load(token.scales.x, token.scales.y, at);
            if (slice == FIRST_HALF) load(token.scales.z, token.scales.w, at + 8);
        }
        token.raw[slice] = load(token.from + 64 * slice);
    }

    // Bits of a slice's scale as float32.
    __device__ static uint32 scale_bits(const uint4& scales, int slice) {
        if (LAYOUT::ue8m0) return ((slice < 4 ? scales.x : scales.y) >> 8 * (slice % 4) & 0xff) << 23;
        return slice < 2 ? scales.x : slice < 4 ? scales.y : slice < 6 ? scales.z : scales.w;
    }

    // Whether the scales of the first or second half are out of range.
    static __device__ bool lacks_first(const uint4& scales) {
        return LAYOUT::ue8m0 ? lacks_exponents(scales.x) : lacks_float(scales.x) || lacks_float(scales.y);
    }
    static __device__ bool lacks_second(const uint4& scales) {
        constexpr uint32 PAD = 0xff000000, ANY = MIN_SCALE << 24;  // after seven exponents
        return LAYOUT::ue8m0 ? lacks_exponents(scales.y & ~PAD | ANY) : lacks_float(scales.z) || lacks_float(scales.w);
    }

    // Four words of two values to two neighbouring chunks, in the order of decode_sm90_rows.cuh: those of `high` are four
    // further in their row than those of `low`, and so stand beside them.
    static __device__ void convert(uint32 at, uint32 low, uint32 high, uint32 factor) {
        uint32 x[4];
        to_f16(low, x[0], x[1]), to_f16(high, x[2], x[3]);
        sts64(at, multiply(x[0], factor), multiply(x[2], factor));
        sts64(at ^ 16, multiply(x[1], factor), multiply(x[3], factor));
    }

    // Loads whose values live from turn to turn share one scoreboard, so that a wait for any is a wait for all: a half is asked
    // for only when the half before is there. `after` is one of its values; the compiler does not know that nothing comes of
    // it, as shares are never negative.
    template <int FIRST, int LAST> __device__ void load_half(uint32 after) {
        uint32 zero = after & problem.shares >> 31;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            tokens[i].from += zero;
#pragma unroll
            for (int slice = FIRST; slice < LAST; ++slice) load_slice(tokens[i], slice);
            if (LAST == SLICES) load_rope(tokens[i]);
        }
    }

    // Keeps the compiler from taking the second half's scales apart, that is, from waiting for them, before it has `zero`.
    __device__ void not_before(uint32 zero) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (LAYOUT::ue8m0) tokens[i].scales.y ^= zero;
            else tokens[i].scales.z ^= zero, tokens[i].scales.w ^= zero;
        }
    }

    // RoPE as it is and, where it is of V, as float16. `k`: where this thread's part of the buffer's first tile is.
    __device__ void write_rope(uint32 k, uint32 to, uint32 rope_to) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 at = k + i * 32 * 128;
            const Token& token = tokens[i];
            uint32 as_it_is = k - to + rope_to + i * 32 * 128 + K_ROPE * TILE_BYTES;
            sts128(as_it_is, token.rope[0]), sts128(as_it_is ^ 16, token.rope[1]);
            if (ROPE_IN_V) {
                uint4 low = bf16x8_to_f16x8(token.rope[0]), high = bf16x8_to_f16x8(token.rope[1]);
                uint32 at_v = at + (V_TILES - 1) * TILE_BYTES;
                sts64(at_v, low.x, high.x), sts64(at_v ^ 16, low.y, high.y);
                sts64(at_v ^ 32, low.z, high.z), sts64(at_v ^ 48, low.w, high.w);
            }
        }
    }

    // Slices to the buffer as float16; `bad`: whether a token's scales are out of range.
    template <int FIRST, int LAST> __device__ void write_slices(uint32 k, bool (&bad)[2]) {
#pragma unroll
        for (int slice = FIRST; slice < LAST; ++slice)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Token& token = tokens[i];
                uint32 at = k + i * 32 * 128 + slice * TILE_BYTES, bits = scale_bits(token.scales, slice);
                if (slice == FIRST && !(slice % FIRST_HALF))
                    bad[i] |= slice ? lacks_second(token.scales) : lacks_first(token.scales);
                uint32 factor = pack(f16{}, __uint_as_float(bits), __uint_as_float(bits));
                convert(at, token.raw[slice].x, token.raw[slice].z, factor);
                convert(at ^ 32, token.raw[slice].y, token.raw[slice].w, factor);
            }
    }

    // Say that a part is written.
    __device__ void say(uint32 barrier) {
        fence_for_matrix();
        warp_arrive(barrier);
    }

    __device__ void run() {
        Turn turn;
        Share share = whole_share();
        // Where this thread's values are in a tile: the first of its half chunks (the others are 16, 32 and 48 away, XOR), and
        // the first of its two chunks of RoPE.
        uint32 to = row * 128 + ((part / 2 * 4 ^ (row & 7)) << 4) + part % 2 * 8;
        uint32 rope_to = row * 128 + ((2 * part ^ (row & 7)) << 4);
        Work work;
        for (; share.next(problem, work); share = share_after(work.tile)) {
            open(work);
            int block = work.first, last = work.last, slots[2];
            fetch_indices(slots, block);
            find(block, slots);
            load_half<0, FIRST_HALF>(0);
            fetch_indices(slots, block + 1);
#pragma unroll 1
            for (; block < last; ++block) {
                uint32 k = K_AT + turn.k() * K_BYTES + to, full = K_FULL + 8 * PARTS * turn.k();
                barrier_wait(K_EMPTY + 8 * turn.k(), turn.k_round() ^ 1);
                load_half<FIRST_HALF, SLICES>(tokens[0].raw[0].x);
                bool present[2] = {tokens[0].present, tokens[1].present}, bad[2] = {};
                if (part < 2) {
                    bool here = part ? present[1] : present[0];
                    sts_float(BIAS_AT + (turn.k() * BLOCK + row + 32 * part) * 4,
                              here ? 0.0f : problem.softmax_scale < 0.0f ? infinity() : -infinity());
                }
                bool any_absent = __any_sync(~0u, !present[0] || !present[1]);
                if (thread % 32 == 0) sts32(ABSENT_AT + turn.k() * 16 + thread / 32 * 4, any_absent);
                // Where the next block is. After the last one there is none, and zeros are loaded.
                find(block + 1, slots);
                fetch_indices(slots, block + 2);
                write_slices<0, 2>(k, bad);
                say(full);
                write_slices<2, FIRST_HALF>(k, bad);
                say(full + 8);
                uint32 zero = lds32(ZERO_AT);
                not_before(zero);
                load_half<0, FIRST_HALF>(tokens[0].rope[0].x ^ zero);
                write_slices<FIRST_HALF, 6>(k, bad);
                say(full + 16);
                write_slices<6, SLICES>(k, bad);
                write_rope(k, to, rope_to);
                say(full + 24);
                if ((present[0] && bad[0]) || (present[1] && bad[1])) problem.unsafe[work.tile] = 1;
                ++turn.n;
            }
        }
    }
};
