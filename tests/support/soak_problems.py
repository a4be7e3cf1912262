"""Problems of tests/soak_device.py: each operation at shapes that select different kernels or divisions of work."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cumla
from cumla.specs import SPECS, compressor, dense_attention, indexer, indexer_topk, sparse_attention
from cumla.specs.inputs import TINY, Inputs, Size
from cumla.specs.measured import Measured
from cumla.specs.spec import flat
from support.attention import make_indices, steep
from support.lab import BF16

BLOCK = 64


class Problem(NamedTuple):
    """A call of an operation, with arguments by name.

    Attributes:
        inputs: arrays that the call only reads
        outputs: {name: (shape, dtype)}: arrays that it only writes
        states: arrays that it reads and writes; a repeated call leaves the same contents
        plan: the constructor of its plan, if it takes one
    """

    op: str
    name: str
    call: Callable[..., Any]
    inputs: dict[str, Any]
    outputs: dict[str, tuple[tuple[int, ...], Any]]
    states: dict[str, Any] | None = None
    plan: Callable[[], Any] | None = None


class Make(NamedTuple):
    """tiny: for an emulated device, which takes a tenth of a second for a few rows."""

    rng: Any
    tiny: bool

    def sized(self, **size):
        """Inputs of calls; tiny ones are of one size."""
        if self.tiny:
            return Inputs("cuda", TINY, int(self.rng.integers(2**31)))
        return Measured("cuda", Size(**{"heads": 64, "pages": 1 << 10} | size), int(self.rng.integers(2**31)))


def problems(rng, tiny):
    """All problems. tiny: for an emulated device."""
    make = Make(rng, tiny)
    return [
        problem for of_op in (sparse_decodes, prefills, scores, choices, compressors, dense) for problem in of_op(make)
    ]


def problem_of(op, name, function, arguments, plan=None, workspace=0):
    """A call of an operation, which writes into arrays of its own. workspace: bytes that it takes, also compared."""
    spec = SPECS[function]
    states = {name: arguments[name] for name in spec.writes if spec.arrays[name].way == "in out" and name in arguments}
    written = {name: flat([arguments[name]]) for name in spec.writes if name in arguments and name not in states}
    results = spec.results(arguments)
    written |= dict(zip(spec.outputs, [results] if len(spec.outputs) == 1 else [[x] for x in results], strict=True))
    outputs = {f"{name} {i}": (x.shape, np.dtype(x.dtype)) for name, of in written.items() for i, x in enumerate(of)}
    outputs |= {"workspace 0": ((workspace,), np.uint8)} if workspace else {}

    def call(**given):
        parts = {}
        for name in outputs:
            parts.setdefault(name.split()[0], []).append(given.pop(name))
        spec.function(**given, **{name: tuple(x) if len(x) > 1 else x[0] for name, x in parts.items()})

    inputs = {name: x for name, x in arguments.items() if name not in written and name not in states}
    return Problem(op, name, call, inputs, outputs, states, plan)


class Soaked(Measured):
    """Any entries in lists, and lengths of any number; queries for heads whose maxima rise, by little and by much.

    Args:
        huge: whether some rows of caches overflow float16: tiles with them are recomputed
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
    return problem_of("decode", name, "sparse_mla_decode", arguments, functools.partial(cumla.DecodePlan, **options))


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
        yield problem_of("prefill", name, "sparse_mla_prefill", arguments)


def scores(make):
    for queries, keys in ((40, 16384), (512, 8192))[: 1 if make.tiny else 2]:
        given = indexer.packed_logits(make.sized(tokens=queries, keys=keys))
        yield problem_of("indexer", f"{queries} queries, {keys} keys", "fp8_mqa_logits", given)
    for requests, next_n, rows in ((3, 1, 32768), (128, 1, 4096), (64, 2, 4096), (40, 4, 4096))[
        :: 2 if make.tiny else 1
    ]:
        given = indexer.paged(make.sized(requests=requests, context=rows), next_n=next_n) | {"clean_logits": True}
        yield problem_of("indexer", f"{requests} x {next_n} of pages, {rows} rows", "fp8_paged_mqa_logits", given)


def choices(make):
    """The logits are compared, too: for all queries at once."""
    for queries, keys, topk in ((40, 16384, 2048), (512, 8192, 512))[: 1 if make.tiny else 2]:
        x = make.sized(tokens=queries, keys=keys, topk=topk)
        given, name = indexer_topk.over_keys(x), f"{topk} of {keys} keys, {queries} queries"
        yield problem_of("top-k", name, "indexer_topk", given, workspace=x.size.tokens * x.size.keys * 4)
    for requests, next_n, rows, topk in ((1, 1, 65536, 2048), (4, 2, 65536, 2048), (128, 1, 8192, 512)):
        x = make.sized(requests=requests, context=rows, topk=topk)
        for with_slots in (True, False):
            given = indexer_topk.over_pages(x, next_n=next_n, with_slots=with_slots)
            name = f"{topk} of {rows} rows of pages, {requests} x {next_n}" + ", with slots" * with_slots
            bytes_of_logits = len(given["weights"]) * given["block_table"].shape[1] * x.size.block_size * 4
            yield problem_of("top-k", name, "indexer_topk", given, workspace=bytes_of_logits)


def compressors(make):
    """Requests of `each` tokens: one that completes a row, or from the middle of a window on."""
    for ratio, requests, each in ((4, 64, 1), (4, 8, 512), (128, 128, 1), (128, 4, 700)):
        before = 2 * ratio - 1 if each == 1 else ratio + ratio // 2
        x = make.sized(requests=requests, tokens=requests * each, context=before, lengths=False)
        given = compressor.compress(x, cumla.DSV4_FP8, cumla.INDEXER_FP8, ratio)
        yield problem_of("compressor", f"ratio {ratio}, {requests} x {each} tokens", "compress_and_insert", given)


def dense(make):
    """Decodes over latent rows, and packed sequences with separate keys."""
    requests, heads, columns = (3, 8, 3) if make.tiny else (24, 128, 40)
    x = Soaked(
        make.rng, requests=requests, heads=heads, context=columns * BLOCK - 1, pages=requests * columns // 2,
    )  # fmt: skip
    name, arguments = f"decode, {heads} heads, {requests} x {columns * BLOCK} keys", dense_attention.decode(x)
    yield problem_of("dense", name, "dense_mla_decode", arguments, cumla.DenseDecodePlan)
    sequences, length, heads = (2, 70, 2) if make.tiny else (6, 300, 16)
    x = Soaked(make.rng, requests=sequences, tokens=sequences * length, heads=heads, lengths=False)
    name = f"packed, {heads} heads, {sequences} x {length} tokens"
    yield problem_of("dense", name, "mha_varlen", dense_attention.packed(x, causal=True))
