// Blocks a stream until the host releases it, or for at most `longest` nanoseconds.
//
// Work that the host queues in the meantime then runs without gaps, so that two events of the stream time the device
// alone. Grid and block: one thread. No shared memory. `opened` is in pinned host memory.
#include "common/device.cuh"

__device__ inline int64 nanoseconds() {
    int64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void hold(const int64* opened, int64 ticket, int64 longest) {
    int64 start = nanoseconds();
    while (*(const volatile int64*)opened < ticket && nanoseconds() - start < longest) __nanosleep(500);
}
