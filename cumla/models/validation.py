"""Checks the arguments of a layer, and of its step before anything is written.

The operations also check their arguments, but only after the step has written rows, and under their own names.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..dispatch.backends import choose
from ..dispatch.call import FLOAT32, INT32, Call
from ..dispatch.formats import checked_pages
from ..dispatch.launch_cache import VALIDATED, call_key, remember_validated
from ..dispatch.values import check_choice, check_integers, check_optional_size
from ..metadata.batch import host_integers
from ..metadata.builder import check_current
from ..metadata.slots import ring_capacity
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata
from ..metadata.validation import check_pages, check_rows_of_longest, check_window_pages
from .caches import (
    PLAIN_DTYPES,
    RING_VALUES,
    DeepseekV4Caches,
    DeepseekV32Caches,
    DeepseekV41Caches,
    Formats,
    V41Formats,
)
from .step import DeepseekV4StepMetadata, DeepseekV32StepMetadata
from .v4_config import DeepseekV4Config
from .v41_config import DeepseekV41Config
from .v41_step import DeepseekV41Selection, DeepseekV41StepMetadata


class AttentionLayer(Protocol):
    """The attributes of any model's attention layer that the checks read."""

    backend: str | None
    cos_sin: Any


class ModelLayer(AttentionLayer, Protocol):
    """The further attributes of a V4 or V3.2 layer that the checks read."""

    layouts: Formats


class V41Layer(AttentionLayer, Protocol):
    """The attributes of a `DeepseekV41Attention` that the checks read."""

    layouts: V41Formats
    ratio: int
    mode: str
    layer: int
    config: DeepseekV41Config


class V4Layer(ModelLayer, Protocol):
    """The attributes of a `DeepseekV4Attention` that the checks read."""

    ratio: int
    config: DeepseekV4Config
    compressors: Any


def check_options(
    layer: Any,
    num_layers: int | None,
    activations: Any,
    cache_format: str,
    max_position: Any,
    on_host: bool,
    backend: str | None,
    weight_format: str | None = None,
) -> np.dtype[Any]:
    """The activations' type. Raises TypeError or ValueError for options that no layer supports.

    Args:
        weight_format: of a layer whose products of many tokens may round activations to FP8
    """
    check_integers(0, 2**31 - 1 if num_layers is None else num_layers - 1, layer=layer)
    check_optional_size(max_position=max_position)
    choose(backend, on_device=not on_host)
    float32 = ("float32",) if on_host else ()
    name = str(activations) if isinstance(activations, (str, type(None))) else str(np.dtype(activations))
    check_choice(("bfloat16", *(("fp8",) if weight_format else ()), *float32), activations=name)
    if name == "fp8":
        if weight_format != "fp8":
            raise ValueError(f"activations: got 'fp8' with weight_format={weight_format!r}, expected FP8 weights")
        name = "bfloat16"
    check_choice(("fp8", "bfloat16", *float32), cache_format=cache_format)
    return PLAIN_DTYPES[name]


def check_v4_step(
    layer: V4Layer,
    hidden_states: Any,
    caches: DeepseekV4Caches,
    metadata: DeepseekV4StepMetadata,
    topk_indices: Any,
    all_rows: bool = True,
) -> None:
    """Raise TypeError or ValueError for arguments of a V4 layer's step that do not fit together.

    Args:
        all_rows: whether the cache has all compressed rows; the cache of one rank's rows may have pages of any size

    Arguments on a device whose key was already validated are not checked again.
    """
    check_current("metadata.window", metadata.window)
    ratio, layouts = layer.ratio, layer.layouts
    window, step = metadata.window, metadata.compressors.get(ratio)
    if ratio > 1 and step is None:
        raise ValueError(
            f"metadata: got compressors of ratios {sorted(metadata.compressors)}, expected {ratio} among them: "
            "the builder's config must have it in compress_ratios"
        )
    if window.config.window_size != layer.config.sliding_window:
        raise ValueError(
            f"metadata: got a window_size of {window.config.window_size} in the builder's config, expected the model's "
            f"sliding_window, {layer.config.sliding_window}"
        )
    check_positions(layer, window)
    check_window_pages("layer_caches.window", caches.window, window.longest)
    if ratio > 1:
        rows, page_rows = window.longest // ratio, window.config.compressed_block_size // ratio
        check_rows_of_longest("layer_caches.compressed", caches.compressed, page_rows, rows if all_rows else 0)
        check_rows_of_longest("layer_caches.indexer", caches.indexer, page_rows, rows)
        for name in ("state", "indexer_state"):
            check_window_pages(f"layer_caches.{name}", getattr(caches, name), window.longest)
    key = call_key(
        "v4", all_rows, ratio, layer.backend, layouts.v4.name, layer.cos_sin, hidden_states, topk_indices,
        *vars(caches).values(), window.block_size, window.config.compressed_block_size, window.slot_mapping,
        *(() if step is None else (step.state_block_size, step.slot_mapping)),
    )  # fmt: skip
    if key in VALIDATED:
        return
    call = begin(layer, hidden_states)
    checked_pages(call, "layer_caches.window", caches.window, layouts.v4, window.block_size)
    wanted = {1: (), 4: ("compressed", "state", "indexer", "indexer_state"), 128: ("compressed", "state")}[ratio]
    for name, value in vars(caches).items():
        if name in wanted and value is None:
            raise ValueError(f"layer_caches.{name}: got None, expected an array for a layer of ratio {ratio}")
    if step is not None:
        rows = window.config.compressed_block_size // ratio
        checked_pages(call, "layer_caches.compressed", caches.compressed, layouts.v4, rows if all_rows else None)
        states = (-1, step.state_block_size, layer.compressors[0].columns)
        call.array("layer_caches.state", caches.state, FLOAT32, states, writable=True)
        if ratio == 4:
            checked_pages(call, "layer_caches.indexer", caches.indexer, layouts.indexer, rows)
            states = (-1, step.state_block_size, layer.compressors[1].columns)
            call.array("layer_caches.indexer_state", caches.indexer_state, FLOAT32, states, writable=True)
        if len(step.slot_mapping) != len(window.slot_mapping):
            raise ValueError(
                f"metadata: got {len(step.slot_mapping)} slots of compressed rows and {len(window.slot_mapping)} of "
                "the window's, expected both of one batch"
            )
    check_selection(call, topk_indices, len(metadata.positions))
    remember_validated(key)


def check_v32_step(
    layer: ModelLayer,
    hidden_states: Any,
    caches: DeepseekV32Caches,
    metadata: DeepseekV32StepMetadata,
    topk_indices: Any,
    all_rows: bool = True,
) -> None:
    """`check_v4_step` for a V3.2 layer's step; the cache may have only one rank's latent rows."""
    check_current("metadata.tokens", metadata.tokens)
    layouts, block_size = layer.layouts, metadata.tokens.block_size
    check_positions(layer, metadata.tokens)
    longest = metadata.tokens.longest
    check_rows_of_longest("layer_caches.rows", caches.rows, block_size, longest if all_rows else 0)
    check_rows_of_longest("layer_caches.indexer", caches.indexer, block_size, longest)
    key = call_key(
        "v32",
        all_rows,
        layer.backend,
        layouts.v32.name,
        layer.cos_sin,
        hidden_states,
        topk_indices,
        caches.rows,
        caches.indexer,
        block_size,
    )
    if key in VALIDATED:
        return
    call = begin(layer, hidden_states)
    checked_pages(call, "layer_caches.rows", caches.rows, layouts.v32, block_size if all_rows else None)
    checked_pages(call, "layer_caches.indexer", caches.indexer, layouts.indexer, block_size)
    check_selection(call, topk_indices, len(metadata.positions))
    remember_validated(key)


def check_v41_step(
    layer: V41Layer,
    hidden_states: Any,
    caches: DeepseekV41Caches,
    metadata: DeepseekV41StepMetadata,
    selection: DeepseekV41Selection | None,
) -> None:
    """Raise TypeError or ValueError for arguments of a V4.1 layer's step that do not fit together.

    Arguments on a device whose key was already validated are not checked again.
    """
    check_types(layer_caches=(caches, DeepseekV41Caches), metadata=(metadata, DeepseekV41StepMetadata))
    check_current("metadata.window", metadata.window)
    ratio, layouts, window = layer.ratio, layer.layouts, metadata.window
    step, config = metadata.rows.get(ratio), window.config
    if ratio and step is None:
        raise ValueError(
            f"metadata: got rows of ratios {sorted(metadata.rows)}, expected {ratio} among them: the builder's config "
            "must have it in compress_ratios"
        )
    for name, got, expected in (
        ("window_size", config.window_size, layer.config.sliding_window),
        ("index_topk", config.index_topk, layer.config.index_topk),
    ):
        if got != expected:
            raise ValueError(f"metadata: got {name} {got} in the builder's config, expected the model's {expected}")
    check_positions(layer, window)
    check_window_pages("layer_caches.window", caches.window, window.longest)
    if ratio:
        for name in ("compressed", "indexer"):
            page_rows = config.compressed_block_size // ratio
            check_rows_of_longest(f"layer_caches.{name}", getattr(caches, name), page_rows, window.longest // ratio)
        if ratio > 1 and layer.mode == "full":
            check_rings("layer_caches.ring", caches.ring, window)
    arrays: tuple[Any, ...] = ()
    if ratio:
        check_types(selection=(selection, DeepseekV41Selection))
        assert selection is not None
        assert step is not None
        if layer.mode == "reuse":
            selection.check("rows", layer.config.index_source(layer.layer), metadata)
        elif layer.config.reads_candidates(layer.layer):
            selection.check("candidates", layer.config.candidate_source_layer_id, metadata)
        source = layer.config.kv_source(layer.layer)
        if layer.mode != "full" and source is not None:
            selection.check_owned(source, metadata, caches)
        check_indexer_metadata(step.indexer, window, None)
        arrays = (selection.topk_indices, selection.slots, selection.lens, selection.candidate_blocks)
        arrays = (*arrays, step.slot_mapping, step.row_positions, metadata.ring_slot_mapping)
    key = call_key(
        "v41", ratio, layer.mode, layer.layer, layer.backend, layouts.window.name, layouts.compressed.name,
        layer.cos_sin, hidden_states, *vars(caches).values(), *arrays, window.block_size, config.compressed_block_size,
        window.slot_mapping,
    )  # fmt: skip
    if key in VALIDATED:
        return
    call = begin(layer, hidden_states)
    checked_pages(call, "layer_caches.window", caches.window, layouts.window, window.block_size)
    if ratio:
        assert selection is not None
        rows, owns = config.compressed_block_size // ratio, layer.mode == "full"
        wanted = ["compressed", "indexer", *(["ring"] if owns and ratio > 1 else [])]
        for name in wanted:
            if getattr(caches, name) is None:
                raise ValueError(
                    f"layer_caches.{name}: got None, expected an array for layer {layer.layer} of ratio {ratio}"
                )
        checked_pages(call, "layer_caches.compressed", caches.compressed, layouts.compressed, rows, writable=owns)
        checked_pages(call, "layer_caches.indexer", caches.indexer, layouts.indexer, rows, writable=owns)
        if "ring" in wanted:
            capacity = ring_capacity(config.num_speculative_tokens)
            call.array("layer_caches.ring", caches.ring, FLOAT32, ("rings", capacity, RING_VALUES), writable=True)
            check_restart(call, caches.restart_rows, caches.restart_positions)
        tokens, topk = len(metadata.positions), layer.config.index_topk
        blocks = selection.candidate_blocks
        for name, array, width in (("topk_indices", selection.topk_indices, topk), ("slots", selection.slots, topk)):
            check_tokens(f"selection.{name}", call.array(f"selection.{name}", array, INT32, (-1, width)), tokens)
        check_tokens("selection.lens", call.array("selection.lens", selection.lens, INT32, (-1,)), tokens)
        if layer.config.candidate_source_layer_id >= 0:
            width = layer.config.candidate_topk_blocks
            blocks = call.array("selection.candidate_blocks", blocks, INT32, (-1, width))
            check_tokens("selection.candidate_blocks", blocks, tokens)
    remember_validated(key)


def check_restart(call: Call, rows: Any, positions: Any) -> None:
    """Raise TypeError or ValueError for restart rows and positions that do not fit, if the caches have them."""
    if (rows is None) != (positions is None):
        raise ValueError(
            "layer_caches.restart_positions: got one of restart_rows and restart_positions, expected both or none"
        )
    call.optional("layer_caches.restart_rows", rows, FLOAT32, ("rings", RING_VALUES), writable=True)
    call.optional("layer_caches.restart_positions", positions, INT32, ("rings",), writable=True)


def check_rings(name: str, ring: Any, window: DeepseekSparseSWAMetadata) -> None:
    """Raise ValueError for fewer rings than the step has requests with tokens."""
    requests = window.num_decodes + window.num_prefills
    if len(getattr(ring, "shape", ())) and ring.shape[0] < requests:  # some may be padding
        starts = host_integers("metadata.window.query_start_loc_cpu", window.query_start_loc_cpu)[: requests + 1]
        served = int(np.count_nonzero(np.diff(starts) > 0))
        check_pages(name, ring, served, f"the {served} requests of the step, a ring each", "rings")


def check_tokens(name: str, array: Any, tokens: int) -> None:
    if len(array) < tokens:
        raise ValueError(f"{name}: got {len(array)} tokens, expected at least the metadata's {tokens}")


def check_positions(layer: AttentionLayer, tokens: DeepseekSparseSWAMetadata) -> None:
    """Raise ValueError for sequences longer than RoPE's tables: later positions would be rotated wrongly."""
    if tokens.max_seq_len > len(layer.cos_sin):
        raise ValueError(
            f"metadata: got sequences of up to {tokens.max_seq_len} tokens, expected at most the {len(layer.cos_sin)} "
            "positions of the layer's max_position"
        )


def check_types(**arguments: tuple[Any, type]) -> None:
    """Raise TypeError for an argument that is not of the class paired with it."""
    for name, (value, wanted) in arguments.items():
        if not isinstance(value, wanted):
            raise TypeError(f"{name}: got {type(value).__name__}, expected {wanted.__name__}")


def check_indexer_metadata(indexer: Any, tokens: DeepseekSparseSWAMetadata, topk_indices: Any) -> None:
    """Raise ValueError for an indexer's metadata of another batch, if the layer selects with an indexer."""
    if topk_indices is not None:
        return
    if indexer is None:
        raise ValueError("metadata.indexer: got None, expected it for a layer that selects")
    check_current("metadata.indexer", indexer)
    names = ("num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens")
    got, expected = ([int(getattr(of, name)) for name in names] for of in (indexer, tokens))
    if got != expected:
        raise ValueError(
            f"metadata.indexer: got decodes, their tokens, prefills and their tokens {got}, expected {expected} as the "
            "rest of the metadata has"
        )


def begin(layer: AttentionLayer, hidden_states: Any) -> Call:
    """A call whose arrays must be on the layer's device."""
    call = Call(layer.backend)
    call.borrow("layer", layer.cos_sin)
    call.borrow("hidden_states", hidden_states)
    return call


def check_selection(call: Call, topk_indices: Any, tokens: int) -> None:
    if topk_indices is not None:
        call.array("topk_indices", topk_indices, INT32, (tokens, -1))
