// Matrix products of a warp (mma.sync, sm_80 and later): 16 x 8 results of 16-bit operands, 16 values deep.
//
// Operands lie in shared memory as rows whose distance in 16-byte chunks is odd, so that the eight rows of a
// matrix fall into different banks. Of hopper.cuh only what sm_80 has as well is used: asynchronous copies and plain
// accesses of shared memory.
#pragma once
#include "hopper.cuh"

// Bytes from row to row of `dim` 16-bit values, a multiple of 16 of them.
__host__ __device__ constexpr int row_stride(int dim) { return 2 * dim + 16; }

__device__ inline uint32 shared_address(const void* p) { return uint32(__cvta_generic_to_shared(p)); }

// Four 8x8 matrices; lane i points to row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
__device__ inline void load_transposed(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

// The address that this lane gives to load_matrices for 16 rows and 16 columns of a row-major operand: as A, or
// transposed as B; as `b_address`, for 16 rows (of a result's columns) of B as it is.
__device__ inline uint32 a_address(uint32 base, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    return base + (row + lane % 16) * stride + 2 * (column + lane / 16 * 8);
}
__device__ inline uint32 b_address(uint32 base, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    return base + (row + lane / 16 * 8 + lane % 8) * stride + 2 * (column + lane / 8 % 2 * 8);
}

__device__ inline void multiply_add(bf16, float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply_add(f16, float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
