// A kernel without work. Launched without programmatic serialisation, it starts when all kernels ahead of it in the stream have
// ended and their writes are visible. A kernel behind it that does not wait (griddepcontrol.wait) can start no earlier.
//
// Grid and block: one warp. No shared memory.
extern "C" __global__ void ordinary_launch(int unused) {}
