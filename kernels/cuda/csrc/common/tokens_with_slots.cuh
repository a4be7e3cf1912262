// Iterates over neighbouring tokens that have a slot. Macro: PARTS (if above 1, slots are loaded together).
#pragma once
#include "common/device.cuh"

template <class S> __device__ inline int64 slot_of(const S* slots, int token, int count, int64 num_slots) {
    int64 slot = token < count ? int64(slots[token]) : -1;
    return slot < num_slots ? slot : -1;
}

// The tokens with a slot among up to 128 tokens, every `stride`-th from `first` on. They complete a row or save a
// state.
struct Tokens {
    int first, stride;
    uint32 left[4];

    template <class S>
    __device__ Tokens(const S* slots, int first, int end, int count, int64 num_slots, int stride = 1) : first(first), stride(stride) {
        int lane = threadIdx.x % 32;
        bool has[4];
#if PARTS > 1
        S slot[4] = {-1, -1, -1, -1};
        if (count > 0)  // loaded together: with a branch for each load, loads would wait for each other
#pragma unroll
            for (int i = 0; i < 4; ++i) slot[i] = slots[min(first + (32 * i + lane) * stride, count - 1)];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int token = first + (32 * i + lane) * stride;
            has[i] = token < min(end, count) && slot[i] >= 0 && slot[i] < num_slots;
        }
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int token = first + (32 * i + lane) * stride;
            has[i] = token < end && slot_of(slots, token, count, num_slots) >= 0;
        }
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = __ballot_sync(~0u, has[i]);
    }

    // The next such token, or -1.
    __device__ int next() {
        int from = left[0] ? 0 : left[1] ? 1 : left[2] ? 2 : 3;
        uint32 some = left[0] ? left[0] : left[1] ? left[1] : left[2] ? left[2] : left[3];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i == from) left[i] = some & (some - 1);
        return some ? first + (32 * from + __ffs(some) - 1) * stride : -1;
    }
};
