"""Spec of the copy of spans of bytes."""

from __future__ import annotations

from typing import Any

from ..dispatch.call import BYTES, FLOATS, SLOTS
from ..dispatch.debug_checks import spans as checks
from ..layout import DSV4_FP8
from ..ops.spans import copy_spans
from .inputs import Inputs
from .spec import Array, OperationSpec, Variant

ANY = (*BYTES, *FLOATS, *SLOTS)


def arguments(x: Inputs) -> dict[str, Any]:
    """Spans of pages of two arrays, aligned and not, and spans that are not within a page."""
    size = x.size.block_size * DSV4_FP8.token_bytes
    src, dst = ([x.e4m3(x.size.pages, size), x.rows(x.size.pages, 3, 4)] for _ in range(2))
    spans = [
        [0, 0, 0, 0, 3, 0, size], [0, 1, 16, 0, 2, 32, size - 48], [0, 1, 1, 0, 1, 2, 5], [1, 2, 8, 0, 4, 4, 16],
        [1, x.size.pages, 0, 0, 5, 0, 4], [1, 0, 20, 0, 5, 0, 5], [0, 0, -1, 1, 0, 0, 4], [2, 0, 0, 1, 0, 0, 4],
    ]  # fmt: skip
    return {"src": src, "dst": dst, "spans": x.put(spans, SLOTS[0])}


SPECS = (
    OperationSpec(
        copy_spans, "spans",
        {"src": Array(ANY), "dst": Array(ANY, "in out"), "spans": Array(SLOTS, holds="pages")},
        (Variant("", arguments),), (checks.copy_spans, checks.copy_spans_across), compiled=False,
    ),
)  # fmt: skip
