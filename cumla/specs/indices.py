"""Specs of the index maps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import EQUAL
from ..dispatch.call import BOOL, INT32
from ..dispatch.debug_checks import indices as checks
from ..ops.indices import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
    compute_swa_indices_and_lens,
    pooled_width,
)
from .inputs import Inputs
from .spec import Array, OperationSpec, Result, Variant, shape

RATIO = 4  # positions of a compressed row
ENTRIES, LENGTHS, PAGES = (Array(INT32, holds=x) for x in ("entries", "lengths", "pages"))
REQUESTS, STARTS = Array(INT32, holds="requests"), Array(INT32, holds="starts")


def windows(x: Inputs) -> dict[str, Any]:
    step, size = x.step, x.size
    return {
        "query_start_loc": x.starts(step.query_lens), "seq_lens": x.put(step.seq_lens, np.int32),
        "token_to_req_indices": x.put(step.requests, np.int32), "is_valid_token": x.valid(step.num_tokens),
        "block_table": x.table(size.requests, x.longest(step.seq_lens)), "block_size": size.block_size,
        "window_size": size.window, "num_tokens": step.num_tokens,
    }  # fmt: skip


def global_topk(x: Inputs, compact: bool = False) -> dict[str, Any]:
    """Rows that tokens selected, in pages of a compressed cache."""
    step, size = x.step, x.size
    visible = step.seq_lens // RATIO
    return {
        "topk_indices": x.selected(visible[step.requests], size.topk + size.spare),
        "token_to_req_indices": x.put(step.requests, np.int32),
        "block_table": x.table(size.requests, x.longest(visible)), "block_size": size.block_size,
        "is_valid_token": x.valid(step.num_tokens), "compact": compact,
    }  # fmt: skip


def pooled_topk(x: Inputs, pool: int = 4) -> dict[str, Any]:
    """Pools that tokens selected, in pages of a cache that has a row for each position."""
    step, size = x.step, x.size
    return {
        "topk_indices": x.selected((step.positions + 1) // pool, size.topk),
        "token_to_req_indices": x.put(step.requests, np.int32),
        "block_table": x.table(size.requests, x.longest(step.seq_lens)), "block_size": pool * size.block_size,
        "is_valid_token": x.valid(step.num_tokens), "positions": x.put(step.positions, np.int32), "compact": True,
        "pool": pool,
    }  # fmt: skip


def combined(x: Inputs) -> dict[str, Any]:
    """Rows that tokens of prefills selected, and windows, in the workspace that both are gathered into."""
    step, size = x.step, x.size
    rows = x.longest(step.seq_lens) // RATIO
    return {
        "topk_indices": x.selected((step.positions + 1) // RATIO, size.topk + size.spare),
        "query_start_loc": x.starts(step.query_lens), "seq_lens": x.put(step.seq_lens, np.int32),
        "gather_lens": x.put(step.gathered, np.int32), "window_size": size.window, "compress_ratio": RATIO,
        "topk": size.topk, "M": rows + x.longest(step.gathered) + 1, "N": rows,
    }  # fmt: skip


def mixed(x: Inputs) -> dict[str, Any]:
    """Decodes with their lists, then prefills."""
    step, size = x.step, x.size
    tokens = (step.positions + 1) // RATIO
    decodes, of_prefills = tokens[: size.decodes], tokens[size.decodes :]
    lens = x.integers(size.topk + 1, size.decodes)
    table, rows = x.table(size.requests, x.longest(step.seq_lens)), x.longest(step.seq_lens) // RATIO
    return {
        "decode_swa_indices": x.entries(size.pages * size.block_size, size.decodes, size.window),
        "decode_compressed_indices": x.selected(decodes, size.topk) if size.decodes else None,
        "decode_compressed_topk_lens": x.choose(None, lens),
        "prefill_topk_indices": x.selected(of_prefills, size.topk + size.spare),
        "query_start_loc": x.starts(step.query_lens), "seq_lens": x.put(step.seq_lens, np.int32),
        "token_to_req_indices": x.put(step.requests, np.int32), "swa_block_table": table,
        "swa_block_size": size.block_size, "compressed_block_table": x.table(size.requests, rows),
        "compressed_block_size": size.block_size, "window_size": size.window, "compress_ratio": RATIO,
        "topk": size.topk, "decode_compressed_indices_are_local": x.choose(True, False),
        "decode_is_valid_token": x.valid(size.decodes), "swa_block_span": size.block_size + 2 * size.spare,
    }  # fmt: skip


def windows_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens = arguments["num_tokens"]
    return Result((tokens, arguments["window_size"]), "int32"), Result((tokens,), "int32")


def global_topk_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, topk = shape(arguments, "topk_indices", "T", "K")
    return Result((tokens, pooled_width(topk, arguments.get("pool", 1))), "int32"), Result((tokens,), "int32")


def padded(count: Any, multiple: int) -> Any:
    return (count + multiple - 1) // multiple * multiple


def combined_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, _ = shape(arguments, "topk_indices", "T", ">= topk")
    width = padded(arguments["topk"] + arguments["window_size"], 128)
    return Result((tokens, width), "int32"), Result((tokens,), "int32")


def mixed_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    compressed, topk = arguments["decode_compressed_indices"], arguments["topk"]
    prefill_tokens, _ = shape(arguments, "prefill_topk_indices", "P", ">= topk")
    tokens = arguments["decode_swa_indices"].shape[0] + prefill_tokens
    widest = topk if compressed is None else max(topk, compressed.shape[-1])
    return Result((tokens, arguments["window_size"] + padded(widest, 4)), "int32"), Result((tokens,), "int32")


SPECS = (
    OperationSpec(
        compute_swa_indices_and_lens, "indices",
        {
            "query_start_loc": STARTS, "seq_lens": LENGTHS, "token_to_req_indices": REQUESTS,
            "is_valid_token": Array(BOOL), "block_table": PAGES,
        },
        (Variant("", windows),), checks.compute_swa_indices_and_lens, results=windows_results, bounds=(EQUAL, EQUAL),
        outputs=("out",),
    ),
    OperationSpec(
        compute_global_topk_indices_and_lens, "indices",
        {
            "topk_indices": ENTRIES, "token_to_req_indices": REQUESTS, "block_table": PAGES,
            "is_valid_token": Array(BOOL), "positions": Array(INT32, holds="positions"),
        },
        (
            Variant("", global_topk), Variant("compact", functools.partial(global_topk, compact=True)),
            Variant("positions", pooled_topk),
        ),
        checks.compute_global_topk_indices_and_lens, results=global_topk_results, bounds=(EQUAL, EQUAL),
        outputs=("out",),
    ),
    OperationSpec(
        combine_topk_swa_indices, "indices",
        {"topk_indices": ENTRIES, "query_start_loc": STARTS, "seq_lens": LENGTHS, "gather_lens": LENGTHS},
        (Variant("", combined),), checks.combine_topk_swa_indices, results=combined_results, bounds=(EQUAL, EQUAL),
        outputs=("out",),
    ),
    OperationSpec(
        build_flashinfer_mixed_sparse_indices, "indices",
        {
            "decode_swa_indices": ENTRIES, "decode_compressed_indices": ENTRIES, "decode_compressed_topk_lens": LENGTHS,
            "prefill_topk_indices": ENTRIES, "query_start_loc": STARTS, "seq_lens": LENGTHS,
            "token_to_req_indices": REQUESTS, "swa_block_table": PAGES, "compressed_block_table": PAGES,
            "decode_is_valid_token": Array(BOOL),
        },
        (Variant("", mixed),), checks.build_flashinfer_mixed_sparse_indices, results=mixed_results,
        bounds=(EQUAL, EQUAL), outputs=("out",),
    ),
)  # fmt: skip
