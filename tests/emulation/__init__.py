"""The CUDA backend without a GPU: kernels as C++ on the CPU, behind what stands in for CuPy and the driver.

    ptx.py       a CUDA source as C++; what each inline PTX statement means
    builds.py    g++, and where what it built is kept
    launches.py  kernels, and how a launch schedules their threads
    queues.py    devices, streams, events, graphs; what overlaps
    arrays.py    cupy.ndarray and device memory
    cupy.py      the module `cupy`, and libcuda, as far as cumla uses them
    cublas.py    the product of matrices that is not ours
    runtime/     the emulator itself, in C++: threads as fibers, barriers, asynchronous copies, matrix products

Launchers, argument packing and public functions run as they are: nothing in the package knows of this.

What it shows: wrong results; accesses where no array is; waits that are missing or never end (under late and random
schedules, see launches.py); a kernel that does not wait for the one that it overlaps with, and work that does not wait
for another stream (queues.py); arguments that are packed wrongly; outputs that nobody writes.

What it cannot show: time, registers, occupancy; weakly ordered memory (fences do nothing: a write is seen by all at
once, so that a missing proxy fence, wgmma.fence or __threadfence goes unnoticed); races between threads that do not
wait in between, as a fiber runs from one wait to the next undisturbed; thread blocks side by side, as one runs after
another: of a kernel's blocks only the first waits for the kernel ahead in earnest; what an instruction does beyond what
ptx.py says of it; how tensor cores and approximate instructions round.
hold.cu, which waits for the clock, does not run. For these there are devices: pytest -m gpu.
"""

from .builds import unavailable
from .cupy import devices
from .launches import SCHEDULES, EmulationError, scheduled

__all__ = ["SCHEDULES", "EmulationError", "devices", "scheduled", "unavailable"]
