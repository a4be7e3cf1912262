"""Index maps that `cumla bench` does not offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cumla.arrays.memory import to_host
from cumla.bench.index_maps import CONTEXT, RATIO, SAMPLE, GlobalTopk, Inputs, compared
from cumla.bench.problem import BLOCK, WINDOW, Problem, Sizes
from cumla.specs.measured import selected_rows


@dataclass(frozen=True)
class Windows:
    tokens: int

    op: ClassVar[str] = "compute_swa_indices_and_lens"

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, window {WINDOW}"

    def problem(self, sizes: Sizes) -> Problem:
        x, tokens, requests = Inputs(sizes), self.tokens, min(self.tokens, 128)
        starts, lens = x.prefills(tokens, requests)
        given = (
            starts, lens, x.array(np.arange(tokens) * requests // tokens), sizes.xp.ones(tokens, np.bool_),
            x.table(requests, CONTEXT + tokens // requests), BLOCK, WINDOW, tokens,
        )  # fmt: skip
        return compared(
            self, sizes, lambda: given, (tokens, WINDOW), 4 * tokens * (WINDOW + 1),
            lambda *given: (*given[:-1], min(tokens, SAMPLE)),
        )  # fmt: skip


@dataclass(frozen=True)
class Combine:
    """Selected rows and window rows of prefills, as gathered rows."""

    tokens: int
    topk: int
    lengths: bool = False

    op: ClassVar[str] = "combine_topk_swa_indices"

    __str__ = GlobalTopk.__str__

    def problem(self, sizes: Sizes) -> Problem:
        x, tokens, topk, requests = Inputs(sizes), self.tokens, self.topk, 4
        new, width = tokens // requests, -(-(topk + WINDOW) // 128) * 128
        starts, lens = x.prefills(tokens, requests, self.lengths)
        before = to_host(lens) - new
        gather_lens = x.array(new + np.minimum(before, WINDOW - 1))
        compressed = (CONTEXT + new) // RATIO
        visible = (before[:, None] + np.arange(1, new + 1)).reshape(-1) // RATIO

        def make() -> Any:
            listed = x.rng.integers(0, CONTEXT // RATIO, (tokens, topk), np.int32)
            if self.lengths:
                listed = selected_rows(x.rng, visible, topk, neighbours=True)
            rows = compressed + new + WINDOW - 1
            return x.array(listed), starts, lens, gather_lens, WINDOW, RATIO, topk, rows, compressed

        return compared(
            self, sizes, make, (tokens, width), 4 * tokens * (topk + width),
            lambda indices, *rest: (indices[:SAMPLE], *rest),
        )  # fmt: skip


@dataclass(frozen=True)
class Mixed:
    """FlashInfer's map of decodes, or of four prefills."""

    decodes: int
    prefill_tokens: int
    topk: int

    op: ClassVar[str] = "build_flashinfer_mixed_sparse_indices"

    def __str__(self) -> str:
        return f"{self.decodes:,} decodes, {self.prefill_tokens:,} prefill x {self.topk:,}"

    def problem(self, sizes: Sizes) -> Problem:
        x, topk, decodes, entries = Inputs(sizes), self.topk, self.decodes, CONTEXT // RATIO
        prefills = 4 if self.prefill_tokens else 0
        new = self.prefill_tokens // max(prefills, 1)
        query_lens = np.repeat([1, new], [decodes, prefills])
        tokens, requests, longest = int(query_lens.sum()), decodes + prefills, CONTEXT + max(new, 1)
        swa_table = x.table(requests, longest)
        swa = x.integers(swa_table.size * BLOCK, decodes, WINDOW)
        rest = (
            x.array(np.append(0, np.cumsum(query_lens))), x.array(CONTEXT + query_lens),
            x.array(np.repeat(np.arange(requests), query_lens)), swa_table, BLOCK, x.table(requests, longest // RATIO),
            BLOCK, WINDOW, RATIO, topk, True, sizes.xp.ones(decodes, np.bool_),
        )  # fmt: skip

        def make() -> Any:
            of_decodes = x.lists(decodes, topk, entries) if decodes else None
            return swa, of_decodes, None, x.lists(self.prefill_tokens, topk, entries), *rest

        def of_first(swa: Any, of_decodes: Any, lens: Any, of_prefills: Any, *rest: Any) -> Any:
            if decodes:
                return swa[:SAMPLE], of_decodes[:SAMPLE], lens, of_prefills[:0], *rest
            return swa, of_decodes, lens, of_prefills[:SAMPLE], *rest

        moved = 4 * tokens * (topk + topk + WINDOW) + 4 * decodes * WINDOW
        return compared(self, sizes, make, (tokens, WINDOW + topk), moved, of_first)
