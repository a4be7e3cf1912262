"""Suites that `cumla bench` does not have, with the same options: a layer's other operations, whole layers, frameworks.

    python -m benchmarks.suites layers compressor --batch 1,32 [--json FILE] [--compare OLD]

indices     maps of indices
compressor  compressors of V4 and of V4.1
norms       norms with RoPE, and inverse RoPE
merge       the merge of partial attention
metadata    window metadata of a step
products    products of FP8 weights and few tokens, at V4 Flash's sizes
layers      a step of decodes of each kind of attention layer, between its projections
invariant   batch-invariant decodes, and decodes by default: attention alone, and steps of sparse layers
frameworks  host time of a call by the framework of its arrays
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import framework_calls
import index_cases
import layer_cases
import product_cases
import step_cases

from cumla import __main__ as command
from cumla.bench.rows import Suite
from cumla.cli import bench
from cumla.cli.options import Parser

SUITES: dict[str, Suite] = {
    "indices": index_cases.index_maps,
    "compressor": layer_cases.compressor,
    "norms": layer_cases.norms,
    "merge": layer_cases.merges,
    "metadata": step_cases.metadata,
    "products": product_cases.products,
    "layers": step_cases.layers,
    "invariant": step_cases.invariant,
    "frameworks": framework_calls.frameworks,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run as `cumla bench`. Returns the exit status."""
    parser = Parser(prog="python -m benchmarks.suites")
    bench.add_options(parser, tuple(SUITES))
    parser.description = (__doc__ or "").partition("\n")[0]
    parser.set_defaults(run=functools.partial(bench.run, suites=SUITES))
    return command.main(argv, parser)


if __name__ == "__main__":
    sys.exit(main())
