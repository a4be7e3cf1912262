// Makes words zero: a launch like any other, so that what is launched again (interop/xla.py) includes it.
#include "common/pdl.cuh"

extern "C" __global__ void __launch_bounds__(256)
clear(int* words, int count) {
    pdl_wait();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) words[i] = 0;
}
