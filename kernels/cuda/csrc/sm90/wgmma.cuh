// Warpgroup products of 128, 32 and 16 columns for bfloat16 and float16 operands.
#pragma once
#include "sm90/hopper.cuh"

// x (64 x 128) = a b^T (+ x): a is a tile of 64 rows, b of 128 rows; 16 values along the rows of both.
__device__ inline void wgmma_rows(bf16, float (&x)[64], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS64 ", %64, %65, p, 1, 1, 0, 0;\n}\n"
                 : FLOATS64(x) : "l"(a), "l"(b), "r"(add));
}
__device__ inline void wgmma_rows(f16, float (&x)[64], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " REGISTERS64 ", %64, %65, p, 1, 1, 0, 0;\n}\n"
                 : FLOATS64(x) : "l"(a), "l"(b), "r"(add));
}

// x (64 x 128) = a b (+ x): b is 16 rows of two neighbouring tiles, a is 16 columns of a tile or a fragment in registers.
__device__ inline void wgmma_columns(bf16, float (&x)[64], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS64 ", %64, %65, p, 1, 1, 0, 1;\n}\n"
                 : FLOATS64(x) : "l"(a), "l"(b), "r"(add));
}
__device__ inline void wgmma_columns(f16, float (&x)[64], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " REGISTERS64 ", %64, %65, p, 1, 1, 0, 1;\n}\n"
                 : FLOATS64(x) : "l"(a), "l"(b), "r"(add));
}
__device__ inline void wgmma_columns(bf16, float (&x)[64], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS64 ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
                 : FLOATS64(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ inline void wgmma_columns(f16, float (&x)[64], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " REGISTERS64 ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
                 : FLOATS64(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// x (64 x 64) = a b^T (+ x): both are tiles of 64 rows.
__device__ inline void wgmma_rows(bf16, float (&x)[32], uint64 a, uint64 b, int add) { wgmma_bf16(x, a, b, add); }
__device__ inline void wgmma_rows(f16, float (&x)[32], uint64 a, uint64 b, int add) { wgmma_f16(x, a, b, add); }

// Like the products of 64 columns in sm90/hopper.cuh, with 32 and 16 columns: a is in registers, b a tile of as many rows.
#define FLOATS4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define FLOATS8(x) \
    "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7])
#define FLOATS16(x) \
    FLOATS8(x), "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15])
#define REGISTERS4 "{%0, %1, %2, %3} "
#define REGISTERS8 "{%0, %1, %2, %3, %4, %5, %6, %7} "
#define REGISTERS16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15} "
__device__ inline void wgmma_f16(float (&x)[16], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " REGISTERS16 ", {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
                 : FLOATS16(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ inline void wgmma_bf16(float (&x)[16], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " REGISTERS16 ", {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
                 : FLOATS16(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ inline void wgmma_f16(float (&x)[8], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " REGISTERS8 ", {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}\n"
                 : FLOATS8(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ inline void wgmma_bf16(float (&x)[8], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " REGISTERS8 ", {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}\n"
                 : FLOATS8(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// x (64 x 128) = a b^T (+ x) of e4m3 tiles of 64 and 128 rows: 32 values along both.
__device__ inline void wgmma_e4m3(float (&x)[64], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " REGISTERS64 ", %64, %65, p, 1, 1;\n}\n"
                 : FLOATS64(x) : "l"(a), "l"(b), "r"(add));
}

// Synchronise the threads of a warpgroup by named barrier `id`, 1 to 15.
__device__ inline void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
// Whether x holds for any thread of a warpgroup.
__device__ inline bool warpgroup_any(int id, bool x) {
    uint32 y;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(y) : "r"(uint32(x)), "r"(id) : "memory");
    return y;
}

// Transpose words among four lanes: lane c gets word c of each.
__device__ inline void transpose_words(uint32 (&words)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 &a = words[step == 1 ? 2 * i : i], &b = words[step == 1 ? 2 * i + 1 : i + 2];
            uint32 got = __shfl_xor_sync(~0u, upper ? a : b, step);
            a = upper ? got : a, b = upper ? b : got;
        }
    }
}
