"""Time limits for operations that may wait for a GPU, or for other ranks on their GPUs."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable

import cupy

from ..arrays import streams

GRACE_SECONDS = 5.0  # wait for NCCL, the GPU, and the reports of other ranks, after a rank has given up

_given_up: list[tuple[str, threading.Event]] = []  # the message about a GPU, and whether the GPU is idle


def in_time(end: Callable[[], None]) -> str:
    """Run `end`, which may wait for other ranks, for at most GRACE_SECONDS. Returns the error, or an empty string."""
    errors: list[str] = []

    def run() -> None:
        try:
            end()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    ending = threading.Thread(target=run, daemon=True)
    ending.start()
    ending.join(GRACE_SECONDS)
    if ending.is_alive():
        return "NCCL waits for other ranks, or for graphs that still exist, to be closed"
    return "".join(errors)


def end_process_if_stuck(device: int, words: str) -> None:
    """Let the process end at exit even if calls on the GPU never end.

    CUDA would wait for these calls. Until the exit the process continues, but cannot use the GPU.
    """
    idle = threading.Event()

    def wait() -> None:
        try:
            with cupy.cuda.Device(device), streams.relaxed_capture():
                cupy.cuda.Device().synchronize()
        finally:
            idle.set()

    threading.Thread(target=wait, daemon=True).start()
    _given_up.append((f"{words}; its call on CUDA device {device} cannot be ended, so the process is", idle))


@atexit.register
def _end_process() -> None:
    for words, idle in _given_up:
        if not idle.wait(GRACE_SECONDS):
            print(words, file=sys.stderr, flush=True)
            with contextlib.suppress(OSError, ValueError):  # a closed pipe or file
                sys.stdout.flush()  # `_exit` discards what the program has printed
            os._exit(1)
