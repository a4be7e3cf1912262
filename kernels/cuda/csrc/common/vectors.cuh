// Eight values at a time between global memory and registers.
//
// ALIGNED says whether 16-byte accesses are allowed; without it every access is a single element or byte.
// STREAM says that data read or written is not needed again soon: evicted first.
// Aligned accesses are written in PTX because the compiler splits some wide stores into four; they keep their
// order. Data that is read must not be written by the same kernel.
#pragma once
#include "common/numbers.cuh"

#ifndef ALIGNED
#define ALIGNED 1
#endif
#if STREAM
#define EVICTION ".cs"
#else
#define EVICTION ""
#endif

__device__ inline uint4 load16(const void* p) {
#if ALIGNED
    uint4 x;
    asm volatile("ld.global" EVICTION ".nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
#else
    uint32 words[4] = {};
    for (int i = 0; i < 16; ++i) words[i / 4] |= uint32(static_cast<const uint8*>(p)[i]) << 8 * (i % 4);
    return {words[0], words[1], words[2], words[3]};
#endif
}

__device__ inline uint2 load8(const void* p) {
#if ALIGNED
    uint2 x;
    asm volatile("ld.global" EVICTION ".nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
#else
    uint32 words[2] = {};
    for (int i = 0; i < 8; ++i) words[i / 4] |= uint32(static_cast<const uint8*>(p)[i]) << 8 * (i % 4);
    return {words[0], words[1]};
#endif
}

__device__ inline uint32 load4(const void* p) {
#if ALIGNED
    return *static_cast<const uint32*>(p);
#else
    uint32 word = 0;
    for (int i = 0; i < 4; ++i) word |= uint32(static_cast<const uint8*>(p)[i]) << 8 * i;
    return word;
#endif
}

__device__ inline void store_bytes(uint8* p, const uint32* words, int count) {
    for (int i = 0; i < count; ++i) p[i] = uint8(words[i / 4] >> 8 * (i % 4));
}

__device__ inline void store16(void* p, uint4 x) {
#if ALIGNED
    asm volatile("st.global" EVICTION ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
#else
    uint32 words[4] = {x.x, x.y, x.z, x.w};
    store_bytes(static_cast<uint8*>(p), words, 16);
#endif
}

__device__ inline void store8(void* p, uint2 x) {
#if ALIGNED
    asm volatile("st.global" EVICTION ".v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x.x), "r"(x.y) : "memory");
#else
    uint32 words[2] = {x.x, x.y};
    store_bytes(static_cast<uint8*>(p), words, 8);
#endif
}

__device__ inline void store4(void* p, uint32 x) {
#if ALIGNED
    *static_cast<uint32*>(p) = x;
#else
    store_bytes(static_cast<uint8*>(p), &x, 4);
#endif
}

// Eight values as stored in memory.
template <class T> struct Raw8 { uint4 words; };
template <> struct Raw8<float> { uint4 low, high; };

__device__ inline Raw8<bf16> load_raw8(const bf16* p) { return {load16(p)}; }
__device__ inline Raw8<f16> load_raw8(const f16* p) { return {load16(p)}; }
__device__ inline Raw8<float> load_raw8(const float* p) { return {load16(p), load16(p + 4)}; }

template <class T> __device__ inline void unpack8(Raw8<T> raw, float (&x)[8]) {
    uint32 words[4] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = to_float(T{uint16(words[i])});
        x[2 * i + 1] = to_float(T{uint16(words[i] >> 16)});
    }
}
__device__ inline void unpack8(Raw8<float> raw, float (&x)[8]) {
    uint32 words[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(words[i]);
}

template <class T> __device__ inline void store_values8(T* p, const float (&x)[8]) {
    store16(p, {pack(T{}, x[0], x[1]), pack(T{}, x[2], x[3]), pack(T{}, x[4], x[5]), pack(T{}, x[6], x[7])});
}
__device__ inline void store_values8(float* p, const float (&x)[8]) {
    store16(p, {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
    store16(p + 4, {__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7])});
}

// Eight values converted to another type; values of the same type keep their bits, NaN's included.
template <class To, class From> __device__ inline void store_raw8(To* p, Raw8<From> raw) {
    float x[8];
    unpack8(raw, x);
    store_values8(p, x);
}
template <class T> __device__ inline void store_raw8(T* p, Raw8<T> raw) { store16(p, raw.words); }

// Eight floats as e4m3 bytes.
__device__ inline void store_e4m3x8(uint8* p, const float (&x)[8]) {
    uint32 words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        words[i] = float_to_e4m3x2(x[4 * i], x[4 * i + 1]) | float_to_e4m3x2(x[4 * i + 2], x[4 * i + 3]) << 16;
    store8(p, {words[0], words[1]});
}

// Eight e4m3 bytes times `scale`.
__device__ inline void dequantize8(uint2 bytes, float scale, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32 word = i < 2 ? bytes.x : bytes.y;
        e4m3x2_to_float(word >> 16 * (i % 2), x[2 * i], x[2 * i + 1]);
        x[2 * i] = mul(x[2 * i], scale);
        x[2 * i + 1] = mul(x[2 * i + 1], scale);
    }
}
