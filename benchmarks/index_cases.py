"""Index maps that `cumla bench` does not measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cumla.bench.index_maps import CONTEXT, SAMPLE, GlobalTopk, compared, first_lists
from cumla.bench.problem import WINDOW, Problem, Sizes
from cumla.specs import indices


@dataclass(frozen=True)
class Windows:
    tokens: int

    op: ClassVar[str] = "compute_swa_indices_and_lens"

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, window {WINDOW}"

    def problem(self, sizes: Sizes) -> Problem:
        x = sizes.inputs(requests=min(self.tokens, 128), tokens=self.tokens, context=CONTEXT, lengths=False)

        def first(given: dict[str, Any]) -> None:
            given["num_tokens"] = min(self.tokens, SAMPLE)

        return compared(self, sizes, lambda: indices.windows(x), 4 * self.tokens * (WINDOW + 1), first)


@dataclass(frozen=True)
class Combine:
    """Maps selected rows and window rows of prefills to gathered rows."""

    tokens: int
    topk: int
    lengths: bool = False

    op: ClassVar[str] = "combine_topk_swa_indices"

    __str__ = GlobalTopk.__str__

    def problem(self, sizes: Sizes) -> Problem:
        width = -(-(self.topk + WINDOW) // 128) * 128
        x = sizes.inputs(requests=4, tokens=self.tokens, topk=self.topk, context=CONTEXT, lengths=self.lengths)
        return compared(
            self, sizes, lambda: indices.combined(x), 4 * self.tokens * (self.topk + width), first_lists
        )  # fmt: skip


@dataclass(frozen=True)
class Mixed:
    """FlashInfer's index map for decodes, or for four prefills."""

    decodes: int
    prefill_tokens: int
    topk: int

    op: ClassVar[str] = "build_flashinfer_mixed_sparse_indices"

    def __str__(self) -> str:
        return f"{self.decodes:,} decodes, {self.prefill_tokens:,} prefill x {self.topk:,}"

    def problem(self, sizes: Sizes) -> Problem:
        tokens = self.decodes + self.prefill_tokens
        x = sizes.inputs(
            requests=self.decodes + (4 if self.prefill_tokens else 0), decodes=self.decodes, tokens=tokens,
            topk=self.topk, context=CONTEXT, lengths=False,
        )  # fmt: skip

        def first(given: dict[str, Any]) -> None:
            if self.decodes:
                for name in ("decode_swa_indices", "decode_compressed_indices"):
                    given[name] = given[name][:SAMPLE]
            rest = slice(0, 0 if self.decodes else SAMPLE)
            given["prefill_topk_indices"] = given["prefill_topk_indices"][rest]

        moved = 4 * tokens * (2 * self.topk + WINDOW) + 4 * self.decodes * WINDOW
        return compared(self, sizes, lambda: indices.mixed(x), moved, first)
