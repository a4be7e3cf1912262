"""Attention of DeepSeek V3.2's layers: each token attends to the rows of one cache that it selects.

Decodes read the pages of the cache. Prefills take the faster of two paths (prefill_path.py): they also read the pages,
or dequantise the rows of their requests into a workspace first and read that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dlpack, streams
from ..dispatch.backends import choose
from ..layout import CacheLayout
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata
from ..ops.indices import compute_global_topk_indices_and_lens
from ..ops.sparse_attention import sparse_mla_decode, sparse_mla_prefill
from ..ops.sparse_cache import dequantize_and_gather_k_cache
from .prefill_path import COSTS, HEADS, cheaper_path, tokens_of_a_last_wave

WORKSPACE_ROWS = 1 << 18  # most dequantised rows, 302 MB in bfloat16; a longer request gets a workspace of its own
PrefillRange = tuple[int, int, int]  # prefills: the first, one past the last, and the rows of the longest


class Chosen(NamedTuple):
    """The rows that a step's tokens select; None for a layer that takes all rows, or none.

    Attributes:
        topk_indices: [T, topk] int32, counted within the token's request, -1 for none; pools of rows with pool above 1
        slots: [T, topk * pool + pool - 1] int32, memory for the slots of these rows
        lens: [T] int32, memory for the number of a token's slots
        mapped: first tokens whose slots and lens are written already: 0, or the number of decodes
        pool: rows of an entry of topk_indices; above 1, a token also attends to the rows of its incomplete pool
    """

    topk_indices: Any
    slots: Any
    lens: Any
    mapped: int = 0
    pool: int = 1


@dataclass(frozen=True)
class SelectedAttention:
    """One layer's attention over the rows that tokens select.

    Attributes:
        cache: [num_blocks, block_size, ..], rows of `layout`
        attn_sink: [h] float32, as in sparse_mla_decode, or None
        path: of prefills: "pages", "rows", or None for the faster one
        observe: called with a part's name around each part ("map", "gather", "decode", "prefill")
        batch_invariant: as of sparse_mla_decode; prefills then read pages, too
    """

    cache: Any
    layout: CacheLayout
    softmax_scale: float
    path: str | None = None
    backend: str | None = None
    observe: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext()
    attn_sink: Any = None
    batch_invariant: bool = False

    def attend(self, q: Any, metadata: DeepseekSparseSWAMetadata, chosen: Chosen, out: Any, lse: Any) -> None:
        """Write `out` [T, h, 512] for all tokens of a step, on the current stream.

        Args:
            q: [T, h, head_dim]
            lse: [T, h, 1] float32, overwritten
        """
        tokens, (_, heads, _) = len(q), q.shape
        chunks, ahead = self._chunks(metadata, heads, chosen.slots.shape[1])
        decodes = metadata.num_decode_tokens
        over_pages = decodes + (ahead if decodes else 0) if chunks else tokens
        if chosen.mapped < over_pages:
            part = slice(chosen.mapped, over_pages)
            self._map(metadata, chosen, part, metadata.block_table, metadata.block_size)
        if over_pages:
            part = slice(0, over_pages)
            with self.observe("decode"):
                sparse_mla_decode(
                    q[part, None], self.cache, chosen.slots[part, None], layout=self.layout,
                    topk_length=chosen.lens[part], attn_sink=self.attn_sink, softmax_scale=self.softmax_scale,
                    out=out[part, None], lse=lse[part], plan=metadata.tile_sched_swaonly or metadata.pages_plan(1, 0),
                    batch_invariant=self.batch_invariant, backend=self.backend,
                )  # fmt: skip
        for chunk in chunks:
            self._over_rows(q, metadata, chosen, out, chunk, over_pages)

    def _chunks(self, metadata: DeepseekSparseSWAMetadata, heads: int, topk: int) -> tuple[list[PrefillRange], int]:
        """The chunks of prefills whose rows are dequantised together; none if prefills read pages.

        Also the number of their first tokens that read pages in the decodes' call. Reads host integers only.
        """
        if not metadata.num_prefills or self.path == "pages" or self.batch_invariant:
            return [], 0
        seq_lens = dlpack.borrow(metadata.prefill_seq_lens_cpu, "prefill_seq_lens_cpu")
        chunks, start, longest = [], 0, 0
        for i, length in enumerate(seq_lens.tolist()):
            if i > start and (i + 1 - start) * max(longest, length) > WORKSPACE_ROWS:
                chunks.append((start, i, longest))
                start, longest = i, 0
            longest = max(longest, length, 1)
        chunks.append((start, len(seq_lens), longest))
        if self.path is None:
            if heads < HEADS:  # 16 heads: 767 us over pages, 767 to 830 over rows (2,000 tokens of 5K to 47K, H200)
                return [], 0
            costs = COSTS.get(
                (choose(self.backend, on_device=not isinstance(self.cache, np.ndarray)), self.layout.name)
            )
            if costs is None or streams.is_capturing():  # later replays' rows may not fit in a workspace
                return [], 0
            query_lens = dlpack.borrow(metadata.prefill_query_lens_cpu, "prefill_query_lens_cpu")
            count = int(query_lens.sum())
            listed = listed_rows(seq_lens, query_lens, topk) // max(count, 1)
            if cheaper_path(costs, count, heads, 0, listed, int(seq_lens.sum())) == "pages":
                return [], 0
            first = min(int(seq_lens[0] - query_lens[0]), topk)
            return chunks, tokens_of_a_last_wave(costs, int(query_lens[: chunks[0][1]].sum()), heads, 0, first)
        return chunks, 0

    def _over_rows(
        self, q: Any, metadata: DeepseekSparseSWAMetadata, chosen: Chosen, out: Any, chunk: PrefillRange, done: int
    ) -> None:
        """Dequantise all rows of the chunk's requests into [requests, longest, head_dim], and attend to them.

        Args:
            done: the step's first tokens, which have attended already
        """
        start, stop, longest = chunk
        longest = -(-longest // chosen.pool) * chosen.pool
        first = metadata.num_decodes
        requests = slice(first + start, first + stop)
        starts = dlpack.borrow(metadata.query_start_loc_cpu, "query_start_loc_cpu")
        end = len(q) if stop == metadata.num_prefills else int(starts[requests.stop])  # padding: tokens without rows
        tokens = slice(max(int(starts[requests.start]), done), end)
        rows = dlpack.empty((stop - start, longest, self.layout.head_dim), q.dtype, q)
        with self.observe("gather"):
            seq_lens, table = (dlpack.borrow(getattr(metadata, x), x)[requests] for x in ("seq_lens", "block_table"))
            dequantize_and_gather_k_cache(
                rows, self.cache, seq_lens, None, table, metadata.block_size, layout=self.layout, backend=self.backend
            )
        # Row i of request r is r * longest + i: the workspace is addressed as pages of `longest` rows.
        table = dlpack.namespace_of(q).arange(-requests.start, stop - start, dtype=np.int32)[:, None]
        self._map(metadata, chosen, tokens, table, longest)
        with self.observe("prefill"):
            logits = dlpack.empty((2, tokens.stop - tokens.start, q.shape[1]), np.dtype(np.float32), q)
            sparse_mla_prefill(
                q[tokens], rows.reshape(-1, self.layout.head_dim), chosen.slots[tokens],
                softmax_scale=self.softmax_scale, attn_sink=self.attn_sink, topk_length=chosen.lens[tokens],
                out=(out[tokens], logits[0], logits[1]), backend=self.backend,
            )  # fmt: skip

    def _map(
        self, metadata: DeepseekSparseSWAMetadata, chosen: Chosen, tokens: slice, table: Any, rows: int
    ) -> None:  # fmt: skip
        """Write the slots of the rows that `tokens` select, in pages of `rows` rows."""
        names = ("token_to_req_indices", "is_valid_token", "positions")
        requests, is_valid, positions = (dlpack.borrow(getattr(metadata, name), name)[tokens] for name in names)
        with self.observe("map"):
            compute_global_topk_indices_and_lens(
                chosen.topk_indices[tokens], requests, table, rows, is_valid, compact=True, positions=positions,
                pool=chosen.pool, out=(chosen.slots[tokens], chosen.lens[tokens]), backend=self.backend,
            )  # fmt: skip


def listed_rows(seq_lens: np.ndarray, query_lens: np.ndarray, topk: int) -> int:
    """Rows that the last query_lens[r] of seq_lens[r] tokens select: topk each, or all up to the token if fewer."""

    def up_to(n: np.ndarray) -> np.ndarray:
        """Rows that a request's first n tokens select."""
        growing = np.minimum(n, topk).astype(np.int64)
        return growing * (growing + 1) // 2 + (n - growing) * topk

    return int((up_to(seq_lens) - up_to(seq_lens - query_lens)).sum())
