"""Operations on a device with arguments of any value, to be run under compute-sanitizer.

    tools/sanitize.sh             (or: python tests/fuzz_device.py [--backend cuda] [--ops attention] [--rounds 20])

Results are not compared. Every array is a separate allocation of its exact size, so that compute-sanitizer detects
an access one byte off; rows, pages and tables are strided, with or without the alignment that wide accesses need.
"""

import argparse
from dataclasses import replace

import cupy
import numpy as np

from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.sparse import kernels as sparse_kernels
from cumla.specs import SPECS
from cumla.specs.inputs import TINY
from support import fuzzed, operations

OPS = {  # values of --ops: the files of kernels whose examples they are
    "caches": ("sparse_cache", "prefill_rows", "dense_cache", "blocks", "advance", "indices", "shards"),
    "attention": ("sparse_attention", "dense_attention"),
    "indexer": ("indexer", "indexer_topk", "candidates"),
}
OPS["layers"] = tuple(sorted({spec.kernels for spec in SPECS.values()}.difference(*OPS.values())))  # all others


class Fuzz:
    """Random variants of operations, at random sizes."""

    def __init__(self, backend, seed):
        self.backend = backend
        self.rng = np.random.default_rng(seed)

    def choose(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def examples(self, files, sizes=(TINY, None)):
        """Every variant of the operations whose kernels these files have, new ones included. sizes: None is random."""
        for example in operations.EXAMPLES.values():
            if example.kernels not in files:
                continue
            seed = int(self.rng.integers(2**32))
            for size in sizes:
                fuzzed.call(example.spec, example.of_variant, self.backend, seed, size)

    def of_any_size(self, op, heads=None):
        """A call of any variant of an operation."""
        spec, size = SPECS[op], fuzzed.random_size(self.rng)
        size = size if heads is None else replace(size, heads=heads)
        fuzzed.call(spec, self.choose(*spec.variants), self.backend, int(self.rng.integers(2**32)), size)

    def attention(self):
        for kernel in sparse_kernels.KERNELS:
            with sparse_kernels.forced(kernel):
                self.of_any_size("sparse_mla_decode")
        for fewest, most in ((1, 16), (17, 32), (33, 70)):  # numbers of heads for each tile of Hopper's kernels
            with sparse_kernels.forced("hopper"):
                self.of_any_size("sparse_mla_prefill", int(self.rng.integers(fewest, most + 1)))
        with sparse_kernels.forced(self.choose("portable", "exact")):
            self.of_any_size("sparse_mla_prefill")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ops", choices=OPS, default="caches", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--define", action="append", default=[], metavar="MACRO", help="for the CUDA sources")
    args = parser.parse_args()
    compiler.OPTIONS += tuple(f"-D{macro}" for macro in args.define)
    cupy.cuda.set_allocator(None)  # no pool: memory outside an array is unallocated
    for seed in range(args.rounds):
        fuzz = Fuzz(args.backend, seed)
        if args.ops == "attention":
            fuzz.attention()
        fuzz.examples(OPS[args.ops])
    cupy.cuda.Device().synchronize()
    print(f"{args.rounds} rounds of {args.ops} on {args.backend}")


if __name__ == "__main__":
    main()
