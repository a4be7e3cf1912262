// The work of a CTA of sm90/dense/decode/decode.cu (common/dense/work.cuh), for its roles.
#pragma once
#include "sm90/dense/decode/memory.cuh"
#include "common/dense/work.cuh"

static_assert(BLOCK == KEYS);

__device__ inline void store_work(uint32 window, const DenseWork& work) {
    sts128(window + WORK_AT, {uint32(work.begin.token), uint32(work.begin.block), uint32(work.end.token), uint32(work.end.block)});
}
__device__ inline DenseWork load_work(uint32 window) {
    uint4 x = lds128(window + WORK_AT);
    return {{uniform(x.x), uniform(x.y)}, {uniform(x.z), uniform(x.w)}, 0};
}
