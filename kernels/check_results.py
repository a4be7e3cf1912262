"""Compiled kernels that are not yet self-tested.

Compilers have bugs (NVRTC of CUDA 13.1 to 13.3 is known to miscompile kernels on sm_90a). So a backend records
here what it compiles or loads, `dispatch.kernel_check` runs it once on a small case and compares it with the reference,
and the result is a file beside the compiled code: a process that finds it neither tests nor waits.
"""

import collections
import contextlib
import contextvars
import logging
import os
import threading
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)
VARIABLE = "CUMLA_TEST_KERNELS"  # "0": no self-tests
RIGHT, NOT_REACHED, WRONG = "right", "not reached", "wrong"
SAVED = "saved"  # by an earlier process, in which it passed or its test was not reached


class MiscompiledError(RuntimeError):
    """A compiled kernel gives wrong results; the message names it, its compiler and what to do."""


class Fresh(NamedTuple):
    """Compiled code without a self-test result.

    Attributes:
        what: the kernel, for error messages
        backend: its backend
        compiler: its compiler, with version
        remedy: what to do if it is wrong
        result_file: the file for the result; None if it cannot be kept
        layout: the cache format that it was compiled for; "" for none
        kernel: the object that launches it, to see whether a case did; None: every case does
        file: its source
        macros: with which the source was compiled
    """

    what: str
    backend: str
    compiler: str
    remedy: str
    result_file: Path | None
    layout: str = ""
    kernel: Any = None
    file: str = ""
    macros: Mapping[str, str | int] = {}


class RunningCall(NamedTuple):
    """A call of a public operation.

    Attributes:
        op: its name
        fresh: what was compiled or loaded for it without a result so far
        is_test: whether it is part of a self-test
    """

    op: str
    fresh: list[Fresh]
    is_test: bool = False


# The call of this thread; worker threads take it over. A kernel is tested by the call that it was compiled for: another
# call, of any thread, need not launch it.
RUNNING: contextvars.ContextVar[RunningCall | None] = contextvars.ContextVar("running call", default=None)
# What the self-test that is running tests; nothing outside of one.
UNDER_TEST: contextvars.ContextVar[Sequence[Fresh]] = contextvars.ContextVar("under test", default=())
# The message by operation and backend whose self-test gave a wrong result in this process, where the code stays loaded.
FAILED: dict[tuple[str, str], str] = {}
RESULTS: collections.Counter[str] = collections.Counter()  # of this process, by the first words of each result
UNSAVED: collections.Counter[str] = collections.Counter()  # compiled code and results that no file holds, by the reason
_counting = threading.Lock()
_announced: dict[str, object] = {}  # operations that compiled in this process


def _begin_in_child() -> None:
    """A fork may find the lock held by a thread that the child lacks."""
    global _counting
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_begin_in_child)


def note(fresh: Fresh) -> None:
    """Record what was compiled or loaded. Raises MiscompiledError for code that is known to be wrong."""
    if os.environ.get(VARIABLE) == "0":
        return
    result = None if fresh.result_file is None else read_result(fresh.result_file)
    if result is not None:
        if result.startswith(WRONG):
            raise MiscompiledError(result.partition(": ")[2])
        _count(SAVED)
        return
    running = RUNNING.get()
    if running is not None:
        running.fresh.append(fresh)


def read_result(path: Path) -> str | None:
    """A self-test result. None, with a warning if the file is damaged, where there is none: the kernel is tested."""
    try:
        text = path.read_bytes().decode()
    except OSError:
        return None
    except UnicodeDecodeError:
        text = ""
    # The end of a message shows that it is whole.
    if text in (RIGHT, NOT_REACHED) or (text.startswith(f"{WRONG}: ") and text.endswith("\n")):
        return text.strip()
    warnings.warn(f"{path} is damaged: the kernel is tested again", RuntimeWarning, stacklevel=2)
    return None


def conclude(fresh: Fresh, result: str) -> None:
    """Write a self-test result, if there is a file for it: the whole file or none."""
    _count(result.partition(":")[0])
    if fresh.result_file is None:
        return
    temporary = fresh.result_file.with_name(f"{fresh.result_file.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(f"{result}\n" if result.startswith(WRONG) else result)
        temporary.replace(fresh.result_file)
    except OSError as error:
        note_unsaved(f"{fresh.result_file.parent}: {error.strerror or error}")
        with contextlib.suppress(OSError):
            temporary.unlink()


def note_unsaved(reason: str) -> None:
    """Record that compiled code, or a result, is not on disk: every process compiles, or tests, again."""
    with _counting:
        UNSAVED[reason] += 1


def _count(what: str) -> None:
    with _counting:
        RESULTS[what] += 1


def macros_under_test(file: str) -> Mapping[str, str | int] | None:
    """The macros of the tested program of this source; None if this is no self-test of one.

    Launchers whose programs depend on a call's size choose the tested program for the small case.
    """
    return next((x.macros for x in UNDER_TEST.get() if x.file == file), None)


def check_not_failed(backend: str) -> None:
    """Raise MiscompiledError where a kernel of the running operation gave a wrong result on this backend."""
    running = RUNNING.get()
    if running is not None and (running.op, backend) in FAILED:
        raise MiscompiledError(FAILED[running.op, backend])


def announce_compilation(file: str, cached: bool = True) -> None:
    """Log that kernels are compiled, which takes seconds: once a process and operation.

    Args:
        file: of the kernels, which is named where no operation runs, as in metadata builders
        cached: whether later processes load what is compiled
    """
    running, mine = RUNNING.get(), object()
    name = file if running is None else running.op
    if _announced.setdefault(name, mine) is mine:
        ahead = "`cumla warmup` does so ahead of time" if cached else "every process does so"
        log.info("%s: a first call compiles its kernels (%s)", name, ahead)
