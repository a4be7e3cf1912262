"""An ordinary launch: the end of a chain of kernels that overlap (programmatic dependent launch).

A kernel may let the next one start before its results are stored. Kernels of this package wait for them; another
library's kernel may be launched to overlap, and not wait. Leaving out the early release would not be enough: such a
kernel starts when the blocks ahead of it have ended, which is before their writes are visible.
"""

from .compile import kernel

THREADS = 32


def ordinary_launch() -> None:
    """Launch, on CuPy's current stream, a kernel without work that starts when all work ahead of it has ended.

    No kernel behind it starts earlier, and all of them see that work's results.
    """
    kernel("common/ordinary_launch.cu", "ordinary_launch")((1,), (THREADS,), (0,))
