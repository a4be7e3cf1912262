// Copies of boxes of an array from global to shared memory by the Tensor Memory Accelerator (sm_90 and newer).
//
// Rows of a box are 128 bytes; they are swizzled in shared memory like matrix operands (sm90/hopper.cuh).
#pragma once
#include "sm90/hopper.cuh"

// A tensor map, encoded by the driver for an array of three dimensions (tma.py). A kernel takes it as
// `const __grid_constant__ TensorMap`, and its address has to be a multiple of 64. alignas(64) does not ensure that: the
// compiler would align relative to a multiple of 64 before the parameters, so the first could be at 48, unlike in a struct.
// Each kernel's parameter list ensures it instead (tests/kernels/test_launch.py).
struct TensorMap {
    const uint8* start;
    int64 rest[15];
};

// Policy of the L2 cache for what is read once: that of createpolicy.fractional, L2::evict_first.
[[maybe_unused]] constexpr uint64 EVICT_FIRST = 0x12f0000000000000;

// Start a copy of the box at [z][y][x]. The barrier counts its bytes when they have landed.
__device__ inline void tma_load(uint32 target, const TensorMap& map, int x, int y, int z, Barrier barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(target), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address) : "memory");
}
// The same with a policy of the L2 cache.
__device__ inline void tma_load(uint32 target, const TensorMap& map, int x, int y, int z, Barrier barrier, uint64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(target), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address), "l"(policy) : "memory");
}
__device__ inline void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
