// Copies of boxes of an array from global to shared memory by the tensor memory accelerator (sm_90 and newer).
//
// Rows of a box are 128 bytes; they land swizzled as matrix operands are (sm90/hopper.cuh).
#pragma once
#include "sm90/hopper.cuh"

// What the driver makes of an array of three dimensions (tma.py). A kernel takes it by
// `const __grid_constant__ TensorMap`, and its address has to be a multiple of 64. That is not said by alignas(64), as
// the compiler then counts from a multiple of 64 before the parameters: of them the first may lie at 48, unlike in a
// struct. So whoever declares a kernel sees to it (tests/kernels/test_launch.py).
struct TensorMap {
    const uint8* start;
    int64 rest[15];
};

// Start to copy the box at [z][y][x]; its bytes count at the barrier when they are there.
__device__ inline void tma_load(uint32 target, const TensorMap& map, int x, int y, int z, uint32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(target), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
// Have the box brought into the L2 cache.
__device__ inline void tma_prefetch(const TensorMap& map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ inline void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
