"""Compiles CUDA C++ sources: this module expands includes, and CuPy caches compiled programs on disk by content."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from ...arrays.streams import relaxed_capture
from ...layout import BUILT_IN, LAYOUTS, CacheLayout
from ..check_results import Fresh, announce_compilation, note, note_unsaved
from .constants import CSRC, INCLUDE, numbers_of
from .described import DescribedKernel
from .device import asked, assumed_capability, cached_by_capability, is_described
from .launch import Kernel, packing, parameters, recorded_launches

log = logging.getLogger(__name__)
FOLDERS = [CSRC]  # searched for sources, first to last
OPTIONS = ("-std=c++17",)


def layouts_header() -> str:
    """`cumla.layout` for the CUDA sources: one struct of constants per layout of cumla."""
    return "\n".join(_layout_struct(layout) for layout in BUILT_IN)


def _registered_layouts(defines: dict[str, str | int]) -> str:
    """The structs of the registered layouts that macros name: other programs' texts and cached files do not change."""
    named = (LAYOUTS.get(str(value)) for value in dict.fromkeys(defines.values()))
    return "".join(_layout_struct(layout) + "\n" for layout in named if layout is not None and layout not in BUILT_IN)


def _layout_struct(layout: CacheLayout) -> str:
    fields = ", ".join(f"{name} = {value}" for name, value in numbers_of(layout).items())
    kinds = {
        "ue8m0": layout.scale_type == "ue8m0",
        "e4m3_scales": layout.scale_type == "e4m3",
        "e2m1_values": layout.value_type == "e2m1",
    }
    flags = ", ".join(f"{name} = {str(holds).lower()}" for name, holds in kinds.items())
    return (
        f"struct {layout.name} {{\n"
        f"    static constexpr int {fields};\n"
        f"    static constexpr bool {flags};\n"
        f"    static constexpr float min_scale = {layout.min_scale:.9e}f;\n"
        "};"
    )


def look_first_in(*folders: pathlib.Path) -> None:
    """From now on take sources from `folders` first: for experiments that compare versions of a kernel.

    Compiled kernels are dropped. Calls in the launch cache keep their kernels: compare versions within
    `recorded_launches`, where every call runs in full.
    """
    FOLDERS[:] = [*folders, CSRC]
    for name, module in list(sys.modules.items()):
        if name.startswith(__package__ + ".") and name != Kernel.__module__:  # the Kernel's module keeps its state
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def find(name: str) -> pathlib.Path:
    """The source `name`."""
    return next(folder / name for folder in FOLDERS if (folder / name).exists())


@functools.cache
def source(file: str) -> str:
    """csrc/<file> with its includes expanded, each once, so that a single text is hashed."""
    included: set[str] = set()

    def expand(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        text = layouts_header() if name == "layouts.cuh" else find(name).read_text()
        return INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return expand(file)


Program = tuple[str, tuple[str, ...], int]  # text, options, device


class _Build(threading.Thread):
    """Compiles and loads a program. Not a daemon: at exit the interpreter waits for the thread to end."""

    def __init__(self, program: Program) -> None:
        super().__init__(name="cumla compiler")
        self._program = program
        self.module: Any = None  # None after an error: the caller that needs the program compiles again, and raises it

    def run(self) -> None:
        import cupy

        text, options, device = self._program
        with contextlib.suppress(Exception), _cores, cupy.cuda.Device(device), relaxed_capture():
            module = cupy.RawModule(code=text, options=options)
            module.compile()
            self.module = module


_cores = threading.BoundedSemaphore(os.cpu_count() or 1)  # concurrent compilations: each takes hundreds of megabytes
_builds: dict[Program, _Build] = {}
_loaded: set[Program] = set()


def text_of(file: str, defines: dict[str, str | int]) -> str:
    """csrc/<file> with these macros, as it is compiled."""
    assumed = assumed_capability()
    if assumed is not None:
        defines = {"ASSUMED_ARCH": 10 * assumed, **defines}
    macros = "".join(f"#define {macro} {value}\n" for macro, value in defines.items())
    return _registered_layouts(defines) + macros + source(file)


def _program(file: str, arch: str | None, defines: dict[str, str | int]) -> Program:
    import cupy

    options = OPTIONS + (() if arch is None else (f"-arch={arch}",))
    return text_of(file, defines), options, 0 if _is_emulated() else int(cupy.cuda.Device().id)


def _is_emulated() -> bool:
    import cupy

    return not hasattr(cupy.cuda, "nvrtc")


def start(file: str, arch: str | None = None, **defines: str | int) -> None:
    """Begin to compile csrc/<file> in its own thread, before `kernel` needs it.

    A first call needs several programs: each takes seconds, and NVRTC compiles them in parallel.
    """
    if is_described() or _is_emulated():
        return
    program = _program(file, arch, defines)
    if program not in _loaded and program not in _builds:
        _builds[program] = _Build(program)
        _builds[program].start()


def _module(program: Program) -> Any:
    """The program; compiles it now unless a thread has begun to."""
    import cupy

    build = _builds.pop(program, None)
    if build is not None:
        build.join()
    _loaded.add(program)
    text, options, _ = program
    if build is not None and build.module is not None:
        return build.module
    return cupy.RawModule(code=text, options=options)


class _NotLaunched:
    """Replaces a kernel within `programs_asked_for`: calls do nothing."""

    max_dynamic_shared_size_bytes = 0

    def __call__(self, *launch: Any, **options: Any) -> None:
        pass

    def arguments(self, **named: Any) -> tuple[Any, ...]:
        return ()


@contextlib.contextmanager
def programs_asked_for() -> Iterator[set[Any]]:
    """A context in which this thread launches nothing. Yields the programs its calls need, which threads compile."""
    programs: set[Any] = set()
    token = asked.set(programs)
    try:
        with recorded_launches():  # the launch cache must not record calls that launch nothing
            yield programs
    finally:
        asked.reset(token)


@contextlib.contextmanager
def loaded_now() -> Iterator[None]:
    """A context in which kernels are compiled and loaded even within `programs_asked_for`: for questions to the driver
    about a kernel."""
    token = asked.set(None)
    try:
        yield
    finally:
        asked.reset(token)


@cached_by_capability
def kernel(file: str, name: str, arch: str | None = None, **defines: str | int) -> Kernel:
    """The kernel `name` of csrc/<file>.

    Args:
        arch: a target such as "sm_90a" instead of the device's own
        defines: macros; each set of values is compiled once
    """
    programs = asked.get()
    if programs is not None:
        if (key := (file, name, arch, *sorted(defines.items()))) not in programs:
            programs.add(key)
            start(file, arch, **defines)
        return cast(Kernel, _NotLaunched())
    if is_described():
        text = text_of(file, defines)
        raw = SimpleNamespace(name=name, file=file, arch=arch, macros=defines)
        return DescribedKernel(raw, packing(text, name, defines), parameters(text, name))
    program = _program(file, arch, defines)
    text, options, _ = program
    result_file = None if _is_emulated() else _result_file(text, options)
    if result_file is None or not result_file.exists():
        announce_compilation(pathlib.PurePath(file).stem)
    before = time.perf_counter()
    with relaxed_capture():  # code cannot be loaded otherwise while this thread captures a graph
        raw = _module(program).get_function(name)
    log.debug("%s of %s %s: compiled or loaded in %.3f s", name, file, defines, time.perf_counter() - before)
    made = Kernel(raw, packing(text, name, defines), parameters(text, name))
    if not _is_emulated():
        if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in ("", "0"):
            note_unsaved("CUPY_CACHE_IN_MEMORY is set")
        _note(made, name, file, defines, result_file)
    return made


def _result_file(text: str, options: tuple[str, ...]) -> pathlib.Path | None:
    """The file of the self-test's result for this text, compiler and kind of device, in CuPy's cache folder."""
    import cupy

    identity = repr((text, options, nvrtc_version(), _arch(), cupy.__version__))
    # CuPy's cache folder. CuPy accepts a relative path, too, but anyone may have written to the current directory.
    place = pathlib.Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
    if not place.is_absolute() or not place.is_dir():
        return None
    return place / f"cumla-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.verdict"


def nvrtc_version() -> str:
    import cupy

    return ".".join(str(part) for part in cupy.cuda.nvrtc.getVersion())


def _arch() -> int:
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def _note(made: Kernel, name: str, file: str, defines: dict[str, str | int], result_file: pathlib.Path | None) -> None:
    """Queue the kernel's self-test, unless its result is cached."""
    remedy = (
        "Install another NVRTC (pip install 'nvidia-cuda-nvrtc<13.1', or the extra cuda12) and run `cumla warmup` "
        "again; until then backend='numba_cuda' uses another compiler"
    )
    what = f"{name} of {file}" + "".join(f" {key}={value}" for key, value in defines.items())
    compiler = f"NVRTC {nvrtc_version()} for compute capability {_arch() / 10}"
    note(Fresh(what, "cuda", compiler, remedy, result_file, str(defines.get("LAYOUT", "")), made, file, defines))
