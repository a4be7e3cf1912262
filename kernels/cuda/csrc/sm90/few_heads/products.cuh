// Products of a warpgroup whose columns are heads: 16 or 32 of them. All operands are tiles in shared memory.
#pragma once
#include "sm90/wgmma.cuh"

// x (64 x heads) = a b^T (+ x): a tile of 64 rows, b of a row for each head; 16 values along both.
__device__ inline void wgmma_keys(float (&x)[8], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " REGISTERS8 ", %8, %9, p, 1, 1, 0, 0;\n}\n"
                 : FLOATS8(x) : "l"(a), "l"(b), "r"(add));
}
__device__ inline void wgmma_keys(float (&x)[16], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " REGISTERS16 ", %16, %17, p, 1, 1, 0, 0;\n}\n"
                 : FLOATS16(x) : "l"(a), "l"(b), "r"(add));
}

// x (64 x heads) = a^T b^T (+ x): the same, but 16 rows of a tile whose 64 columns are the result's rows.
__device__ inline void wgmma_values(float (&x)[8], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " REGISTERS8 ", %8, %9, p, 1, 1, 1, 0;\n}\n"
                 : FLOATS8(x) : "l"(a), "l"(b), "r"(add));
}
__device__ inline void wgmma_values(float (&x)[16], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " REGISTERS16 ", %16, %17, p, 1, 1, 1, 0;\n}\n"
                 : FLOATS16(x) : "l"(a), "l"(b), "r"(add));
}

// An 8x8 matrix of 16-bit values, as a fragment holds it, transposed.
__device__ inline uint32 transposed_matrix(uint32 x) {
    uint32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
