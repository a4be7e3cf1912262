// Operands of mma.sync as rows in shared memory whose distance in 16-byte chunks is odd, so that the eight rows of a
// matrix fall into different banks.
#pragma once
#include "sm80/mma.cuh"

// Bytes from row to row of `dim` 16-bit values, a multiple of 16 of them.
constexpr int row_stride(int dim) { return 2 * dim + 16; }

// Four 8 x 8 matrices, transposed; lanes 8 i to 8 i + 7 point to the rows of matrix i.
__device__ inline void load_transposed(uint32 (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}

// The row that this lane points to for 16 rows and 16 columns of a row-major operand: as A, or transposed as B; and
// for 16 rows (columns of the result) of B as it is.
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
