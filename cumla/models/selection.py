"""The indexer's choice of rows for each token: decodes score straight from the pages, prefills chunk by chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..layout import CacheLayout
from ..metadata.indexer import DeepseekV32IndexerMetadata
from ..metadata.indexer_chunks import DeepseekV32IndexerPrefillChunkMetadata
from ..ops.indexer import fused_indexer_q_rope_quant
from ..ops.indexer_topk import indexer_topk
from ..ops.sparse_cache import cp_gather_indexer_k_quant_cache
from .caches import PLAIN_DTYPES
from .scratch import Scratch

FLOAT32 = np.dtype(np.float32)
WORKSPACE_BYTES = 64 << 20


class Indexer:
    """What the indexers of a model's layers share.

    heads, topk  of the model
    layout       INDEXER_FP8, INDEXER_BF16 or INDEXER_F32: of the cache of keys; queries are scored in its type
    rope_first   whether the first values of a head are turned, in halves (V3.2), or the last ones, in pairs (V4)
    """

    def __init__(
        self, heads: int, topk: int, layout: CacheLayout, rope_first: bool, scratch: Scratch, backend: str | None
    ) -> None:
        self.heads, self.topk, self.layout, self.rope_first = heads, topk, layout, rope_first
        self.scratch, self.backend = scratch, backend

    def select(
        self,
        q: Any,
        weights: Any,
        k_cache: Any,
        metadata: DeepseekV32IndexerMetadata,
        positions: Any,
        token_to_req: Any,
        block_table: Any,
        cos_sin: Any,
    ) -> Any:
        """int32 [T, topk]: rows counted within each token's request, in ascending order, then -1.

        q             [T, heads, 128], as projected
        weights       [T, heads] float32, as projected
        k_cache       of `layout`, with the rows that the step's tokens may see
        positions     [T] int32 or int64; token_to_req [T] int32
        block_table   [num_reqs, B] int32, of k_cache
        cos_sin       float32 [max_position, 64]
        """
        tokens, decodes = len(q), metadata.num_decode_tokens
        q, weights = self._queries(q, weights, positions, cos_sin)
        out = self.scratch.array("topk_indices", (tokens, self.topk), np.int32, q)
        if decodes:
            self._decode(q, weights, k_cache, metadata, positions, token_to_req, block_table, out[:decodes])
        out[decodes:] = -1
        for chunk in metadata.prefill.chunks if metadata.prefill is not None else ():
            self._prefill(q, weights, k_cache, chunk, out)
        return out

    def _queries(self, q: Any, weights: Any, positions: Any, cos_sin: Any) -> tuple[Any, Any]:
        quantized = self.layout.num_scales > 0
        dtype = np.dtype(np.uint8) if quantized else PLAIN_DTYPES[self.layout.value_type]
        out = (
            self.scratch.array("indexed_q", q.shape, dtype, q),
            self.scratch.array("indexed_weights", weights.shape, FLOAT32, q),
        )
        fused_indexer_q_rope_quant(
            positions, q, cos_sin, weights, rope_first=self.rope_first, is_neox=self.rope_first, quantize=quantized,
            out=out, backend=self.backend,
        )  # fmt: skip
        return out

    def _decode(
        self,
        q: Any,
        weights: Any,
        k_cache: Any,
        metadata: DeepseekV32IndexerMetadata,
        positions: Any,
        token_to_req: Any,
        block_table: Any,
        out: Any,
    ) -> None:
        decode, tokens = metadata.decode, len(out)
        if decode is None:
            raise ValueError(f"metadata: got no decodes, expected those of {tokens} tokens")
        lens, table = decode.seq_lens, decode.block_table
        each = lens.shape[1] if lens.ndim == 2 else 1
        schedule = decode.schedule_metadata
        if len(lens) * each != tokens:  # decodes of different lengths: every token is an entry of its own
            ratio = metadata.compress_ratio
            lens, each, schedule = (positions[:tokens] + 1).astype(np.int32) // ratio, 1, None
            table = block_table[token_to_req[:tokens]]
        indexer_topk(
            q[:tokens].reshape(-1, each, *q.shape[1:]), k_cache, weights[:tokens], self.topk, context_lens=lens,
            block_table=table, schedule_metadata=schedule, layout=self.layout, out=out, backend=self.backend,
            workspace=self._workspace(q),
        )  # fmt: skip

    def _prefill(
        self, q: Any, weights: Any, k_cache: Any, chunk: DeepseekV32IndexerPrefillChunkMetadata, out: Any
    ) -> None:
        rows, quantized = chunk.total_seq_lens, self.layout.num_scales > 0
        keys = self.scratch.array("index_keys", (rows, self.layout.head_dim), q.dtype, q)
        scales = self.scratch.array("index_scales", (rows,), FLOAT32, q) if quantized else None
        if not chunk.skip_kv_gather:
            cp_gather_indexer_k_quant_cache(
                k_cache, keys, scales, chunk.block_table, chunk.cu_seq_lens, backend=self.backend
            )
        some = slice(chunk.token_start, chunk.token_end)
        indexer_topk(
            q[some], (keys, scales) if quantized else keys, weights[some], self.topk, cu_seqlen_ks=chunk.cu_seqlen_ks,
            cu_seqlen_ke=chunk.cu_seqlen_ke, out=out[some], backend=self.backend, workspace=self._workspace(q),
        )  # fmt: skip

    def _workspace(self, q: Any) -> Any:
        """Memory for scores of some queries at a time."""
        return self.scratch.array("scores", (WORKSPACE_BYTES,), np.uint8, q)
