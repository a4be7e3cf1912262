"""Entry point of `cumla`; exits quietly on Ctrl-C while the package is imported, which `cumla.__main__` cannot."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    # A KeyboardInterrupt would not do: NumPy's import makes an ImportError with advice of it.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        from cumla.__main__ import main as run
    except KeyboardInterrupt:
        print("cumla: interrupted", file=sys.stderr)
        return 130
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
    os.write(2, b"cumla: interrupted\n")
    os._exit(130)
