"""The C runtime, built with the system's compiler, and a stand-in for libcuda that records launches."""

import ctypes
import fcntl
import functools
import os
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from cumla.cli.served_model import Model
from cumla.export import file_of, record, recorded
from cumla.export.calls import Claims, calls_of
from cumla.export.header import number_of, write_runtime
from cumla.export.record import Sampler, function_of
from cumla.kernels.cuda.device import LIMITS, Device
from cumla.replay.options import V41_LAYOUT

HERE = Path(__file__).parents[1] / "export"
H200 = Device(LIMITS[90], 132, True, ((2, 66), (3, 39), (4, 30), (5, 22), (6, 17)))
MODELS = {"v4": Model("v4", 64, 512), "v32": Model("v32", 64, 2048), "v41": Model("v41", 64, 512, layout=V41_LAYOUT),
          "mla": Model("mla", 16, 0), "glm5_next": Model("glm5_next", 64, 2048)}  # fmt: skip
CLAIMS = Claims(tokens=24, decodes=12, context=4096)
FLAGS = ("-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror")
STREAM = 0x5EA


class Launched(ctypes.Structure):
    """A launch as the stand-in has it."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("overlap", ctypes.c_uint32), ("argument_bytes", ctypes.c_uint32), ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64), ("code", ctypes.c_uint64), ("arguments", ctypes.c_ubyte * 4096),
    )  # fmt: skip


def compiler():
    """The system's C compiler; the test is skipped without one."""
    found = shutil.which("cc")
    if found is None:
        pytest.skip("there is no C compiler (cc)")
    return found


def built(*arguments):
    done = subprocess.run([compiler(), *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functools.cache
def folder():
    """A folder with the sources, libcuda's stand-in and the runtime as a library."""
    place = Path(tempfile.mkdtemp(prefix="cumla-runtime-"))
    write_runtime(place)
    built("-shared", "-fPIC", "-o", place / "libstandin.so", HERE / "stand_in.c", "-lpthread")
    built(libcuda(place), "-shared", "-fPIC", "-o", place / "libcumla.so", place / "cumla.c", "-ldl")
    return place


def libcuda(place):
    """The option with which the runtime finds the stand-in."""
    return f'-DCUMLA_LIBCUDA="{place}/libstandin.so"'


@functools.cache
def calls(kind):
    """The calls of a file. Of V4.1's decodes of 1 to 6 tokens a request, 3 to 5 are left to tests on a device."""
    return tuple(x for x in calls_of(MODELS[kind], CLAIMS, H200) if not re.search("[345] tokens a request", x.name))


@functools.cache
def records(kind):
    return recorded_quickly(calls(kind))


def recorded_quickly(of):
    """Records that few further calls are checked against: tests compare the runtime's launches of such calls."""
    with mock.patch.object(record, "CHECKED", 8):
        return tuple(recorded(of, H200))


@functools.cache
def some(kind, *names, **sizes):
    """The calls of these names, of a model of this kind and claims of these sizes."""
    found = calls_of(MODELS[kind], Claims(**{"tokens": 8, "decodes": 4, "context": 1024, **sizes}), H200)
    chosen = tuple(x for x in found if x.name in names)
    assert len(chosen) == len(names), [x.name for x in chosen]
    return chosen


def assert_launches_are_those_of_python(calls, with_file=None, samples=30):
    """Compare the runtime's launches of random sizes with Python's, by a file of the calls. Returns the runtime."""
    with_file = with_file or Runtime(file_of(recorded_quickly(calls), H200, without_code))
    assert with_file.status == 0, with_file.message
    for number, call in enumerate(calls):
        sampler = Sampler(call, H200, np.random.default_rng(1000 + number))
        for _ in range(samples):
            made = sampler.sample(sampler.sizes())
            assert with_file.call(call.fields.spec.name, made.values) == 0, with_file.message
            assert with_file.launches() == words_of(made.launches), call.name
    return with_file


def without_code(programs, capability):
    """Stands for the compiler: the stand-in loads anything."""
    return {program: struct.pack("<Q", code_of(program)) for program in programs}


def code_of(program):
    """A number in place of a program's code, which the stand-in has of each launch."""
    return zlib.crc32(repr(program).encode())


@functools.cache
def file(kind):
    """The bytes of a file without code."""
    return once(kind, lambda: file_of(records(kind), H200, without_code))


def once(name, make):
    """The bytes that `make` returns in one of a run's processes."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    path = Path(tempfile.gettempdir(), f"cumla-export-{run}-{name}")
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(make())
    return path.read_bytes()


class Runtime:
    """The library, opened with a file on the stand-in."""

    def __init__(self, data, device=0):
        place = folder()
        self.library, self.driver = (ctypes.CDLL(str(place / name)) for name in ("libcumla.so", "libstandin.so"))
        self.driver.stand_in_launches((Launched * 64)())  # a test that failed may have left some
        self.library.cumla_message.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()
        self.status = self.library.cumla_open_memory(
            data, ctypes.c_size_t(len(data)), device, ctypes.byref(self.handle)
        )

    @property
    def message(self):
        return self.library.cumla_message().decode()

    def call(self, name, words, function="cumla_call", extra=(), size=None):
        packed = (ctypes.c_int64 * len(words))(*words)
        size = ctypes.c_size_t(8 * len(words) if size is None else size)
        if function == "cumla_call":
            extra = (ctypes.c_void_p(STREAM), 0)
        return getattr(self.library, function)(self.handle, number_of(name), packed, size, *extra)

    def workspace(self, name, words):
        found = ctypes.c_uint64(7)
        return self.call(name, words, "cumla_workspace", (ctypes.byref(found),)), found.value

    def launches(self):
        """Launches since the call before: name, grid, block, shared bytes, overlap, arguments, program."""
        out = (Launched * 64)()
        count = self.driver.stand_in_launches(out)
        assert all(x.stream == STREAM for x in out[:count])
        return [
            (ctypes.string_at(x.function).decode(), tuple(x.grid), tuple(x.block), x.shared, bool(x.overlap),
             bytes(x.arguments[: x.argument_bytes]), x.code)
            for x in out[:count]
        ]  # fmt: skip

    def close(self):
        self.library.cumla_close(self.handle)


def words_of(launches):
    """Launches of a dry run, as `Runtime.launches` has them."""
    return [
        (x.kernel.raw.name, x.grid, x.block, x.shared_bytes, x.overlap, x.kernel.packed(x.packed_arguments),
         code_of(function_of(x).program))
        for x in launches
    ]  # fmt: skip
