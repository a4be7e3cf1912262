"""Calls of attention and of the compressors, as engines make them in a step: `cumla warmup` makes them once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..dispatch import backends
from ..dispatch.call import BFLOAT16
from ..kernels.types.metadata import C128A_RATIO
from ..kernels.types.plan import DecodePlan
from ..layout import DSV4_FP8, INDEXER_FP8
from ..ops.compressor import compress_and_insert
from ..ops.norm_rope import norm_rope_and_insert, qnorm_rope_and_insert
from ..ops.prefill_rows import gather_prefill_rows
from ..ops.sparse_attention import sparse_mla_decode, sparse_mla_prefill
from ..ops.sparse_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from ..specs import compressor, norm_rope, prefill_rows, sparse_cache
from ..specs.inputs import Size
from ..specs.served import Served
from .served_model import Model


def compressor_calls(backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Compressors of V4's layers, of a decode and of a prompt, whose kernels differ."""
    for ratio, indexer in ((4, INDEXER_FP8), (128, None)):
        for tokens in (1, 300):
            x = Served(backend, Size(tokens=tokens, pages=-(-tokens // Size.block_size)))
            given = compressor.compress(x, DSV4_FP8, indexer, ratio, np.int32)
            call = functools.partial(compress_and_insert, **given, backend=backend)
            yield f"compress_and_insert ratio {ratio}, {tokens} tokens", call


def norm_calls(model: Model, block_size: int, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Norms, RoPE and inserts into caches of the model's formats: V4's window rows with the queries, V4.1's latents."""
    x, (first, second) = Served(backend, model.size(1, block_size)), model.formats
    for layout in dict.fromkeys((first, second)):
        if model.kind == "v4" and layout is first:
            given = norm_rope.window_rows(x, layout)
            call = functools.partial(qnorm_rope_and_insert, **given, backend=backend)
            yield f"qnorm_rope_and_insert {layout.name}", call
        if model.kind != "v4" or (layout is second and first is not DSV4_FP8):
            given = norm_rope.latent_rows(x, layout)
            call = functools.partial(norm_rope_and_insert, **given, backend=backend)
            yield f"norm_rope_and_insert {layout.name}", call


def sparse_calls(model: Model, batch: int, block_size: int, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of a step of `batch` requests with the widths of the model, as engines make them."""
    xp: Any = backends.array_module(backend)
    layout, second = model.formats
    tokens = 4 * block_size
    caches = {x: x.allocate(4, block_size, xp) for x in (layout, second)}

    def rows(*shape: int) -> Any:
        return xp.asarray(np.random.default_rng(0).standard_normal(shape).astype(BFLOAT16))

    def slots(*shape: int) -> Any:
        return xp.asarray(np.random.default_rng(0).integers(0, tokens, shape).astype(np.int32))

    x = Served(backend, model.size(batch, block_size))
    for dtype in (np.int64, np.int32):
        for of_cache in caches:
            given = sparse_cache.insert(x, of_cache, slots=dtype)
            yield "insert", functools.partial(quantize_and_insert_k_cache, **given, backend=backend)
    q, sink = rows(batch, 1, model.heads, layout.head_dim), xp.zeros(model.heads, np.float32)
    window: dict[str, Any] = {}
    widths: list[tuple[int, int | None]] = [(model.topk, None)]
    if model.has_window:
        window = {"topk_length": xp.full(batch, model.window, np.int32), "attn_sink": sink}
        widths = [(model.window, None), (model.window, model.topk)]
    for topk, extra in widths:
        asked = dict(window)
        if extra is not None:
            asked |= {
                "extra_k_cache": caches[second], "extra_indices": slots(batch, 1, extra),
                "extra_topk_length": xp.full(batch, extra, np.int32), "extra_layout": second,
            }  # fmt: skip
        results: dict[str, Any] = {
            "out": xp.empty((batch, 1, model.heads, 512), BFLOAT16), "plan": DecodePlan(),
            "lse": xp.empty((batch, model.heads, 1), np.float32),
        }  # fmt: skip
        for outputs in ({}, results):
            options = {**asked, **outputs, "layout": layout, "backend": backend}
            yield "decode", functools.partial(sparse_mla_decode, q, caches[layout], slots(batch, 1, topk), **options)
    workspace = xp.zeros((batch, tokens, layout.head_dim), BFLOAT16)
    for of_cache in caches:
        gathered = sparse_cache.gather(x, of_cache)
        yield "gather", functools.partial(dequantize_and_gather_k_cache, **gathered, backend=backend)
    if model.has_window:
        yield from prefill_row_calls(model, block_size, backend)
    width = model.topk + (model.window if model.has_window else 0)
    options = {"attn_sink": sink if model.has_window else None, "backend": backend}
    kv = workspace.reshape(-1, layout.head_dim)
    yield "prefill", functools.partial(sparse_mla_prefill, q[:, 0], kv, slots(batch, width), **options)


def prefill_row_calls(model: Model, block_size: int, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Rows and lists of prefills: of windows alone, of selected rows and of all; few rows, and more than stay in L2."""
    for rows in (64, 1 << 14):
        x = Served(backend, replace(model.size(1, block_size), tokens=1, rows=rows, context=rows))
        for ratio in (0, 4, C128A_RATIO):
            given = prefill_rows.gather(x, *model.formats, ratio, compact=ratio != C128A_RATIO)
            yield "prefill rows", functools.partial(gather_prefill_rows, **given, backend=backend)


def decodes_of_any_number(model: Model, most: int, backend: str) -> None:
    """Decodes of 1 to `most` requests, whose number decides how a kernel divides the work; of several tokens, too.

    Lists are empty, so that a call takes no longer than its launches.
    """
    xp: Any = backends.array_module(backend)
    layout, second = model.formats
    caches = [x.allocate(1, 64, xp) for x in (layout, second)]
    for tokens in range(1, most * model.decode_tokens + 1):
        q, none = xp.zeros((tokens, 1, model.heads, layout.head_dim), BFLOAT16), xp.zeros(tokens, np.int32)
        shapes = [(tokens, 1, width) for width in (model.window, model.topk)]
        if not model.has_window:
            absent = xp.full(shapes[1], -1, np.int32)
            sparse_mla_decode(q, caches[0], absent, layout=layout, backend=backend)
            continue
        absent, extra = (xp.full(shape, -1, np.int32) for shape in shapes)
        window = {"topk_length": none, "attn_sink": xp.zeros(model.heads, np.float32)}
        compressed = {
            "extra_k_cache": caches[1], "extra_indices": extra, "extra_topk_length": none, "extra_layout": second,
        }  # fmt: skip
        for more in ({}, compressed):
            sparse_mla_decode(q, caches[0], absent, layout=layout, **window, **more, backend=backend)
