// Sets words to zero. It is a kernel launch, so that a recorded sequence of launches (interop/xla.py) includes it.
//
// Grid: any; grid-stride loop. Block: 256 threads. No shared memory.
#include "common/device.cuh"

extern "C" __global__ void __launch_bounds__(256) clear(int* words, int count) {
    pdl_wait();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) words[i] = 0;
}
