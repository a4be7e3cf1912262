// A row of logits, and reads of its columns.
//
// Macro: ALIGNED (rows start at multiples of 16 bytes, so that they are read 16 bytes at a time).
#pragma once
#include "common/selection.cuh"

struct Row {
    const float* values;  // starts at a multiple of four columns
    uint32 skipped, end;  // the valid columns

    __device__ int length() const { return int(end - skipped); }
    __device__ bool has(uint32 at) const { return at >= skipped && at < end; }
};
__device__ inline Row row_of(const float* columns, Range range) {
    int origin = range.first / 4 * 4;
    return {columns + origin, uint32(range.first - origin), uint32(range.end - origin)};
}

// Four columns.
__device__ inline void read4(const float* from, float* x) {
    if (ALIGNED) asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(from));
    else
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x[i]) : "l"(from + i));
}
// The same if `present`; otherwise x is unchanged.
__device__ inline void read4(const float* from, bool present, float* x) {
    if (ALIGNED)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n}\n"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                     : "l"(from), "r"(int(present)));
    else
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.f32 %0, [%1];\n}\n"
                         : "+f"(x[i])
                         : "l"(from + i), "r"(int(present)));
}
// A column that was read before.
__device__ inline float read_again(const float* from) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}
// Reads the valid ones of four columns from `at` on; the other elements of x are unchanged.
__device__ inline void read_at_end(const Row& row, uint32 at, float* x) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (row.has(at + j)) x[j] = row.values[at + j];
}
