"""What every benchmark shares: options, tables and JSON.

A row is {op, config, impl, us, us_graph, gbps, tflops, limit_us, max_abs_err, checked}: `us_graph` is the time of one
call inside a CUDA graph of back-to-back calls (median over replays), inputs rotated through several sets so that the L2
cache does not answer; `us` is the host's time for one call, launch included; `limit_us` the least that an H200's memory
(4.3 TB/s) and products (790 TFLOP/s) allow. A row of another library names its function and version as `peer`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib

import cupy

from cumla.bench import rows
from cumla.bench.measure import L2_BYTES, copy_calls, copy_gbps, environment, graph_us, host_us, limit_us, sets_for
from cumla.bench.peers import has_peer
from cumla.bench.problem import Problem, Sizes
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.launch import recorded_launches
from cumla.kernels.cuda.sparse import kernels as sparse_kernels
from cumla.replay.errors import RunError

__all__ = [
    "L2_BYTES", "Report", "arguments", "as_torch", "copy_calls", "copy_gbps", "environment", "graph_us", "has_peer",
    "host_us", "measure", "random_bits", "run", "sets_for",
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
        print(
            f"{'op':38} {'config':44} {'impl':16} {'us':>9} {'us_graph':>9} {'limit':>8} {'GB/s':>7} {'TF':>7} "
            f"{'max err':>9}"
        )

    def wants(self, op, config):
        return self.args.only in op or self.args.only in config

    def add(
        self, op, config, impl, us=None, us_graph=None, bytes_moved=None, flop=None, max_abs_err=None, checked=True
    ):
        seconds = (us_graph or us or 0) * 1e-6
        self.add_row({
            "op": op,
            "config": config,
            "impl": impl,
            "us": us,
            "us_graph": us_graph,
            "limit_us": limit_us(bytes_moved or 0, flop or 0) or None,
            "gbps": bytes_moved / seconds / 1e9 if bytes_moved and seconds else None,
            "tflops": flop / seconds / 1e12 if flop and seconds else None,
            "max_abs_err": max_abs_err,
            "checked": checked,
        })  # fmt: skip

    def add_row(self, row):
        self.rows.append(row)
        columns = (("us", "9.2f"), ("us_graph", "9.2f"), ("limit_us", "8.2f"), ("gbps", "7.0f"), ("tflops", "7.0f"),
                   ("max_abs_err", "9.2g"))  # fmt: skip
        text = " ".join(
            f"{'-':>{form.partition('.')[0]}}" if row.get(key) is None else f"{row[key]:{form}}"
            for key, form in columns
        )
        print(f"{row['op']:38} {row['config']:44} {row['impl']:16} {text}", flush=True)

    def fail(self, op, config, impl, error):
        """A row of what could not be measured."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self.rows.append({"op": op, "config": config, "impl": impl, "us": None, "us_graph": None, "error": text})
        print(f"{op:38} {config:44} {impl:16} {text}", flush=True)

    def finish(self, **extra):
        if self.args.json:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            record = {"environment": environment(), **extra, "rows": self.rows}
            self.args.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(report, op, config, impls, bytes_moved, check=None, clear=None, flop=0, functions=None):
    """Check and time several implementations of one operation; replays of their graphs in turn.

    impls  {name: (framework, calls)}, a call a set of inputs; "copy" moves as many bytes and is not checked
    check  given the result of the first call, returns the largest error; raises AssertionError if it is wrong
    clear  called before each implementation is checked: whatever calls write in place is wiped
    functions  of other libraries' implementations, which function of which version that is
    """
    for row in rows.rows_of(Problem(op, config, impls, bytes_moved, flop or 0, check, clear, functions or {})):
        report.add_row(row)


def run(description, cases, beside=(), attention=False, **extra):
    """Measure cases of cumla.bench, one after another, and write what came of each.

    beside     backends that are measured beside the CUDA sources
    attention  whether there is a choice of kernels
    """
    parser = arguments(description)
    parser.add_argument(
        "--versions", nargs="+", metavar="DIR",
        help="for experiments: compare versions of the sources instead, csrc/ or folders with files to take first",
    )  # fmt: skip
    if attention:
        parser.add_argument("--kernel", choices=sparse_kernels.KERNELS, help="instead of the one that is chosen")
    args = parser.parse_args()
    report, failed = Report(args), False
    for case in cases:
        if not report.wants(case.op, str(case)):
            continue
        forced = getattr(args, "kernel", None)
        try:
            with sparse_kernels.forced(forced) if forced else contextlib.nullcontext():
                problem = case.problem(Sizes("cuda", beside=() if args.versions else tuple(beside)))
                for row in versions(problem, args.versions) if args.versions else rows.rows_of(problem):
                    report.add_row(row)
            del problem
        except Exception as error:  # the next one may do
            report.fail(case.op, str(case), "cumla", error)
            failed = True
        cupy.get_default_memory_pool().free_all_blocks()
        report.finish(**extra)  # as far as it has come
    return 1 if failed else 0


def versions(problem, folders):
    """Versions of the CUDA sources against one another; the error of a wrong one is nan."""
    framework, calls = problem.impls["cumla"]
    for folder in folders:
        compiler.look_first_in(pathlib.Path(folder))
        with recorded_launches():
            error = float("nan")
            with contextlib.suppress(AssertionError, RunError):
                if problem.clear:
                    problem.clear()
                error = problem.check(calls[0]())
            us = graph_us(calls, framework)
        yield {
            "op": problem.op, "config": problem.config, "impl": folder, "us": None, "us_graph": us,
            "limit_us": limit_us(problem.bytes_moved, problem.flop), "gbps": problem.bytes_moved / us / 1e3,
            "tflops": problem.flop / us / 1e6 if problem.flop else None, "max_abs_err": error,
            "checked": error == error,
        }  # fmt: skip


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
