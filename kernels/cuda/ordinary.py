"""An ordinary launch ends a chain of kernels that overlap (programmatic dependent launch).

A kernel may let the next one start before its results are stored. Kernels of this package wait for the results; another
library's kernel may be launched to overlap without waiting. Without the early release it would still be wrong: it
starts when the blocks of the kernel ahead have ended, before their writes are visible.
"""

from .compile import kernel

THREADS = 32


def ordinary_launch() -> None:
    """Launch an empty kernel on CuPy's current stream, which starts when all work ahead of it has ended.

    Later kernels start after it and see the results of that work.
    """
    kernel("common/ordinary_launch.cu", "ordinary_launch")((1,), (THREADS,), (0,))
