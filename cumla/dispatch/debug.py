"""A mode for engines in development that checks the values in arrays: `with cumla.debug():`.

Outside of it a call only reads the integer `active`. The checks are in debug_checks/.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from .debug_checks import check_of

active = 0  # number of entered contexts, of all threads
_lock = threading.Lock()


class _Thread(threading.local):
    """Numbers of entered contexts of this thread: of `debug`, and of `unchecked`."""

    contexts = 0
    unchecked = 0


thread = _Thread()


@contextlib.contextmanager
def debug() -> Iterator[None]:
    """Check values in this thread's calls. Outside of it values are not checked, so that no call waits for a device.

    Each of these raises a ValueError that names the argument and the request, position, row or entry, before anything
    is written:

    slots              outside of the cache and not -1, or given twice in one insert
    block tables       no page of the cache for a position that a call reads (other entries may have any value)
    indices            out of range, except -1; candidate blocks likewise
    selections         entries, but none that names a row complete at its token's position, as where slots are given
    lengths            of an operation: negative, less than the request's query, or more than its list, its keys, its
                       cache or its block table has; bounds of packed sequences that descend
    positions          without a row in RoPE's table, except -1 for padding
    softmax scales     not above 0, or above 4.5 / sqrt(d); YaRN's reach 4.2 / sqrt(d). NaN and infinity always are
                       errors
    rings              of V4.1's compressor and of pooled keys, that two requests have, and slots that are not at their
                       position
    replay_start       after a request's first position of the step
    requests           of a token, without a row in the block table
    batches            seq_lens and query_start_loc that differ from their copies in host memory
    metadata           of a build before its builder's last, whose arrays contain another batch by now

    Every call waits for the device, and is checked and launched in full, without the launch cache. In a CUDA graph
    capture a call raises ValueError, as it cannot wait; inside jax.jit nothing is checked. Other threads' calls are not
    affected.

        >>> import numpy as np
        >>> import cumla
        >>> cache = cumla.DSV4_FP8.allocate(num_blocks=2, block_size=64)
        >>> rows = np.zeros((2, 512), np.float32)
        >>> with cumla.debug():
        ...     cumla.quantize_and_insert_k_cache(rows, cache, slot_mapping=np.array([5, 128]))
        Traceback (most recent call last):
        ValueError: slot_mapping: row 1 has slot 128, expected -1 or 0 to 127
    """
    global active
    with _lock:
        active += 1
    thread.contexts += 1
    try:
        yield
    finally:
        thread.contexts -= 1
        with _lock:
            active -= 1


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """A context whose calls on this thread are not checked: for compiled programs, whose compiler decides which arrays
    share memory, and for self-tests, whose values are out of range on purpose."""
    thread.unchecked += 1
    try:
        yield
    finally:
        thread.unchecked -= 1


def is_on() -> bool:
    """Whether this thread's calls are checked."""
    return active > 0 and thread.contexts > 0 and not thread.unchecked


class Checked:
    """A file of kernels whose functions check the values of their arguments first."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._done: dict[str, int] = {}  # rows of a function's calls so far: large calls are made in pieces

    def __getattr__(self, name: str) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self._kernels, name)
        file = self._kernels.__name__.rpartition(".")[2]
        check = check_of(file, name)
        if check is None:
            return function
        names = parameters(file, name)

        def call(*arguments: Any) -> None:
            named = by_name(names, arguments)
            named.first = self._done.get(name, 0)
            self._done[name] = named.first + (check(named) or 0)
            function(*arguments)

        return call


def parameters(file: str, name: str) -> tuple[str, ...]:
    """The names of a kernel's parameters, which every backend calls by position."""
    reference = importlib.import_module(f"..kernels.reference.{file}", __package__)
    return tuple(inspect.signature(getattr(reference, name)).parameters)


def by_name(names: Sequence[str], arguments: Sequence[Any]) -> SimpleNamespace:
    """Arguments by the names of parameters; those that a NamedTuple groups also by the names of its fields."""
    grouped = {
        field: getattr(value, field) for value in arguments for field in getattr(type(value), "_fields", ())
    }  # fmt: skip
    return SimpleNamespace(**(grouped | dict(zip(names, arguments, strict=True))))
