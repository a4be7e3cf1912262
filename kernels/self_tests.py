"""Compiled kernels that are not yet self-tested.

Compilers have bugs (NVRTC of CUDA 13.1 to 13.3 is known to miscompile kernels on sm_90a). So a backend records
here what it compiles or loads, `dispatch.self_test` runs it once on a small case and compares it with the reference,
and the result is a file beside the compiled code: a process that finds it neither tests nor waits.
"""

import collections
import contextlib
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "CUMLA_TEST_KERNELS"  # "0": no self-tests
RIGHT, NOT_REACHED, WRONG = "right", "not reached", "wrong"
KEPT = "kept"  # by an earlier process, in which it passed or its test was not reached


class MiscompiledError(RuntimeError):
    """A compiled kernel gives wrong results; the message names it, its compiler and what to do."""


class Fresh(NamedTuple):
    """Compiled code without a self-test result.

    what      the kernel, for error messages
    backend   its backend
    compiler  its compiler, with version
    remedy    what to do if it is wrong
    result_file   the file for the result; None if it cannot be kept
    layout    the cache format that it was compiled for; "" for none
    kernel    the object that launches it, to see whether a case did; None: every case does
    """

    what: str
    backend: str
    compiler: str
    remedy: str
    result_file: Path | None
    layout: str = ""
    kernel: Any = None


UNTESTED: list[Fresh] = []
FAILED: dict[str, str] = {}  # operations whose self-test failed here, and the message: their code stays loaded
RESULTS: collections.Counter[str] = collections.Counter()  # of this process, by the first words of each result


def note(fresh: Fresh) -> None:
    """Record what was compiled or loaded. Raises MiscompiledError for code that is known to be wrong."""
    if os.environ.get(VARIABLE) == "0":
        return
    if fresh.result_file is not None:
        with contextlib.suppress(OSError):
            result = fresh.result_file.read_text()
            if result.startswith(WRONG):
                raise MiscompiledError(result.partition(": ")[2])
            RESULTS[KEPT] += 1
            return
    UNTESTED.append(fresh)


def conclude(fresh: Fresh, result: str) -> None:
    """Write a self-test result, if there is a file for it: the whole file or none."""
    RESULTS[result.partition(":")[0]] += 1
    if fresh.result_file is None:
        return
    temporary = fresh.result_file.with_name(f"{fresh.result_file.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(result)
        temporary.replace(fresh.result_file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
