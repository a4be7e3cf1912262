// Products of e4m3 operands in shared memory.
#pragma once
#include "sm90/hopper.cuh"

// Descriptor of rows of 64 bytes, 512-aligned, whose 16-byte chunks are swizzled: chunk c of row r is at
// r * 64 + ((c ^ (r / 2 % 4)) << 4). + 2 advances by 32 values.
__device__ inline uint64 narrow_descriptor(uint32 address) { return (uint64(0x80000020) << 32) | (1u << 16) | (address >> 4); }

// Transpose 4 x 4 bytes: byte j of word i becomes byte i of word j.
__device__ inline void transpose_bytes(uint32 (&x)[4]) {
    uint32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[0], x[1], 0x7362);
    uint32 c = __byte_perm(x[2], x[3], 0x5140), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, c, 0x5410), x[1] = __byte_perm(a, c, 0x7632);
    x[2] = __byte_perm(b, d, 0x5410), x[3] = __byte_perm(b, d, 0x7632);
}
