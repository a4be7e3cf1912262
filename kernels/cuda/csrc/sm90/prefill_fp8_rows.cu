// Converts rows of 512 values to e4m3 with one scale for each row, for prefill_fp8/prefill.cu. A scale is a power of
// two whose exponent is 4 plus a multiple of 8: the smallest one with which no value overflows. So nearly all rows have
// the same scale, for which the kernel has a fast path. If the exponent is 7 larger than necessary, values below 2^-8 of
// the largest value lose bits; the error is at most 2^-10 of the largest value. Values are rounded to bfloat16 first,
// which is exact for formats with power-of-two scales.
//
// Grid: any number of CTAs; warps stride over the rows. Block: 256 threads. No shared memory.
//
// Macro: LAYOUT.
#include "common/device.cuh"
#include "common/rows_in_bf16.cuh"
#include "sm90/prefill_fp8/e4m3_rows.cuh"

// A scale 2^e as a word: 2^e and e in bfloat16. For |e| > 44 it is NaN, which makes the scores NaN: numerators and
// denominators of weights would no longer both fit into float32.
constexpr int LEAST_ROW_EXPONENT = -44, ZERO_ROW_EXPONENT = -4;
constexpr uint32 NAN_SCALE = 0x7fc00000;
__device__ inline uint32 scale_word(int e) { return uint32(e + 127) << 23 | __float_as_uint(float(e)) >> 16; }

extern "C" __global__ void __launch_bounds__(256)
    rows_to_e4m3(uint8* pages, int64 page_stride, int block_size, int count, uint8* out, uint32* scales) {
    pdl_wait();
    int lane = threadIdx.x % 32;
    for (int row = blockIdx.x * 8 + threadIdx.x / 32; row < count; row += gridDim.x * 8) {
        Token token = token_at<LAYOUT>(pages, page_stride, block_size, page_row_of(row, block_size));
        HeadPart x{bf16x8_of_row<LAYOUT>(token, 8 * lane), bf16x8_of_row<LAYOUT>(token, 256 + 8 * lane)};
        uint32 largest = largest_of_row(x);
        int least = scale_exponent(__uint_as_float(largest << 16), LEAST_ROW_EXPONENT - 1),
            e = largest ? least + (4 - least & 7) : ZERO_ROW_EXPONENT;
        bool fits = largest < 0x7f80 && e >= LEAST_ROW_EXPONENT && e <= -LEAST_ROW_EXPONENT && (!largest || least >= LEAST_ROW_EXPONENT);
        float factor = fits ? power_of_two(-e) : 0.0f;
        store8(out + int64(row) * 512 + 8 * lane, e4m3x8(x.low, factor));
        store8(out + int64(row) * 512 + 256 + 8 * lane, e4m3x8(x.high, factor));
        if (lane == 0) scales[row] = fits ? scale_word(e) : NAN_SCALE;
    }
}
