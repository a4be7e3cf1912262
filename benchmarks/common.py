"""Options, tables and JSON of all benchmarks.

A row is {op, config, impl, us, us_graph, gbps, tflops, limit_us, max_abs_err, checked}. `us_graph` is the time of one
call inside a CUDA graph of back-to-back calls (median over replays); inputs rotate through several sets, so that they
are not in the L2 cache. `us` is the host's time for one call, launch included. `limit_us` is the least time that an
H200's memory (4.3 TB/s) and tensor cores (790 TFLOP/s) allow. `peer` is the function and version of another library.
"""

import argparse
import contextlib
import logging
import pathlib

try:
    import cupy
except ImportError:  # --help needs no GPU
    cupy = None

from cumla.bench import rows
from cumla.bench.measure import L2_BYTES, copy_gbps, environment
from cumla.bench.peers import has_peer
from cumla.bench.problem import Sizes
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.sparse import kernels as sparse_kernels

__all__ = ["L2_BYTES", "Report", "arguments", "case_arguments", "copy_gbps", "cupy", "has_peer", "run", "write"]


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows and what they were run on")
    parser.add_argument(
        "--sources", metavar="DIR", help="compile CUDA sources of DIR where it has them, for experiments"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="run only rows whose op or config has TEXT")
    return parser


def case_arguments(description):
    """The parser of `run`'s options."""
    parser = arguments(description)
    parser.add_argument("--kernel", choices=sparse_kernels.KERNELS, help="run sparse attention with this kernel")
    return parser


class Report:
    """Collects rows, prints them as a table, and writes them to a file at the end."""

    def __init__(self, args):
        if cupy is None:
            raise SystemExit("benchmarks need an NVIDIA GPU and CuPy: pip install '.[cuda13]'")
        self.args, self.rows = args, []
        logging.basicConfig(format="%(message)s")
        logging.getLogger("cumla").setLevel(logging.INFO)  # a first call says that it compiles
        if args.sources:
            compiler.look_first_in(pathlib.Path(args.sources))
        print(
            f"{'op':38} {'config':44} {'impl':16} {'us':>9} {'us_graph':>9} {'limit':>8} {'GB/s':>7} {'TF':>7} "
            f"{'max err':>9}"
        )

    def wants(self, op, config):
        return self.args.only in op or self.args.only in config

    def add(self, op, config, impl, us_graph, bytes_moved=0, flop=0, max_abs_err=None, checked=True):
        """Add a row that is not a case's: the caller has measured its time."""
        row = rows.numbers_of(us_graph, bytes_moved, flop) | {"max_abs_err": max_abs_err, "checked": checked}
        self.add_row({"op": op, "config": config, "impl": impl, "us": None, "us_graph": us_graph, **row})

    def add_row(self, row):
        self.rows.append(row)
        columns = (("us", "9.2f"), ("us_graph", "9.2f"), ("limit_us", "8.2f"), ("gbps", "7.0f"), ("tflops", "7.0f"),
                   ("max_abs_err", "9.2g"))  # fmt: skip
        text = " ".join(
            f"{'-':>{form.partition('.')[0]}}" if row.get(key) is None else f"{row[key]:{form}}"
            for key, form in columns
        )
        print(f"{row['op']:38} {row['config']:44} {row['impl']:16} {text} {row.get('error', '')}".rstrip(), flush=True)

    def fail(self, op, config, impl, error):
        """Add a row with the error of a failed measurement."""
        text = rows.reason(error)
        self.rows.append({"op": op, "config": config, "impl": impl, "us": None, "us_graph": None, "error": text})
        print(f"{op:38} {config:44} {impl:16} {text}", flush=True)

    def finish(self, **extra):
        if self.args.json:
            write(self.args.json, {"environment": environment(), **extra, "rows": self.rows})


def write(path, record):
    """Write a record as JSON, one row per line, so that versions of a file can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rows.text(record))


def run(args, cases, backends=(), **extra):
    """Measure cases, one after another, and write a row for each implementation.

    Args:
        args: parsed options of `case_arguments`
        backends: backends to measure in addition to the CUDA sources
        extra: further entries of the file, by name; functions are called with all rows at the end
    """
    import cupy

    report, failed = Report(args), False
    known = {name: x for name, x in extra.items() if not callable(x)}
    for case in cases:
        if not report.wants(case.op, str(case)):
            continue
        try:
            with sparse_kernels.forced(args.kernel) if args.kernel else contextlib.nullcontext():
                for row in rows.rows_of(case.problem(Sizes("cuda", beside=tuple(backends)))):
                    report.add_row(row)
        except Exception as error:  # the next case may succeed
            report.fail(case.op, str(case), "cumla", error)
            failed = True
        cupy.get_default_memory_pool().free_all_blocks()
        report.finish(**known)  # writes the rows measured so far
    if len(known) < len(extra):
        report.finish(**{name: x(report.rows) if callable(x) else x for name, x in extra.items()})
    return 1 if failed else 0
