"""Calls of the indexer's selection: `cumla warmup` makes them once.

Kernels of scores and of the top-k have sizes that follow from the number of rows and columns, which change with every
step. The calls here have all of them: every number of decodes of one token; other numbers in steps of at most a half.
Few of these thousands of calls need a program that no other one needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..dispatch import backends
from ..layers.selection import MOST_SCORE_BYTES
from ..layout import CacheLayout
from ..ops.candidates import candidate_topk
from ..ops.indexer_topk import WORKSPACE_BYTES, indexer_topk, logits_row_bytes
from ..ops.sparse_cache import cp_gather_indexer_k_quant_cache
from .served_model import Model

Call = Callable[[], Any]
LEAST_COLUMNS, MOST_PROMPT_ROWS, PAGE = 64, 8192, 64


def selection_calls(model: Model, decodes: int, backend: str) -> Iterator[Call]:
    """Selections of up to `decodes` decodes, and of prompts; none on the host, where sizes decide nothing.

    Contexts are empty, so that a call takes no longer than its launches.
    """
    if not backends.takes_device_arrays(backend):
        return
    shared: dict[str, Any] = {}
    for layout in model.index_formats:
        columns = LEAST_COLUMNS
        while columns < 2 * model.context:
            selection = Selection(model, layout, columns, backend, shared)
            yield from selection.decodes(decodes)
            yield from selection.prompts()
            columns *= 2


def find_needed(calls: Iterable[Call], needed: list[Call]) -> None:
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


def call_all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()


class Selection:
    """Selections among so many rows.

    shared  arrays by name that every selection's calls begin with: together they would take gigabytes
    """

    def __init__(self, model: Model, layout: CacheLayout, columns: int, backend: str, shared: dict[str, Any]) -> None:
        self.model, self.layout, self.columns, self.backend, self.shared = model, layout, columns, backend, shared
        self.xp: Any = backends.array_module(backend)
        # V4.1's layers that own rows choose candidate blocks, or not; the others choose among them.
        self.blocks = (0, model.candidate_blocks) if model.kind == "v41" else (0,)

    def queries(self, rows: int) -> tuple[Any, Any]:
        heads = self.model.index_heads
        return self.rows_of("q", rows, (heads, 128), np.uint8, 0), self.rows_of(
            "weights", rows, (heads,), np.float32, 0
        )

    def chosen(self, rows: int, blocks: int) -> dict[str, Any]:
        return {"candidate_blocks": self.rows_of("blocks", rows, (blocks,), np.int32, -1)} if blocks else {}

    def rows_of(self, name: str, rows: int, shape: tuple[int, ...], dtype: Any, value: int) -> Any:
        """The first rows of a shared array."""
        if len(self.shared.get(name, ())) < rows:
            self.shared[name] = self.xp.full((max(rows, 2 * len(self.shared.get(name, ()))), *shape), value, dtype)
        return self.shared[name][:rows]

    @property
    def most_score_bytes(self) -> int:
        """As much memory for scores as layers give."""
        return WORKSPACE_BYTES if self.model.kind == "v41" else MOST_SCORE_BYTES

    def decodes(self, most: int) -> Iterator[Call]:
        cache, topk = self.layout.allocate(1, PAGE, self.xp), self.model.topk
        options: dict[str, Any] = {"layout": self.layout, "backend": self.backend}
        row_bytes = logits_row_bytes(self.columns)
        each_of = [(1, count) for count in range(1, most + 1)]
        some = {most, *(n for power in range(13) for n in (2**power, 3 * 2**power // 2) if n <= most)}
        each_of += [(each, count) for each in range(2, self.model.decode_tokens + 1) for count in sorted(some)]
        for each, count in each_of:
            rows = each * count
            q, weights = self.queries(rows)
            q = q.reshape(count, each, *q.shape[1:])
            lens = self.xp.zeros(count, np.int32)
            table = self.xp.zeros((count, -(-self.columns // PAGE)), np.int32)
            slots = self.xp.empty((rows, topk), np.int32), self.xp.empty(rows, np.int32)
            most_bytes = max(WORKSPACE_BYTES, min(rows * row_bytes, self.most_score_bytes))
            for blocks in self.blocks:
                yield functools.partial(
                    indexer_topk, q, cache, weights, topk, context_lens=lens, block_table=table, slots=slots,
                    max_workspace_bytes=most_bytes, **self.chosen(rows, blocks), **options,
                )  # fmt: skip
                if blocks:
                    listed = self.chosen(rows, blocks)["candidate_blocks"]
                    yield functools.partial(candidate_topk, q, cache, weights, listed, topk, lens, table, **options)

    def prompts(self) -> Iterator[Call]:
        columns, xp = self.columns, self.xp
        keys = xp.zeros((columns, 128), np.uint8), xp.zeros(columns, np.float32)  # layers gather MXFP4 as FP8
        yield functools.partial(
            cp_gather_indexer_k_quant_cache, self.layout.allocate(1, PAGE, xp), *keys, xp.zeros((1, 1), np.int32),
            xp.zeros(2, np.int32), backend=self.backend,
        )  # fmt: skip
        # The last pass over a chunk has any number of rows.
        most = min(MOST_PROMPT_ROWS, self.most_score_bytes // logits_row_bytes(columns))
        for rows in sorted({most, *(n for power in range(14) for n in (2**power, 3 * 2**power // 2) if n <= most)}):
            q, weights = self.queries(rows)
            none = xp.zeros(rows, np.int32)
            for blocks in self.blocks:
                yield functools.partial(
                    indexer_topk, q, keys, weights, self.model.topk, cu_seqlen_ks=none, cu_seqlen_ke=none,
                    max_workspace_bytes=self.most_score_bytes, **self.chosen(rows, blocks), backend=self.backend,
                )  # fmt: skip
                if blocks:
                    listed, pages = self.chosen(rows, blocks)["candidate_blocks"], self.layout.allocate(1, PAGE, xp)
                    table = xp.zeros((rows, -(-columns // PAGE)), np.int32)
                    yield functools.partial(
                        candidate_topk, q[:, None], pages, weights, listed, self.model.topk, none, table,
                        layout=self.layout, backend=self.backend,
                    )  # fmt: skip
