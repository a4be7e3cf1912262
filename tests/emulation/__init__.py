"""The CUDA backend without a GPU: kernels as C++ on the CPU, with a fake CuPy and driver.

    ptx.py       a CUDA source as C++; what each inline PTX statement means
    builds.py    g++, and the folder of its builds
    launches.py  kernels, and how a launch schedules their threads
    queues.py    devices, streams, events, graphs; overlapping kernels
    arrays.py    cupy.ndarray and device memory
    cupy.py      the module `cupy`, and libcuda, as far as cumla uses them
    cublas.py    the matrix product that cuBLAS computes
    runtime/     the emulator itself, in C++: threads as fibers, barriers, asynchronous copies, matrix products

Launchers, argument packing and public functions run unmodified: no code in the package knows of the emulation.

It detects: wrong results; accesses outside arrays; missing waits and deadlocks (under late and random
schedules, see launches.py); a kernel that does not wait for the one that it overlaps with, and work that does not wait
for another stream (queues.py); wrongly packed arguments; outputs that are not written.

It does not cover: time, registers, occupancy; weakly ordered memory (fences do nothing: a write is visible to all at
once, so a missing proxy fence, wgmma.fence or __threadfence is not detected); races between threads that do not
wait in between, as a fiber runs from one wait to the next undisturbed; thread blocks side by side, as one runs after
another: only the first block of a kernel waits for the kernel ahead; effects of an instruction that ptx.py
does not model; rounding of tensor cores and approximate instructions.
hold.cu, which waits for the clock, does not run. For these there are devices: pytest -m gpu.
"""

from .builds import unavailable
from .cupy import devices
from .launches import SCHEDULES, EmulationError, Schedule, scheduled

__all__ = ["SCHEDULES", "EmulationError", "Schedule", "devices", "scheduled", "unavailable"]
