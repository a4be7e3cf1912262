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
from . import peers
from .problem import (
    BLOCK,
    Arrays,
    Calls,
    Peer,
    Problem,
    Sizes,
    by_backend,
    contexts,
    error_within,
    first,
    kind_of,
    problem_of,
)

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
        arrays, xp, columns = Arrays(sizes), sizes.xp, -(-self.context // BLOCK)
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


@dataclass(frozen=True)
class DensePrefill:
    """New tokens of a request among themselves, causal, or over a context, which is not."""

    heads: int
    new: int
    context: int = 0

    op: ClassVar[str] = "mha_varlen"

    def __str__(self) -> str:
        return f"h{self.heads} {self.new} x {self.context or self.new}" + ("" if self.context else " causal")

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, new, keys = Arrays(sizes), sizes.xp, self.new, self.context or self.new
        q, kv = arrays.rows(new, self.heads, NOPE + ROPE), arrays.rows(keys, self.heads, NOPE + V)
        k_pe, scale = arrays.rows(keys, ROPE), (NOPE + ROPE) ** -0.5
        starts = [xp.asarray(np.array([0, n], np.int32)) for n in (new, keys)]
        out, lse = xp.empty((new, self.heads, V), BFLOAT16), xp.empty((self.heads, new), np.float32)
        samples = np.linspace(0, new - 1, SAMPLES).astype(int)

        def check(_: Any) -> float:
            """Some tokens, each with other heads."""
            worst = 0.0
            for number, token in enumerate(samples):
                one, heads = slice(token, token + 1), slice(number % self.heads, None, SAMPLES)
                seen = keys if self.context else token + 1
                of_keys = [to_host(x) for x in (kv[:seen, heads, :NOPE], kv[:seen, heads, NOPE:], k_pe[:seen])]
                want = cumla.mha_varlen(
                    to_host(q[one, heads]), *of_keys[:2], *(np.array([0, n], np.int32) for n in (1, seen)),
                    k_pe=of_keys[2], softmax_scale=scale, backend="reference",
                )  # fmt: skip
                want = want[0] if isinstance(want, tuple) else want
                worst = max(worst, error_within(to_host(out[one, heads]), want, BOUND))
            return worst

        calls = by_backend(
            cumla.mha_varlen, [(q, kv[..., :NOPE], kv[..., NOPE:], *starts)], k_pe=k_pe, softmax_scale=scale,
            causal=not self.context, out=out, lse=lse,
        )  # fmt: skip
        pairs = new * keys if self.context else new * (new + 1) // 2
        moved = 2 * (self.heads * (new * (NOPE + ROPE + V) + keys * (NOPE + V)) + keys * ROPE)
        flop = 2 * self.heads * pairs * (NOPE + ROPE + V)
        return problem_of(self, sizes, calls, moved, check, lambda: out.fill(0), flop=flop)


def dense(sizes: Sizes) -> Iterator[DenseDecode]:
    for lengths in (True, False):
        yield from (DenseDecode(sizes.heads, batch, sizes.context, lengths) for batch in sizes.batch)
