"""cumla export and its C runtime: the host's time of a call, in us a launch, beside cuLaunchKernelEx and Python's call.

    python benchmarks/export.py [--requests 64] [--json benchmarks/results/h200/export.json]

`us` is the host's time for one launch (impl C: cumla_call; cuLaunchKernelEx: the same launches by the driver alone, in
turn in one process; Python: the public function), or of a part of cumla_open. `us_graph` is the time of a call in a
graph, by C and by Python. The file's row has its bytes and the seconds of its export. Needs cc and NVRTC's bindings.
"""

import argparse
import ctypes
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

from cumla.bench.measure import graph_times_in_turn, host_us
from cumla.cli.export import device_of
from cumla.cli.served_model import Model
from cumla.export import cubins, file_of, recorded
from cumla.export.calls import RESULTS, Claims, calls_of, fields_of
from cumla.export.fields import PLANNED, OperationFields
from cumla.export.header import number_of, write_runtime
from cumla.specs import SPECS, norm_rope, sparse_attention
from cumla.specs import indices as index_maps
from cumla.specs.inputs import Size
from cumla.specs.measured import Measured

BATCHES, PAGES, CONTEXT, BLOCK = 200, 4096, 8192, 64
PARTS = ("reading and checking", "finding the driver", "loading of cubins", "asking for clusters")


def built(place: Path) -> ctypes.CDLL:
    """export_host.c with the runtime, as a library."""
    write_runtime(place)
    out = place / "libhost.so"
    source = Path(__file__).with_name("export_host.c")
    subprocess.run(["cc", "-std=c11", "-O2", "-shared", "-fPIC", "-I", place, "-o", out, source, "-ldl"], check=True)
    return library_at(out)


def library_at(path: Path) -> ctypes.CDLL:
    """The library, with its functions' types."""
    found = ctypes.CDLL(str(path))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    found.cumla_message.restype = ctypes.c_char_p
    found.cumla_open_memory.argtypes = [ctypes.c_char_p, size, ctypes.c_int, ctypes.POINTER(pointer)]
    found.cumla_call.argtypes = [pointer, number, pointer, size, pointer, number]
    found.cumla_close.argtypes = [pointer]
    found.cumla_close.restype = None
    found.opening_times.argtypes = [ctypes.c_char_p, size, ctypes.c_int, ctypes.POINTER(ctypes.c_double)]
    doubles = ctypes.POINTER(ctypes.c_double)
    found.host_times.argtypes = [pointer, number, pointer, size, pointer, ctypes.c_int, doubles, doubles]
    return found


def strided(xp: Any, array: Any) -> Any:
    """The array with strides of multiples of 16 bytes, but the last."""
    strides: list[int] = []
    stride = array.itemsize
    for axis in reversed(range(array.ndim)):
        strides.append(stride)
        stride = -(-stride * array.shape[axis] // 16) * 16
    strides.reverse()
    if array.ndim < 2 or tuple(strides) == array.strides:
        return array
    memory = xp.zeros(stride, np.uint8)
    if xp is np:
        made = np.ndarray(array.shape, array.dtype, memory.data, 0, tuple(strides))
    else:
        made = xp.ndarray(array.shape, array.dtype, memory.data, tuple(strides))
    made[...] = array
    return made


def step_calls(x: Measured, model: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    """(operation, arguments) of a step of a window and selected rows, without results."""
    first, second = model.formats
    yield "compute_swa_indices_and_lens", index_maps.windows(x)
    yield "compute_global_topk_indices_and_lens", index_maps.global_topk(x, compact=True)
    yield "qnorm_rope_and_insert", norm_rope.window_rows(x, first)
    decode = sparse_attention.decode(x, first, second, model.has_window)
    yield "sparse_mla_decode", decode | {"softmax_scale": first.head_dim**-0.5}
    yield "apply_rope", norm_rope.rope(x, inverse=True, dim=512)


def whole(xp: Any, operation: str, arguments: dict[str, Any]) -> tuple[OperationFields, dict[str, Any]]:
    """Arguments with results and workspace, as a struct has them."""
    spec, fields = SPECS[operation], fields_of(SPECS[operation])
    if "extra_topk_length" in arguments:  # a length of each query
        lengths = arguments["extra_topk_length"]
        arguments = {**arguments, "extra_topk_length": lengths.reshape(len(lengths), -1)}
    names = RESULTS.get(operation, spec.outputs)
    results = {
        name: xp.empty(result.shape, np.dtype(result.dtype))
        for name, result in zip(names, spec.results(arguments), strict=True)
    }
    made = {name: strided(xp, x) if hasattr(x, "strides") and not name.endswith("k_cache") else x
            for name, x in {**arguments, **results}.items()}  # fmt: skip
    if spec.scratch is not None:
        made["workspace"] = xp.zeros(spec.scratch(made), np.uint8)
    return fields, made


def packed(fields: OperationFields, arguments: dict[str, Any]) -> tuple[int, Any, int]:
    """The words of a call, its size and its operation's number, as the runtime takes them."""
    words = fields.values(arguments)
    return number_of(fields.spec.name), (ctypes.c_int64 * len(words))(*words), 8 * len(words)


def medians(
    library: ctypes.CDLL, handle: Any, fields: OperationFields, arguments: dict[str, Any], stream: Any,
    batches: int = BATCHES,
) -> tuple[float, float, int]:  # fmt: skip
    """us of a launch by C and by the driver, and launches of a call. Raises RuntimeError."""
    times = (ctypes.c_double * batches)(), (ctypes.c_double * batches)()
    number, words, size = packed(fields, arguments)
    launches = library.host_times(handle, number, words, size, stream, batches, *times)
    if launches < 0:
        raise RuntimeError(library.cumla_message().decode() or "the driver refused a launch")
    return statistics.median(times[0]), statistics.median(times[1]), launches


def opening(library: ctypes.CDLL, data: bytes, device: int = 0, repeats: int = 5) -> list[float]:
    """Median seconds of each of PARTS. Raises RuntimeError."""
    found = []
    for _ in range(repeats):
        parts = (ctypes.c_double * len(PARTS))()
        if library.opening_times(data, len(data), device, parts):
            raise RuntimeError(library.cumla_message().decode())
        found.append(list(parts))
    return [statistics.median(x) for x in zip(*found, strict=True)]


def exported(report: common.Report, model: Model, claims: Claims) -> bytes:
    """The file for this device."""
    device, claimed = common.cupy.cuda.Device(), f"{model.kind}, {claims.tokens} tokens, {claims.decodes} requests"
    capability = f"{device.compute_capability[:-1]}.{device.compute_capability[-1]}"
    described, start = device_of(capability, device.attributes["MultiProcessorCount"], None), time.perf_counter()
    records = recorded(calls_of(model, claims, described), described)
    after = time.perf_counter()
    data = file_of(records, described, cubins)
    seconds = {"record_seconds": after - start, "compile_seconds": time.perf_counter() - after}
    report.add_row({"op": "cumla export", "config": claimed, "impl": "file", "us": None, "us_graph": None,
                    "bytes": len(data), **seconds})  # fmt: skip
    print(f"{len(data) / 1e6:.1f} MB, {seconds}", flush=True)
    return data


def measure(report: common.Report, library: ctypes.CDLL, handle: Any, model: Model, requests: int) -> None:
    """A row of each call's host time by C, by the driver and by Python, and its time in a graph."""
    cupy, config = common.cupy, f"{model.kind}, {requests} requests"
    size = Size(requests, requests, tokens=requests, rows=requests, heads=model.heads, topk=model.topk,
                window=model.window, context=CONTEXT, block_size=BLOCK, pages=PAGES)  # fmt: skip
    x = Measured("cuda", size)
    for operation, given in step_calls(x, model):
        if not report.wants(operation, config):
            continue
        fields, arguments = whole(cupy, operation, given)
        stream = cupy.cuda.get_current_stream()
        variants = [("", arguments)]
        if fields.has_plan:  # the calls of later layers have no plan to compute
            variants.append((", planned", arguments | {PLANNED: 1}))
        plan = fields.plan_in(arguments)
        for name, of_variant in variants:
            python = functools.partial(python_call, fields, arguments, plan if name else None)
            number, words, bytes_of = packed(fields, of_variant)

            def in_c(number: int = number, words: Any = words, bytes_of: int = bytes_of) -> None:
                current = common.cupy.cuda.get_current_stream().ptr
                if library.cumla_call(handle, number, words, bytes_of, current, 0):
                    raise RuntimeError(library.cumla_message().decode())

            python()
            in_c()
            stream.synchronize()
            by_c, by_driver, launches = medians(library, handle, fields, of_variant, stream.ptr)
            by_python = host_us(python) / launches
            stream.synchronize()
            graphs = graph_times_in_turn({"C": ("cupy", [in_c]), "Python": ("cupy", [python])})
            times = {"C": by_c, "cuLaunchKernelEx": by_driver, "Python": by_python}
            for impl, us in times.items():
                us_graph = statistics.median(graphs[impl]) if impl in graphs else None
                report.add_row({"op": operation + name, "config": config, "impl": impl, "us": us, "us_graph": us_graph,
                                "launches": launches})  # fmt: skip


def python_call(fields: OperationFields, arguments: dict[str, Any], plan: Any) -> None:
    """plan: of the step; None: the call computes one."""
    fields.call(arguments, plan or fields.plan_in(arguments))


def parser() -> argparse.ArgumentParser:
    made = common.arguments(__doc__)
    made.add_argument("--requests", type=int, default=64, help="of the measured decodes (64)")
    made.add_argument("--tokens", type=int, default=4096, help="most tokens of a step that the file serves (4096)")
    made.add_argument("--heads", type=int, default=64, help="query heads of a rank (64)")
    return made


def main() -> int:
    args = parser().parse_args()
    report, model = common.Report(args), Model("v4", args.heads, 512)
    data = exported(report, model, Claims(tokens=args.tokens, decodes=max(args.requests, 256)))
    with tempfile.TemporaryDirectory() as place:
        library = built(Path(place))
        for part, seconds in zip(PARTS, opening(library, data), strict=True):
            report.add_row({"op": "cumla_open", "config": part, "impl": "C", "us": 1e6 * seconds, "us_graph": None})
        handle = ctypes.c_void_p()
        if library.cumla_open_memory(data, len(data), 0, ctypes.byref(handle)):
            raise SystemExit(library.cumla_message().decode())
        measure(report, library, handle, model, args.requests)
        library.cumla_close(handle)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
