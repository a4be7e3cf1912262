"""Selects the compressed rows of a token at ratio 4: a cache of FP8 keys, scores, and top-k.

A row's key is the first 128 values of the mean that the row is. A query's 64 heads are copies with different weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..layout import INDEXER_FP8
from ..ops.indexer import fp8_mqa_logits, fp8_paged_mqa_logits, fused_indexer_q_rope_quant
from ..ops.indexer_topk import top_k_per_row
from ..ops.sparse_cache import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from ..timing import Stopwatch
from .step_batch import StepBatch

INDEX_DIM, INDEX_HEADS = INDEXER_FP8.head_dim, 64
SCORES_AT_ONCE = 1 << 24  # scores of one pass: 64 MiB


class Indexer:
    """The indexer of one layer.

    Attributes:
        cache: uint8 [num_blocks, rows of a block, 132]
    """

    def __init__(self, seed: int, layer: int, num_blocks: int, rows: int, topk: int, backend: str, xp: Any) -> None:
        self.cache = INDEXER_FP8.allocate(num_blocks, rows, xp)
        self.topk, self.backend, self.xp = topk, backend, xp
        rng = np.random.default_rng([seed, layer, INDEX_HEADS])
        self._gains = xp.asarray(rng.standard_normal((INDEX_HEADS, INDEX_DIM)).astype(np.float32))
        self._weights = xp.asarray(rng.uniform(0.5, 1.5, INDEX_HEADS).astype(np.float32))
        self._no_table = xp.zeros((0, 64), np.float32)  # keys are not rotated, so queries are not either

    def insert(self, means: Any, slots: Any) -> None:
        """Insert the keys of rows, [n, >= 128] float32, into their slots."""
        indexer_k_quant_and_cache(means[:, :INDEX_DIM], self.cache, slots, backend=self.backend)

    def select(self, batch: StepBatch, queries: Any, visible: np.ndarray, stopwatch: Stopwatch, layer: str) -> Any:
        """[num_tokens, topk] int32, the rows that each token selects.

        Args:
            queries: [num_tokens, >= 128] float32
            visible: host [num_tokens], complete rows at each token
        """
        xp, n, tokens = self.xp, batch.num_decodes, len(visible)
        lens = xp.asarray(visible.astype(np.int32))
        with stopwatch.measure((layer, "index q")):
            q, weights = fused_indexer_q_rope_quant(
                xp.zeros(tokens, np.int64), queries[:, None, :INDEX_DIM] * self._gains, self._no_table,
                xp.broadcast_to(self._weights, (tokens, INDEX_HEADS)).copy(), backend=self.backend,
            )  # fmt: skip
        selected = xp.full((tokens, self.topk), -1, np.int32)
        if n and visible[:n].max():
            with stopwatch.measure((layer, "scores")):
                logits = fp8_paged_mqa_logits(
                    q[:n, None], self.cache, weights[:n], lens[:n], batch.block_table[:n], None,
                    int(visible[:n].max()), backend=self.backend,
                )  # fmt: skip
            with stopwatch.measure((layer, "choice")):
                top_k_per_row(logits, self.topk, seq_lens=lens[:n], out=selected[:n], backend=self.backend)
        for request in range(n, len(batch.scheduled)):
            begin, end = int(batch.starts[request]), int(batch.starts[request + 1])
            rows = int(visible[begin:end].max(initial=0))
            if not rows:
                continue
            with stopwatch.measure((layer, "scores")):
                keys = self._gather(batch.block_table[request : request + 1], rows)
            step = max(1, SCORES_AT_ONCE // rows)
            for first in range(begin, end, step):
                part = slice(first, min(first + step, end))
                starts = xp.zeros(part.stop - first, np.int32)
                with stopwatch.measure((layer, "scores")):
                    logits = fp8_mqa_logits(
                        q[part], keys, weights[part], starts, lens[part], False, backend=self.backend
                    )
                with stopwatch.measure((layer, "choice")):
                    top_k_per_row(logits, self.topk, starts, lens[part], out=selected[part], backend=self.backend)
        return selected

    def _gather(self, block_table: Any, rows: int) -> tuple[Any, Any]:
        """Keys and scales of a request's first rows."""
        keys, scales = self.xp.empty((rows, INDEX_DIM), np.uint8), self.xp.empty(rows, np.float32)
        starts = self.xp.asarray(np.array([0, rows], np.int32))
        cp_gather_indexer_k_quant_cache(self.cache, keys, scales, block_table, starts, backend=self.backend)
        return keys, scales
