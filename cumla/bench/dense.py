"""Dense attention: decodes over a paged bfloat16 cache, prefill with projected K and V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..bounds import DECODE_OUT
from ..dispatch.call import BFLOAT16
from ..layout import MLA_BF16
from ..specs.measured import contexts
from . import peers
from .problem import BLOCK, Calls, Peer, Problem, Sizes, by_backend, error_within, first, kind_of, problem_of

SETS, SAMPLES = 4, 4
NOPE, ROPE, V = 128, 64, 128  # of a head
BOUND = DECODE_OUT._replace(cosine=np.inf)  # of prefill: a few rows of it say nothing of the distance of all


@dataclass(frozen=True)
class DenseDecode:
    """Decodes over a paged bfloat16 cache. lengths: of contexts up to `context`, else all of it."""

    heads: int
    batch: int
    context: int
    lengths: bool = False

    op: ClassVar[str] = "dense_mla_decode"

    def __str__(self) -> str:
        return f"h{self.heads} b{self.batch} of {self.context}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, columns = sizes.inputs(), sizes.xp, -(-self.context // BLOCK)
        cache = arrays.rows(max(sizes.slots // BLOCK, columns), BLOCK, MLA_BF16.head_dim)
        lens = np.full(self.batch, self.context, np.int32)
        if self.lengths:
            lens = contexts(arrays.rng, self.batch, self.context)
        q, on_device, scale = arrays.rows(self.batch, 1, self.heads, 576), xp.asarray(lens), 576**-0.5
        given = [(q, cache, arrays.integers(len(cache), self.batch, columns), on_device) for _ in range(SETS)]
        out = xp.empty((self.batch, 1, self.heads, 512), BFLOAT16)
        lse = xp.empty((self.batch, self.heads, 1), np.float32)

        def ours(backend: str) -> Calls:
            options = {"softmax_scale": scale, "max_seqlen": self.context, "out": out, "lse": lse}
            return by_backend(cumla.dense_mla_decode, given, plan=cumla.DenseDecodePlan(), **options)(backend)

        def check(result: Any) -> float:
            worst, got = 0.0, result[0] if isinstance(result, (tuple, list)) else result
            for entry in sorted({0, self.batch - 1}):
                one, pages = slice(entry, entry + 1), to_host(cache[given[0][2][entry]])
                want, _ = cumla.dense_mla_decode(
                    to_host(q[one]), pages, np.arange(columns, dtype=np.int32)[None], lens[one], softmax_scale=scale,
                    backend="reference",
                )  # fmt: skip
                largest = float(abs(pages.astype(np.float32)).max())
                worst = max(worst, error_within(first(got[one]), want, DECODE_OUT.of_values(largest)))
            return worst

        keys = int(lens.sum())
        return problem_of(
            self, sizes, ours, keys * MLA_BF16.row_bytes, check, lambda: out.fill(0),
            flop=2 * keys * self.heads * (576 + 512),
            peer=Peer(
                "flash_mla", peers.FLASH_MLA_DECODE, peers.flash_mla_dense_decode, [(*x, scale) for x in given]
            ),
        )  # fmt: skip


def dense(sizes: Sizes) -> Iterator[DenseDecode]:
    for lengths in (True, False):
        yield from (DenseDecode(sizes.heads, batch, sizes.context, lengths) for batch in sizes.batch)
