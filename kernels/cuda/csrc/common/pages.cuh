// Pages of a paged cache and their rows: lookups in a block table, addresses of rows and scales, dequantisation,
// quantisation to e2m1. Formats are the structs of layouts.cuh, which kernels/cuda/compile.py generates from
// cumla/layout.py.
#pragma once
#include "common/device.cuh"
#include "layouts.cuh"

// ---- block tables

struct PageRow {
    int64 page;  // -1 if absent
    int row;
};

// Page and row of a non-negative `slot`. Slots beyond int32 need a 64-bit division, which is slow.
__device__ inline PageRow page_row_of(int slot, int block_size) {
    return {uint32(slot) / uint32(block_size), int(uint32(slot) % uint32(block_size))};
}
__device__ inline PageRow page_row_of(int64 slot, int block_size) {
    if (slot <= INT32_LIMIT) return page_row_of(int(slot), block_size);
    return {slot / block_size, int(slot % block_size)};
}

// A block size, and the constants that replace a division by it by a multiplication (`division` of indices.py).
struct BlockSize {
    int tokens;
    uint32 multiplier;
    int shift;

    __device__ uint32 page_of(uint32 position) const {  // positions below 2^31
        return __umulhi(2 * position, multiplier) >> shift;
    }
    __device__ int remainder_of(uint32 position) const { return int(position - page_of(position) * tokens); }
};

struct BlockTable {
    const int* entries;
    int64 row_stride;  // in entries
    int rows, columns;

    // Number of positions of a request that have an entry.
    __device__ int64 covered(int block_size) const { return int64(columns) * block_size; }
};

// Page and row of a position (int or int64) of request `row`. Absent if the table has no such entry, or if the block is
// absent or its slot is beyond `num_slots` or int32.
template <class Position>
__device__ inline PageRow lookup_page_row(BlockTable table, int row, Position position, int block_size,
                                          int64 num_slots = INT32_LIMIT + 1ll) {
    PageRow absent{-1, 0};
    if (row < 0 || row >= table.rows || position < 0 || position >= int64(table.columns) * block_size) return absent;
    PageRow column = page_row_of(position, block_size);
    int block = table.entries[row * table.row_stride + column.page];
    int64 slot = int64(block) * block_size + column.row;
    return block >= 0 && slot <= INT32_LIMIT && slot < num_slots ? PageRow{block, column.row} : absent;
}

// The slot of a position of request `row`, or -1 if it is absent.
template <class Position>
__device__ inline int lookup_slot(BlockTable table, int row, Position position, int block_size) {
    PageRow at = lookup_page_row(table, row, position, block_size);
    return at.page < 0 ? -1 : int(at.page) * block_size + at.row;
}

// A value in a page, which may start at any address.
template <class T> __device__ inline T read_at(const uint8* from) {
    if (reinterpret_cast<uint64>(from) % sizeof(T) == 0) return *reinterpret_cast<const T*>(from);
    T x;
    for (int i = 0; i < int(sizeof(T)); ++i) reinterpret_cast<uint8*>(&x)[i] = from[i];
    return x;
}
template <class T> __device__ inline void write_at(uint8* to, T x) {
    if (reinterpret_cast<uint64>(to) % sizeof(T) == 0) *reinterpret_cast<T*>(to) = x;
    else
        for (int i = 0; i < int(sizeof(T)); ++i) to[i] = reinterpret_cast<const uint8*>(&x)[i];
}

// ---- rows and scales

struct Token {
    uint8* row;
    uint8* scales;
};

// The value of a stored scale: a byte of UE8M0 or e4m3, or float32.
template <class Layout> __device__ inline float stored_scale(uint32 stored) {
    if (Layout::ue8m0) return ue8m0_scale(stored);
    if (!Layout::e4m3_scales) return __uint_as_float(stored);
    float scale, none;
    e4m3x2_to_float(stored & 0xff, scale, none);
    return scale;
}

// The row and scales at `at`. Page offsets are 64-bit, as the page stride may be large.
template <class Layout>
__device__ inline Token token_at(uint8* pages, int64 page_stride, int block_size, PageRow at) {
    uint8* base = pages + at.page * page_stride;
    int64 scale_start = Layout::scale_start + int64(block_size) * Layout::scale_start_per_token;
    return {base + int64(at.row) * Layout::row_bytes, base + scale_start + int64(at.row) * Layout::scale_stride};
}

template <class Layout>
__device__ inline Token token_at(uint8* pages, int64 page_stride, int block_size, int64 slot) {
    return token_at<Layout>(pages, page_stride, block_size, page_row_of(slot, block_size));
}

// ---- e2m1

// Eight e2m1 codes, the first in the lowest bits, as eight e4m3 bytes of the same values.
__device__ inline void e2m1_to_e4m3(uint32 codes, uint32& first, uint32& second) {
    constexpr uint32 SMALL = 0x3c383000, LARGE = 0x4c484440;  // 0, 0.5, 1, 1.5 and 2, 3, 4, 6
    uint32 magnitudes = codes & 0x77777777, even = codes << 4 & 0x80808080, odd = codes & 0x80808080;
    first = __byte_perm(SMALL, LARGE, magnitudes) | __byte_perm(even, odd, 0x5140);
    second = __byte_perm(SMALL, LARGE, magnitudes >> 16) | __byte_perm(even, odd, 0x7362);
}

// Eight e2m1 codes, the first in the lowest bits, as four pairs of bfloat16 values.
__device__ inline void e2m1_to_bf16(uint32 codes, uint32 (&pairs)[4]) {
    constexpr uint32 LOW_SMALL = 0xc0800000, LOW_LARGE = 0xc0804000;    // low bytes of 0, 0.5, 1, 1.5 and 2, 3, 4, 6
    constexpr uint32 HIGH_SMALL = 0x3f3f3f00, HIGH_LARGE = 0x40404040;  // high bytes
    uint32 even = codes << 4;                                           // the sign of every second code is the highest bit of a byte
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32 magnitudes = (codes & 0x77777777) >> 16 * i;
        uint32 signs = __byte_perm(even, codes, i ? 0x7362 : 0x5140) & 0x80808080;
        uint32 low = __byte_perm(LOW_SMALL, LOW_LARGE, magnitudes), high = __byte_perm(HIGH_SMALL, HIGH_LARGE, magnitudes) | signs;
        pairs[2 * i] = __byte_perm(low, high, 0x5140), pairs[2 * i + 1] = __byte_perm(low, high, 0x7362);
    }
}

// Eight e2m1 codes, the first in the lowest bits, as eight e4m3 bytes of 2^-6 times their values, also for subnormals:
// exponent and mantissa only move. The caller's factors compensate.
__device__ inline void e2m1_to_small_e4m3(uint32 codes, uint32& first, uint32& second) {
    constexpr uint32 SIGN = 0x80808080, MAGNITUDE = 0x1c1c1c1c;
    uint32 even = (codes << 4 & SIGN) | (codes << 2 & MAGNITUDE), odd = (codes & SIGN) | (codes >> 2 & MAGNITUDE);
    first = __byte_perm(even, odd, 0x5140), second = __byte_perm(even, odd, 0x7362);
}

// Sixteen bytes of codes as 32 e4m3 bytes; `convert` is one of the functions above.
template <class Convert> __device__ inline void expand_e2m1(uint4 codes, uint4& low, uint4& high, Convert convert) {
    convert(codes.x, low.x, low.y), convert(codes.y, low.z, low.w);
    convert(codes.z, high.x, high.y), convert(codes.w, high.z, high.w);
}

// ---- values

// Eight neighbouring stored values of a row. Quantised values share one scale.
template <class Layout> struct StoredValues {
    uint4 bytes;   // e4m3 in the low half, e2m1 in the lowest word, or bfloat16
    uint32 scale;  // as stored in the cache
};

template <class Layout> __device__ inline StoredValues<Layout> load_stored(Token token, int first) {
    if (first >= Layout::quantized_dim) return {load16(token.row + Layout::rope_offset + 2 * (first - Layout::quantized_dim)), 0};
    int tile = first / Layout::scale_tile;
    if (Layout::e2m1_values) return {{load4(token.row + first / 2), 0, 0, 0}, token.scales[tile]};
    uint2 bytes = load8(token.row + first);
    return {{bytes.x, bytes.y, 0, 0}, Layout::ue8m0 || Layout::e4m3_scales ? token.scales[tile] : load4(token.scales + 4 * tile)};
}

// Quantised values, times a factor.
template <class Layout> __device__ inline void dequantize8(const StoredValues<Layout>& stored, float factor, float (&x)[8]) {
    if constexpr (Layout::e2m1_values) {
        uint2 e4m3;
        e2m1_to_e4m3(stored.bytes.x, e4m3.x, e4m3.y);
        dequantize8(e4m3, factor, x);
    } else {
        dequantize8({stored.bytes.x, stored.bytes.y}, factor, x);
    }
}

// ---- to scales and e2m1

// x / unit as a four-bit e2m1 code. Magnitudes beyond 6 saturate, ties go to even codes. If unit is an e4m3 number and
// x has at most 11 bits (bfloat16, float16), a midpoint times unit is exact, and comparing x with it gives the same
// code as rounding the quotient.
__device__ inline uint32 float_to_e2m1(float x, float unit) {
    float y = fabsf(x);
    uint32 code = (y > 0.25f * unit) + (y >= 0.75f * unit) + (y > 1.25f * unit) + (y >= 1.75f * unit) + (y > 2.5f * unit) +
                  (y >= 3.5f * unit) + (y > 5.0f * unit);
    return __float_as_uint(x) >> 28 & 8 | code;
}

// Smallest e with amax <= 6 * 2^e, at least `least`. Exact: 6 is 1.5 * 2^2.
__device__ inline int e2m1_scale_exponent(float amax, int least) {
    uint32 bits = __float_as_uint(amax);
    int e = int(bits >> 23) - 127 - 2 + ((bits & 0x7fffff) > 0x400000);
    return max(e, least);
}

// Smallest e with amax <= 448 * 2^e, at least `least`. Exact: 448 is 1.75 * 2^8.
__device__ inline int scale_exponent(float amax, int least) {
    uint32 bits = __float_as_uint(amax);
    int e = int(bits >> 23) - 127 - 8 + ((bits & 0x7fffff) > 0x600000);
    return max(e, least);
}

// The scale of a tile: a power of two, or an e4m3 number. A tile with a NaN, which e2m1 cannot represent, has the scale
// NaN and codes of 0.
struct E2m1Scale {
    uint32 byte;  // as stored
    float value;
    float inverse;  // of a power of two
    bool is_nan;
};

// x / 6, precise enough for rounding to e4m3.
template <class Input> __device__ inline float sixth_of(Input, float x) { return div(x, 6.0f); }
__device__ inline float sixth_of(bf16, float x) { return mul(x, 1.0f / 6.0f); }

// The scale for the largest finite magnitude of a tile; Input is the type of the values.
template <class Layout, class Input = float> __device__ inline E2m1Scale e2m1_scale(float amax, bool has_nan, int min_exponent) {
    if constexpr (Layout::ue8m0) {
        int exponent = e2m1_scale_exponent(amax, min_exponent);
        return {has_nan ? 255u : uint32(exponent + 127), power_of_two(exponent), power_of_two(-exponent), has_nan};
    }
    uint32 byte = float_to_e4m3x2(fmaxf(sixth_of(Input{}, amax), Layout::min_scale), 0.0f) & 0xff;
    return {has_nan ? 0x7fu : byte, stored_scale<Layout>(byte), 0.0f, has_nan};
}

// The codes of two values times 2^-14: one code in the low four bits of each half. An e2m1 number times 2^-14, as
// float16, is its code shifted left by nine bits, also where it is subnormal; the lowest nine bits are rounded off.
__device__ inline uint32 e2m1_pair(float low, float high) {
    constexpr uint32 SIX = 0x0e000e00, HALVES = 0x00010001;
    uint32 pair = pack(f16{}, low, high), magnitudes;
    asm("{\n.reg .b32 m;\nabs.f16x2 m, %1;\nmin.f16x2 %0, m, %2;\n}" : "=r"(magnitudes) : "r"(pair), "r"(SIX));
    uint32 rounded = magnitudes + 0xff * HALVES + (magnitudes >> 9 & HALVES);
    return (rounded >> 9 & 7 * HALVES) | (pair >> 12 & 8 * HALVES);
}

// Codes of x / scale for eight values, to nearest even. A bfloat16 number has 8 significant bits and a scale at most 4,
// so a quotient is either a midpoint of two e2m1 numbers or differs from it by more than 2^-8 of it. Rounding to
// float16 therefore keeps the quotient on its side of a midpoint, and gives the midpoint itself although the reciprocal
// may have an error of two units in the last place.
template <class Layout> __device__ inline uint32 e2m1_codes(bf16, const float* x, const E2m1Scale& scale) {
    uint32 codes = 0;
    constexpr float SMALLEST = 1.0f / 16384.0f;
    float inverse = Layout::ue8m0 ? scale.inverse : mul(reciprocal_fast(scale.value), SMALLEST);
    auto scaled = [&](float y) { return Layout::ue8m0 ? mul(mul(y, inverse), SMALLEST) : mul(y, inverse); };
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= e2m1_pair(scaled(x[i]), scaled(x[i + 4])) << 4 * i;
    return scale.is_nan ? 0 : codes;
}

// The same for values with more bits.
template <class Layout, class Input> __device__ inline uint32 e2m1_codes(Input, const float* x, const E2m1Scale& scale) {
    uint32 codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32 code;
        if (Layout::ue8m0) code = float_to_e2m1(mul(x[i], scale.inverse), 1.0f);
        else code = sizeof(Input) == 4 ? float_to_e2m1(div(x[i], scale.value), 1.0f) : float_to_e2m1(x[i], scale.value);
        codes |= code << 4 * i;
    }
    return scale.is_nan ? 0 : codes;
}

// Whether one of LANES neighbouring lanes has a NaN among its values. Called by a whole warp.
template <int LANES> __device__ inline bool tile_has_nan(bool own, int lane) {
    return __ballot_sync(~0u, own) & (LANES == 32 ? ~0u : ((1u << LANES % 32) - 1) << (lane & -LANES));
}
