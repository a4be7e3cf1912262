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

CALLS_PER_GRAPH = 24
REPLAYS = 20


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows and what they were run on")
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
        print(f"{'op':38} {'config':34} {'impl':12} {'us':>9} {'us_graph':>9} {'GB/s':>7} {'TF':>7} {'max err':>9}")

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
            f"{op:38} {config:34} {impl:12} {text[0]:>9} {text[1]:>9} {text[2]:>7} {text[3]:>7} {error:>9}", flush=True
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
        run = {"cwd": root, "capture_output": True, "text": True, "check": True}
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout.strip()
        return head + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def graph_us(calls, framework="cupy"):
    """Median time in us of one call inside a graph of back-to-back calls.

    calls      functions without arguments, one a set of inputs; they run in turn
    framework  "cupy" or "torch": whose capture the calls run under
    """
    for call in calls:
        call()
    cupy.cuda.Device().synchronize()
    count = max(CALLS_PER_GRAPH // len(calls), 1) * len(calls)
    replay = _capture_torch(calls, count) if framework == "torch" else _capture_cupy(calls, count)
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(REPLAYS + 2):
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / count)
    return statistics.median(times[2:])


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


def host_us(call, repeats=200):
    """Median host time in us of one call, the device left to catch up between batches."""
    for _ in range(3):
        call()
    times = []
    for _ in range(10):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(repeats // 10):
            call()
        times.append((time.perf_counter() - start) * 1e6 / (repeats // 10))
    cupy.cuda.Device().synchronize()
    return statistics.median(times)


def copy_gbps():
    """Device-to-device copy bandwidth, bytes read plus bytes written."""
    source = cupy.zeros(1 << 30, cupy.uint8)
    target = cupy.empty_like(source)
    us = graph_us([lambda: cupy.cuda.runtime.memcpyAsync(
        target.data.ptr, source.data.ptr, source.nbytes, 3, cupy.cuda.get_current_stream().ptr)])  # fmt: skip
    return 2 * source.nbytes / us / 1e3
