"""Maps of indices, beside vLLM's Triton kernels of the same names, which allocate what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays.memory import to_host
from ..specs import SPECS
from ..specs import indices as maps
from . import peers
from .problem import Peer, Problem, Sizes, calls_of, kind_of, on_host, problem_of

CONTEXT = 32_768  # positions that a request has before this step
SAMPLE = 48  # tokens that are compared with the reference backend


def compared(
    case: Any, sizes: Sizes, make: Callable[[], dict[str, Any]], moved: int, first: Callable[[dict[str, Any]], Any]
) -> Problem:
    """A map beside vLLM's of the same name.

    Args:
        make: gives a new set of arguments at each call
        first: changes arguments to those of the first SAMPLE tokens

    The first tokens are compared with the reference, all tokens with those of the implementation before.
    """
    sets, spec = [make() for _ in range(sizes.sets(moved))], SPECS[case.op]
    outs = [tuple(sizes.xp.empty(x.shape, x.dtype) for x in spec.results(arguments)) for arguments in sets]
    of_first = on_host(sets[0])
    first(of_first)
    want = spec.function(**of_first, backend="reference")
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

    taken = [name for name, x in spec.parameters.items() if x.kind is not x.KEYWORD_ONLY and name in sets[0]]
    theirs = [[case.op, *(arguments[name] for name in taken if name != "swa_block_span")] for arguments in sets]
    return problem_of(
        case, sizes, calls_of(spec.function, sets, outs), moved, check, clear,
        peer=Peer("vllm", f"{case.op}, vLLM 0.26", peers.vllm_map, theirs), copied=moved > 1 << 24,
    )  # fmt: skip


def first_lists(arguments: dict[str, Any]) -> None:
    arguments["topk_indices"] = arguments["topk_indices"][:SAMPLE]


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
        x = sizes.inputs(
            requests=min(self.tokens, 128), tokens=self.tokens, topk=self.topk, context=self.context,
            lengths=self.lengths,
        )  # fmt: skip
        return compared(self, sizes, lambda: maps.global_topk(x), 8 * self.tokens * self.topk, first_lists)


def indices(sizes: Sizes) -> Iterator[GlobalTopk]:
    for lengths in (True, False):
        yield from (GlobalTopk(batch, sizes.extra, lengths, sizes.context) for batch in sizes.batch)
