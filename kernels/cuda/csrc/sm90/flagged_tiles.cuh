// Recomputes tiles whose values are outside a prefill kernel's range. Each CTA recomputes its own tiles after its last
// one, which saves a second kernel of 7 to 16 us (docs/kernels/sparse-prefill.md).
#pragma once
#include "common/sparse/exact_unit.cuh"
#include "sm90/hopper.cuh"

// Called by EXACT_THREADS threads after the last tile of the CTA, when nothing else is running. `flagged`: the word in
// shared memory that is non-zero if one was flagged; `memory`: shared memory for a UnitMemory. With `problem.unsafe`,
// flagged tiles stay as they are, so that tests can count them.
__device__ inline void recompute_flagged_tiles(const SparseProblem& problem, uint32 flagged, void* memory) {
    exact_sync();  // all flags and results are written, and shared memory is free
    if (problem.unsafe || !lds32(flagged)) return;
    asm volatile("" : "+l"(memory));  // otherwise it takes registers from the start of the kernel
    UnitMemory& unit_memory = *reinterpret_cast<UnitMemory*>(memory);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x)
#pragma unroll 1
        for (int unit = 0; unit < UNITS; ++unit) {
            bool wanted = is_unsafe(problem, tile, unit);
            exact_sync();  // all threads have read the flags, which the recomputation overwrites
            if (wanted) Unit(problem, unit_memory, tile, unit).attend(0, 1, nullptr, nullptr);
        }
}
// The same as a function call, so that the main loop keeps its registers.
__device__ __noinline__ void call_recompute_flagged_tiles(const SparseProblem& problem, uint32 flagged, void* memory) {
    recompute_flagged_tiles(problem, flagged, memory);
}
