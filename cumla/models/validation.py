"""Checks the arguments of a layer, and of its step before anything is written.

The operations also check their arguments, but only after the step has written rows, and under their own names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dispatch.call import FLOAT32, INT32, Call
from ..dispatch.formats import checked_pages
from ..dispatch.launch_cache import VALIDATED, call_key, remember_validated
from ..dispatch.values import check_choice, check_kind
from ..metadata.batch import host_integers
from ..metadata.builder import check_current, check_mode
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata
from ..metadata.validation import check_pages, check_rows_of_longest, check_window_pages
from .caches import PLAIN_DTYPES, LayerCaches, Ring, paged_caches, states_of
from .context import LayerContext
from .layer_spec import LayerSpec
from .shared_selection import SharedSelection
from .step import StepMetadata


def checked_activations(
    activations: Any, on_host: bool, may_round: bool, weight_format: str, batch_invariant: bool
) -> np.dtype[Any]:
    """The type of the activations. Raises TypeError or ValueError for a type that the layer's other options exclude.

    Args:
        may_round: whether products of many tokens may round activations to FP8
    """
    float32 = ("float32",) if on_host else ()
    name = str(activations) if isinstance(activations, (str, type(None))) else str(np.dtype(activations))
    check_choice(("bfloat16", *(("fp8",) if may_round else ()), *float32), activations=name)
    if name == "fp8":
        if weight_format != "fp8":
            raise ValueError(f"activations: got 'fp8' with weight_format={weight_format!r}, expected FP8 weights")
        if batch_invariant:
            raise ValueError(
                "activations: got 'fp8' with batch_invariant=True, expected 'bfloat16': the number of tokens decides "
                "whether products round activations"
            )
        name = "bfloat16"
    return PLAIN_DTYPES[name]


def check_step(
    layer: LayerContext,
    hidden_states: Any,
    caches: LayerCaches,
    metadata: StepMetadata,
    selection: SharedSelection | None,
    topk_indices: Any,
    all_rows: bool = True,
) -> None:
    """Raise TypeError or ValueError for arguments of a layer's step that do not fit together.

    Args:
        all_rows: whether the cache has all selected rows; the cache of one rank's rows may have pages of any size

    Arguments on a device whose key was already validated are not checked again.
    """
    spec, layouts = layer.spec, layer.layouts
    check_kind(LayerCaches, layer_caches=caches)
    check_kind(StepMetadata, metadata=metadata)
    if topk_indices is not None and (not spec.selects or selection is not None):
        raise ValueError(f"topk_indices: got an array for a layer of ratio {spec.ratio}, expected None")
    tokens, step = metadata.tokens, metadata.rows.get(spec.ratio)
    check_current("metadata.tokens", tokens)
    check_mode("metadata", tokens.config.batch_invariant, layer.batch_invariant)
    if spec.ratio and step is None:
        raise ValueError(
            f"metadata: got rows of ratios {sorted(metadata.rows)}, expected {spec.ratio} among them: the builder's "
            "specs must have such a layer"
        )
    if spec.window and tokens.config.window_size != spec.window:
        raise ValueError(
            f"metadata: got window_size {tokens.config.window_size} in the builder's config, expected the model's "
            f"{spec.window}"
        )
    if tokens.max_seq_len > len(layer.cos_sin):  # later positions would be rotated wrongly
        raise ValueError(
            f"metadata: got sequences of up to {tokens.max_seq_len} tokens, expected at most the {len(layer.cos_sin)} "
            "positions of the layer's max_position"
        )
    for name in ("window", "state", "indexer_state"):
        check_window_pages(f"layer_caches.{name}", getattr(caches, name), tokens.longest)
    paged = paged_caches(spec, layouts, tokens.block_size, tokens.config.compressed_block_size)
    rows = tokens.longest // max(spec.ratio, 1)
    of_rank = rows if all_rows else 0
    for name, needed in {"rows": of_rank, "compressed": of_rank, "indexer": rows // spec.pool}.items():
        if name in paged:
            check_rows_of_longest(f"layer_caches.{name}", getattr(caches, name), paged[name].rows, needed)
    if "rings" in spec.groups():
        check_rings("layer_caches.ring", caches.ring, tokens)
    if spec.selection == "source" or spec.candidates != "none" or (spec.ratio and not spec.owns_rows):
        check_kind(SharedSelection, selection=selection)
    if selection is not None:
        check_shared(spec, caches, metadata, selection)
    if spec.selects:
        assert step is not None
        check_indexer_metadata(step.indexer, tokens, topk_indices)
    key = call_key(
        "layer", spec.layer, spec.ratio, spec.mode, spec.rows, all_rows, layer.backend, layouts.rows.name,
        layouts.compressed.name, layouts.indexer.name, layer.cos_sin, hidden_states, topk_indices,
        *vars(caches).values(), tokens.block_size, tokens.config.compressed_block_size, tokens.slot_mapping,
        *(() if selection is None else selection.arrays), metadata.ring_slot_mapping,
        *(() if step is None else (step.state_block_size, step.slot_mapping, step.row_positions)),
    )  # fmt: skip
    if key in VALIDATED:
        return
    call = begin(layer, hidden_states)
    check_arrays(call, layer, caches, metadata, all_rows)
    if selection is not None and spec.ratio:
        check_selection_arrays(call, spec, selection, len(metadata.positions))
    if topk_indices is not None:
        call.array("topk_indices", topk_indices, INT32, (len(metadata.positions), -1))
    remember_validated(key)


def check_shared(spec: LayerSpec, caches: LayerCaches, metadata: StepMetadata, selection: SharedSelection) -> None:
    """Raise ValueError unless the layers on which this one depends have run in this step."""
    if spec.ratio and metadata.tokens.config.index_topk != spec.topk:
        raise ValueError(
            f"metadata: got index_topk {metadata.tokens.config.index_topk} in the builder's config, expected the "
            f"model's {spec.topk}"
        )
    if spec.selection == "source":
        selection.check("rows", spec.selection_source, metadata)
    elif spec.candidates == "read":
        selection.check("candidates", spec.candidate_source, metadata)
    if spec.ratio and not spec.owns_rows:
        selection.check_owned(spec, metadata, caches)


def check_arrays(
    call: Call, layer: LayerContext, caches: LayerCaches, metadata: StepMetadata, all_rows: bool
) -> None:  # fmt: skip
    """Raise TypeError or ValueError for a cache that is missing, or of another format or shape."""
    spec, layouts, tokens, step = layer.spec, layer.layouts, metadata.tokens, metadata.rows.get(layer.spec.ratio)
    paged = paged_caches(spec, layouts, tokens.block_size, tokens.config.compressed_block_size)
    states, rings = states_of(spec), ("ring",) if "rings" in spec.groups() else ()
    for name in (*paged, *states, *rings):
        if getattr(caches, name) is None and (name == "ring" or (spec.rows == "window" and name != "window")):
            raise ValueError(
                f"layer_caches.{name}: got None, expected an array for layer {spec.layer} of ratio {spec.ratio}"
            )
    for name, cache in paged.items():
        rows = cache.rows if all_rows or name in ("window", "indexer") else None
        checked_pages(call, f"layer_caches.{name}", getattr(caches, name), cache.layout, rows, writable=cache.owned)
    if step is not None:
        for name, values in states.items():
            shape = -1, step.state_block_size, values
            call.array(f"layer_caches.{name}", getattr(caches, name), FLOAT32, shape, writable=True)
    if rings:
        ring, restart = Ring.of(spec, layouts, tokens.config.num_speculative_tokens), caches.restart_rows
        of_rings = "rings", ring.capacity, ring.values
        call.array("layer_caches.ring", caches.ring, (ring.dtype,), of_rings, writable=True)
        if (restart is None) != (caches.restart_positions is None):
            raise ValueError(
                "layer_caches.restart_positions: got one of restart_rows and restart_positions, expected both or none"
            )
        call.optional("layer_caches.restart_rows", restart, (ring.dtype,), ("rings", *ring.restart), writable=True)
        call.optional("layer_caches.restart_positions", caches.restart_positions, INT32, ("rings",), writable=True)
    if step is not None and len(step.slot_mapping) != len(tokens.slot_mapping):
        raise ValueError(
            f"metadata: got {len(step.slot_mapping)} slots of selected rows and {len(tokens.slot_mapping)} of all "
            "tokens, expected both of one batch"
        )


def check_selection_arrays(call: Call, spec: LayerSpec, selection: SharedSelection, tokens: int) -> None:
    """Raise TypeError or ValueError for a selection for fewer tokens or other numbers of rows."""
    shapes = {"topk_indices": (-1, spec.selected_keys), "slots": (-1, spec.listed_rows), "lens": (-1,)}
    if selection.candidate_blocks is not None:
        shapes["candidate_blocks"] = -1, spec.candidate_blocks
    for name, shape in shapes.items():
        array = call.array(f"selection.{name}", getattr(selection, name), INT32, shape)
        if len(array) < tokens:
            raise ValueError(f"selection.{name}: got {len(array)} tokens, expected at least the metadata's {tokens}")


def check_rings(name: str, ring: Any, window: DeepseekSparseSWAMetadata) -> None:
    """Raise ValueError for fewer rings than the step has requests with tokens."""
    requests = window.num_decodes + window.num_prefills
    if len(getattr(ring, "shape", ())) and ring.shape[0] < requests:  # some may be padding
        starts = host_integers("metadata.tokens.query_start_loc_cpu", window.query_start_loc_cpu)[: requests + 1]
        served = int(np.count_nonzero(np.diff(starts) > 0))
        check_pages(name, ring, served, f"the {served} requests of the step, a ring each", "rings")


def check_indexer_metadata(indexer: Any, tokens: DeepseekSparseSWAMetadata, topk_indices: Any) -> None:
    """Raise ValueError for an indexer's metadata of another batch, if the layer selects with an indexer."""
    if topk_indices is not None:
        return
    if indexer is None:
        raise ValueError("metadata.indexer: got None, expected it for a layer that selects")
    check_current("metadata.indexer", indexer)
    check_mode("metadata.indexer", indexer.batch_invariant, tokens.config.batch_invariant)
    names = ("num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens")
    got, expected = ([int(getattr(of, name)) for name in names] for of in (indexer, tokens))
    if got != expected:
        raise ValueError(
            f"metadata.indexer: got decodes, their tokens, prefills and their tokens {got}, expected {expected} as the "
            "rest of the metadata has"
        )


def begin(layer: LayerContext, hidden_states: Any) -> Call:
    """A call whose arrays must be on the layer's device."""
    call = Call(layer.backend)
    call.borrow("layer", layer.cos_sin)
    call.borrow("hidden_states", hidden_states)
    return call
