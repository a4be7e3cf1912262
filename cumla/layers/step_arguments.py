"""Arguments of a sparse layer's step: the compressed cache, and the step's temporary memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_integers
from .selection import IndexerInputs


@dataclass(frozen=True)
class CompressedCache:
    """The compressed rows of one layer, and the rows that a step adds.

    Attributes:
        cache: uint8 [num_blocks, block_size, 584, 528 or 288] (or rows that are not quantised), of the layer's
            extra_layout; a page has compressed_block_size positions of the metadata's config
        block_table: [num_reqs, B] int32, wide enough for the compressed rows of the longest sequence
        k: [n, 512] bfloat16, rows that this step completes; None: the cache contains them already
        slot_mapping: [n] int64 or int32, their slots, -1 skips a row; not used without k
        topk_indices: [num_tokens, topk] int32, rows that each token selects, in any order, -1 anywhere; rows that are
            not complete at the token's position are absent. None for a C128A layer, which takes all rows
        indexer: in place of topk_indices: inputs from which the step selects rows
        decode_slots: [>= num_decode_tokens, topk] int32, slots of the rows that decodes select, from the left of each
            row, as cumla.indexer_topk writes them with topk_indices; None: they are mapped from topk_indices
        decode_lens: [>= num_decode_tokens] int32, the number of these slots; 0 for padding. If both arrays have more
            rows, a step may overwrite the additional rows with the slots of prefills
    """

    cache: Any
    block_table: Any
    k: Any = None
    slot_mapping: Any = None
    topk_indices: Any = None
    indexer: IndexerInputs | None = None
    decode_slots: Any = None
    decode_lens: Any = None


@dataclass(frozen=True)
class LayerWorkspace:
    """Temporary memory of a step's decodes, for steps that must not allocate.

    Attributes:
        lse: [>= num_decode_tokens, h, 1] float32
        topk_indices: [>= num_decode_tokens, >= topk] int32, slots of the rows that tokens select; for a layer that
            selects
        topk_lens: [>= num_decode_tokens] int32; for a layer that selects
        selected: [>= num_tokens, index_topk] int32, the rows that tokens select; with an indexer
        scores: uint8 [>= score_bytes(indexer)], for scores of some tokens at a time; with an indexer
    """

    lse: Any
    topk_indices: Any = None
    topk_lens: Any = None
    selected: Any = None
    scores: Any = None

    @classmethod
    def allocate(cls, q: Any, topk: int = 0, score_bytes: int = 0) -> LayerWorkspace:
        """Allocate a workspace on `q`'s device, for steps of up to num_tokens tokens as in `q` [num_tokens, h, 512].

        Args:
            topk: rows that a token selects, of a layer that selects
            score_bytes: for scores, with an indexer; more than cumla.layers.selection.score_bytes needs fewer launches
        """
        check_integers(0, topk=topk)
        check_integers(0, 2**63 - 1, score_bytes=score_bytes)
        framework, native = dlpack.framework_of(q), dlpack.borrow(q, "q")
        tokens, heads, _ = native.shape

        def empty(shape: tuple[int, ...], dtype: type) -> Any:
            return dlpack.give(dlpack.empty(shape, np.dtype(dtype), native), framework)

        lse = empty((tokens, heads, 1), np.float32)
        if not topk:
            return cls(lse)
        slots, lens = empty((tokens, topk), np.int32), empty((tokens,), np.int32)
        if not score_bytes:
            return cls(lse, slots, lens)
        return cls(lse, slots, lens, empty((tokens, topk), np.int32), empty((score_bytes,), np.uint8))
