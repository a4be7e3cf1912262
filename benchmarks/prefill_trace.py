"""Clocks between trace points of the roles of sm90/prefill/prefill.cu: where a role waits, and for how long.

    python benchmarks/prefill_trace.py [--topk 640] [--tiles 7] [--sources DIR]

Compiles the kernel for 64 heads and 512 values with -DTRACE (sm90/prefill/trace.cuh). Rows: a role, two consecutive
points, mean clocks, and the number of times that a CTA passes them from its third tile on. Lists have lengths and a
sink, and lists of neighbouring tokens overlap by 90%.
"""

import argparse
import collections
import functools
import pathlib
import re

import numpy as np
from common import cupy

import cumla
from cumla.bench.problem import Sizes
from cumla.bench.sparse import Prefill
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.launch import recorded_launches
from cumla.kernels.cuda.sparse import kernels as sparse_kernels

FILE, NAME, LAYOUT = "sm90/prefill/prefill.cu", "sparse_mla_prefill", "DSV4_BF16"
ROLES = ("consumer 0", "consumer 1", "producers")
CTAS, TRACED, POINT_BITS = 256, 1024, 27  # as in trace.cuh


def points() -> list[str]:
    """The names of enum Point."""
    text = re.sub("//.*", "", compiler.find("sm90/prefill/trace.cuh").read_text())
    return re.findall(r"\w+", text.partition("enum Point {")[2].partition("}")[0])


def traced(case: Prefill) -> np.ndarray:
    """The words of each CTA and role, after two calls of a case."""
    module = cupy.RawModule(
        code=f"#define LAYOUT {LAYOUT}\n#define TRACE 1\n" + compiler.source(FILE),
        options=(*compiler.OPTIONS, "-arch=sm_90a"),
    )
    kept = sparse_kernels.kernel
    text = f"#define LAYOUT {LAYOUT}\n" + compiler.source(FILE)
    made = compiler.Kernel(module.get_function(NAME), compiler.packing(text, NAME, {}), compiler.parameters(text, NAME))
    sparse_kernels._hopper_prefill.cache_clear()  # type: ignore[attr-defined]
    vars(sparse_kernels)["kernel"] = lambda file, *args, **options: (
        made if file == FILE else kept(file, *args, **options)
    )
    try:
        arguments = case.arguments(case.inputs(Sizes("cuda")))
        call = functools.partial(cumla.sparse_mla_prefill, **arguments, backend="cuda")
        with recorded_launches():
            call()
            call()
    finally:
        vars(sparse_kernels)["kernel"] = kept
        sparse_kernels._hopper_prefill.cache_clear()  # type: ignore[attr-defined]
    words = cupy.ndarray((CTAS, len(ROLES), TRACED), np.uint32, module.get_global("prefill_trace"))
    return words[: cupy.cuda.Device().attributes["MultiProcessorCount"]].get()


def table(words: np.ndarray, names: list[str]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """{(role, point, next point): (mean clocks, times a CTA)}."""
    found: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for cta in words:
        for role, row in zip(ROLES, cta, strict=True):
            row = row[row != 0xFFFFFFFF]
            at = (row >> POINT_BITS).tolist()
            clocks = np.diff((row & (1 << POINT_BITS) - 1).astype(np.int64)) % (1 << POINT_BITS)
            for here, after, took in zip(at[:-1], at[1:], clocks, strict=True):
                found[role, names[here], names[after]].append(int(took))
    return {key: (float(np.mean(took)), len(took) / len(words)) for key, took in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topk", type=int, default=640)
    parser.add_argument("--tiles", type=int, default=7, help="tiles of each CTA")
    parser.add_argument("--sources", metavar="DIR", help="compile CUDA sources of DIR where it has them")
    args = parser.parse_args()
    if args.sources:
        compiler.look_first_in(pathlib.Path(args.sources))
    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    case = Prefill(512, 64, args.topk, 32 << 10, sms * args.tiles, lengths=True)
    for (role, here, after), (clocks, times) in sorted(table(traced(case), points()).items()):
        print(f"{role:11} {here:16} {after:16} {clocks:9.0f} {times:7.1f}")
