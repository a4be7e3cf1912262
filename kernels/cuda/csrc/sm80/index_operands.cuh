// Operands of index scores by tensor cores: heads of a query, and e4m3 keys. Both operands of a product may have their
// values in any common order: a lane reads a row in pieces, and each four values of them are its operands of a step of
// 16 values.
//
// float16 has every e4m3 value. bfloat16 has every e2m1 value times a power of two, and every e4m3 value. So products are exact,
// and sums are float32.
//
// Macros: QUERY, LAYOUT, HEADS and ALIGNED, see sm80/index_scores.cu.
#pragma once
#include "common/pages.cuh"
#include "sm80/mma.cuh"

constexpr int DIM = 128, STEPS = DIM / 16, CHUNK_HEADS = HEADS == 64 ? 64 : 32;
constexpr bool IS_MXFP4 = LAYOUT::e2m1_values, IS_E4M3 = !IS_MXFP4 && LAYOUT::num_scales == 1;
// Without an instruction that converts e4m3, the bits of codes are moved to the fields of float16: keys are in units of
// 2^8, and queries in units of 2^-7.
#if E4M3_ARCH >= 890
constexpr bool BY_BITS = false;
#else
constexpr bool BY_BITS = IS_E4M3;
#endif
constexpr float UNIT = IS_E4M3 && !BY_BITS ? 0.5f : 1.0f;  // of sums, which are doubled where products cannot be infinite

template <bool E4M3> struct ProductType { using type = bf16; };
template <> struct ProductType<true> { using type = f16; };
using Product = ProductType<IS_E4M3>::type;

// max(x, 0) / UNIT
__device__ inline float positive(float x) { return IS_E4M3 ? twice_relu(x) : relu(x); }

// Four e4m3 values of a query as two pairs. With BY_BITS the pairs are values 0 and 2, and 1 and 3.
__device__ inline void query_pairs(uint32 bytes, uint32& low, uint32& high) {
#if E4M3_ARCH < 890
    if (!is_nan4(bytes)) {
        if constexpr (BY_BITS) {
            uint32 unit = pack(f16{}, 32768.0f, 32768.0f);
            low = multiply(spread_codes(bytes << 8), unit), high = multiply(spread_codes(bytes), unit);
        } else {
            codes_to(Product{}, bytes, low, high);
        }
        return;
    }
#endif
    float x[4];
    e4m3x2_to_float(bytes & 0xffff, x[0], x[1]), e4m3x2_to_float(bytes >> 16, x[2], x[3]);
    if constexpr (BY_BITS) low = pack(f16{}, x[0] * 128, x[2] * 128), high = pack(f16{}, x[1] * 128, x[3] * 128);
    else low = pack(Product{}, x[0], x[1]), high = pack(Product{}, x[2], x[3]);
}
// The same for a key, in float16. With BY_BITS a NaN becomes a number, and `nan` is set.
__device__ inline void e4m3_key_pairs(uint32 bytes, uint32& low, uint32& high, [[maybe_unused]] uint32& nan) {
#if E4M3_ARCH >= 890
    codes_to_f16(bytes, low, high);
#else
    low = spread_codes(bytes << 8), high = spread_codes(bytes);
    nan |= ((bytes & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
#endif
}

// The first of the four values of a step for lanes with this c, where a lane reads PIECES pieces of a row.
template <int PIECES> __device__ inline int first_value(int step, int c) {
    constexpr int PIECE_STEPS = STEPS / PIECES, VALUES = DIM / PIECES;
    return step / PIECE_STEPS * VALUES + c * (VALUES / 4) + step % PIECE_STEPS * 4;
}

// A word at `from`.
template <class T> __device__ inline T load(const void* from) {
    if constexpr (ALIGNED) return *static_cast<const T*>(from);
    else return read_at<T>(static_cast<const uint8*>(from));
}

// CHUNK_HEADS heads of a query as operands, and their weights. PIECES: see first_value.
template <int PIECES> struct Heads {
    uint32 b[CHUNK_HEADS / 8][STEPS][2];
    float weights[CHUNK_HEADS / 8][2];

    __device__ void read(const QUERY* q, int64 q_stride_h, const float* of_heads, int first, int heads) {
        int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
        for (int n = 0; n < CHUNK_HEADS / 8; ++n) {
            int head = first + 8 * n + lane / 4;
            bool present = HEADS || head < heads;
            const QUERY* row = q + (present ? head : 0) * q_stride_h;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const QUERY* from = row + first_value<PIECES>(step, c);
                if constexpr (sizeof(QUERY) == 1) {
                    query_pairs(load<uint32>(from), b[n][step][0], b[n][step][1]);
                } else {
                    uint2 words{load<uint32>(from), load<uint32>(from + 2)};
                    b[n][step][0] = words.x, b[n][step][1] = words.y;
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int column = first + 8 * n + 2 * c + i;
                weights[n][i] = HEADS || column < heads ? of_heads[column] : 0;
            }
            __syncwarp();  // keeps the loads of the next heads from taking registers now
        }
    }
};

// Sums over the four lanes of a g: lane c receives the sum of value c.
__device__ inline float sum_of_four(const float (&x)[4]) {
    int c = threadIdx.x % 4;
    bool odd = c & 1, upper = c & 2;
    float low = (odd ? x[1] : x[0]) + __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    float high = (odd ? x[3] : x[2]) + __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
}
