"""Problems of tests/soak_device.py: each operation at shapes that select other kernels or divisions of work."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cumla
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

    def queries(self, *shape):
        """For heads whose maxima rise from block to block, by little and by much."""
        return self.put((self.rng.standard_normal(shape, np.float32) * steep(shape[-2])).astype(BF16))

    def lengths(self, most, *shape):
        return self.put(self.rng.integers(0, most + 1, shape), np.int32)

    def e4m3(self, *shape):
        return self.put(self.rng.integers(0, 0x7F, shape, np.uint8))

    def pages(self, layout, tokens, huge=()):
        """A cache of `tokens` rows, some of which overflow float16: tiles with them are recomputed."""
        blocks, base = -(-tokens // BLOCK), min(BASE_ROWS, tokens)
        cache = layout.allocate(blocks, BLOCK, self.cupy)
        rows = self.rng.standard_normal((base, layout.head_dim), np.float32)
        for row in huge:
            rows[row] *= 2.0**20
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


def sparse_decodes(make):
    sizes = (  # layout, heads, requests, queries of each, keys and extra keys, ragged, options
        ("DSV4_FP8", 64, 1, 1, 128, 512, False, {}),
        ("DSV4_FP8", 64, 32, 1, 128, 512, True, {}),
        ("DSV4_FP8", 64, 128, 2, 128, 512, False, {}),
        ("DSV4_FP8", 16, 66, 1, 128, 1024, True, {}),
        ("DSV4_FP8", 128, 40, 2, 128, 512, True, {"batch_invariant": True}),
        ("V32_FP8", 128, 32, 1, 2048, 0, False, {}),
        ("V32_FP8", 32, 3, 1, 2048, 0, True, {}),
    )
    if make.tiny:
        sizes = (("DSV4_FP8", 8, 1, 1, 300, 60, False, {}), ("V32_FP8", 8, 3, 1, 150, 0, True, {}))
    slots = 200 if make.tiny else 1 << 17
    caches = {name: make.pages(getattr(cumla, name), slots) for name in ("DSV4_FP8", "V32_FP8")}
    for layout, heads, requests, s_q, topk, extra, ragged, options in sizes:
        name = f"{layout}, {heads} heads, {requests} x {s_q}, {topk} + {extra} keys"
        yield decode(make, caches[layout], layout, heads, (requests, s_q), (topk, extra), ragged, options, name)
    # Tiles that the fast kernel leaves to the exact one, which CTAs claim dynamically.
    cache = make.pages(cumla.DSV4_FP8, slots, huge=(5, 7))
    size = (3, 1) if make.tiny else (96, 1)
    yield decode(make, cache, "DSV4_FP8", 64, size, (128, 0), False, {}, "DSV4_FP8, tiles computed again")


def decode(make, cache, layout, heads, size, keys, ragged, options, name):
    layout, (requests, s_q) = getattr(cumla, layout), size
    inputs = {"q": make.queries(requests, s_q, heads, layout.head_dim)}
    for prefix, count in zip(("", "extra_"), keys, strict=True):
        if not count:
            continue
        slots = cache.shape[0] * BLOCK
        inputs |= {
            f"{prefix}k_cache": cache, f"{prefix}indices": make.put(make_indices(make.rng, requests, s_q, count, slots))
        }  # fmt: skip
        if ragged:
            inputs[f"{prefix}topk_length"] = make.lengths(count, requests, s_q)
    outputs = {"out": ((requests, s_q, heads, 512), BF16), "lse": ((requests, heads, s_q), np.float32)}

    def call(**arguments):
        cumla.sparse_mla_decode(**arguments, layout=layout, **options)

    name += ", ragged" * ragged + ", invariant" * bool(options)
    return Problem("decode", name, call, inputs, outputs, plan=cumla.DecodePlan)


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
        indices = make_indices(make.rng, tokens, 1, topk, rows)[:, 0]
        inputs = {"q": make.queries(tokens, heads, dim), "kv": make.normal(rows, dim), "indices": make.put(indices)}
        if ragged:
            inputs["topk_length"] = make.lengths(topk, tokens)
        outputs = {"out": ((tokens, heads, 512), BF16)}
        outputs |= dict.fromkeys(("max_logits", "lse"), ((tokens, heads), np.float32))

        def call(out, max_logits, lse, **arguments):
            cumla.sparse_mla_prefill(**arguments, out=(out, max_logits, lse))

        name = f"{heads} heads of {dim}, {tokens} x {topk} keys" + ", ragged" * ragged
        yield Problem("prefill", name, call, inputs, outputs)


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
    sizes = ((4, 2, 64, 1), (4, 2, 8, 512), (128, 1, 128, 1), (128, 1, 4, 700))  # ratio, coff, requests, tokens
    for ratio, coff, requests, tokens in ((4, 2, 2, 5), (128, 1, 1, 130)) if make.tiny else sizes:
        first = 2 * ratio - 1 if tokens == 1 else ratio + ratio // 2
        positions = np.tile(np.arange(first, first + tokens), requests)
        request, block = np.repeat(np.arange(requests), tokens), 2 * ratio
        columns = -(-(first + tokens) // block)
        rows = -(-(first + tokens) // ratio)  # of a request in the cache
        width, index_width = 2 * coff * 512, 2 * coff * 128
        table = np.arange(requests * columns).reshape(requests, columns)
        saved = table[request, positions // block] * block + positions % block
        slots = np.where((positions + 1) % ratio == 0, request * rows + positions // ratio, -1)
        inputs = {
            "kv_score": make.normal(len(positions), width, dtype=np.float32),
            "position_bias": make.normal(ratio, coff * 512, dtype=np.float32),
            "norm_weight": make.normal(512, dtype=np.float32),
            "index_kv_score": make.normal(len(positions), index_width, dtype=np.float32),
            "index_position_bias": make.normal(ratio, coff * 128, dtype=np.float32),
            "index_norm_weight": make.normal(128, dtype=np.float32),
            "state_slot_mapping": make.put(saved), "state_block_table": make.put(table, np.int32),
            "slot_mapping": make.put(slots), "positions": make.put(positions),
            "token_to_req_indices": make.put(request, np.int32),
            "query_start_loc": make.put(np.arange(requests + 1) * tokens, np.int32),
            "cos_sin_cache": make.normal(first + tokens, 64, dtype=np.float32),
        }  # fmt: skip
        states = {
            "state_cache": make.normal(requests * columns, block, width, dtype=np.float32),
            "index_state_cache": make.normal(requests * columns, block, index_width, dtype=np.float32),
        }  # fmt: skip
        pages = -(-requests * rows // BLOCK)
        outputs = {
            "k_cache": ((pages, cumla.DSV4_FP8.page_bytes(BLOCK)), np.uint8),
            "index_k_cache": ((pages, cumla.INDEXER_FP8.page_bytes(BLOCK)), np.uint8),
        }  # fmt: skip

        def call(k_cache, index_k_cache, ratio=ratio, **arguments):
            k_cache, index_k_cache = cumla.DSV4_FP8.view(k_cache, BLOCK), cumla.INDEXER_FP8.view(index_k_cache, BLOCK)
            cumla.compress_and_insert(
                **arguments, k_cache=k_cache, index_k_cache=index_k_cache, compress_ratio=ratio, layout=cumla.DSV4_FP8
            )

        name = f"ratio {ratio}, {requests} x {tokens} tokens"
        yield Problem("compressor", name, call, inputs, outputs, states)


def dense(make):
    """Decodes over latent rows, and packed sequences with separate keys."""
    requests, heads, columns = (3, 8, 3) if make.tiny else (24, 128, 40)
    cache = make.normal(requests * columns // 2, BLOCK, 576)
    inputs = {
        "q": make.normal(requests, 1, heads, 576), "k_cache": cache,
        "block_table": make.table(requests, columns, len(cache)),
        "cache_seqlens": make.lengths(columns * BLOCK, requests),
    }  # fmt: skip
    outputs = {"out": ((requests, 1, heads, 512), BF16), "lse": ((requests, heads, 1), np.float32)}
    name = f"decode, {heads} heads, {requests} x {columns * BLOCK} keys"
    yield Problem("dense", name, cumla.dense_mla_decode, inputs, outputs, plan=cumla.DenseDecodePlan)
    sequences, length, heads = (2, 70, 2) if make.tiny else (6, 300, 16)
    starts = make.put(np.arange(sequences + 1) * length, np.int32)
    inputs = {
        "q": make.normal(sequences * length, heads, 192), "k": make.normal(sequences * length, heads, 192),
        "v": make.normal(sequences * length, heads, 128), "cu_seqlens_q": starts, "cu_seqlens_k": starts,
    }  # fmt: skip
    outputs = {"out": ((sequences * length, heads, 128), BF16), "lse": ((heads, sequences * length), np.float32)}

    def call(**arguments):
        cumla.mha_varlen(**arguments, causal=True)

    yield Problem("dense", f"packed, {heads} heads, {sequences} x {length} tokens", call, inputs, outputs)
