// Shared by the kernels of all devices: number formats and their arithmetic without host headers, accesses of eight
// values, asynchronous copies, programmatic dependent launch.
//
// float32 arithmetic that must not flush subnormals is written in PTX: CuPy compiles with -ftz=true.
#pragma once

// ---- number formats: bfloat16, float16, float32 and e4m3, to and from float32

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

// The compute capability whose instructions convert e4m3: of this device, or of the device that a test assumes
// (kernels/cuda/device.py).
#ifdef ASSUMED_ARCH
#define E4M3_ARCH ASSUMED_ARCH
#else
#define E4M3_ARCH __CUDA_ARCH__
#endif

struct bf16 { uint16 bits; };
struct f16 { uint16 bits; };

[[maybe_unused]] constexpr int INT32_LIMIT = 0x7fffffff;

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(uint32(x.bits) << 16); }
__device__ inline float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Two floats as a pair of 16-bit values, `low` in the low half; to nearest even.
__device__ inline uint32 pack(bf16, float low, float high) {
    uint32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ inline uint32 pack(f16, float low, float high) {
    uint32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ inline float mul(float a, float b) {
    float y;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
__device__ inline float div(float a, float b) {
    float y;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
// The larger of two numbers; NaN is ignored.
__device__ inline float larger(float a, float b) {
    float y;
    asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// 2^e as float32 for -149 <= e <= 127.
__device__ inline float exp2i(int e) { return __uint_as_float(e >= -126 ? uint32(e + 127) << 23 : 1u << (e + 149)); }

// 2^e for exponents of normal numbers.
__device__ inline float power_of_two(int e) { return __uint_as_float(uint32(e + 127) << 23); }

// The scale of a UE8M0 byte; 255 is NaN.
__device__ inline float ue8m0_scale(int byte) { return byte == 255 ? __uint_as_float(0x7fc00000) : exp2i(byte - 127); }

#if E4M3_ARCH >= 890

// Two e4m3 bytes (the low 16 bits) to two floats; NaN stays NaN.
__device__ inline void e4m3x2_to_float(uint32 bytes, float& low, float& high) {
    uint32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16(bytes)));
    low = to_float(f16{uint16(pair)});
    high = to_float(f16{uint16(pair >> 16)});
}

// Two floats to two e4m3 bytes, to nearest even. Magnitudes beyond 448 saturate, NaN becomes 0x7F.
__device__ inline uint32 float_to_e4m3x2(float low, float high) {
    uint16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

#else  // the same in integer arithmetic

__device__ inline float e4m3_to_float(uint32 byte) {
    // Exponent and mantissa of the byte, moved to the fields of float32, are the value times 2^-120, also for
    // subnormals.
    uint32 magnitude = byte & 0x7f;
    float value = magnitude == 0x7f ? __uint_as_float(0x7fc00000) : mul(__uint_as_float(magnitude << 20), exp2i(120));
    return byte & 0x80 ? -value : value;
}

__device__ inline void e4m3x2_to_float(uint32 bytes, float& low, float& high) {
    low = e4m3_to_float(bytes & 0xff);
    high = e4m3_to_float(bytes >> 8 & 0xff);
}

__device__ inline uint32 float_to_e4m3(float x) {
    if (x != x) return 0x7f;
    uint32 sign = __float_as_uint(x) >> 24 & 0x80;
    uint32 magnitude = __float_as_uint(x) & 0x7fffffff;
    if (magnitude >= 0x43e00000) return sign | 0x7e;                                   // 448
    if (magnitude < 0x3c800000) return sign | __float2int_rn(fabsf(x) * 512.0f);       // below 2^-6: steps of 2^-9
    return sign | (magnitude + 0x7ffff + (magnitude >> 20 & 1)) - (120u << 23) >> 20;  // 3 bits of mantissa
}

__device__ inline uint32 float_to_e4m3x2(float low, float high) { return float_to_e4m3(low) | float_to_e4m3(high) << 8; }

#endif

// Whether one of four e4m3 bytes is NaN.
__device__ inline bool is_nan4(uint32 bytes) { return ((bytes & 0x7f7f7f7f) + 0x01010101) & 0x80808080; }

// max(x, 0); NaN stays NaN.
__device__ inline float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// 2 max(x, 0) for a finite x or NaN, by an addition, which takes half the time of a comparison.
__device__ inline float twice_relu(float x) { return x + fabsf(x); }

// For a maximum logit (base 2) from here on, fmaf(score, scale, -logit) may have an error of more than 1, because it
// does not round `score * scale` as the maximum was rounded. Logits are then rounded first, so that no weight becomes
// infinite.
[[maybe_unused]] constexpr float LARGE_LOGIT = 1 << 24;

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- pairs of float16 from bfloat16, and approximate arithmetic

__device__ inline uint32 bf16x2_to_f16x2(uint32 x) { return pack(f16{}, __uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
__device__ inline uint4 bf16x8_to_f16x8(uint4 x) {
    return {bf16x2_to_f16x2(x.x), bf16x2_to_f16x2(x.y), bf16x2_to_f16x2(x.z), bf16x2_to_f16x2(x.w)};
}
// Larger of the magnitudes of 8 bfloat16 values, in each half of a word.
__device__ inline uint32 largest_of_8(uint4 x) {
    return __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff), __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff));
}
__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- reductions over a quad, the four lanes that have a row of a product

__device__ inline float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ inline float quad_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

// ---- eight values at a time between global memory and registers
//
// ALIGNED: whether 16-byte accesses are allowed; otherwise every access is a single element or byte. STREAM: data is
// evicted first, as it is not needed again soon. Aligned accesses are written in PTX, because the compiler splits some
// wide stores into four; they keep their order. Data that is read must not be written by the same kernel.

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
    asm volatile("ld.global" EVICTION ".nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
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

// Eight values converted to another type. Values of the same type keep their bits, also NaN.
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
    for (int i = 0; i < 2; ++i) words[i] = float_to_e4m3x2(x[4 * i], x[4 * i + 1]) | float_to_e4m3x2(x[4 * i + 2], x[4 * i + 3]) << 16;
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

// ---- clusters

__device__ inline uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address in the cluster of `address` in the shared memory of CTA `rank`.
__device__ inline uint32 cluster_address(uint32 address, uint32 rank) {
    uint32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// All threads of a cluster arrive; threads that depend on the others' writes wait until all have arrived.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- asynchronous copies from global to shared memory (cp.async)

// Rounded up to a multiple of 16.
constexpr int to_16(int bytes) { return (bytes + 15) / 16 * 16; }

// In a cluster, the shared memory of a CTA begins at its rank << 24, which constant addresses do not include. For
// kernels that define IN_CLUSTER.
__device__ inline uint32 own(uint32 address) {
#ifdef IN_CLUSTER
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    address += rank << 24;
#endif
    return address;
}

__device__ inline uint32 shared_address(const void* pointer) { return uint32(__cvta_generic_to_shared(pointer)); }

// Copy 16 bytes to shared memory: `size` bytes from global memory, then zeros. Bypasses the L1 cache.
__device__ inline void copy_async_part(uint32 target, const void* source, int size) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(own(target)), "l"(source), "r"(size) : "memory");
}
// Copy BYTES (4, 8 or 16) from global to shared memory, or zeros, without a global access, if `present` is false.
template <int BYTES> __device__ inline void copy_async(uint32 target, const void* source, bool present) {
    int size = present ? BYTES : 0;
    if (BYTES == 16) copy_async_part(target, source, size);
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(own(target)), "l"(source), "n"(BYTES), "r"(size) : "memory");
}
template <int BYTES> __device__ inline void copy_async(void* target, const void* source, bool present) {
    copy_async<BYTES>(shared_address(target), source, present);
}
// Prefetch this byte's line to L2.
__device__ inline void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until all but the last PENDING groups of this thread's copies have arrived.
template <int PENDING> __device__ inline void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- programmatic dependent launch (sm_90 and later)
//
// A kernel that is launched this way starts while the previous kernel of the stream still runs, which hides its launch
// latency.

// Wait until the previous kernel has ended and its writes are visible. Every thread calls this before it accesses
// memory. Does nothing in an ordinary launch. The next kernel starts when all CTAs of this one have exited or have
// called pdl_release. An early pdl_release costs kernels that move rows 0.6 us from a few hundred rows on
// (docs/kernels/launches.md).
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allow the next kernel to start, for this CTA. That kernel sees the writes of this one only after its pdl_wait.
__device__ inline void pdl_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
