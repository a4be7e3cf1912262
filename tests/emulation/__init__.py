"""The CUDA backend without a GPU: kernels as C++ on the CPU, behind what stands in for CuPy and the driver.

    ptx.py       a CUDA source as C++; what each inline PTX statement means
    builds.py    g++, and where what it built is kept
    launches.py  kernels, and how a launch schedules their threads
    arrays.py    cupy.ndarray and device memory
    cupy.py      the module `cupy`, and libcuda, as far as cumla uses them
    runtime/     the emulator itself, in C++: threads as fibers, barriers, asynchronous copies, matrix products

Launchers, argument packing and public functions run as they are: nothing in the package knows of this.

What it shows: wrong results; accesses where no array is; waits that are missing or never end (with late and jittered
schedules, see launches.py); arguments that are packed wrongly.

What it cannot show: anything about time, registers or occupancy; weak ordering of memory (fences do nothing here:
every write is seen by all at once, so a missing __threadfence, proxy fence or wgmma.fence goes unnoticed); races that
need two threads between one wait and the next; what an instruction does beyond what ptx.py says of it; the
rounding of approximate instructions and of the order in which tensor cores add; more than one thread block at a
time. Only a device shows those: pytest -m gpu.
"""

from .builds import unavailable
from .cupy import devices
from .launches import SCHEDULES, EmulationError, scheduled

__all__ = ["SCHEDULES", "EmulationError", "devices", "scheduled", "unavailable"]
