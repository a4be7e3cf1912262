"""What every benchmark shares: timing in CUDA graphs, checks before timing, tables and JSON.

A row is {op, config, impl, us, us_graph, gbps, tflops, max_abs_err, checked}: `us_graph` is the time of one call
inside a CUDA graph of back-to-back calls (median over replays), inputs rotated through several sets so that
the L2 cache does not answer; `us` is the host's time for one call, launch included.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import statistics
import subprocess
import time

import cupy

from cumla.kernels.cuda import compile as compiler

GRAPH_US = 1_000  # of calls that a graph holds, about
MAX_CALLS_PER_GRAPH = 400
REPLAYS = 20
L2_BYTES = 64 << 20


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows and what they were run on")
    parser.add_argument(
        "--sources", metavar="DIR", help="compile CUDA sources of DIR where it has them, for experiments"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="run only rows whose op or config has TEXT")
    return parser


def has_peer(module):
    """Whether a peer can be imported (tools in the shared folder lay them out; cumla never needs them)."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Report:
    """Rows as they come, a table as it grows, a file at the end."""

    def __init__(self, args):
        self.args, self.rows = args, []
        if args.sources:
            compiler.look_first_in(pathlib.Path(args.sources))
        print(f"{'op':38} {'config':34} {'impl':16} {'us':>9} {'us_graph':>9} {'GB/s':>7} {'TF':>7} {'max err':>9}")

    def wants(self, op, config):
        return self.args.only in op or self.args.only in config

    def add(
        self, op, config, impl, us=None, us_graph=None, bytes_moved=None, flop=None, max_abs_err=None, checked=True
    ):
        seconds = (us_graph or us or 0) * 1e-6
        row = {
            "op": op,
            "config": config,
            "impl": impl,
            "us": us,
            "us_graph": us_graph,
            "gbps": bytes_moved / seconds / 1e9 if bytes_moved and seconds else None,
            "tflops": flop / seconds / 1e12 if flop and seconds else None,
            "max_abs_err": max_abs_err,
            "checked": checked,
        }
        self.rows.append(row)
        text = [
            "-" if row[key] is None else form.format(row[key])
            for key, form in (("us", "{:.2f}"), ("us_graph", "{:.2f}"), ("gbps", "{:.0f}"), ("tflops", "{:.0f}"))
        ]
        error = "-" if max_abs_err is None else f"{max_abs_err:.2g}"
        print(
            f"{op:38} {config:34} {impl:16} {text[0]:>9} {text[1]:>9} {text[2]:>7} {text[3]:>7} {error:>9}", flush=True
        )

    def finish(self, **extra):
        if self.args.json:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            record = {"environment": environment(), **extra, "rows": self.rows}
            self.args.json.write_text(json.dumps(record, indent=1) + "\n")


def environment():
    """Device, versions and commit."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    versions = {}
    for package in ("cumla", "numpy", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "torch", "triton", "jax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
    }


def commit():
    """The checkout's commit, with a + where it was changed; a file .commit stands in where git is not there."""
    root = pathlib.Path(__file__).parent.parent
    stand_in = root / ".commit"
    if stand_in.exists():
        return stand_in.read_text().strip()
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=root)
        return head + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def sets_for(bytes_moved, most=8):
    """How many sets of inputs it takes until none of them is in the L2 cache when its turn comes."""
    return max(2, min(most, -(-6 * L2_BYTES // max(bytes_moved, 1))))


def measure(report, op, config, impls, bytes_moved, check=None, clear=None):
    """Check and time several implementations of one operation, one after another.

    impls  {name: (framework, calls)}, a call a set of inputs; "copy" moves as many bytes and is not checked
    check  given the result of the first call, returns the largest error; raises AssertionError if it is wrong
    clear  called before each implementation: whatever calls write in place is wiped
    """
    for name, (framework, calls) in impls.items():
        if clear:
            clear()
        result = calls[0]()
        checked = check is not None and name != "copy"
        error = check(result) if checked else None
        report.add(
            op, config, name, us=host_us(calls[0]), us_graph=graph_us(calls, framework), bytes_moved=bytes_moved,
            max_abs_err=error, checked=checked,
        )  # fmt: skip


def graph_us(calls, framework="cupy"):
    """Median time in us of one call inside a graph of back-to-back calls.

    calls      functions without arguments, one a set of inputs; they run in turn
    framework  "cupy" or "torch": whose capture the calls run under
    """
    for call in calls:
        call()
    replay, count = _capture(calls, framework, 2), 2 * len(calls)
    total = statistics.median(_time_us(replay) for _ in range(4))
    rounds = int(min(GRAPH_US / (total / count), MAX_CALLS_PER_GRAPH) / len(calls))
    if rounds > 2:
        replay, count = _capture(calls, framework, rounds), rounds * len(calls)
    replay()
    return statistics.median(_time_us(replay) for _ in range(REPLAYS)) / count


def _time_us(run):
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) * 1e3


def _capture(calls, framework, rounds):
    return (_capture_torch if framework == "torch" else _capture_cupy)(calls, rounds * len(calls))


def _capture_cupy(calls, count):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for i in range(count):
            calls[i % len(calls)]()
        graph = stream.end_capture()
    return lambda: graph.launch(cupy.cuda.get_current_stream())


def _capture_torch(calls, count):
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph.replay


def host_us(call, repeats=200, seconds=0.3):
    """Median host time in us of one call, the device left to catch up between batches."""
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    cupy.cuda.Device().synchronize()
    batch = max(2, min(repeats // 10, int(seconds / 10 / (time.perf_counter() - start))))
    times = []
    for _ in range(10):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) * 1e6 / batch)
    cupy.cuda.Device().synchronize()
    return statistics.median(times)


def as_torch(*arrays):
    """CuPy arrays as torch tensors over the same memory; anything else as it is."""
    import torch

    return [torch.from_dlpack(x) if isinstance(x, cupy.ndarray) else x for x in arrays]


def random_bits(count, seed=0):
    """uint32 [count] on the device, any number as likely as any other."""
    x = cupy.arange(count, dtype=cupy.uint32) + cupy.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for factor, shift in ((0x85EBCA6B, 15), (0xC2B2AE35, 13), (0x27D4EB2F, 16)):
        x ^= x >> cupy.uint32(shift)
        x *= cupy.uint32(factor)
    x ^= x >> cupy.uint32(16)
    return x


COPY = r"""
extern "C" __global__ void copy(const uint4* source, uint4* target, unsigned long long count) {
    unsigned long long first = blockIdx.x * 1024ull + threadIdx.x;
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) if (first + 256 * i < count) x[i] = __ldcs(source + first + 256 * i);
#pragma unroll
    for (int i = 0; i < 4; ++i) if (first + 256 * i < count) __stcs(target + first + 256 * i, x[i]);
}
"""


def copy_calls(nbytes, sets):
    """Calls that copy `nbytes` bytes by an elementwise kernel: the pace that a kernel which only moves can have."""
    copy = cupy.RawKernel(COPY, "copy")
    count = max(nbytes // 16, 1)

    def call():
        source, target = (cupy.zeros(16 * count, cupy.uint8) for _ in range(2))
        return lambda: copy((-(-count // 1024),), (256,), (source, target, cupy.uint64(count)))

    return [call() for _ in range(sets)]


def copy_gbps():
    """Device-to-device copy bandwidth, bytes read plus bytes written."""
    nbytes = 1 << 30
    return 2 * nbytes / graph_us(copy_calls(nbytes, 1)) / 1e3
