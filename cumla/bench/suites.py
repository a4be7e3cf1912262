"""What `cumla bench` measures of indices, dense attention and window metadata."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..bounds import DECODE_OUT
from ..dispatch.call import BFLOAT16
from ..layout import MLA_BF16
from ..metadata import CommonAttentionMetadata, DeepseekSparseSWAMetadataBuilder, ServingConfig
from ..replay.device import to_host
from . import peers
from .problem import BLOCK, Arrays, Peer, Problem, Sizes, against, contexts, error_within, first, of_sets


def indices(sizes: Sizes) -> Iterator[Problem]:
    arrays = Arrays(sizes)
    for batch in sizes.batch:
        columns = -(-sizes.context // BLOCK)
        local, table = arrays.integers(sizes.context, batch, sizes.extra), arrays.integers(1 << 16, batch, columns)
        requests, valid = sizes.xp.arange(batch, dtype=np.int32), sizes.xp.ones(batch, np.bool_)
        out = sizes.xp.empty((batch, sizes.extra), np.int32), sizes.xp.empty(batch, np.int32)
        call = functools.partial(
            cumla.compute_global_topk_indices_and_lens, local, requests, table, BLOCK, valid, out=out,
            backend=sizes.backend,
        )  # fmt: skip
        yield Problem("topk to slots", f"b{batch} {sizes.extra}", {"cumla": ("cupy", [call])}, 8 * local.size)


SETS = 4


@dataclass(frozen=True)
class DenseDecode:
    """Decodes over a paged bfloat16 cache. lengths: of contexts up to `context`, else all of it."""

    heads: int
    batch: int
    context: int
    lengths: bool = False

    op: ClassVar[str] = "dense_mla_decode"

    def __str__(self) -> str:
        return f"h{self.heads} b{self.batch} of {self.context}, {'lengths' if self.lengths else 'full lists'}"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, columns = Arrays(sizes), sizes.xp, -(-self.context // BLOCK)
        cache = arrays.rows(max(sizes.slots // BLOCK, columns), BLOCK, MLA_BF16.head_dim)
        lens = np.full(self.batch, self.context, np.int32)
        if self.lengths:
            lens = contexts(arrays.rng, self.batch, self.context)
        q, on_device, scale = arrays.rows(self.batch, 1, self.heads, 576), xp.asarray(lens), 576**-0.5
        tables = [arrays.integers(len(cache), self.batch, columns) for _ in range(SETS)]
        out = xp.empty((self.batch, 1, self.heads, 512), BFLOAT16)
        lse = xp.empty((self.batch, self.heads, 1), np.float32)

        def ours(backend: str) -> list[Any]:
            given, plan = [(q, cache, table, on_device) for table in tables], cumla.DenseDecodePlan()
            return of_sets(
                cumla.dense_mla_decode, given, softmax_scale=scale, max_seqlen=self.context, plan=plan, out=out,
                lse=lse, backend=backend,
            )  # fmt: skip

        def check(result: Any) -> float:
            worst, got = 0.0, result[0] if isinstance(result, (tuple, list)) else result
            for entry in sorted({0, self.batch - 1}):
                one, pages = slice(entry, entry + 1), to_host(cache[tables[0][entry]])
                want, _ = cumla.dense_mla_decode(
                    to_host(q[one]), pages, np.arange(columns, dtype=np.int32)[None], lens[one], softmax_scale=scale,
                    backend="reference",
                )  # fmt: skip
                worst = max(worst, error_within(first(got[one]), want, DECODE_OUT))
            return worst

        theirs = [peers.flash_mla_dense_decode(q, cache, table, on_device, scale) if sizes.with_peers else None
                  for table in tables]  # fmt: skip
        keys = int(lens.sum())
        return Problem(
            self.op, str(self), **against(sizes, ours, flash_mla=Peer(peers.FLASH_MLA_DECODE, theirs)),
            bytes_moved=keys * MLA_BF16.row_bytes, flop=2 * keys * self.heads * (576 + 512), check=check,
            clear=lambda: out.fill(0),
        )  # fmt: skip


def dense(sizes: Sizes) -> Iterator[DenseDecode]:
    for lengths in (True, False):
        for batch in sizes.batch:
            yield DenseDecode(sizes.heads, batch, sizes.context, lengths)


def metadata(sizes: Sizes) -> Iterator[Problem]:
    """A step's window metadata: decodes, and one prefill of the first size in `tokens`."""
    prefill, longest = sizes.tokens[0], max(sizes.context, *sizes.tokens)
    columns = -(-longest // BLOCK)
    for batch in sizes.batch:
        query_lens = np.array([1] * batch + [prefill], np.int32)
        seq_lens = np.maximum(query_lens, np.array([sizes.context] * batch + [prefill], np.int32))
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        tokens, xp = int(starts[-1]), sizes.xp
        config = ServingConfig(
            window_size=sizes.topk, block_size=BLOCK, max_num_batched_tokens=tokens, max_num_seqs=batch + 1,
            max_model_len=longest,
        )  # fmt: skip
        step = CommonAttentionMetadata(
            xp.asarray(starts), starts, xp.asarray(seq_lens), seq_lens, seq_lens - query_lens, batch + 1, tokens,
            prefill, Arrays(sizes).integers(sizes.slots // BLOCK, batch + 1, columns), xp.arange(tokens),
        )  # fmt: skip
        build = functools.partial(DeepseekSparseSWAMetadataBuilder(config, backend=sizes.backend).build, 0, step)
        moved = tokens * sizes.topk * 4
        yield Problem("window metadata", f"b{batch} + prefill {prefill}", {"cumla": ("cupy", [build])}, moved)
