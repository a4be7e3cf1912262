"""CUDA C++ sources to kernels: put together here, compiled and cached on disk by CuPy, by content."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pathlib
import re
import sys
import time

from ...arrays.streams import relaxed_capture
from ...layout import LAYOUTS, CacheLayout
from ..types.verdicts import Fresh, note
from .launch import Kernel, packing, parameters

log = logging.getLogger(__name__)
CSRC = pathlib.Path(__file__).parent / "csrc"
FOLDERS = [CSRC]  # where sources are looked for, first to last
OPTIONS = ("-std=c++17",)
_INCLUDE = re.compile(r'^#include "([\w./]+)"$', re.MULTILINE)


def layouts_header() -> str:
    """`cumla.layout` for the CUDA sources: one struct of constants a layout."""
    return "\n".join(_layout_struct(layout) for layout in LAYOUTS.values())


def _layout_struct(layout: CacheLayout) -> str:
    numbers = {
        "head_dim": layout.head_dim,
        "quantized_dim": layout.quantized_dim,
        "rope_offset": layout.rope_offset if layout.quantized_dim else 0,
        "row_bytes": layout.row_bytes,
        "scale_tile": layout.scale_tile or 1,
        "num_scales": layout.num_scales,
        "scale_bytes": layout.scale_bytes,
        "scale_stride": layout.scale_stride,
        "scale_start": layout.scale_start(0),
        "scale_start_per_token": layout.scale_start(1) - layout.scale_start(0),
        "min_exponent": layout.min_exponent,
    }
    fields = ", ".join(f"{name} = {value}" for name, value in numbers.items())
    flags = f"ue8m0 = {str(layout.scale_type == 'ue8m0').lower()}"
    return (
        f"struct {layout.name} {{\n"
        f"    static constexpr int {fields};\n"
        f"    static constexpr bool {flags};\n"
        f"    static constexpr float min_scale = {layout.min_scale:.9e}f;\n"
        "};"
    )


def look_first_in(*folders: pathlib.Path) -> None:
    """From now on take sources from `folders` where they have them: for experiments, to compare versions of a kernel.

    What was compiled is forgotten; calls that the launch cache has recorded are not, which makes them as they were:
    compare versions within `recorded_launches`, where every call is made in full.
    """
    FOLDERS[:] = [*folders, CSRC]
    for name, module in list(sys.modules.items()):
        if name.startswith(__package__ + ".") and name != Kernel.__module__:  # which keeps what threads record
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def find(name: str) -> pathlib.Path:
    """The source `name`."""
    return next(folder / name for folder in FOLDERS if (folder / name).exists())


@functools.cache
def source(file: str) -> str:
    """csrc/<file> with its includes put in, each once, so that one text is all there is to hash."""
    included: set[str] = set()

    def expand(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        text = layouts_header() if name == "layouts.cuh" else find(name).read_text()
        return _INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return expand(file)


@functools.cache
def kernel(file: str, name: str, arch: str | None = None, **defines: str | int) -> Kernel:
    """The kernel `name` of csrc/<file>.

    arch     a target such as "sm_90a" instead of the device's own
    defines  macros, one compilation for each set of values
    """
    import cupy

    options = OPTIONS + (() if arch is None else (f"-arch={arch}",))
    text = "".join(f"#define {macro} {value}\n" for macro, value in defines.items()) + source(file)
    start = time.perf_counter()
    with relaxed_capture():  # or no code could be loaded while this thread captures a graph
        raw = cupy.RawModule(code=text, options=options).get_function(name)
    log.debug("%s of %s %s: compiled or loaded in %.3f s", name, file, defines, time.perf_counter() - start)
    made = Kernel(raw, packing(text, name, defines), parameters(text, name))
    _note(made, name, file, text, options, defines)
    return made


def _note(
    made: Kernel, name: str, file: str, text: str, options: tuple[str, ...], defines: dict[str, str | int]
) -> None:
    """Have it tested, unless there is a verdict for this text by this compiler for this kind of device."""
    import cupy

    if not hasattr(cupy.cuda, "nvrtc"):  # emulated
        return
    version = ".".join(str(part) for part in cupy.cuda.nvrtc.getVersion())
    arch = int(cupy.cuda.Device().compute_capability)
    identity = repr((text, options, version, arch, cupy.__version__))
    place = pathlib.Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))  # CuPy's own
    verdict = place / f"cumla-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.verdict" if place.is_dir() else None
    remedy = (
        "Install another NVRTC (pip install 'nvidia-cuda-nvrtc<13.1', or the extra cuda12) and run `cumla warmup` "
        "again; until then backend='numba_cuda' goes another way"
    )
    what = f"{name} of {file}" + "".join(f" {key}={value}" for key, value in defines.items())
    layout = str(defines.get("LAYOUT", ""))
    note(Fresh(what, "cuda", f"NVRTC {version} for compute capability {arch / 10}", remedy, verdict, layout, made))
