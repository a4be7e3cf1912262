"""What is measured of whole steps, and of what it costs to call from a framework."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cumla

from ..arrays import dlpack
from ..dispatch import backends
from ..kernels.types.metadata import C128A_RATIO
from ..layers.dense import MLACommonImpl
from ..layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer
from ..layout import DSV4_FP8, MLA_BF16
from ..metadata import (
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
)
from .peers import has_peer
from .problem import BLOCK, Arrays, Calls, Problem, Sizes

PAGE = 256  # positions of a page of a compressed cache
SPARSE = {1: "window", 4: "C4A", C128A_RATIO: "C128A"}
NOPE, ROPE, V = 128, 64, 128  # of a head of a dense layer


def layers(sizes: Sizes) -> Iterator[Problem]:
    """A step of decodes of each kind of attention layer between its projections: insert, map, attend."""
    for batch in sizes.batch:
        for ratio, name in SPARSE.items():
            yield _sparse_layer(sizes, ratio, name, batch)
        yield _dense_layer(sizes, batch)


def _decodes(sizes: Sizes, arrays: Arrays, batch: int) -> CommonAttentionMetadata:
    """A batch of decodes, all of `context` tokens; their pages are anywhere."""
    xp, starts = sizes.xp, np.arange(batch + 1, dtype=np.int32)
    lens = np.full(batch, sizes.context, np.int32)
    table = arrays.integers(sizes.slots // BLOCK, batch, -(-sizes.context // BLOCK))
    slots = xp.asarray(arrays.rng.permutation(sizes.slots)[:batch])
    return CommonAttentionMetadata(
        xp.asarray(starts), starts, xp.asarray(lens), lens, lens - 1, batch, batch, 1, table, slots
    )


def _sparse_layer(sizes: Sizes, ratio: int, name: str, batch: int) -> Problem:
    xp, arrays = sizes.xp, Arrays(sizes)
    config = ServingConfig(
        window_size=sizes.topk, compress_ratios=(ratio,), num_heads=sizes.heads, block_size=BLOCK,
        index_topk=sizes.extra, compressed_block_size=PAGE, max_num_batched_tokens=batch, max_num_seqs=batch,
        max_model_len=sizes.context,
    )  # fmt: skip
    rows = PAGE // ratio
    pages = sizes.slots // rows
    table = arrays.integers(pages, batch, -(-sizes.context // PAGE))
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend=sizes.backend).build(
        0, _decodes(sizes, arrays, batch), c128a_block_table=table if ratio == C128A_RATIO else None
    )
    cache, compressed, selected = arrays.cache(DSV4_FP8), None, 0
    if ratio > 1:
        chosen = None
        selected = visible = sizes.context // ratio
        if ratio != C128A_RATIO:
            selected = min(visible, sizes.extra)
            chosen = arrays.integers(max(visible, 1), batch, sizes.extra)
        compressed = CompressedCache(DSV4_FP8.allocate(pages, rows, xp), table, topk_indices=chosen)
    layer = SparseMLALayer(ratio, index_topk=sizes.extra)
    calls = []
    for _ in range(4):
        q, k = arrays.rows(batch, sizes.heads, 512), arrays.rows(batch, 512)
        workspace = LayerWorkspace.allocate(q, sizes.extra if ratio == 4 else 0)
        calls.append(
            functools.partial(
                layer.step, q, k, cache, metadata, compressed, out=xp.empty(q.shape, q.dtype), workspace=workspace,
                backend=sizes.backend,
            )
        )  # fmt: skip
    keys = batch * (min(sizes.topk, sizes.context) + selected)
    moved = (keys + batch) * DSV4_FP8.token_bytes + 2 * batch * (sizes.heads * 1024 + 512)
    config_name = f"{name} h{sizes.heads} b{batch} of {sizes.context}"
    return Problem("layer", config_name, {"cumla": ("cupy", calls)}, moved, 4 * keys * sizes.heads * 512)


def _dense_layer(sizes: Sizes, batch: int) -> Problem:
    xp, arrays = sizes.xp, Arrays(sizes)
    config = MLAConfig(
        block_size=BLOCK, num_heads=sizes.heads, max_num_batched_tokens=batch, max_num_seqs=batch,
        max_model_len=sizes.context,
    )  # fmt: skip
    metadata = MLACommonMetadataBuilder(config, backend=sizes.backend).build(0, _decodes(sizes, arrays, batch))
    layer = MLACommonImpl(
        sizes.heads, MLA_BF16.head_dim, (NOPE + ROPE) ** -0.5, kv_b_proj=arrays.rows(sizes.heads * (NOPE + V), 512),
        backend=sizes.backend,
    )  # fmt: skip
    layer.process_weights_after_loading()
    cache = arrays.rows(sizes.slots // BLOCK, BLOCK, MLA_BF16.head_dim)
    calls = [
        functools.partial(
            layer.forward, arrays.rows(batch, sizes.heads, NOPE + ROPE), arrays.rows(batch, 512),
            arrays.rows(batch, ROPE), cache, metadata, xp.empty((batch, sizes.heads * V), cache.dtype),
        )
        for _ in range(4)
    ]  # fmt: skip
    keys = batch * sizes.context
    config_name = f"dense h{sizes.heads} b{batch} of {sizes.context}"
    flop = 2 * keys * sizes.heads * (576 + 512)
    return Problem("layer", config_name, {"cumla": ("cupy", calls)}, keys * MLA_BF16.row_bytes, flop)


def frameworks(sizes: Sizes) -> Iterator[Problem]:
    """Host time of an insert and a decode by whose arrays they get: for a device, what it takes until all is queued."""
    for batch in sizes.batch:
        arrays = Arrays(sizes)
        cache = arrays.cache(DSV4_FP8)
        k, slots = arrays.rows(batch, 512), sizes.xp.asarray(arrays.rng.permutation(sizes.slots)[:batch])
        q, indices = arrays.rows(batch, 1, sizes.heads, 512), arrays.integers(sizes.slots, batch, 1, sizes.topk)
        out = sizes.xp.empty((batch, 1, sizes.heads, 512), q.dtype)
        lse = sizes.xp.empty((batch, sizes.heads, 1), np.float32)
        moved = batch * (1024 + DSV4_FP8.token_bytes)
        yield Problem("call: insert", f"T{batch}", _inserts(sizes, k, cache, slots), moved, from_host=True)
        moved = batch * (sizes.topk * DSV4_FP8.token_bytes + sizes.heads * 2048)
        found = _decodes_from(sizes, q, cache, indices, out, lse)
        yield Problem("call: decode", f"h{sizes.heads} b{batch} {sizes.topk}", found, moved, from_host=True)


def _inserts(sizes: Sizes, k: Any, cache: Any, slots: Any) -> dict[str, tuple[str, Calls]]:
    insert = functools.partial(cumla.quantize_and_insert_k_cache, backend=sizes.backend)
    found: dict[str, Callable[[], Any]] = {sizes.xp.__name__: functools.partial(insert, k, cache, slots)}
    if has_peer("torch"):
        tensors = _tensors(k, cache, slots)
        found["torch"] = functools.partial(insert, *tensors)
        if _is_default(sizes):
            import cumla.interop.torch as operators

            found["torch operator"] = functools.partial(operators.quantize_and_insert_k_cache, *tensors)
    return _calls(found)


def _decodes_from(sizes: Sizes, *arrays: Any) -> dict[str, tuple[str, Calls]]:
    def call(q: Any, cache: Any, indices: Any, out: Any, lse: Any) -> Callable[[], Any]:
        given = {"plan": cumla.DecodePlan(), "out": out, "lse": lse, "backend": sizes.backend}
        return functools.partial(cumla.sparse_mla_decode, q, cache, indices, **given)

    found = {sizes.xp.__name__: call(*arrays)}
    if has_peer("torch"):
        tensors = _tensors(*arrays)
        found["torch"] = call(*tensors)
        if _is_default(sizes):
            import cumla.interop.torch as operators

            found["torch operator"] = functools.partial(
                operators.sparse_mla_decode, *tensors[:3], layout=DSV4_FP8, out=tensors[3], lse=tensors[4]
            )
    if has_peer("jax") and _is_default(sizes):
        found |= _jax_decodes(sizes, *arrays[:3])
    return _calls(found)


def _jax_decodes(sizes: Sizes, *arrays: Any) -> dict[str, Callable[[], Any]]:
    """JAX's arrays, whose results are allocated; nothing where its device is another."""
    import jax

    if (jax.default_backend() == "gpu") != sizes.on_device:
        return {}
    import cumla.interop.jax as operations

    given = [jax.device_put(x if isinstance(x, np.ndarray) else x.get()) for x in arrays]
    jitted = jax.jit(functools.partial(operations.sparse_mla_decode, layout=DSV4_FP8))
    return {
        "JAX": functools.partial(cumla.sparse_mla_decode, *given),
        "jax.jit": lambda: jax.block_until_ready(jitted(*given)) if not sizes.on_device else jitted(*given),
    }


def _tensors(*arrays: Any) -> list[Any]:
    importlib.import_module("torch")  # which must be there for arrays to become its tensors
    return [dlpack.give(x, "torch") for x in arrays]


def _is_default(sizes: Sizes) -> bool:
    """Whether the backend is the one that operators of a framework's own call."""
    return sizes.backend == backends.default(sizes.on_device)


def _calls(found: dict[str, Callable[[], Any]]) -> dict[str, tuple[str, Calls]]:
    return {name: ("", [call]) for name, call in found.items()}
