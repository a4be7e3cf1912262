// Declarations that CUDA C++ has without any include.
#pragma once
#include "emulator.h"

#define __device__
#define __forceinline__ inline
#define __noinline__
#define __host__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z) x  // the translation reads the number of blocks from it
#define __restrict__

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

// CUDA's overloads of min and max: mixed types convert to the wider one.
#define EMULATED_MIN_MAX(T) \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
#undef EMULATED_MIN_MAX
inline long long min(int a, long long b) { return min((long long)a, b); }
inline long long min(long long a, int b) { return min(a, (long long)b); }
inline long long max(int a, long long b) { return max((long long)a, b); }
inline long long max(long long a, int b) { return max(a, (long long)b); }

inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline double __hiloint2double(int high, int low) {
    uint64_t bits = uint64_t(uint32_t(high)) << 32 | uint32_t(low);
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline int __float2int_rn(float x) { return int(lrintf(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xffffu, b & 0xffffu) | max(a & 0xffff0000u, b & 0xffff0000u);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
    unsigned long long bytes = a | (unsigned long long)b << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned selector = selectors >> 4 * i & 15, byte = bytes >> 8 * (selector & 7) & 255;
        if (selector & 8) byte = byte & 128 ? 255 : 0;  // the sign alone
        result |= byte << 8 * i;
    }
    return result;
}
// The number if one is NaN, signalling NaN included, for which C's functions return NaN.
namespace emulator {
inline float larger(float a, float b) { return a != a ? b : a < b ? b : a; }
inline float smaller(float a, float b) { return a != a ? b : b < a ? b : a; }
}  // namespace emulator
#define fmaxf emulator::larger
#define fminf emulator::smaller
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// Fibers switch only where they wait, so plain arithmetic is atomic.
template <class T> T atomicAdd(T* p, T x) {
    T before = *p;
    *p += x;
    return before;
}
template <class T> T atomicSub(T* p, T x) {
    T before = *p;
    *p -= x;
    return before;
}
template <class T> T atomicMax(T* p, T x) {
    T before = *p;
    if (x > before) *p = x;
    return before;
}
template <class T> T atomicMin(T* p, T x) {
    T before = *p;
    if (x < before) *p = x;
    return before;
}
template <class T> T atomicOr(T* p, T x) {
    T before = *p;
    *p |= x;
    return before;
}
template <class T> T atomicCAS(T* p, T expected, T x) {
    T before = *p;
    if (before == expected) *p = x;
    return before;
}
template <class T> T atomicExch(T* p, T x) {
    T before = *p;
    *p = x;
    return before;
}
inline void __threadfence() {}
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

inline size_t __cvta_generic_to_shared(const void* p) {
    return static_cast<const uint8_t*>(p) - emulator::shared_memory + (emulator::cluster_rank << emulator::RANK_SHIFT);
}

// ---- warps

inline void whole_warp(unsigned mask) {
    if (mask != ~0u) emulator::fail("a warp's part meets (mask %#x), which is not emulated", mask);
}
template <class T> T __shfl_sync(unsigned mask, T x, int source) {
    whole_warp(mask);
    return emulator::everybodys("shfl.sync", x)[source & 31];
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int other) {
    whole_warp(mask);
    return emulator::everybodys("shfl.sync.bfly", x)[(emulator::thread_number ^ other) & 31];
}
template <class T> T __shfl_up_sync(unsigned mask, T x, int by) {
    whole_warp(mask);
    int lane = emulator::thread_number % 32;
    return emulator::everybodys("shfl.sync.up", x)[lane >= by ? lane - by : lane];
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    whole_warp(mask);
    return emulator::ballot(vote);
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == ~0u; }
template <class T> T __reduce_max_sync(unsigned mask, T x) {
    whole_warp(mask);
    auto all = emulator::everybodys("redux.sync.max", x);
    for (int i = 0; i < 32; ++i) x = max(x, all[i]);
    return x;
}
inline int __reduce_add_sync(unsigned mask, int x) {
    whole_warp(mask);
    auto all = emulator::everybodys("redux.sync.add", x);
    x = 0;
    for (int i = 0; i < 32; ++i) x += all[i];
    return x;
}
inline void __syncwarp(unsigned mask = ~0u) {
    whole_warp(mask);
    emulator::everybodys("bar.warp.sync", 0);
}

// ---- blocks

inline void __syncthreads() { emulator::block_sync(); }
inline int __syncthreads_or(int predicate) { return emulator::block_sync_or(predicate); }

// ---- how a kernel is called: with arguments as the driver takes them, each at a multiple of its alignment

namespace emulator {
template <class T> struct Plain { using Type = T; };
template <class T> struct Plain<const T&> { using Type = T; };  // a __grid_constant__, read in place
struct Arguments {
    const uint8_t *start, *at;
    template <class T> T next() {
        using Type = typename Plain<T>::Type;
        static_assert(alignof(Type) <= 16, "the compiler and a struct do not agree on where this would be");
        size_t offset = (at - start + alignof(Type) - 1) / alignof(Type) * alignof(Type);
        at = start + offset + sizeof(Type);
        return *reinterpret_cast<const Type*>(start + offset);
    }
};
template <class... T> struct Call {  // braces evaluate arguments in order
    Call(void (*kernel)(T...), T... x) { kernel(x...); }
};
template <class... T> void call(void (*kernel)(T...), const void* packed) {
    Arguments arguments{static_cast<const uint8_t*>(packed), static_cast<const uint8_t*>(packed)};
    Call<T...>{kernel, arguments.next<T>()...};
}
}  // namespace emulator
