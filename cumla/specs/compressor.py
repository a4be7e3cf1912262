"""Spec of V4's compressors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..bounds import ROUNDED
from ..dispatch.call import FLOAT32, INT32, SLOTS
from ..dispatch.debug_checks import compressor as checks
from ..layout import DSV4_BF16, INDEXER_BF16, CacheLayout
from ..metadata.slots import STATE_BLOCK_SIZES
from ..ops.compressor import PROJECTED, compress_and_insert
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Variant


def compress(
    x: Inputs, layout: CacheLayout, indexer: CacheLayout | None = None, ratio: int = 4, positions: Any = np.int64
) -> dict[str, Any]:
    """Tokens, of which those at every ratio-th position complete a row; an indexer's compressor as well.

    States are those of the last pages of each request, which a step reads. positions: their dtype.
    """
    step, block, overlap = x.step, STATE_BLOCK_SIZES[ratio], 2 if ratio == 4 else 1
    last = np.maximum(step.seq_lens - 1, 0) // block
    pages = -(-overlap * ratio // block) + 1
    table = np.full((x.size.requests, int(last.max(initial=0)) + 1), -1)
    for request, column in enumerate(last):
        first = max(column - pages + 1, 0)
        table[request, first : column + 1] = pages * request + np.arange(column + 1 - first)
    page = table[step.requests, step.positions // block]
    state_slots = np.where(page < 0, -1, page * block + step.positions % block)
    slots = np.where((step.positions + 1) % ratio == 0, np.arange(step.num_tokens), -1)

    def rows(prefix: str, layout: CacheLayout) -> dict[str, Any]:
        width = 2 * overlap * layout.head_dim
        arrays = {
            "kv_score": x.floats(step.num_tokens, width), "position_bias": x.floats(ratio, width // 2),
            "norm_weight": x.floats(layout.head_dim), "state_cache": x.states(pages * len(table), block, width),
            "k_cache": x.new_cache(layout),
        }  # fmt: skip
        return {f"{prefix}{name}": array for name, array in arrays.items()}

    arguments = rows("", layout)
    if indexer is not None:
        arguments |= rows("index_", indexer)
        if arguments["index_k_cache"].ndim == 2:  # raw pages, of which no argument says the format
            arguments["index_k_cache"] = indexer.view(arguments["index_k_cache"], x.size.block_size)
    return {
        **arguments, "state_slot_mapping": x.put(state_slots, np.int64), "state_block_table": x.put(table, np.int32),
        "slot_mapping": x.put(slots, np.int64), "positions": x.put(step.positions, x.choose(positions, np.int32)),
        "token_to_req_indices": x.put(step.requests, np.int32), "query_start_loc": x.starts(step.query_lens),
        "cos_sin_cache": x.rotation(x.longest(step.seq_lens)), "compress_ratio": ratio,
        "block_size": x.size.block_size, "layout": layout,
    }  # fmt: skip


SPECS = (
    OperationSpec(
        compress_and_insert, "compressor",
        {
            "kv_score": Array(PROJECTED), "position_bias": Array(FLOAT32), "norm_weight": Array(PROJECTED),
            "state_cache": Array(FLOAT32, "in out", bound=ROUNDED),
            "state_slot_mapping": Array(SLOTS, holds="slots"), "state_block_table": Array(INT32, holds="pages"),
            "k_cache": Array(CACHE, "out", bound=ROUNDED), "slot_mapping": Array(SLOTS, holds="slots"),
            "positions": Array(SLOTS, holds="positions"), "token_to_req_indices": Array(INT32, holds="requests"),
            "query_start_loc": Array(INT32, holds="starts"), "cos_sin_cache": Array(FLOAT32),
            "index_kv_score": Array(PROJECTED), "index_position_bias": Array(FLOAT32),
            "index_norm_weight": Array(PROJECTED), "index_state_cache": Array(FLOAT32, "in out", bound=ROUNDED),
            "index_k_cache": Array(CACHE, "out", bound=ROUNDED),
        },
        (
            Variant("DSV4_BF16, ratio 4", functools.partial(compress, layout=DSV4_BF16)),
            Variant("DSV4_BF16, both", functools.partial(compress, layout=DSV4_BF16, indexer=INDEXER_BF16)),
        ),
        checks.compress_and_insert, optional_writes=(("index_state_cache", "index_k_cache"),),
    ),
)  # fmt: skip
