"""What every benchmark shares: timing in CUDA graphs, checks before timing, tables and JSON.

A row is {op, config, impl, us, us_graph, gbps, tflops, max_abs_err, checked}: `us_graph` is the time of one call
inside a CUDA graph of back-to-back calls (median over replays), inputs rotated through several sets so that
the L2 cache does not answer; `us` is the host's time for one call, launch included.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import pathlib
import statistics
import subprocess
import sys
import tempfile

import cupy

from cumla.bench.measure import L2_BYTES, copy_calls, copy_gbps, graph_times_in_turn, graph_us, host_us, sets_for
from cumla.bench.measure import environment as measure_environment
from cumla.bench.peers import has_peer
from cumla.kernels.cuda import compile as compiler

__all__ = [
    "L2_BYTES", "Report", "arguments", "as_torch", "commit", "copy_calls", "copy_gbps", "environment",
    "graph_us", "has_peer", "host_us", "measure", "random_bits", "sets_for",
]  # fmt: skip


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows and what they were run on")
    parser.add_argument(
        "--sources", metavar="DIR", help="compile CUDA sources of DIR where it has them, for experiments"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="run only rows whose op or config has TEXT")
    return parser


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
    return {**measure_environment(), "commit": commit()}


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


def measure(report, op, config, impls, bytes_moved, check=None, clear=None, flop=None, host_calls=200):
    """Check and time several implementations of one operation; replays of their graphs in turn.

    impls       {name: (framework, calls)}, a call a set of inputs; "copy" moves as many bytes and is not checked
    check       given the result of the first call, returns the largest error; raises AssertionError if it is wrong
    clear       called before each implementation is checked: whatever calls write in place is wiped
    host_calls  how many calls the host's time is measured by
    """
    errors = {}
    for name, (_, calls) in impls.items():
        if clear:
            clear()
        result = calls[0]()
        errors[name] = check(result) if check is not None and name != "copy" else None
    times = graph_times_in_turn(impls)
    for name, (_, calls) in impls.items():
        report.add(
            op, config, name, us=host_us(calls[0], host_calls), us_graph=statistics.median(times[name]),
            bytes_moved=bytes_moved, flop=flop, max_abs_err=errors[name], checked=errors[name] is not None,
        )  # fmt: skip


@functools.cache
def vllm_ops():
    """torch.ops with the operations of vLLM's library, which is sought on sys.path (it may be packed); None without."""
    for folder in map(pathlib.Path, sys.path):
        packed, unpacked = folder / "vllm_c_ops.so.xz", folder / "vllm_c_ops.so"
        if not (packed.exists() or unpacked.exists()):
            continue
        import torch

        with tempfile.TemporaryDirectory() as scratch:
            if not unpacked.exists():
                unpacked = pathlib.Path(scratch) / unpacked.name
                unpacked.write_bytes(lzma.decompress(packed.read_bytes()))
            torch.ops.load_library(str(unpacked))
        return torch.ops
    return None


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
