"""Programs compiled to cubins by NVRTC, without a device, with the options that CuPy compiles with."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InputError
from ..kernels.cuda.compile import OPTIONS, text_of
from .record import Program

CUPYS_OPTIONS = ("--device-as-default-execution-space", "-ftz=true")
MISCOMPILING = range(13_01, 13_04)  # versions that compile wrong code for sm_90a


def nvrtc() -> Any:
    """NVRTC's bindings. Raises InputError if they or the library are missing, or compile wrong code."""
    try:
        from cuda.bindings import nvrtc as bindings

        _, major, minor = bindings.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise InputError(f"cumla export: NVRTC was not found ({error}); pip install 'cumla[export]'") from None
    if 100 * major + minor in MISCOMPILING:
        raise InputError(f"cumla export: NVRTC {major}.{minor} compiles wrong code for Hopper; take 13.0, or 13.4 on")
    return bindings


def compiled(text: str, file: str, options: tuple[str, ...]) -> tuple[str, bytes]:
    """The compiler's log of a text, and its cubin. Raises ValueError with the log if compilation fails."""
    bindings = nvrtc()
    _, program = bindings.nvrtcCreateProgram(text.encode(), file.encode(), 0, None, None)
    (status,) = bindings.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _read(bindings, program, "ProgramLog").decode().rstrip("\0 ")
    if status != bindings.nvrtcResult.NVRTC_SUCCESS:
        raise ValueError(f"{file}: {log}")
    result = log, _read(bindings, program, "PTX" if "-arch=compute" in " ".join(options) else "CUBIN")
    bindings.nvrtcDestroyProgram(program)
    return result


def _read(bindings: Any, program: Any, kind: str) -> bytes:
    _, size = getattr(bindings, f"nvrtcGet{kind}Size")(program)
    data = bytearray(size)
    getattr(bindings, f"nvrtcGet{kind}")(program, data)
    return bytes(data)


def cubin(program: Program, capability: int) -> bytes:
    """The code of a program for devices of this capability."""
    arch = program.arch or f"sm_{capability}"
    options = (*OPTIONS, *CUPYS_OPTIONS, f"-arch={arch}")
    return compiled(text_of(program.file, dict(program.macros)), program.file, options)[1]


def cubins(
    programs: Iterable[Program], capability: int, done: Callable[[Program, int], None] = lambda program, left: None
) -> dict[Program, bytes]:
    """All programs, compiled in threads.

    Args:
        done: called after each, with how many are left
    """
    nvrtc()
    found: dict[Program, bytes] = {}
    programs = list(programs)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting = {pool.submit(cubin, program, capability): program for program in programs}
        for future in concurrent.futures.as_completed(waiting):
            found[waiting[future]] = future.result()
            done(waiting[future], len(programs) - len(found))
    return {program: found[program] for program in programs}
