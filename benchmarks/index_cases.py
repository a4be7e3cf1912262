"""Maps of indices, and vLLM's Triton kernels of the same names, which allocate their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from record_peers import vllm_map

from cumla.arrays.memory import to_host
from cumla.bench.problem import WINDOW, Peer, Problem, Sizes, calls_of, kind_of, on_host, problem_of
from cumla.specs import SPECS, indices

CONTEXT = 32_768  # positions that a request has before this step
SAMPLE = 48  # tokens that are compared with the reference backend


def compared(
    case: Any, sizes: Sizes, make: Callable[[], dict[str, Any]], moved: int, first: Callable[[dict[str, Any]], Any]
) -> Problem:
    """An index map, and vLLM's function of the same name.

    Args:
        make: gives a new set of arguments at each call
        first: reduces the arguments to the first SAMPLE tokens

    The first tokens are compared with the reference, and all tokens with the result of the previous implementation.
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
        peer=Peer("vllm", f"{case.op}, vLLM 0.26", vllm_map, theirs), copied=moved > 1 << 24,
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
        return compared(self, sizes, lambda: indices.global_topk(x), 8 * self.tokens * self.topk, first_lists)


@dataclass(frozen=True)
class Windows:
    tokens: int

    op: ClassVar[str] = "compute_swa_indices_and_lens"

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, window {WINDOW}"

    def problem(self, sizes: Sizes) -> Problem:
        x = sizes.inputs(requests=min(self.tokens, 128), tokens=self.tokens, context=CONTEXT, lengths=False)

        def first(arguments: dict[str, Any]) -> None:
            arguments["num_tokens"] = min(self.tokens, SAMPLE)

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

        def first(arguments: dict[str, Any]) -> None:
            if self.decodes:
                for name in ("decode_swa_indices", "decode_compressed_indices"):
                    arguments[name] = arguments[name][:SAMPLE]
            rest = slice(0, 0 if self.decodes else SAMPLE)
            arguments["prefill_topk_indices"] = arguments["prefill_topk_indices"][rest]

        moved = 4 * tokens * (2 * self.topk + WINDOW) + 4 * self.decodes * WINDOW
        return compared(self, sizes, lambda: indices.mixed(x), moved, first)


def index_maps(sizes: Sizes) -> Iterator[GlobalTopk]:
    for lengths in (True, False):
        yield from (GlobalTopk(batch, sizes.extra, lengths, sizes.context) for batch in sizes.batch)
