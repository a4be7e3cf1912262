"""Problems of tests/soak_device.py: each operation at shapes that select other kernels or divisions of work."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cumla
from cumla.specs import SPECS, compressor, dense_attention, sparse_attention
from cumla.specs.inputs import Size
from cumla.specs.measured import Measured
from support.attention import make_indices, steep
from support.lab import BF16

BLOCK = 64
BASE_ROWS = 1 << 12  # random rows of a cache, which are repeated


class Problem(NamedTuple):
    """A call of an operation by names of its arguments.

    inputs   what it only reads
    outputs  {name: (shape, dtype)}: what it writes and does not read
    states   what it reads and writes, such that the same call finds and leaves the same again
    plan     what makes a plan, if it takes one
    """

    op: str
    name: str
    call: Callable[..., Any]
    inputs: dict[str, Any]
    outputs: dict[str, tuple[tuple[int, ...], Any]]
    states: dict[str, Any] | None = None
    plan: Callable[[], Any] | None = None


class Inputs:
    """Random arrays on the device. tiny: on an emulated one, which takes a tenth of a second for a few rows."""

    def __init__(self, rng, tiny):
        import cupy

        self.rng, self.tiny, self.cupy = rng, tiny, cupy

    def put(self, array, dtype=None):
        return self.cupy.asarray(np.ascontiguousarray(array, dtype))

    def normal(self, *shape, dtype=BF16):
        return self.put(self.rng.standard_normal(shape, np.float32).astype(dtype))

    def lengths(self, most, *shape):
        return self.put(self.rng.integers(0, most + 1, shape), np.int32)

    def e4m3(self, *shape):
        return self.put(self.rng.integers(0, 0x7F, shape, np.uint8))

    def pages(self, layout, tokens):
        """A cache of `tokens` rows."""
        blocks, base = -(-tokens // BLOCK), min(BASE_ROWS, tokens)
        cache = layout.allocate(blocks, BLOCK, self.cupy)
        rows = self.rng.standard_normal((base, layout.head_dim), np.float32)
        rows = self.put(rows.astype(BF16))
        for start in range(0, tokens, base):
            slots = self.put(np.arange(start, min(start + base, tokens)))
            if layout is cumla.INDEXER_FP8:
                cumla.indexer_k_quant_and_cache(rows[: len(slots)], cache, slots)
            else:
                cumla.quantize_and_insert_k_cache(rows[: len(slots)], cache, slots, BLOCK, layout=layout)
        return cache

    def table(self, requests, columns, blocks):
        return self.put(self.rng.integers(0, blocks, (requests, columns)), np.int32)


def problems(rng, tiny):
    """All problems. tiny: for an emulated device."""
    make = Inputs(rng, tiny)
    return [
        problem for of_op in (sparse_decodes, prefills, scores, choices, compressors, dense) for problem in of_op(make)
    ]


def problem_of(op, name, x, spec, arguments, plan=None):
    """A call of the spec's function, which writes into arrays of its own."""
    found = spec.results(arguments)
    names = spec.outputs if len(found) == len(spec.outputs) else [f"{spec.outputs[0]}[{i}]" for i in range(len(found))]
    outputs = {name: (array.shape, np.dtype(array.dtype)) for name, array in zip(names, found, strict=True)}
    of_way = {way: [name for name, array in spec.arrays.items() if array.way == way] for way in ("out", "in out")}
    inputs, states = dict(arguments), {name: arguments[name] for name in of_way["in out"]}
    for written in of_way["out"]:
        array = inputs.pop(written)
        outputs[written] = array.shape, array.dtype

    def call(**given):
        spec.function(**spec.results_in([given.pop(name) for name in names]), **given)

    return Problem(op, name, call, inputs, outputs, states, plan)


class Soaked(Measured):
    """Any entries in lists, and lengths of any number; queries for heads whose maxima rise, by little and by much.

    huge  whether some rows of caches overflow float16: tiles with them are recomputed
    """

    def __init__(self, rng, huge=False, **size):
        super().__init__("cuda", Size(**size))
        self.rng, self.huge = rng, huge

    def queries(self, *shape, dtype=BF16):
        return self.put((self.rng.standard_normal(shape, np.float32) * steep(shape[-2])).astype(dtype))

    def cache(self, layout, block_size=None):
        if not self.huge:
            return super().cache(layout, block_size)
        rows = self.rows(self.size.pages * self.size.block_size, layout.head_dim)
        rows[5:8:2] *= BF16(2.0**20)
        cache, slots = self.new_cache(layout), self.xp.arange(len(rows))
        cumla.quantize_and_insert_k_cache(rows, cache, slots, self.size.block_size, layout=layout)
        return cache

    def lists(self, width, end, *shape):
        indices = make_indices(self.rng, *shape, width, end)
        return self.put(indices), self.integers(width + 1, *shape) if self.size.lengths else None

    def slot_lists(self, queries, width, slots, block_size, ratio):
        return self.lists(width, slots, self.size.requests, queries)

    def row_lists(self, windows):
        found = self.lists(self.size.topk, self.size.rows, self.size.tokens, 1)
        return [x if x is None else x[:, 0] for x in found]

    def cached(self):
        return self.integers(self.size.context + 1, self.size.requests)


def sparse_decodes(make):
    sizes = (  # layout, heads, requests, queries of each, keys and extra keys, ragged, options
        (cumla.DSV4_FP8, 64, 1, 1, 128, 512, False, {}),
        (cumla.DSV4_FP8, 64, 32, 1, 128, 512, True, {}),
        (cumla.DSV4_FP8, 64, 128, 2, 128, 512, False, {}),
        (cumla.DSV4_FP8, 16, 66, 1, 128, 1024, True, {}),
        (cumla.DSV4_FP8, 128, 40, 2, 128, 512, True, {"batch_invariant": True}),
        (cumla.V32_FP8, 128, 32, 1, 2048, 0, False, {}),
        (cumla.V32_FP8, 32, 3, 1, 2048, 0, True, {}),
    )
    if make.tiny:
        sizes = ((cumla.DSV4_FP8, 8, 1, 1, 300, 60, False, {}), (cumla.V32_FP8, 8, 3, 1, 150, 0, True, {}))
    for size in sizes:
        yield decode(make, *size)
    # Tiles that the fast kernel leaves to the exact one, which CTAs claim dynamically.
    yield decode(make, cumla.DSV4_FP8, 64, 3 if make.tiny else 96, 1, 128, 0, False, {}, huge=True)


def decode(make, layout, heads, requests, s_q, topk, extra, ragged, options, huge=False):
    x = Soaked(
        make.rng, huge, requests=requests, tokens=requests * s_q, heads=heads, window=topk, topk=extra, lengths=ragged,
        pages=4 if make.tiny else 1 << 11,
    )  # fmt: skip
    arguments = sparse_attention.decode(x, layout, layout if extra else None) | {"attn_sink": None} | options
    name = f"{layout.name}, {heads} heads, {requests} x {s_q}, {topk} + {extra} keys" + ", ragged" * ragged
    name += ", invariant" * bool(options) + ", tiles computed again" * huge
    return problem_of("decode", name, x, SPECS["sparse_mla_decode"], arguments, cumla.DecodePlan)


def prefills(make):
    rows = 200 if make.tiny else 1 << 15
    sizes = (
        (16, 512, 512, 640, True),
        (32, 576, 256, 640, True),
        (64, 512, 700, 640, True),
        (128, 576, 64, 2048, False),
    )
    if make.tiny:
        sizes = (8, 576, 3, 130, True), (40, 512, 3, 130, False)
    for heads, dim, tokens, topk, ragged in sizes:
        x = Soaked(make.rng, rows=rows, tokens=tokens, heads=heads, topk=topk, lengths=ragged)
        arguments = sparse_attention.prefill(x, dim) | {"attn_sink": None}
        name = f"{heads} heads of {dim}, {tokens} x {topk} keys" + ", ragged" * ragged
        yield problem_of("prefill", name, x, SPECS["sparse_mla_prefill"], arguments)


def scored_keys(make, queries, keys):
    firsts = make.rng.integers(0, keys // 2, queries)
    return {
        "q": make.e4m3(queries, 64, 128), "kv": make.e4m3(keys, 128), "kv_scales": make.normal(keys, dtype=np.float32),
        "weights": make.normal(queries, 64, dtype=np.float32), "cu_seqlen_ks": make.put(firsts, np.int32),
        "cu_seqlen_ke": make.put(firsts + make.rng.integers(0, keys, queries), np.int32),
    }  # fmt: skip


def scored_pages(make, cache, requests, next_n, rows):
    columns = rows // BLOCK
    return {
        "q": make.e4m3(requests, next_n, 64, 128), "weights": make.normal(requests * next_n, 64, dtype=np.float32),
        "context_lens": make.lengths(rows, requests), "block_table": make.table(requests, columns, len(cache)),
    }  # fmt: skip


def scores(make):
    for queries, keys in ((9, 300),) if make.tiny else ((40, 16384), (512, 8192)):
        inputs = scored_keys(make, queries, keys)

        def call(**arguments):
            cumla.fp8_mqa_logits(**arguments, clean_logits=True)

        outputs = {"out": ((queries, keys), np.float32)}
        yield Problem("indexer", f"{queries} queries, {keys} keys", call, inputs, outputs)
    cache = make.pages(cumla.INDEXER_FP8, 200 if make.tiny else 1 << 16)
    sizes = ((2, 1, 128), (2, 3, 128)) if make.tiny else ((3, 1, 32768), (128, 1, 4096), (64, 2, 4096), (40, 4, 4096))
    for requests, next_n, rows in sizes:
        inputs = {"kv_cache": cache, **scored_pages(make, cache, requests, next_n, rows)}

        def call_paged(**arguments):
            cumla.fp8_paged_mqa_logits(**arguments, clean_logits=True)

        outputs = {"out": ((requests * next_n, rows // BLOCK * BLOCK), np.float32)}
        yield Problem("indexer", f"{requests} x {next_n} of pages, {rows} rows", call_paged, inputs, outputs)


def choices(make):
    def problem(name, inputs, queries, width, topk):
        def call(**arguments):
            cumla.indexer_topk(**arguments, topk=topk)

        # The logits are compared, too: for all queries at once.
        outputs = {"out": ((queries, topk), np.int32), "workspace": ((queries * width * 4,), np.uint8)}
        return Problem("top-k", f"{topk} of {name}", call, inputs, outputs)

    def mapped(name, inputs, queries, width, topk):
        def call(slots, lens, **arguments):
            cumla.indexer_topk(**arguments, topk=topk, slots=(slots, lens))

        outputs = {
            "out": ((queries, topk), np.int32), "slots": ((queries, topk), np.int32), "lens": ((queries,), np.int32),
            "workspace": ((queries * width * 4,), np.uint8),
        }  # fmt: skip
        return Problem("top-k", f"{topk} of {name}, with slots", call, inputs, outputs)

    for queries, keys, topk in ((9, 300, 20),) if make.tiny else ((40, 16384, 2048), (512, 8192, 512)):
        yield problem(f"{keys} keys, {queries} queries", scored_keys(make, queries, keys), queries, keys, topk)
    cache = make.pages(cumla.INDEXER_FP8, 200 if make.tiny else 1 << 16)
    sizes = ((2, 1, 128, 20),) if make.tiny else ((1, 1, 65536, 2048), (4, 2, 65536, 2048), (128, 1, 8192, 512))
    for requests, next_n, rows, topk in sizes:
        inputs = {"kv": cache, **scored_pages(make, cache, requests, next_n, rows)}
        yield mapped(f"{rows} rows of pages, {requests} x {next_n}", inputs, requests * next_n, rows, topk)
        yield problem(f"{rows} rows of pages, {requests} x {next_n}", inputs, requests * next_n, rows, topk)


def compressors(make):
    """Requests of `tokens` tokens each, from a position in the middle of a window on."""
    sizes = ((4, 64, 1), (4, 8, 512), (128, 128, 1), (128, 4, 700))  # ratio, requests, tokens
    for ratio, requests, tokens in ((4, 2, 5), (128, 1, 130)) if make.tiny else sizes:
        first = 2 * ratio - 1 if tokens == 1 else ratio + ratio // 2
        x = Soaked(
            make.rng, requests=requests, tokens=requests * tokens, context=first, lengths=False,
            pages=-(-requests * tokens // BLOCK),
        )  # fmt: skip
        arguments = compressor.compress(x, cumla.DSV4_FP8, cumla.INDEXER_FP8, ratio)
        name = f"ratio {ratio}, {requests} x {tokens} tokens"
        yield problem_of("compressor", name, x, SPECS["compress_and_insert"], arguments)


def dense(make):
    """Decodes over latent rows, and packed sequences with separate keys."""
    requests, heads, columns = (3, 8, 3) if make.tiny else (24, 128, 40)
    x = Soaked(
        make.rng, requests=requests, heads=heads, context=columns * BLOCK - 1, pages=requests * columns // 2,
    )  # fmt: skip
    name, arguments = f"decode, {heads} heads, {requests} x {columns * BLOCK} keys", dense_attention.decode(x)
    yield problem_of("dense", name, x, SPECS["dense_mla_decode"], arguments, cumla.DenseDecodePlan)
    sequences, length, heads = (2, 70, 2) if make.tiny else (6, 300, 16)
    x = Soaked(make.rng, requests=sequences, tokens=sequences * length, heads=heads, lengths=False)
    name = f"packed, {heads} heads, {sequences} x {length} tokens"
    yield problem_of("dense", name, x, SPECS["mha_varlen"], dense_attention.packed(x, causal=True))
