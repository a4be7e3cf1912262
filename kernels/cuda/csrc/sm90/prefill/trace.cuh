// With -DTRACE: records when each role of sm90/prefill/prefill.cu passes each point, for benchmarks/prefill_trace.py.
// Without it: no code.
#pragma once
#include "sm90/prefill/memory.cuh"

// Points, in the order of a block.
enum Point {
    SCORES_BEGIN,
    Q_ARRIVED,
    ROWS_ARRIVED,
    SCORES_STARTED,
    WEIGHTS_ARRIVED,
    OTHER_STARTED,
    SCORES_DONE,
    WEIGHTS_STORED,
    OTHER_DONE,
    OWN_STARTED,
    OWN_DONE,
    LAST_BEGIN,
    LAST_DONE,
    FINISH_BEGIN,
    FINISH_END,  // consumers
    SPACE_BEGIN,
    SPACE_FREE,
    COPIES_STARTED,
    COPIES_LANDED,
    Q_SPACE_BEGIN,
    Q_SPACE_FREE  // producers
};

#ifdef TRACE
// The first warp of each role notes points in shared memory, from the CTA's third tile on, and stores them when it ends:
// the point << 27 | clock.
constexpr int TRACED = 1024, ROLES = 3;
extern "C" {
__device__ uint32 prefill_trace[256][ROLES][TRACED];
}

struct Trace {
    uint32 first, at, end;

    __device__ Trace() {
        first = SHARED_START + ((SHARED_BYTES + 127) & ~127u) + threadIdx.x / 128 * TRACED * 4;
        at = end = first + TRACED * 4;
        if (threadIdx.x % 128) first = end;
        for (uint32 i = first; i < end; i += 4) sts32(i, ~0u);
    }
    __device__ void of_tile(uint32 number) {
        if (number == 2) at = first;
    }
    __device__ void note(Point point) {
        if (at == end) return;
        sts32(at, uint32(point) << 27 | (uint32(clock()) & 0x7ffffff)), at += 4;
    }
    __device__ void store() {
        for (uint32 i = 0; first + 4 * i < end; ++i) prefill_trace[blockIdx.x][threadIdx.x / 128][i] = lds32(first + 4 * i);
    }
};
#else
struct Trace {
    __device__ void of_tile(uint32) {}
    __device__ void note(Point) {}
    __device__ void store() {}
};
#endif
