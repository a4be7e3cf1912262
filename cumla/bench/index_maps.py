"""Maps of indices, beside vLLM's Triton kernels of the same names, which allocate what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from . import peers
from .problem import (
    BLOCK,
    WINDOW,
    Arrays,
    Peer,
    Problem,
    Sizes,
    by_backend,
    contexts,
    kind_of,
    problem_of,
    selected_rows,
)

RATIO, CONTEXT = 4, 32_768  # positions that a request has before this step
SAMPLE = 48  # tokens that are compared with the reference backend


class Inputs(Arrays):
    def array(self, values: Any) -> Any:
        return self.xp.asarray(np.asarray(values, np.int32))

    def lists(self, tokens: int, topk: int, entries: int) -> Any:
        """int32 [tokens, topk] entries in no order, of which one in a hundred is absent."""
        found = self.rng.integers(0, entries, (tokens, topk), np.int32)
        return self.array(np.where(self.rng.integers(0, 101, (tokens, topk), np.int8) == 0, -1, found))

    def table(self, requests: int, positions: int) -> Any:
        columns = -(-positions // BLOCK)
        return self.array(self.rng.permutation(requests * columns).reshape(requests, columns))

    def prefills(self, tokens: int, requests: int, lengths: bool = False) -> tuple[Any, Any]:
        """query_start_loc and seq_lens of prefills that continue a context, or contexts of different lengths."""
        new = tokens // requests
        before = contexts(self.rng, requests, CONTEXT) if lengths else np.full(requests, CONTEXT)
        return self.array(np.arange(requests + 1) * new), self.array(before + new)


def compared(
    case: Any, sizes: Sizes, make: Callable[[], Any], shape: tuple[int, int], moved: int,
    of_first: Callable[..., Any],
) -> Problem:  # fmt: skip
    """A map beside vLLM's of the same name.

    make      gives a new set of arguments at each call
    shape     of the indices; each token has a length beside
    of_first  the arguments of the first SAMPLE tokens, given those of all

    The first tokens are compared with the reference, all tokens with those of the implementation before.
    """
    sets, function = [make() for _ in range(sizes.sets(moved))], getattr(cumla, case.op)
    outs = [tuple(sizes.xp.empty(s, np.int32) for s in (shape, shape[:1])) for _ in sets]
    want = function(*of_first(*(to_host(x) if hasattr(x, "shape") else x for x in sets[0])), backend="reference")
    seen: list[list[np.ndarray]] = []

    def check(result: Any) -> float:
        results = [x.cpu().numpy() if hasattr(x, "cpu") else to_host(x).copy() for x in result]
        for got, first, before in zip(results, want, seen[0] if seen else results, strict=True):
            np.testing.assert_array_equal(got[: len(first)], first)
            np.testing.assert_array_equal(got, before)
        seen.append(results)
        return 0.0

    def clear() -> None:
        for out in outs[0]:
            out.fill(-7)

    theirs = Peer("vllm", f"{case.op}, vLLM 0.26", peers.vllm_map, [(case.op, *given) for given in sets])
    return problem_of(
        case, sizes, by_backend(function, sets, outs), moved, check, clear, peer=theirs, copied=moved > 1 << 24
    )


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
class GlobalTopk:
    """Rows of the second cache that decodes selected, as slots."""

    tokens: int
    topk: int
    lengths: bool = False
    context: int = CONTEXT

    op: ClassVar[str] = "compute_global_topk_indices_and_lens"

    def __str__(self) -> str:
        return f"{self.tokens:,} x {self.topk:,}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        x, tokens, entries = Inputs(sizes), self.tokens, self.context // RATIO
        requests = min(tokens, 128)
        request = np.arange(tokens) * requests // tokens
        rest = (
            x.array(request), x.table(requests, entries), BLOCK,
            sizes.xp.ones(tokens, np.bool_),
        )  # fmt: skip

        def make() -> Any:
            if not self.lengths:
                return x.lists(tokens, self.topk, entries), *rest
            visible = (contexts(x.rng, requests, self.context) // RATIO)[request]
            return x.array(selected_rows(x.rng, visible, self.topk, neighbours=tokens > requests)), *rest

        return compared(
            self, sizes, make, (tokens, self.topk), 8 * tokens * self.topk,
            lambda indices, *rest: (indices[:SAMPLE], *rest),
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


def indices(sizes: Sizes) -> Iterator[GlobalTopk]:
    for lengths in (True, False):
        yield from (GlobalTopk(batch, sizes.extra, lengths, sizes.context) for batch in sizes.batch)


def recorded() -> list[Any]:
    shapes = (128, 512), (4_096, 512), (8_192, 1_024)
    return [
        Windows(128), Windows(4_096),
        *(kind(*shape, lengths) for lengths in (True, False) for kind in (GlobalTopk, Combine) for shape in shapes),
        Mixed(128, 0, 512), Mixed(0, 4_096, 512),
    ]  # fmt: skip
