"""Calls of attention and of the compressors, as engines make them in a step: `cumla warmup` makes them once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16
from ..kernels.types.metadata import C128A_RATIO
from ..kernels.types.plan import DecodePlan
from ..layout import DSV4_FP8, INDEXER_FP8
from ..metadata.slots import ring_capacity
from ..ops.compressor import compress_and_insert
from ..ops.indexer import fused_indexer_q_rope_quant
from ..ops.key_pools import indexer_kpool_and_insert
from ..ops.norm_rope import norm_rope_and_insert, qnorm_rope_and_insert
from ..ops.prefill_rows import gather_prefill_rows
from ..ops.sparse_attention import sparse_mla_decode, sparse_mla_prefill
from ..ops.sparse_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from ..specs import SPECS, compressor, key_pools, norm_rope, prefill_rows, sparse_attention, sparse_cache
from ..specs.inputs import Size
from ..specs.served import Served
from .served_model import Model


def compressor_calls(backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Compressors of V4's layers, of a decode and of a prompt, whose kernels differ."""
    for ratio, indexer in ((4, INDEXER_FP8), (128, None)):
        for tokens in (1, 300):
            x = Served(backend, Size(tokens=tokens, pages=-(-tokens // Size.block_size)))
            arguments = compressor.compress(x, DSV4_FP8, indexer, ratio, np.int32)
            call = functools.partial(compress_and_insert, **arguments, backend=backend)
            yield f"compress_and_insert ratio {ratio}, {tokens} tokens", call


def norm_calls(model: Model, block_size: int, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Norms, RoPE and inserts into caches of the model's formats: V4's window rows with the queries, V4.1's latents."""
    x, (first, second) = Served(backend, model.size(1, block_size)), model.formats
    for layout in dict.fromkeys((first, second)):
        if model.kind == "v4" and layout is first:
            arguments = norm_rope.window_rows(x, layout)
            call = functools.partial(qnorm_rope_and_insert, **arguments, backend=backend)
            yield f"qnorm_rope_and_insert {layout.name}", call
        if model.kind != "v4" or (layout is second and first is not DSV4_FP8):
            arguments = norm_rope.latent_rows(x, layout)
            call = functools.partial(norm_rope_and_insert, **arguments, backend=backend)
            yield f"norm_rope_and_insert {layout.name}", call


def pooled_key_calls(model: Model, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Pooled index keys of a decode and of a prompt, and rotated queries of the indexer."""
    for tokens in (1, 300):
        x = Served(backend, Size(tokens=tokens, heads=model.index_heads, pages=-(-tokens // Size.block_size)))
        arguments = key_pools.pooled_keys(x, INDEXER_FP8, model.pool, ring_capacity(0, model.pool), BFLOAT16)
        yield f"pooled keys, {tokens} tokens", functools.partial(indexer_kpool_and_insert, **arguments, backend=backend)
        positions, q = x.positions(tokens), x.rows(tokens, model.index_heads, INDEXER_FP8.head_dim)
        yield f"rotated queries, {tokens} tokens", functools.partial(
            fused_indexer_q_rope_quant, positions, q, None, x.floats(tokens, model.index_heads), hadamard=True,
            backend=backend,
        )  # fmt: skip


def sparse_calls(model: Model, batch: int, block_size: int, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of a step of `batch` requests with the widths of the model, as engines make them."""
    x, layouts = Served(backend, model.size(batch, block_size)), dict.fromkeys(model.formats)
    for dtype in (np.int64, np.int32):
        for layout in layouts:
            arguments = sparse_cache.insert(x, layout, slots=dtype)
            yield "insert", functools.partial(quantize_and_insert_k_cache, **arguments, backend=backend)
    for arguments in decodes(model, x):
        results = SPECS["sparse_mla_decode"].new_results(x, arguments)
        mode = {"batch_invariant": model.batch_invariant}
        for options in ({}, {**results, "plan": DecodePlan(**mode)}):
            yield "decode", functools.partial(sparse_mla_decode, **{**arguments, **mode}, **options, backend=backend)
    for layout in layouts:
        arguments = sparse_cache.gather(x, layout)
        yield "gather", functools.partial(dequantize_and_gather_k_cache, **arguments, backend=backend)
    if model.has_window:
        yield from prefill_row_calls(model, block_size, backend)
    of_prompts = Served(backend, replace(x.size, tokens=batch, rows=batch * x.size.context))
    arguments = sparse_attention.prefill(of_prompts, model.formats[0].head_dim, model.has_window)
    yield "prefill", functools.partial(sparse_mla_prefill, **arguments, backend=backend)


def decodes(model: Model, x: Served) -> Iterator[dict[str, Any]]:
    """Arguments of decodes: over a window alone, and over selected rows as well; V3.2's over selected tokens."""
    first, second = model.formats
    for compressed in (None, second) if model.has_window else (None,):
        yield sparse_attention.decode(x, first, compressed, model.has_window)


def prefill_row_calls(model: Model, block_size: int, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Rows and lists of prefills: of windows alone, of selected rows and of all; few rows, and more than stay in L2."""
    for rows in (64, 1 << 14):
        x = Served(backend, replace(model.size(1, block_size), tokens=1, rows=rows, context=rows))
        for ratio in (0, 4, C128A_RATIO):
            arguments = prefill_rows.gather(x, *model.formats, ratio, compact=ratio != C128A_RATIO)
            yield "prefill rows", functools.partial(gather_prefill_rows, **arguments, backend=backend)


def decodes_of_any_number(model: Model, most: int, backend: str) -> None:
    """Decodes of 1 to `most` requests, whose number decides how a kernel divides the work; of several tokens, too.

    Lists are empty, so that a call takes no longer than its launches.
    """
    shared: dict[Any, Any] = {}
    for tokens in range(1, most * model.decode_tokens + 1):
        size = replace(model.size(tokens, Size.block_size), pages=1)
        for arguments in decodes(model, Served(backend, size, shared)):
            sparse_mla_decode(**{**arguments, "batch_invariant": model.batch_invariant}, backend=backend)
