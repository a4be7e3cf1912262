// Values of cache rows in bfloat16.
#pragma once
#include "common/pages.cuh"

// Eight values of a row, of any format, rounded to bfloat16.
template <class Layout> __device__ inline uint4 bf16x8_of_row(Token token, int first) {
    StoredValues<Layout> stored = load_stored<Layout>(token, first);
    if (first >= Layout::quantized_dim) return stored.bytes;
    float x[8];
    dequantize8(stored, stored_scale<Layout>(stored.scale), x);
    return {pack(bf16{}, x[0], x[1]), pack(bf16{}, x[2], x[3]), pack(bf16{}, x[4], x[5]), pack(bf16{}, x[6], x[7])};
}
