"""Dense attention: decodes over a paged bfloat16 cache, prefill with projected K and V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..bounds import DECODE_OUT
from ..layout import MLA_BF16
from ..specs import SPECS, dense_attention
from . import peers
from .problem import BLOCK, Calls, Peer, Problem, Sizes, calls_of, error_within, first, kind_of, problem_of

SETS, SAMPLES = 4, 4
BOUND = DECODE_OUT._replace(cosine=np.inf)  # of prefill: a few rows of it say nothing of the distance of all


@dataclass(frozen=True)
class DenseDecode:
    """Decodes over a paged bfloat16 cache.

    Attributes:
        lengths: of contexts up to `context`, else all of it
        beside_invariant: the batch-invariant call is measured as well
    """

    heads: int
    batch: int
    context: int
    lengths: bool = False
    beside_invariant: bool = False

    op: ClassVar[str] = "dense_mla_decode"

    def __str__(self) -> str:
        return f"h{self.heads} b{self.batch} of {self.context}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes, plan: cumla.DenseDecodePlan | None = None) -> Problem:
        """Decodes with a plan; None: a new one for each backend."""
        context = self.context - 1  # before the token of the step
        x = sizes.inputs(
            requests=self.batch, tokens=self.batch, heads=self.heads, context=context, lengths=self.lengths,
            pages=max(sizes.slots, context + BLOCK) // BLOCK,
        )  # fmt: skip
        sets = [dense_attention.decode(x) | {"softmax_scale": 576**-0.5} for _ in range(SETS)]
        for arguments in sets[1:]:  # differ in their tables alone
            arguments |= {name: sets[0][name] for name in ("q", "k_cache", "cache_seqlens")}
        outputs, of_first = SPECS[self.op].new_results(x, sets[0]), sets[0]
        cache, lens = of_first["k_cache"], to_host(of_first["cache_seqlens"])

        def ours(backend: str) -> Calls:
            options = {"max_seqlen": self.context, "plan": plan or cumla.DenseDecodePlan(), **outputs}
            return calls_of(cumla.dense_mla_decode, sets, **options)(backend)

        def check(result: Any) -> float:
            worst, got = 0.0, result[0] if isinstance(result, (tuple, list)) else result
            for entry in sorted({0, self.batch - 1}):
                one, pages = slice(entry, entry + 1), to_host(cache[of_first["block_table"][entry]])
                sample = {
                    "q": to_host(of_first["q"][one]), "k_cache": pages, "cache_seqlens": lens[one],
                    "block_table": np.arange(len(pages), dtype=np.int32)[None],
                }  # fmt: skip
                want, _ = cumla.dense_mla_decode(**of_first | sample, backend="reference")
                largest = float(abs(pages.astype(np.float32)).max())
                worst = max(worst, error_within(first(got[one]), want, DECODE_OUT.of_values(largest)))
            return worst

        keys, names = int(lens.sum()), ("q", "k_cache", "block_table", "cache_seqlens", "softmax_scale")
        theirs = [[arguments[name] for name in names] for arguments in sets]
        problem = problem_of(
            self, sizes, ours, keys * MLA_BF16.row_bytes, check, lambda: outputs["out"].fill(0),
            flop=2 * keys * self.heads * (576 + 512),
            peer=Peer("flash_mla", peers.FLASH_MLA_DECODE, peers.flash_mla_dense_decode, theirs),
        )  # fmt: skip
        if self.beside_invariant:
            options = {"max_seqlen": self.context, "plan": cumla.DenseDecodePlan(batch_invariant=True), **outputs}
            of_mode = [arguments | {"batch_invariant": True} for arguments in sets]
            calls = calls_of(cumla.dense_mla_decode, of_mode, **options)(sizes.backend)
            problem.impls["batch_invariant=True"] = "cupy", calls
        return problem


def dense(sizes: Sizes) -> Iterator[DenseDecode]:
    for lengths in (True, False):
        yield from (DenseDecode(sizes.heads, batch, sizes.context, lengths) for batch in sizes.batch)
