"""Operations on a device with arguments of any value, to be run under compute-sanitizer.

    tools/sanitize.sh             (or: python tests/fuzz_device.py [--backend cuda] [--ops attention] [--rounds 20])

Results are not compared. Every array is a separate allocation of its exact size, so that compute-sanitizer detects
an access one byte off; rows, pages and tables are strided, with or without the alignment that wide accesses need.
"""

import argparse
from dataclasses import replace

import cupy
import numpy as np

import cumla
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.sparse import kernels as sparse_kernels
from cumla.specs import SPECS
from cumla.specs.inputs import TINY
from support import fuzzed, operations
from support.indexing import anything, anything_like
from support.lab import BF16

OPS = {  # values of --ops: the files of kernels whose examples they are
    "caches": ("sparse_cache", "prefill_rows", "dense_cache", "blocks", "advance", "indices", "shards"),
    "attention": ("sparse_attention", "dense_attention"),
    "indexer": ("indexer", "indexer_topk", "candidates"),
    "layers": ("norm_rope", "compressor", "latents", "projection"),
}


class Fuzz:
    """Random arguments. Everything that an operation may read is initialised, everything that it must write is not."""

    def __init__(self, backend, seed):
        self.backend = backend
        self.rng = np.random.default_rng(seed)

    def choose(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def put(self, array, gap=0):
        """A device array with `gap` elements after each row, and nothing after the last."""
        array = np.ascontiguousarray(array)
        if not gap or array.ndim != 2 or not array.size:
            return cupy.asarray(array)
        rows, width = array.shape
        flat = cupy.zeros((rows - 1) * (width + gap) + width, array.dtype)
        strided = cupy.lib.stride_tricks.as_strided(flat, array.shape, ((width + gap) * array.itemsize, array.itemsize))
        strided[...] = cupy.asarray(array)
        return strided

    def ints(self, *shape):
        return self.put(anything(self.rng, shape))

    def like(self, x):
        """An argument of an example on the device, of any value: integers, bytes; rows of NaN and infinities."""
        if isinstance(x, list | tuple):
            return type(x)(self.like(part) for part in x)
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype == np.uint8:
            return self.put(self.rng.integers(0, 256, x.shape, np.uint8) if self.rng.random() < 0.5 else x)
        if x.dtype.kind not in "biu" and x.ndim:
            x = x.copy()
            x[self.rng.random(x.shape[:-1]) < 0.1] = self.choose(np.nan, np.inf, -np.inf)
        return self.put(anything_like(self.rng, x))

    def examples(self, files, sizes=(TINY, None)):
        """Every variant of the operations whose kernels these files have, new ones included. sizes: None is random."""
        for example in operations.EXAMPLES.values():
            if example.kernels not in files:
                continue
            seed = int(self.rng.integers(2**32))
            if hasattr(example, "spec"):
                for size in sizes:
                    fuzzed.call(example.spec, example.of_variant, self.backend, seed, size)
            else:
                arguments = operations.arguments_of(example, seed)
                given = {name: self.like(x) for name, x in arguments.items()}
                operations.called(example)(**given, backend=self.backend)

    def cache(self, layout):
        blocks, block_size = int(self.rng.integers(1, 4)), int(self.choose(1, 2, 53, 64))
        pages = self.rng.integers(0, 256, (blocks, block_size * layout.token_bytes), np.uint8)
        return self.put(pages, self.choose(0, 1, 16)), blocks, block_size

    def numbers(self, *shape, dtype=BF16):
        """Values of ordinary size, a few of any size."""
        values = self.rng.standard_normal(shape)
        values[self.rng.random(shape) < 0.001] = self.choose(np.nan, np.inf, -np.inf, 1e6, 1e30, 1e38, 1e-30, 0.0)
        with np.errstate(over="ignore"):
            return self.put(values.astype(dtype))

    def scores(self):
        """Logits of a few queries, top-k of both kinds, and both at once; over keys and over pages."""
        heads, queries, keys = int(self.choose(3, 32, 64)), int(self.rng.integers(1, 9)), int(self.rng.integers(1, 700))
        rest = {"backend": self.backend}
        q = self.put(self.rng.integers(0, 256, (queries, heads, 128), np.uint8))
        weights = self.numbers32(queries, heads)
        kv = self.put(self.rng.integers(0, 256, (keys, 128), np.uint8)), self.numbers32(keys)
        if self.rng.random() < 0.5:
            kv = tuple(self.put(self.rng.integers(0, 256, (keys, n), np.uint8)) for n in (64, 4))
        ranges, width = (self.ints(queries), self.ints(queries)), int(self.choose(0, 5, 300))
        topk = int(self.choose(1, 7, 64))
        cumla.fp8_mqa_logits(q, kv, weights, *ranges, True, width, **rest)
        cumla.indexer_topk(
            q, kv, weights, topk, cu_seqlen_ks=ranges[0], cu_seqlen_ke=ranges[1], max_seqlen_k=width, **rest
        )
        layout = self.choose(cumla.INDEXER_FP8, cumla.INDEXER_MXFP4)
        pages, _, block_size = self.cache(layout)
        cache, next_n, columns = layout.view(pages, block_size), *map(int, self.rng.integers((1, 0), (7, 6)))
        tokens = queries // next_n * next_n
        q, weights = q[:tokens].reshape(-1, next_n, heads, 128), weights[:tokens]
        lens = self.ints(len(q)) if self.rng.random() < 0.5 else self.ints(len(q), next_n)
        table = self.ints(len(q), columns)
        cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, clean_logits=True, **rest)
        cumla.indexer_topk(q, cache, weights, topk, context_lens=lens, block_table=table, **rest)
        tokens = len(weights)
        slots = cupy.empty((tokens, topk), np.int32), cupy.empty(tokens, np.int32)
        valid = self.put(self.rng.random(tokens) < 0.5) if self.rng.random() < 0.5 else None
        cumla.indexer_topk(
            q, cache, weights, topk, context_lens=lens, block_table=table, slots=slots, is_valid_token=valid, **rest
        )
        blocks, size = cupy.empty((tokens, int(self.choose(1, 5))), np.int32), int(self.choose(8, 3))
        cumla.indexer_topk(
            q, cache, weights, topk, context_lens=lens, block_table=table, candidate_blocks=blocks,
            candidate_block_size=size, **rest,
        )  # fmt: skip
        schedule = cupy.empty((int(self.rng.integers(1, 200)) + 1, 2), np.int32)
        cumla.get_paged_mqa_logits_metadata(lens, 64, len(schedule) - 1, out=schedule, **rest)

    def choice(self):
        rows, width = int(self.rng.integers(1, 5)), int(self.choose(1, 50, 3_000, 20_000, 70_000))
        logits = self.rng.standard_normal((rows, width)).astype(np.float32)
        logits[self.rng.random(logits.shape) < 0.1] = self.choose(0, np.nan, np.inf, -np.inf)
        logits = self.put(np.sort(logits) if self.rng.random() < 0.3 else logits, self.choose(0, 1, 4))
        topk = int(self.choose(0, 1, 200, 512, 2_048, 5_000))
        cumla.top_k_per_row(logits, topk, self.ints(rows), self.ints(rows), backend=self.backend)
        cumla.top_k_per_row(logits, topk, backend=self.backend)
        cumla.top_k_per_row(logits, topk, seq_lens=self.ints(1), next_n=rows, backend=self.backend)

    def numbers32(self, *shape):
        return self.numbers(*shape, dtype=np.float32)

    def queries(self):
        tokens, heads = (int(x) for x in self.rng.integers((0, 1), (20, 70)))
        q, table = self.numbers(tokens, heads, 128), self.numbers32(50, 64)
        for rope_first in (False, True):
            cumla.fused_indexer_q_rope_quant(
                self.ints(tokens), q, table, self.numbers32(tokens, heads), rope_first=rope_first,
                is_neox=bool(self.choose(False, True)), q_format=str(self.choose("fp8", "mxfp4", "mxfp4_rows")),
                backend=self.backend,
            )  # fmt: skip

    def indexer(self):
        self.scores()
        self.choice()
        self.queries()

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


MORE = {"attention": Fuzz.attention, "indexer": Fuzz.indexer}  # calls beside the examples, by values of --ops


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
        if args.ops in MORE:
            MORE[args.ops](fuzz)
        fuzz.examples(OPS[args.ops])
    cupy.cuda.Device().synchronize()
    print(f"{args.rounds} rounds of {args.ops} on {args.backend}")


if __name__ == "__main__":
    main()
