"""Shared libraries from C++, built once for each text and cached in a folder between runs."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

RUNTIME = pathlib.Path(__file__).parent / "runtime"
FLAGS = (
    "-std=c++20", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-strict-aliasing",
    "-fno-semantic-interposition", "-ffp-contract=off", f"-I{RUNTIME}",
)  # fmt: skip
# Chosen by the time of all tests: compiling takes about as long as running. With C headers, because parsing C++'s takes
# longer than a small kernel.
KERNEL_FLAGS = ("-Og", "-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS")


class Dim3(ctypes.Structure):
    _fields_ = tuple((axis, ctypes.c_uint) for axis in "xyz")


class LaunchDescription(ctypes.Structure):
    """`Launch` of runtime/threads.cpp."""


LaunchDescription._fields_ = (
    ("name", ctypes.c_char_p), ("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("grid", Dim3),
    ("block", Dim3), ("shared_bytes", ctypes.c_uint), ("cluster", ctypes.c_uint), ("late", ctypes.c_int),
    ("seed", ctypes.c_int), ("kept_back", ctypes.c_int), ("ahead", ctypes.POINTER(LaunchDescription)),
)  # fmt: skip


_folder: list[pathlib.Path] = []


def keep_in(folder):
    """The folder for builds."""
    _folder[:] = [pathlib.Path(folder)]


@functools.cache
def unavailable():
    """Why nothing can be emulated here, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"CUDA kernels are emulated on Linux on x86-64 only, not on {platform.system()} on {platform.machine()}"
    if compiler() is None:
        return "CUDA kernels are emulated with g++, which is not installed"
    major = subprocess.run([compiler(), "-dumpversion"], capture_output=True, text=True, check=True).stdout.split(".")[
        0
    ]
    return None if int(major) >= 11 else f"CUDA kernels are emulated with g++ 11 or newer, not with {major}"


def compiler():
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def runtime():
    """The emulator. Global, as kernels find its functions by name."""
    sources = map(str, RUNTIME.glob("*.cpp"))
    library = ctypes.PyDLL(str(built("", "-O3", "-flto", "-march=native", *sources)), ctypes.RTLD_GLOBAL)
    library.emulator_launch.restype = ctypes.c_char_p
    library.emulator_launch.argtypes = (ctypes.POINTER(LaunchDescription),)
    return library


@functools.cache
def loaded(text):
    """A kernel's library."""
    runtime()
    return ctypes.CDLL(str(built(text, f"-I{headers()}", *KERNEL_FLAGS)))


@functools.cache
def headers():
    """A folder with the precompiled device.h, which takes a fifth of a kernel's compile time."""
    target = folder() / digest("", *KERNEL_FLAGS)
    target.mkdir(exist_ok=True)
    header = target / "device.h.gch"
    with alone(header):
        if not header.exists():
            build(header, *KERNEL_FLAGS, "-x", "c++-header", str(RUNTIME / "device.h"))
    return target


def built(text, *options):
    """The library for a C++ text. Options may be files to add."""
    target = folder() / f"{digest(text, *options)}.so"
    with alone(target):
        if not target.exists():
            with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".cpp") as source:
                source.write(text)
                source.flush()
                build(target, *options, source.name)
    return target


@contextlib.contextmanager
def alone(target):
    """A lock: other processes with the same build wait, unless its result exists."""
    if target.exists():
        yield
        return
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(target, *arguments):
    """Raises AssertionError with the compiler's message."""
    with result(target) as place:
        command = [compiler(), *arguments, *FLAGS, "-o", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def result(target):
    """A path for a file that becomes the target at once, as others may build the same."""
    with tempfile.TemporaryDirectory(dir=folder()) as place:
        yield pathlib.Path(place, "result")
        pathlib.Path(place, "result").replace(target)


def folder():
    if not _folder:
        _folder.append(pathlib.Path(tempfile.mkdtemp(prefix="cumla-emulation-")))
    _folder[0].mkdir(parents=True, exist_ok=True)
    return _folder[0]


def digest(text, *options):
    return hashlib.sha256("\0".join((runtime_text(), text, *options, *FLAGS)).encode()).hexdigest()[:24]


@functools.cache
def runtime_text():
    about = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in about if line.startswith("flags"))  # for -march=native
    parts = [compiler(), processor, *(path.read_text() for path in sorted(RUNTIME.iterdir()))]
    return "\0".join(parts)
