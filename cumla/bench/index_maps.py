"""Maps of indices, beside vLLM's Triton kernels of the same names, which allocate what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..specs.measured import Measured, contexts, selected_rows
from . import peers
from .problem import BLOCK, Peer, Problem, Sizes, by_backend, kind_of, problem_of

RATIO, CONTEXT = 4, 32_768  # positions that a request has before this step
SAMPLE = 48  # tokens that are compared with the reference backend


class Inputs(Measured):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.backend, sizes.inputs().size)

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


def indices(sizes: Sizes) -> Iterator[GlobalTopk]:
    for lengths in (True, False):
        yield from (GlobalTopk(batch, sizes.extra, lengths, sizes.context) for batch in sizes.batch)
