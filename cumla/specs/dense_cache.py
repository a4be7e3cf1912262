"""Specs of the operations that insert rows into the dense caches and gather them back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16, BYTES, FLOAT32, FLOATS, INT32, SLOTS
from ..dispatch.debug_checks import dense_cache as checks
from ..layout import MLA_BF16
from ..ops.dense_cache import K_PE_DIM, KV_C_DIM, concat_and_cache_mla, gather_cache
from .inputs import Inputs
from .spec import Array, OperationSpec, Variant


def concat(x: Inputs, is_fp8: bool = False) -> dict[str, Any]:
    """is_fp8: values are divided by one scale."""
    dtype = x.choose(BFLOAT16, np.float16, np.float32)
    shape = x.size.pages, x.size.block_size, MLA_BF16.head_dim
    return {
        "kv_c": x.rows(x.size.rows, KV_C_DIM, dtype=dtype), "k_pe": x.rows(x.size.rows, K_PE_DIM, dtype=dtype),
        "kv_cache": x.unwritten(*shape, dtype=np.uint8) if is_fp8 else x.new_cache(MLA_BF16),
        "slot_mapping": x.slots(x.size.rows), "kv_cache_dtype": "fp8" if is_fp8 else "auto",
        "scale": 0.5 if is_fp8 else None,
    }  # fmt: skip


def gather(x: Inputs, is_fp8: bool = False) -> dict[str, Any]:
    """The last rows of contexts; those of one byte a value are multiplied by a scale."""
    step, size, width = x.step, x.size, MLA_BF16.head_dim
    rows = int(step.gathered.sum()) + size.spare
    shape = size.pages, size.block_size, width
    return {
        "src_cache": x.e4m3(*shape) if is_fp8 else x.rows(*shape),
        "dst": x.unwritten(rows, width, dtype=x.choose(np.float32, BFLOAT16, np.uint8) if is_fp8 else BFLOAT16),
        "block_table": x.table(size.requests, size.context), "cu_seq_lens": x.starts(step.gathered),
        "batch_size": size.requests,
        "seq_starts": None if step.gather_lens is None else x.put(step.seq_lens - step.gather_lens, np.int32),
        "scale": 0.25 if is_fp8 else None,
    }  # fmt: skip


SPECS = (
    OperationSpec(
        concat_and_cache_mla, "dense_cache",
        {
            "kv_c": Array(FLOATS), "k_pe": Array(FLOATS), "kv_cache": Array((*BYTES, *FLOATS), "out"),
            "slot_mapping": Array(SLOTS, holds="slots"), "scale": Array(FLOAT32),
        },
        (Variant("bfloat16", concat), Variant("e4m3, one scale", functools.partial(concat, is_fp8=True))),
        checks.concat_and_cache_mla,
    ),
    OperationSpec(
        gather_cache, "dense_cache",
        {
            "src_cache": Array((*BYTES, *FLOATS)), "dst": Array((*FLOATS, *BYTES), "out"),
            "block_table": Array(INT32, holds="pages"), "cu_seq_lens": Array(INT32, holds="starts"),
            "seq_starts": Array(INT32, holds="lengths"), "scale": Array(FLOAT32),
        },
        (Variant("e4m3, one scale", functools.partial(gather, is_fp8=True)),), checks.gather_cache,
    ),
)  # fmt: skip
