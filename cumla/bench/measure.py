"""Timing: in CUDA graphs on a device, call by call on the host. The scripts in benchmarks/ time with it too."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..timing import Gate

GRAPH_US = 1_000  # of calls that a graph holds, about
MAX_CALLS_PER_GRAPH = 400
REPLAYS = 20
HOST_ROUNDS = 20
L2_BYTES = 64 << 20
LONGEST_HOLD_NS = 400_000_000
BYTES_PER_US, FLOP_PER_US = 4.3e6, 790e6  # that an H200's memory and its bfloat16 products reach; FP8: twice as many
PACKAGES = ("cumla", "numpy", "numba", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "torch", "triton", "jax")

Thunk = Callable[[], Any]  # a call with its arguments
Calls = Sequence[Thunk]


def cupy() -> Any:
    """CuPy, which a host without a device lacks."""
    import cupy

    return cupy


def environment(on_device: bool = True) -> dict[str, Any]:
    """Device or processor, and versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {"device": processor()}
    if on_device:
        runtime = cupy().cuda.runtime
        found = {
            "device": runtime.getDeviceProperties(cupy().cuda.Device().id)["name"].decode(),
            "driver": runtime.driverGetVersion(),
            "runtime": runtime.runtimeGetVersion(),
        }
    return {**found, "python": platform.python_version(), "versions": versions, "commit": commit()}


def commit() -> str | None:
    """The commit of the checkout that this is run from, with a + where it was changed; a file .commit replaces git.

    None where the package is installed.
    """
    root = Path(__file__).parents[2]
    for place in (root, Path.cwd()):
        if (place / ".commit").exists():
            return (place / ".commit").read_text().strip()
        if not (place / ".git").exists():
            continue
        try:
            head = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=place, text=True).strip()
            changed = subprocess.check_output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=place)
        except (OSError, subprocess.CalledProcessError):
            continue
        return head + ("+" if changed else "")
    return None


def processor() -> str:
    """The host's processor by name, and how many cores this process may use."""
    from ..kernels.cpu.threads import num_cores

    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {num_cores()} threads"


def limit_us(bytes_moved: float, flop: float = 0, fp8: bool = False) -> float:
    """The least us that an H200 can take for so many bytes, and FLOP of bfloat16 or FP8 products."""
    return max(bytes_moved / BYTES_PER_US, flop / FLOP_PER_US / (2 if fp8 else 1))


def sets_for(bytes_moved: int, most: int = 8) -> int:
    """How many sets of inputs it takes until none of them is in the L2 cache when it is used again."""
    return max(2, min(most, -(-6 * L2_BYTES // max(bytes_moved, 1))))


def graph_us(calls: Calls, framework: str = "cupy") -> float:
    """Median time in us of one call inside a graph of back-to-back calls.

    Args:
        calls: functions without arguments, one a set of inputs; they run in turn
        framework: "cupy" or "torch": whose capture the calls run under
    """
    return statistics.median(graph_times_in_turn({"": (framework, calls)})[""])


def graph_times_in_turn(impls: Mapping[str, tuple[str, Calls]]) -> dict[str, list[float]]:
    """Times in us of a call, a replay each, of several implementations, {name: (framework, calls)}, in turn.

    What a device's clock does meanwhile, which follows heat and power, they then have in common.
    """
    graphs = {name: _graph(calls, framework) for name, (framework, calls) in impls.items()}
    for replay, _ in graphs.values():
        replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, (replay, count) in graphs.items():
            times[name].append(_time_us(replay) / count)
    return times


def _graph(calls: Calls, framework: str) -> tuple[Callable[[], Any], int]:
    """Calls in turn in a graph of about GRAPH_US: what replays it, and how many there are."""
    for call in calls:
        call()
    replay, count = _capture(calls, framework, 2), 2 * len(calls)
    total = statistics.median(_time_us(replay) for _ in range(4))
    rounds = int(min(GRAPH_US / (total / count), MAX_CALLS_PER_GRAPH) / len(calls))
    return (_capture(calls, framework, rounds), rounds * len(calls)) if rounds > 2 else (replay, count)


def queued_times_in_turn(impls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Times in us of calls on the default stream, one of each, and again, for what no graph can capture.

    The device is held until the host has queued a call, so that it never waits for the host. Raises RuntimeError for
    a call that waits for the device, or queues more than a stream takes.
    """
    gate, device = Gate(LONGEST_HOLD_NS), cupy().cuda.Device()
    for call in impls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in impls}
    for _ in range(REPLAYS // 2):
        for name, call in impls.items():
            device.synchronize()
            began = time.perf_counter()
            start, stop = cupy().cuda.Event(), cupy().cuda.Event()
            with gate.closed():
                start.record()
                call()
                stop.record()
                took = time.perf_counter() - began
            if took * 1e9 > LONGEST_HOLD_NS:
                raise RuntimeError(f"{name}: took the host {took:.2f} s, more than the device is held")
            stop.synchronize()
            times[name].append(float(cupy().cuda.get_elapsed_time(start, stop)) * 1e3)
    return times


def _time_us(run: Callable[[], Any]) -> float:
    cuda = cupy().cuda
    start, stop = cuda.Event(), cuda.Event()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(cuda.get_elapsed_time(start, stop)) * 1e3


def _capture(calls: Calls, framework: str, rounds: int) -> Callable[[], Any]:
    return (_capture_torch if framework == "torch" else _capture_cupy)(calls, rounds * len(calls))


def _capture_cupy(calls: Calls, count: int) -> Callable[[], Any]:
    cuda = cupy().cuda
    stream = cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for i in range(count):
            calls[i % len(calls)]()
        graph = stream.end_capture()
    return lambda: graph.launch(cuda.get_current_stream())


def _capture_torch(calls: Calls, count: int) -> Callable[[], Any]:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    replay: Callable[[], Any] = graph.replay
    return replay


def host_us(call: Callable[[], Any], repeats: int = 400) -> float:
    """Median host time in us of one call."""
    return statistics.median(host_times_in_turn({"": call}, repeats)[""])


def host_times_in_turn(
    calls: Mapping[str, Callable[[], Any]], repeats: int = 400, seconds: float = 0.6
) -> dict[str, list[float]]:
    """Host times in us of one call of each, some of each and again: whatever slows the host slows them all.

    The device catches up before each batch of calls, which is short where a call keeps it busy for long.
    """
    synchronize = cupy().cuda.Device().synchronize
    times: dict[str, list[float]] = {name: [] for name in calls}
    batch = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        most = seconds / HOST_ROUNDS / (time.perf_counter() - start)
        batch[name] = max(2, min(repeats // HOST_ROUNDS, int(most)))
    for _ in range(HOST_ROUNDS):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(batch[name]):
                call()
            times[name].append((time.perf_counter() - start) * 1e6 / batch[name])
    synchronize()
    return times


def call_times(calls: Calls, seconds: float = 0.5) -> list[float]:
    """Times in us of calls on the host, one after another, for about so many seconds; the first ones are left out.

    Five at least, or two of calls that take seconds each.
    """
    for call in calls:
        call()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 1_000:
        spent = time.perf_counter() - begun
        if spent > seconds and len(times) >= (5 if spent < 10 * seconds else 2):
            break
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


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


@functools.cache
def _copy_kernel() -> Any:
    return cupy().RawKernel(COPY, "copy")


def copy_calls(nbytes: int, sets: int) -> list[Callable[[], Any]]:
    """Calls that copy `nbytes` bytes by an elementwise kernel: the pace that a kernel which only moves can have."""
    xp, count = cupy(), max(nbytes // 16, 1)

    def call() -> Callable[[], Any]:
        source, target = (xp.zeros(16 * count, xp.uint8) for _ in range(2))
        return lambda: _copy_kernel()((-(-count // 1024),), (256,), (source, target, xp.uint64(count)))

    return [call() for _ in range(sets)]


def copy_gbps() -> float:
    """Device-to-device copy bandwidth, bytes read plus bytes written."""
    nbytes = 1 << 30
    return 2 * nbytes / graph_us(copy_calls(nbytes, 1)) / 1e3
