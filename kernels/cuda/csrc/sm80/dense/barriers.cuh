// Barriers of sm80/dense/decode.cu between the warps of the sums, which copy, and those of the scores. A step's rows have arrived; its
// weights are written, and its rows no longer read by the scores; its weights are no longer read.
#pragma once
#include "common/device.cuh"

constexpr int SUM_WARPS = 8, SCORE_WARPS = 4, THREADS = 32 * (SUM_WARPS + SCORE_WARPS);
constexpr int ARRIVED_SLOTS = 4, WEIGHED_SLOTS = 2;

// A barrier in shared memory for a step, at which warps arrive one by one. Unlike named barriers it lets each warp of a role run ahead
// of the others.
struct StepBarrier {
    uint64 state;

    __device__ void init(int warps) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(warps) : "memory"); }
    // By all lanes of a warp.
    __device__ void arrive() {
        __syncwarp();
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        if (thread % 32 == 0)
            asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(&state)) : "memory");
    }
    // Until all have arrived for the `round`th time, from 0 on.
    __device__ void wait(int round) {
        asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(shared_address(&state)),
                     "r"(round & 1)
                     : "memory");
    }
};

// Each slot is used again only after all who wait have passed it.
struct StepBarriers {
    StepBarrier arrived[ARRIVED_SLOTS], weighed[WEIGHED_SLOTS], summed[WEIGHED_SLOTS];

    // By one thread.
    __device__ void init() {
        for (int i = 0; i < ARRIVED_SLOTS; ++i) arrived[i].init(SUM_WARPS);
        for (int i = 0; i < WEIGHED_SLOTS; ++i) weighed[i].init(SCORE_WARPS), summed[i].init(SUM_WARPS);
    }
    __device__ void arrive_arrived(int step) { arrived[step % ARRIVED_SLOTS].arrive(); }
    __device__ void arrive_weighed(int step) { weighed[step % WEIGHED_SLOTS].arrive(); }
    __device__ void arrive_summed(int step) { summed[step % WEIGHED_SLOTS].arrive(); }
    __device__ void wait_arrived(int step) { arrived[step % ARRIVED_SLOTS].wait(step / ARRIVED_SLOTS); }
    __device__ void wait_weighed(int step) { weighed[step % WEIGHED_SLOTS].wait(step / WEIGHED_SLOTS); }
    __device__ void wait_summed(int step) { summed[step % WEIGHED_SLOTS].wait(step / WEIGHED_SLOTS); }
};
constexpr int BARRIER_BYTES = 8 * (ARRIVED_SLOTS + 2 * WEIGHED_SLOTS);
