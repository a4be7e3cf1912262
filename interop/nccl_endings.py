"""How what may wait for a GPU, or for other ranks on theirs, comes to an end in time."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

import cupy

from ..arrays import streams

GRACE_SECONDS = 5.0  # for NCCL, for the GPU, and for others to say what they are in, once one has given up

_given_up: list[tuple[str, threading.Event]] = []  # what to say of a GPU, and whether it has nothing left to do


def in_time(end: Callable[[], None]) -> str:
    """Do this, which may wait for other ranks, and go on if it is not done soon. What failed, or nothing."""
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
    """See to it that the process ends when it exits, even if the GPU has calls that never will.

    CUDA would wait for them. Until then nothing is done, and the GPU is of no use to this process.
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
            os._exit(1)
