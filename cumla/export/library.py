"""The C runtime, compiled by the system's compiler and called from Python: for the self-test of a file."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import InputError, RunError
from .header import write_runtime

LIBCUDA = "libcuda.so.1"
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t


def compiler() -> list[str]:
    """The command of $CC, or cc. Raises InputError without a compiler."""
    command = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(command[0]) is None:
        raise InputError(f"there is no C compiler: {command[0]} was not found; install one, or set CC")
    return command


def built(folder: Path) -> Path:
    """The runtime as a shared library in this folder. Raises InputError without a compiler, RunError if it fails."""
    command = compiler()
    write_runtime(folder)
    options = "-std=c11", "-O2", "-shared", "-fPIC", f'-DCUMLA_LIBCUDA="{LIBCUDA}"'
    out = folder / "libcumla.so"
    done = subprocess.run([*command, *options, "-o", out, folder / "cumla.c", "-ldl"], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{command[0]} did not compile the C runtime: {done.stderr.strip()}")
    return out


def self_test(path: Path, device: int = 0) -> int:
    """Run the self-test of a file on a device. Returns the number of calls.

    Raises InputError without a compiler, RunError with the runtime's message, which names a result that differs.
    """
    with tempfile.TemporaryDirectory(prefix="cumla-runtime-") as folder:
        runtime = ctypes.CDLL(str(built(Path(folder))))
    runtime.cumla_message.restype = ctypes.c_char_p
    runtime.cumla_close.argtypes, runtime.cumla_close.restype = [POINTER], None
    runtime.cumla_self_test_bytes.argtypes = [POINTER, POINTER]
    runtime.cumla_self_test.argtypes = [POINTER, ctypes.c_uint64, SIZE, POINTER, POINTER]

    def check(status: int) -> None:
        if status:
            raise RunError(runtime.cumla_message().decode())

    library, needed, calls = POINTER(), ctypes.c_uint64(), ctypes.c_uint32()
    check(runtime.cumla_open(os.fsencode(path), device, ctypes.byref(library)))
    try:
        check(runtime.cumla_self_test_bytes(library, ctypes.byref(needed)))
        driver, memory = ctypes.CDLL(LIBCUDA), ctypes.c_uint64()
        if driver.cuMemAlloc_v2(ctypes.byref(memory), SIZE(max(needed.value, 1))):
            raise RunError(f"the device has no {needed.value} bytes for the self-test")
        try:
            check(runtime.cumla_self_test(library, memory.value, needed.value, None, ctypes.byref(calls)))
        finally:
            driver.cuMemFree_v2(memory)
    finally:
        runtime.cumla_close(library)
    return calls.value
