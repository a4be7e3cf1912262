"""Specs of resident rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import EQUAL
from ..dispatch.call import INT32
from ..dispatch.debug_checks import residency as checks
from ..layout import DSV4_FP8
from ..ops.residency import fetch_resident, resolve_resident
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Result, Variant, shape

RATIO = 4  # positions of a compressed row
SLOTS, STEPS = (Array(INT32, "in out", holds=x) for x in ("entries", "positions"))


def hot_rows(x: Inputs) -> int:
    """At least what the tokens of a request of the step select."""
    return x.size.topk * max(x.longest(x.step.query_lens), 1)


def selection(x: Inputs) -> dict[str, Any]:
    """Rows that tokens selected; some of them are in slots, some slots have rows that earlier steps selected."""
    step, requests, hot = x.step, x.size.requests, hot_rows(x)
    rows = max(x.longest(step.seq_lens) // RATIO, 1)
    slot_of_row, row_of_slot = np.full((requests + 1, rows), -1), np.full((requests + 1, hot), -1)
    for lane in range(requests + 1):
        count = min(rows, hot) // 2
        known, slots = x.rng.permutation(rows)[:count], x.rng.permutation(hot)[:count]
        slot_of_row[lane, known], row_of_slot[lane, slots] = slots, known
    last_use = np.where(row_of_slot >= 0, x.rng.integers(1, 6, row_of_slot.shape), 0)
    return {
        "topk_indices": x.selected(step.seq_lens[step.requests] // RATIO, x.size.topk),
        "query_start_loc": x.starts(step.query_lens), "seq_lens": x.put(step.seq_lens, np.int32),
        "lanes": x.put(x.rng.permutation(requests + 1)[:requests], np.int32),
        "slot_of_row": x.put(slot_of_row, np.int32), "row_of_slot": x.put(row_of_slot, np.int32),
        "last_use": x.put(last_use, np.int32), "clock": x.put(np.full(requests + 1, 6), np.int32),
        "compress_ratio": RATIO,
    }  # fmt: skip


def selection_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    found = Result(shape(arguments, "topk_indices", "T", "K"), "int32")
    return found, found


def fetch(x: Inputs) -> dict[str, Any]:
    """Rows that missed, into different slots, of which some are not in the cache."""
    step, size = x.step, x.size
    axes = step.num_tokens, size.topk
    slots = x.rng.permutation(math.prod(axes)).reshape(axes)
    return {
        "misses": x.entries(size.context - 1, *axes), "slots": x.put(slots, np.int32),
        "query_start_loc": x.starts(step.query_lens), "block_table": x.table(size.requests, size.context),
        "host_cache": x.cache(DSV4_FP8), "cache": x.cache(DSV4_FP8, 4),
    }  # fmt: skip


SPECS = (
    OperationSpec(
        resolve_resident, "residency",
        {
            "topk_indices": Array(INT32, holds="entries"), "query_start_loc": Array(INT32, holds="starts"),
            "seq_lens": Array(INT32, holds="lengths"), "lanes": Array(INT32, holds="requests"),
            "slot_of_row": SLOTS, "row_of_slot": SLOTS, "last_use": STEPS, "clock": STEPS,
        },
        (Variant("", selection),), checks.resolve_resident, results=selection_results, bounds=(EQUAL, EQUAL),
        outputs=("out",),
    ),
    OperationSpec(
        fetch_resident, "residency",
        {
            "misses": Array(INT32, holds="entries"), "slots": Array(INT32, holds="entries"),
            "query_start_loc": Array(INT32, holds="starts"), "block_table": Array(INT32, holds="pages"),
            "host_cache": Array(CACHE), "cache": Array(CACHE, "in out"),
        },
        (Variant("DSV4_FP8", fetch),), (checks.fetch_resident, checks.fetch_resident_across),
    ),
)  # fmt: skip
