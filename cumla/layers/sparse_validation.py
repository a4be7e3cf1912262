"""Checks the arguments of a sparse layer's step before anything is written.

The operations also check their arguments, but only after the step has written its rows, and under their own names.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import streams
from ..dispatch.call import BF16, BOOL, FLOAT32, FLOATS, INT32, SLOTS, Call
from ..dispatch.formats import checked_pages
from ..dispatch.launch_cache import VALIDATED, call_key, remember_validated
from ..dispatch.values import check_integers
from ..kernels.types.metadata import C128A_RATIO
from ..layout import INDEXER_BF16, INDEXER_F32, INDEXER_FP8
from ..metadata.batch import host_integers
from ..metadata.builder import check_current, check_mode
from ..metadata.indexer import DeepseekV32IndexerMetadata
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata
from ..metadata.validation import check_columns, check_rows_of_longest, check_window_pages
from ..ops.sparse_attention import ROWS, V_DIM, check_heads, scale_or_default
from .selection import IndexerInputs, score_bytes
from .step_arguments import CompressedCache, LayerWorkspace

INDEXER_LAYOUTS = (INDEXER_FP8, INDEXER_BF16, INDEXER_F32)
DECODE_SLOTS = {"decode_slots": "arrays", "decode_lens": "arrays"}


def check_step(
    layer: Any,
    q: Any,
    k: Any,
    swa_cache: Any,
    metadata: DeepseekSparseSWAMetadata,
    compressed: CompressedCache | None,
    out: Any,
    workspace: LayerWorkspace | None,
    backend: str | None,
    stream: Any,
) -> None:
    """Raise TypeError or ValueError for arguments of the `step` of `layer`, a SparseMLALayer, that do not fit together.

    Arguments on a device whose key was already validated are not checked again.
    """
    if not isinstance(metadata, DeepseekSparseSWAMetadata):
        raise TypeError(f"metadata: got {type(metadata).__name__}, expected DeepseekSparseSWAMetadata")
    check_current("metadata", metadata)
    check_mode("metadata", metadata.config.batch_invariant, layer.batch_invariant)
    ratio = layer.compress_ratio
    if metadata.config.has_compressed_rows(ratio) != (compressed is not None):
        got, expected = ("None", "a CompressedCache") if compressed is None else ("a CompressedCache", "None")
        raise ValueError(f"compressed: got {got}, expected {expected} at compress_ratio {ratio}")
    check_integers(1, **{"metadata.block_size": metadata.block_size})
    used, positions = tokens_used(metadata), metadata.config.compressed_block_size
    check_window_pages("swa_cache", swa_cache, metadata.longest)
    if compressed is not None:
        page_rows, rows = positions // ratio, metadata.longest // ratio
        check_rows_of_longest("compressed.cache", compressed.cache, page_rows, rows)
        if compressed.indexer is not None:
            keys = getattr(compressed.indexer, "cache", None)
            check_rows_of_longest("compressed.indexer.cache", keys, page_rows, rows)
    key = call_key(
        "sparse", ratio, metadata.config.has_c1a, backend, used,
        -(-(metadata.longest // max(ratio, 1) * ratio) // positions),
        metadata.num_decode_tokens, metadata.num_decodes + metadata.num_prefills,
        metadata.block_size, positions, layer.attn_sink, layer.softmax_scale,
        layer.layout.name, layer.compressed_layout.name,
        q, k, swa_cache, metadata.slot_mapping, metadata.block_table, metadata.seq_lens,
        metadata.query_start_loc, metadata.c128a_decode_topk_lens, out,
        *(() if compressed is None else key_parts_of(compressed)),
        *(() if workspace is None else vars(workspace).values()), stream,
    )  # fmt: skip
    if key in VALIDATED:
        return
    call = Call(backend, stream)
    q = check_window_step(call, layer, q, k, swa_cache, metadata, used)
    columns = 0
    if compressed is not None:
        columns = check_compressed(call, layer, metadata, compressed, used)
    call.optional("out", out, (q.dtype,), (call.size("num_tokens"), "h", V_DIM), writable=True)
    if workspace is not None and metadata.num_decode_tokens:
        check_workspace(call, workspace, metadata.num_decode_tokens, columns)
    if workspace is not None and compressed is not None and compressed.indexer is not None:
        check_selection_memory(call, workspace, compressed.indexer, used, layer.index_topk)
    call.kernels("sparse_attention")  # raises for a backend without these kernels
    remember_validated(key)


def check_window_step(
    call: Call, layer: Any, q: Any, k: Any, swa_cache: Any, metadata: DeepseekSparseSWAMetadata, used: int,
    head_ranks: int = 1,
) -> Any:  # fmt: skip
    """Check the arguments that layers of every ratio have. Returns q, borrowed, with one of head_ranks ranks' heads."""
    if k is not None and not layer.layout.num_scales:  # checked before q, whose dtype depends on k
        raise ValueError(
            f"k: got rows for a {layer.layout.name} cache, expected None: a step inserts rows into FP8 caches "
            "only; write these before it, with cumla.qnorm_rope_and_insert or by index"
        )
    q = call.array("q", q, ROWS if k is None else BF16, ("num_tokens", "h", V_DIM))
    check_heads(q.shape[1] * head_ranks)
    check_rows("q", q, used, "tokens")
    for name, dtype in (("q", q.dtype.name), ("layout", layer.layout.value_type)):
        call.check_float32(name, dtype)
    if k is not None:
        check_array(call, "k", k, BF16, (-1, V_DIM), used)
    checked_pages(call, "swa_cache", swa_cache, layer.layout, metadata.block_size)
    call.optional("attn_sink", layer.attn_sink, FLOAT32, ("h",))
    scale_or_default(layer.softmax_scale, V_DIM)
    call.array("metadata.slot_mapping", metadata.slot_mapping, SLOTS, (-1,))
    num_reqs = metadata.num_decodes + metadata.num_prefills
    for name, shape in (("block_table", (-1, -1)), ("seq_lens", (-1,)), ("query_start_loc", (-1,))):
        needed = num_reqs + (name == "query_start_loc")
        check_array(call, f"metadata.{name}", getattr(metadata, name), INT32, shape, needed, "entries")
    for name, dtypes in (("token_to_req_indices", INT32), ("is_valid_token", BOOL), ("positions", INT32)):
        check_array(call, f"metadata.{name}", getattr(metadata, name), dtypes, (-1,), used)
    return q


def key_parts_of(compressed: CompressedCache) -> list[Any]:
    """The compressed cache's part of the argument key. Leaves out the indexer's parts that every call checks."""
    inputs = compressed.indexer
    key_parts = [value for name, value in vars(compressed).items() if name != "indexer"]
    if inputs is None:
        return key_parts
    if not isinstance(inputs, IndexerInputs):
        raise TypeError(f"compressed.indexer: got {type(inputs).__name__}, expected IndexerInputs")
    if not isinstance(inputs.metadata, DeepseekV32IndexerMetadata):
        got = type(inputs.metadata).__name__
        raise TypeError(f"compressed.indexer.metadata: got {got}, expected DeepseekV32IndexerMetadata")
    key_parts += inputs.q, inputs.weights, inputs.cache, inputs.k, inputs.layout.name
    return [*key_parts, inputs.metadata.compress_ratio, inputs.metadata.batch_invariant]


def tokens_used(metadata: DeepseekSparseSWAMetadata) -> int:
    """Query tokens of a step: the tokens of requests, and the padding of decodes."""
    if not metadata.num_prefills:
        return metadata.num_decode_tokens
    starts = host_integers("metadata.query_start_loc_cpu", metadata.query_start_loc_cpu)
    num_reqs = metadata.num_decodes + metadata.num_prefills
    if len(starts) <= num_reqs:
        raise ValueError(f"metadata.query_start_loc_cpu: got {len(starts)} entries, expected at least {num_reqs + 1}")
    return max(metadata.num_decode_tokens, int(starts[num_reqs]))


def check_compressed(
    call: Call, layer: Any, metadata: DeepseekSparseSWAMetadata, compressed: CompressedCache, used: int
) -> int:
    """Check the compressed cache. Returns the number of columns of topk_indices to map, 0 without them."""
    ratio = layer.compress_ratio
    pages = checked_pages(call, "compressed.cache", compressed.cache, layer.compressed_layout)
    requests = metadata.num_decodes + metadata.num_prefills
    table = check_array(call, "compressed.block_table", compressed.block_table, INT32, (-1, -1), requests, "requests")
    positions = metadata.config.compressed_block_size
    rows = pages.block_size if compressed.cache.shape[1] else 0  # pages without tokens count as no pages
    if rows * ratio != positions:
        raise ValueError(
            f"compressed.cache: got pages of {rows} rows, expected {positions // ratio}: the builder's "
            f"config has compressed_block_size = {positions} positions a page"
        )
    check_columns("compressed.block_table", table, pages.block_size, metadata.longest // ratio)
    check_inserted(call, "compressed.k", compressed.k, BF16, V_DIM, compressed.slot_mapping)
    if ratio == C128A_RATIO:
        for name, got in {"indexer": "one", "topk_indices": "an array", **DECODE_SLOTS}.items():
            if getattr(compressed, name) is not None:
                raise ValueError(
                    f"compressed.{name}: got {got}, expected None at compress_ratio 128: all rows are taken"
                )
        check_has_c128a(metadata)
        return 0
    if compressed.indexer is not None:
        for name in ("topk_indices", *DECODE_SLOTS):
            if getattr(compressed, name) is not None:
                raise ValueError(f"compressed.{name}: got an array and an indexer, expected only one of the two")
        of_config = compressed.indexer.metadata.batch_invariant
        check_mode("compressed.indexer.metadata", of_config, layer.batch_invariant)
        check_indexer(call, compressed.indexer, ratio, pages.block_size, used, compressed)
        return int(layer.index_topk)
    if compressed.topk_indices is None:
        raise TypeError(
            f"compressed.topk_indices: got None, expected int32 [num_tokens, topk] at compress_ratio {ratio}"
        )
    topk_indices = check_array(call, "compressed.topk_indices", compressed.topk_indices, INT32, (-1, -1), used)
    if (compressed.decode_slots is None) != (compressed.decode_lens is None):
        raise ValueError("compressed.decode_lens: got one of decode_slots and decode_lens, expected both or none")
    if compressed.decode_slots is None:
        return int(topk_indices.shape[1])
    for name, shape in (("decode_slots", (-1, -1)), ("decode_lens", (-1,))):
        value = getattr(compressed, name)
        check_array(call, f"compressed.{name}", value, INT32, shape, metadata.num_decode_tokens)
    return 0


def check_has_c128a(metadata: DeepseekSparseSWAMetadata) -> None:
    """Raise ValueError for metadata of a builder whose model has no layers of ratio 128."""
    if metadata.c128a_decode_topk_lens is None:
        raise ValueError(
            "metadata: got one without C128A layers, expected a builder whose config has compress_ratios with 128"
        )


def check_indexer(
    call: Call, inputs: IndexerInputs, ratio: int, block_size: int, used: int, compressed: CompressedCache
) -> None:
    """Check the indexer's inputs."""
    if inputs.layout not in INDEXER_LAYOUTS:
        raise ValueError(
            f"compressed.indexer.layout: got {inputs.layout!r}, expected one of {[x.name for x in INDEXER_LAYOUTS]}"
        )
    quantized = inputs.layout.num_scales > 0
    value_type = "uint8" if quantized else inputs.layout.value_type
    dtype = np.dtype(getattr(ml_dtypes, value_type, value_type))
    for name, dtypes, last in (("q", (dtype,), (INDEXER_FP8.head_dim,)), ("weights", FLOAT32, ())):
        check_array(call, f"compressed.indexer.{name}", getattr(inputs, name), dtypes, (-1, "index_heads", *last), used)
    checked_pages(
        call, "compressed.indexer.cache", inputs.cache, inputs.layout, block_size, writable=inputs.k is not None
    )
    if inputs.metadata.compress_ratio != ratio:
        raise ValueError(
            f"compressed.indexer.metadata: got one of compress_ratio {inputs.metadata.compress_ratio}, expected {ratio}"
        )
    check_inserted(call, "compressed.indexer.k", inputs.k, FLOATS, INDEXER_FP8.head_dim, compressed.slot_mapping)


def check_workspace(call: Call, workspace: LayerWorkspace, tokens: int, columns: int) -> None:
    """Check a workspace for `tokens` decode tokens and topk_indices with `columns` columns."""
    check_array(call, "workspace.lse", workspace.lse, FLOAT32, (-1, "h", 1), tokens, writable=True)
    if not columns:
        return
    if workspace.topk_indices is None or workspace.topk_lens is None:
        raise ValueError("workspace: got no topk_indices and topk_lens, expected them for a layer that selects rows")
    name = "workspace.topk_indices"
    indices = check_array(call, name, workspace.topk_indices, INT32, (-1, -1), tokens, writable=True)
    if indices.shape[1] < columns:
        raise ValueError(f"{name}: got {indices.shape[1]} columns, expected {columns}, as compressed.topk_indices has")
    check_array(call, "workspace.topk_lens", workspace.topk_lens, INT32, (-1,), tokens, writable=True)


def check_selection_memory(
    call: Call, workspace: LayerWorkspace, inputs: IndexerInputs, tokens: int, topk: int
) -> None:
    """Check the workspace's memory for the selection, where there is any."""
    if workspace.selected is not None:
        check_array(call, "workspace.selected", workspace.selected, INT32, (-1, topk), tokens, writable=True)
    scores = call.optional("workspace.scores", workspace.scores, (np.dtype(np.uint8),), (-1,), writable=True)
    if scores is not None and len(scores) < score_bytes(inputs):
        raise ValueError(
            f"workspace.scores: got {len(scores)} bytes, expected {score_bytes(inputs)} or more for a request's scores"
        )


def check_inserted(
    call: Call, name: str, k: Any, dtypes: tuple[np.dtype[Any], ...], head_dim: int, slot_mapping: Any
) -> None:
    """Raise TypeError or ValueError unless each of the compressed rows `k`, if any, has a slot."""
    if k is None:
        return
    rows = call.array(name, k, dtypes, (-1, head_dim))
    slots = call.array("compressed.slot_mapping", slot_mapping, SLOTS, (-1,))
    if len(slots) != len(rows):
        raise ValueError(
            f"compressed.slot_mapping: got {len(slots)} entries, expected {len(rows)}, one for each row of {name} "
            "(-1 skips it)"
        )


def check_array(
    call: Call, name: str, value: Any, dtypes: tuple[np.dtype[Any], ...], shape: Any, needed: int, of: str = "tokens",
    writable: bool = False,
) -> Any:  # fmt: skip
    """`Call.array` with a row for each token of the metadata, or for each of what `of` names."""
    array = call.array(name, value, dtypes, shape, writable)
    check_rows(name, array, needed, of)
    return array


def check_rows(name: str, array: Any, needed: int, of: str) -> None:
    if len(array) < needed:
        raise ValueError(f"{name}: got {len(array)} {of}, expected at least the metadata's {needed}")


def refuse_in_capture(
    q: Any, metadata: DeepseekSparseSWAMetadata, compressed: CompressedCache | None, out: Any, workspace: Any
) -> None:
    """Raise ValueError, naming the missing memory, if a CUDA graph is being captured on the current stream."""
    if isinstance(q, np.ndarray) or not streams.is_capturing():
        return
    for name, value, needed in (("out", out, True), ("workspace", workspace, metadata.num_decode_tokens)):
        if value is None and needed:
            raise ValueError(
                f"{name}: got None while a CUDA graph is being captured, expected memory allocated before it"
            )
    selects = compressed is not None and compressed.indexer is not None and workspace is not None
    if selects and (workspace.selected is None or workspace.scores is None):
        raise ValueError(
            "workspace: got no selected and scores while a CUDA graph is being captured, expected them with an indexer"
        )
    if metadata.num_prefills:
        raise ValueError(
            f"metadata: got {metadata.num_prefills} prefills while a CUDA graph is being captured, expected decodes "
            "only: the workspace into which prefills gather would have to be allocated"
        )
