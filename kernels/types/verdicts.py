"""What backends have compiled and nobody has seen a right result of yet.

Compilers are wrong at times (NVRTC of CUDA 13.1 to 13.3 is known to miscompile kernels on sm_90a). So a backend notes
here what it compiles or loads, `dispatch.proof` runs it once on a small case that the reference runs too, and the
verdict is a file beside the compiled code: a process that finds it there neither tests nor waits.
"""

from __future__ import annotations

import collections
import contextlib
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "CUMLA_TEST_KERNELS"  # "0": nothing is tested
RIGHT, NOT_REACHED, WRONG = "right", "not reached", "wrong"
KEPT = "kept"  # by an earlier process, which found it right or did not reach it


class MiscompiledError(RuntimeError):
    """A compiled kernel gives wrong results; the message names it, its compiler and what to do."""


class Fresh(NamedTuple):
    """Something compiled whose verdict is not known.

    what      the kernel, for a person
    backend   its backend
    compiler  what compiled it, with its version
    remedy    what to do if it is wrong
    verdict   the file that the verdict goes to; None where nothing can be kept
    layout    the cache format that it was compiled for; "" for none
    kernel    the object that launches it, to see whether a case did; None: every case does
    """

    what: str
    backend: str
    compiler: str
    remedy: str
    verdict: Path | None
    layout: str = ""
    kernel: Any = None


UNPROVEN: list[Fresh] = []
FAILED: dict[str, str] = {}  # operations that this process has found wrong, and the message: their code stays loaded
VERDICTS: collections.Counter[str] = collections.Counter()  # of this process, by the first words of each


def note(fresh: Fresh) -> None:
    """Say what was compiled or loaded. Raises MiscompiledError for what is known to be wrong."""
    if os.environ.get(VARIABLE) == "0":
        return
    if fresh.verdict is not None:
        with contextlib.suppress(OSError):
            verdict = fresh.verdict.read_text()
            if verdict.startswith(WRONG):
                raise MiscompiledError(verdict.partition(": ")[2])
            VERDICTS[KEPT] += 1
            return
    UNPROVEN.append(fresh)


def conclude(fresh: Fresh, verdict: str) -> None:
    """Keep a verdict, where there is a place for it: a whole file or none."""
    VERDICTS[verdict.partition(":")[0]] += 1
    if fresh.verdict is None:
        return
    temporary = fresh.verdict.with_name(f"{fresh.verdict.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(verdict)
        temporary.replace(fresh.verdict)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
