// Products of e4m3 operands in shared memory.
#pragma once
#include "sm90/wgmma.cuh"

// x (64 x 64) = a b^T (+ x): 32 values along both. wgmma.cuh has the one of 128 columns.
__device__ inline void wgmma_e4m3(float (&x)[32], uint64 a, uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGISTERS32 ", %32, %33, p, 1, 1;\n}\n"
                 : FLOATS32(x) : "l"(a), "l"(b), "r"(add));
}

// x (64 x 128) += a b^T, with a (e4m3, 32 columns) in registers.
__device__ inline void wgmma_e4m3(float (&x)[64], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " REGISTERS64 ", {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
                 : FLOATS64(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Descriptor of rows of 64 bytes, 512-aligned, whose 16-byte chunks are swizzled: chunk c of row r is at
// r * 64 + ((c ^ (r / 2 % 4)) << 4). + 2 advances by 32 values.
__device__ inline uint64 narrow_descriptor(uint32 address) {
    return (uint64(0x80000020) << 32) | (1u << 16) | (address >> 4);
}

// Transpose 4 x 4 bytes: byte j of word i becomes byte i of word j.
__device__ inline void transpose_bytes(uint32 (&x)[4]) {
    uint32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[0], x[1], 0x7362);
    uint32 c = __byte_perm(x[2], x[3], 0x5140), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, c, 0x5410), x[1] = __byte_perm(a, c, 0x7632);
    x[2] = __byte_perm(b, d, 0x5410), x[3] = __byte_perm(b, d, 0x7632);
}
