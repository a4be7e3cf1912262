// Operands of mma.sync as rows in shared memory. The row stride is an odd number of 16-byte chunks, so that the eight rows of
// a matrix are in different banks.
#pragma once
#include "sm80/mma.cuh"

// Bytes from row to row for `dim` 16-bit values; `dim` is a multiple of 16.
constexpr int row_stride(int dim) { return 2 * dim + 16; }

// Four 8 x 8 matrices, transposed; lanes 8 i to 8 i + 7 point to the rows of matrix i.
__device__ inline void load_transposed(uint32 (&x)[4], uint32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}
__device__ inline void load_transposed(uint32 (&x)[4], const void* row) { load_transposed(x, shared_address(row)); }

// Row that this lane points to. a_row: 16 rows and 16 columns of a row-major operand, as A or transposed as B; b_row: 16 rows
// (columns of the result) of B, not transposed.
__device__ inline const uint8* a_row(const uint8* base, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    return base + (row + lane % 16) * stride + 2 * (column + lane / 16 * 8);
}
__device__ inline const uint8* b_row(const uint8* base, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    return base + (row + lane / 16 * 8 + lane % 8) * stride + 2 * (column + lane / 8 % 2 * 8);
}

// x += a b for the first or second eight columns of B's matrices.
template <class T> __device__ inline void multiply_add(T type, float (&x)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    uint32 b[2] = {b0, b1};
    mma(type, x, a, b);
}
