"""Specs of the operations of several ranks, which share contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import EQUAL, MERGE
from ..dispatch.call import BFLOAT16, BOOL, FLOAT32, FLOATS, INT32
from ..dispatch.debug_checks import shards as checks
from ..kernels.types.shard import Shard
from ..ops.shards import local_block_table, local_seq_lens, local_slot_mapping, localise_indices, merge_partials
from .inputs import Inputs
from .spec import Array, OperationSpec, Result, Variant, dtype_name, shape

LENGTHS, PAGES = Array(INT32, holds="lengths"), Array(INT32, holds="pages")


def shard(x: Inputs) -> Shard:
    rank, size = x.choose((1, 3), (0, 1), (6, 7))
    return Shard(rank, size, x.choose(2, 1, 64, 2**31 - 1))


def lengths(x: Inputs) -> dict[str, Any]:
    return {"seq_lens": x.put(x.step.seq_lens, np.int32), "shard": shard(x), "s_q": x.choose(2, 1, 3)}


def table(x: Inputs) -> dict[str, Any]:
    pages = x.table(x.size.requests, x.longest(x.step.seq_lens))
    return {"block_table": pages, "shard": shard(x), "s_q": x.choose(2, 1, 3)}


def slots(x: Inputs) -> dict[str, Any]:
    step, size = x.step, x.size
    return {
        "query_start_loc": x.starts(step.query_lens), "seq_lens": x.put(step.seq_lens, np.int32),
        "block_table": x.table(size.requests, x.longest(step.seq_lens)), "block_size": size.block_size,
        "shard": shard(x), "num_tokens": step.num_tokens + size.spare, "compress_ratio": x.choose(1, 4),
    }  # fmt: skip


def indices(x: Inputs) -> dict[str, Any]:
    step, size = x.step, x.size
    return {
        "indices": x.selected(step.positions + 1, size.topk), "token_to_req_indices": x.put(step.requests, np.int32),
        "block_table": x.table(size.requests, x.longest(step.seq_lens)), "block_size": size.block_size,
        "shard": shard(x), "is_valid_token": x.choose(x.valid(step.num_tokens), None),
    }  # fmt: skip


def partials(x: Inputs) -> dict[str, Any]:
    size, queries = x.size, max(x.size.tokens // max(x.size.requests, 1), 1)
    dtype, ranks, dim = x.choose(np.float32, BFLOAT16, np.float16), x.choose(3, 1, 40), x.choose(64, 24, 67)
    return {
        "parts": x.rows(ranks, size.requests, queries, size.heads, dim, dtype=dtype),
        "lses": x.logs(ranks, size.requests, size.heads, queries), "attn_sink": x.choose(x.floats(size.heads), None),
    }  # fmt: skip


def lengths_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    (requests,) = shape(arguments, "seq_lens", "R")
    return (Result((requests * arguments["s_q"],), "int32"),)


def table_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    (requests, columns), (rank, size, _) = shape(arguments, "block_table", "R", "B"), arguments["shard"]
    return (Result((requests * arguments["s_q"], max(0, -(-(columns - rank) // size))), "int32"),)


def slots_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    return (Result((arguments["num_tokens"],), "int64"),)


def indices_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, topk = shape(arguments, "indices", "T", "K")
    return Result((tokens, topk), "int32"), Result((tokens,), "int32")


def partials_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    _, batch, s_q, heads, dim = shape(arguments, "parts", "n", "b", "s_q", "h", "d")
    return Result((batch, s_q, heads, dim), dtype_name(arguments["parts"])), Result((batch, heads, s_q), "float32")


def of_ranks(function: Any, arrays: Mapping[str, Array], arguments: Any, **options: Any) -> OperationSpec:
    """An operation that cumla.parallel exports."""
    variants = (Variant("", arguments),)
    return OperationSpec(function, "shards", arrays, variants, public=False, compiled=False, **options)


SPECS = (
    of_ranks(
        local_seq_lens,
        {"seq_lens": LENGTHS},
        lengths,
        check=checks.local_seq_lens,
        results=lengths_results,
        bounds=(EQUAL,),
        outputs=("out",),
    ),
    of_ranks(
        local_block_table, {"block_table": PAGES}, table, results=table_results, bounds=(EQUAL,), outputs=("out",)
    ),
    of_ranks(
        local_slot_mapping,
        {"query_start_loc": Array(INT32, holds="starts"), "seq_lens": LENGTHS, "block_table": PAGES},
        slots,
        check=checks.local_slot_mapping,
        results=slots_results,
        bounds=(EQUAL,),
        outputs=("out",),
    ),
    of_ranks(
        localise_indices,
        {
            "indices": Array(INT32, holds="entries"), "token_to_req_indices": Array(INT32, holds="requests"),
            "block_table": PAGES, "is_valid_token": Array(BOOL),
        },
        indices,
        check=checks.localise_indices,
        results=indices_results,
        bounds=(EQUAL, EQUAL),
        outputs=("out",),
    ),
    of_ranks(
        merge_partials,
        {"parts": Array(FLOATS), "lses": Array(FLOAT32), "attn_sink": Array(FLOAT32)},
        partials,
        results=partials_results,
        bounds=(MERGE, MERGE),
        outputs=("out", "lse"),
    ),
)  # fmt: skip
