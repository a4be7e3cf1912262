// Tiles with values outside a prefill kernel's range: a CTA recomputes its own once it has processed all, so that no second kernel
// has to look for them, which takes 7 to 16 us (docs/kernels/sparse-prefill.md).
#pragma once
#include "common/sparse/exact_unit.cuh"
#include "sm90/hopper.cuh"

// Called by EXACT_THREADS threads after the last tile of the CTA, when nothing else is running. `flagged`: the word in shared memory
// that is non-zero if one was flagged; `memory`: shared memory for a UnitMemory. With `unsafe`, flagged tiles are left as they are:
// tests see that no tile is flagged without need.
__device__ inline void recompute_flagged_tiles(const SparseProblem& problem, uint32 flagged, void* memory) {
    exact_sync();  // all flags and results are there, and shared memory is free
    if (problem.unsafe || !lds32(flagged)) return;
    asm volatile("" : "+l"(memory));  // or registers hold it from the kernel's start
    UnitMemory& unit_memory = *reinterpret_cast<UnitMemory*>(memory);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x)
#pragma unroll 1
        for (int unit = 0; unit < UNITS; ++unit) {
            bool wanted = is_unsafe(problem, tile, unit);
            exact_sync();  // all have read what one of them overwrites
            if (wanted) Unit(problem, unit_memory, tile, unit).attend(0, 1, nullptr, nullptr);
        }
}
// The same by a call: what always runs then has the registers that it has without.
__device__ __noinline__ void call_recompute_flagged_tiles(const SparseProblem& problem, uint32 flagged, void* memory) {
    recompute_flagged_tiles(problem, flagged, memory);
}
