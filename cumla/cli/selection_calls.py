"""Calls of the indexer's selection: `cumla warmup` makes them once.

Kernels of scores and of the top-k have sizes that follow from the number of rows and columns, which change with every
step. The calls here have all of them: every number of decodes of one token; other numbers in steps of at most a half.
Few of these thousands of calls need a program that no other one needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..dispatch import backends
from ..layers.selection import MOST_SCORE_BYTES
from ..layout import CacheLayout
from ..ops.candidates import candidate_topk
from ..ops.indexer_topk import CANDIDATE_BLOCK, WORKSPACE_BYTES, indexer_topk, logits_row_bytes
from ..ops.sparse_cache import cp_gather_indexer_k_quant_cache
from ..specs import candidates, sparse_cache
from ..specs import indexer_topk as topk_inputs
from ..specs.inputs import Size
from ..specs.served import Served
from .served_model import Model

Thunk = Callable[[], Any]
LEAST_COLUMNS, MOST_PROMPT_ROWS, PAGE = 64, 8192, 64


def selection_calls(model: Model, decodes: int, backend: str) -> Iterator[Thunk]:
    """Selections of up to `decodes` decodes, and of prompts; none on the host, where sizes decide nothing.

    Contexts are empty, so that a call takes no longer than its launches.
    """
    if not backends.takes_device_arrays(backend):
        return
    shared: dict[Any, Any] = {}
    for layout in model.index_formats:
        columns = LEAST_COLUMNS
        while columns < 2 * model.context // model.pool:
            selection = Selection(model, layout, columns, backend, shared)
            yield from selection.decodes(decodes)
            yield from selection.prompts()
            columns *= 2


def find_needed(calls: Iterable[Thunk], needed: list[Thunk]) -> None:
    """Append the calls of backend cuda that need a program which none before them needs; threads begin to compile it.

    All calls are made here, without launches.
    """
    from ..kernels.cuda.compile import programs_asked_for

    with programs_asked_for() as asked:
        for call in calls:
            before = len(asked)
            call()
            if len(asked) > before:
                needed.append(call)


def call_all(calls: Iterable[Thunk]) -> None:
    for call in calls:
        call()


class Selection:
    """Selections among a number of rows. shared: arrays that the inputs of all sizes begin with (`Served`)."""

    def __init__(self, model: Model, layout: CacheLayout, columns: int, backend: str, shared: dict[Any, Any]) -> None:
        self.model, self.layout, self.columns, self.backend, self.shared = model, layout, columns, backend, shared
        self.size = Size(
            tokens=columns, keys=columns, heads=model.index_heads, topk=model.topk // model.pool, context=columns,
            block_size=max(PAGE // model.pool, 1),
        )  # fmt: skip
        # V4.1's layers that own rows choose candidate blocks, or not; the others choose among them.
        self.blocks = (0, model.candidate_blocks) if model.kind == "v41" else (0,)

    def inputs(self, **size: Any) -> Served:
        return Served(self.backend, replace(self.size, **size), self.shared)

    @property
    def most_score_bytes(self) -> int:
        """As much memory for scores as layers give."""
        return WORKSPACE_BYTES if self.model.kind == "v41" else MOST_SCORE_BYTES

    def decodes(self, most: int) -> Iterator[Thunk]:
        row_bytes = logits_row_bytes(self.columns)
        each_of = [(1, count) for count in range(1, most + 1)]
        each_of += [(each, n) for each in range(2, self.model.decode_tokens + 1) for n in numbers(most)]
        for each, count in each_of:
            x, most_bytes = self.inputs(requests=count), each * count * row_bytes
            most_bytes = max(WORKSPACE_BYTES, min(most_bytes, self.most_score_bytes))
            for blocks in self.blocks:
                arguments = topk_inputs.over_pages(x, self.layout, each, blocks, with_slots=True, pool=self.model.pool)
                yield functools.partial(indexer_topk, **arguments, max_workspace_bytes=most_bytes, backend=self.backend)
            if blocks:
                yield self.among_candidates(x, each)

    def among_candidates(self, x: Served, each: int) -> Thunk:
        arguments = candidates.choice(x, self.layout, each, self.model.candidate_blocks, CANDIDATE_BLOCK)
        return functools.partial(candidate_topk, **arguments, backend=self.backend)

    def prompts(self) -> Iterator[Thunk]:
        """Layers gather MXFP4 keys as FP8. The last pass over a chunk has any number of rows."""
        arguments = sparse_cache.gather_keys(self.inputs(), self.layout)
        yield functools.partial(cp_gather_indexer_k_quant_cache, **arguments, backend=self.backend)
        for rows in numbers(min(MOST_PROMPT_ROWS, self.most_score_bytes // logits_row_bytes(self.columns))):
            x, most_bytes = self.inputs(requests=rows, tokens=rows), self.most_score_bytes
            for blocks in self.blocks:
                arguments = topk_inputs.over_keys(x, blocks)
                yield functools.partial(indexer_topk, **arguments, max_workspace_bytes=most_bytes, backend=self.backend)
            if blocks:
                yield self.among_candidates(x, 1)


def numbers(most: int) -> list[int]:
    """Powers of two, their halves again as much, and the most."""
    return sorted({most, *(n for power in range(14) for n in (2**power, 3 * 2**power // 2) if n <= most)})
