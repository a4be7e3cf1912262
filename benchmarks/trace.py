"""Steps of a request trace: vLLM's chain against cumla's, for each part of a layer.

    python -m benchmarks.trace --heads 64 --steps decode64,mixed64x2048 [--json benchmarks/results/h200/trace.json]

decodeN are N requests at random positions of their outputs, mtpKxN decodes of K tokens each, mixedRxT steps of a
scheduler with R running requests and T tokens. Peers are vLLM's operations and its FlashMLA, where vLLM is installed;
results of both sides are compared before they are timed. A ratio above 1 is cumla's gain. Exit status 1 if a part
failed or the sides disagree.
"""

import argparse
import pathlib
import sys
import time

import common
from trace_layers import KINDS
from trace_rows import TraceOptions, measured
from trace_steps import parsed
from trace_table import record, table

from cumla.bench.measure import environment
from cumla.bench.rows import reason
from cumla.dispatch.backends import BACKENDS
from cumla.errors import InputError
from cumla.replay.options import HOST_DEFAULTS, choose_backend
from cumla.replay.trace import requests_of
from cumla.timing import limit_blas_threads

SAVE_SECONDS = 5.0  # between two writes of the rows: an interrupted run leaves the rows it has measured


def names(text):
    return tuple(part.strip() for part in text.split(","))


def numbers(text):
    return tuple(int(part) for part in text.split(","))


def parser():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows and the table")
    made.add_argument("--steps", type=names, metavar="NAME,...", help="default: the backend's steps")
    made.add_argument("--kinds", type=names, default=tuple(KINDS), metavar="NAME,...", help=", ".join(KINDS))
    made.add_argument("--heads", type=numbers, metavar="N,...", help="default: 64,16,128 on a device, 8 on the CPU")
    made.add_argument("--layers", type=int, default=8, metavar="N", help="layers in one timed call (default: 8)")
    made.add_argument("--trace", type=pathlib.Path, metavar="FILE.jsonl", help="default: the trace in the package")
    made.add_argument("--backend", choices=list(BACKENDS), help="default: cuda if there is a device, else cpu")
    return made


def main(argv=None):
    args = parser().parse_args(argv)
    for kind in args.kinds:
        if kind not in KINDS:
            raise InputError(f"--kinds: got {kind!r}, expected {', '.join(KINDS)}")
    for name in args.steps or ():
        parsed(name)
    options = TraceOptions(choose_backend(args.backend), args.kinds, args.heads, args.steps, args.layers)
    requests = requests_of(args.trace)
    if not options.on_device:
        requests = [request.clipped(HOST_DEFAULTS.max_len) for request in requests[: HOST_DEFAULTS.requests]]
        limit_blas_threads()
    where = environment(options.on_device)
    facts = {"environment": where, "backend": options.backend}
    print(f"{where['device']}, backend {options.backend}", flush=True)
    rows, saved = [], time.monotonic()
    for row in measured(options, requests):
        rows.append(row)
        us = row["us"] if row["us_graph"] is None else row["us_graph"]
        time_text = f"{'-':>10}" if us is None else f"{us:10.2f}"
        text = f"{row['op']:22} {row['config']:34} {row['impl']:6} {time_text}  {row.get('error', '')}"
        print(text.rstrip(), flush=True)
        if args.json and time.monotonic() - saved > SAVE_SECONDS:
            common.write(args.json, {**facts, "rows": rows})
            saved = time.monotonic()
    print("\n".join(table(rows)))
    if args.json:
        common.write(args.json, {**facts, "table": record(rows), "rows": rows})
    return 1 if any(row.get("error") for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {reason(error)}")
