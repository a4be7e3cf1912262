// Four channels per thread, and their means weighted by a softmax. Macro: WIDE (rows may be read 4 values at a time).
#pragma once
#include "common/device.cuh"

struct alignas(16) Channels4 { float x[4]; };

__device__ inline Channels4 read4(const float* p) {
#if WIDE
    float4 x = *reinterpret_cast<const float4*>(p);
    return {x.x, x.y, x.z, x.w};
#else
    return {p[0], p[1], p[2], p[3]};
#endif
}

__device__ inline Channels4 read4(const bf16* p) {
#if WIDE
    uint2 x = *reinterpret_cast<const uint2*>(p);
    return {to_float(bf16{uint16(x.x)}), to_float(bf16{uint16(x.x >> 16)}), to_float(bf16{uint16(x.y)}), to_float(bf16{uint16(x.y >> 16)})};
#else
    return {to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
#endif
}

// The same, loaded at this point of the program, so that no load waits for the registers of another one.
__device__ inline Channels4 read4_volatile(const float* p) {
#if WIDE
    Channels4 q;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(q.x[0]), "=f"(q.x[1]), "=f"(q.x[2]), "=f"(q.x[3]) : "l"(p));
    return q;
#else
    return read4(p);
#endif
}

__device__ inline Channels4 read4_volatile(const bf16* p) {
#if WIDE
    uint2 x;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return {to_float(bf16{uint16(x.x)}), to_float(bf16{uint16(x.x >> 16)}), to_float(bf16{uint16(x.y)}), to_float(bf16{uint16(x.y >> 16)})};
#else
    return read4(p);
#endif
}

__device__ inline void write4(float* p, Channels4 q) {
#if WIDE
    *reinterpret_cast<float4*>(p) = make_float4(q.x[0], q.x[1], q.x[2], q.x[3]);
#else
    for (int i = 0; i < 4; ++i) p[i] = q.x[i];
#endif
}

__device__ inline void write4(bf16* p, Channels4 q) {
    uint32 low = pack(bf16{}, q.x[0], q.x[1]), high = pack(bf16{}, q.x[2], q.x[3]);
#if WIDE
    *reinterpret_cast<uint2*>(p) = {low, high};
#else
    p[0] = {uint16(low)}, p[1] = {uint16(low >> 16)}, p[2] = {uint16(high)}, p[3] = {uint16(high >> 16)};
#endif
}

__device__ inline Channels4 operator+(Channels4 a, Channels4 b) {
    return {a.x[0] + b.x[0], a.x[1] + b.x[1], a.x[2] + b.x[2], a.x[3] + b.x[3]};
}

__device__ inline Channels4 larger(Channels4 a, Channels4 b) {
    return {fmaxf(a.x[0], b.x[0]), fmaxf(a.x[1], b.x[1]), fmaxf(a.x[2], b.x[2]), fmaxf(a.x[3], b.x[3])};
}

// The values of lane ^ `lanes`.
__device__ inline Channels4 exchanged(Channels4 a, int lanes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.x[i] = __shfl_xor_sync(~0u, a.x[i], lanes);
    return a;
}

// Running means of 4 channels weighted by the softmax of their scores: sum / total, with weights relative to the top score.
struct Mean {
    Channels4 top, total, sum;

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) top.x[i] = -infinity(), total.x[i] = sum.x[i] = 0.0f;
    }

    // Raise the top score of channel i to `score`.
    __device__ void raise(int i, float score) {
        float larger = fmaxf(top.x[i], score), keep = weight(top.x[i], larger);
        sum.x[i] *= keep, total.x[i] *= keep, top.x[i] = larger;
    }

    // Add sums of weights and of weighted values, relative to `score`, which is not above the top.
    __device__ void add(int i, float score, float weights, float values) {
        float exp_score = weight(score, top.x[i]);
        sum.x[i] += exp_score * values, total.x[i] += exp_score * weights;
    }

    // Factor from weights relative to `score` to weights relative to `top`; 0 for a score of -inf.
    static __device__ float weight(float score, float top) { return exp2_approx((score - (top == -infinity() ? 0.0f : top)) * LOG2_E); }
};
