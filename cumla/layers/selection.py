"""Selects rows for a step's tokens by their scores: decodes score straight from pages, prefills chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..metadata.builder import check_current
from ..metadata.indexer import DeepseekV32IndexerMetadata
from ..metadata.indexer_chunks import DeepseekV32IndexerPrefillChunkMetadata
from ..ops.candidates import candidate_topk
from ..ops.indexer_topk import WORKSPACE_BYTES, blocks_of, indexer_topk, logits_row_bytes
from ..ops.indices import compute_global_topk_indices_and_lens
from ..ops.sparse_cache import cp_gather_indexer_k_quant_cache

MOST_SCORE_BYTES = 256 << 20  # limit of the memory for scores: of all decodes, or of a chunk's prefills
TABLE_BYTES = 16 << 20  # limit of the block tables of prefill tokens that score candidates, a row for each token

# Returns uninitialised memory for a name, shape and dtype.
Memory = Callable[[str, tuple[int, ...], Any], Any]


@dataclass(frozen=True)
class IndexerInputs:
    """The indexer's inputs for the tokens of a step: queries, keys, and the metadata that locates the keys.

    Attributes:
        q: uint8 [num_tokens, heads, 128], e4m3, RoPE applied, as fused_indexer_q_rope_quant returns; for a cache that
            is not quantised, of the cache's type
        weights: [num_tokens, heads] float32, the scales of q folded in
        cache: uint8 [num_blocks, block_size, 132 or 68] (or rows that are not quantised), of `layout`, with the pages
            of the cache whose rows are selected
        metadata: of the indexer, of the step's batch and the block table of the cache whose rows are selected
        k: [n, 128], keys of the rows that this step completes, one for each slot of the compressed cache's
            slot_mapping; None: the cache contains them already
        layout: of the cache: INDEXER_FP8, INDEXER_MXFP4, INDEXER_BF16 or INDEXER_F32
    """

    q: Any
    weights: Any
    cache: Any
    metadata: DeepseekV32IndexerMetadata
    k: Any = None
    layout: CacheLayout = INDEXER_FP8


@dataclass(frozen=True)
class Candidates:
    """The candidate blocks of a step's tokens (DeepSeek V4.1). One layer writes them, later layers read them.

    Attributes:
        blocks: [>= num_tokens, K] int32, ascending, then -1
        size: rows of a block
        written: True: the blocks with the best scores are written. False: only rows of these blocks are scored
    """

    blocks: Any
    size: int
    written: bool

    @property
    def reach(self) -> int:
        """Rows in all of a token's blocks. If a token sees no more rows than that, all are candidates."""
        return int(self.blocks.shape[1]) * self.size

    def limit(self, chunk: DeepseekV32IndexerPrefillChunkMetadata) -> bool:
        """Whether tokens of the chunk may see rows that are not candidates."""
        return not self.written and chunk.max_seq_len > self.reach

    def row_bytes(self, width: int) -> int:
        """Bytes of a token's scores over `width` rows."""
        if self.written:
            return int(logits_row_bytes(width) + logits_row_bytes(blocks_of(width, self.size)))
        return int(logits_row_bytes(self.reach))


def row_bytes_of(candidates: Candidates | None, width: int) -> int:
    """Bytes of a token's scores over `width` rows."""
    return int(logits_row_bytes(width)) if candidates is None else candidates.row_bytes(width)


def score_bytes(inputs: IndexerInputs, candidates: Candidates | None = None) -> int:
    """Least memory for scores of a step, in bytes: the scores of its longest request."""
    metadata, most = inputs.metadata, 0
    if metadata.decode is not None:
        lens, table = metadata.decode.seq_lens, metadata.decode.block_table
        each = lens.shape[1] if lens.ndim == 2 else 1
        most = row_bytes_of(candidates, table.shape[1] * inputs.cache.shape[1]) * each
    chunks = metadata.prefill.chunks if metadata.prefill is not None else ()
    for chunk in chunks:
        if metadata.batch_invariant:
            most = max(most, row_bytes_of(candidates, chunk.block_table.shape[1] * inputs.cache.shape[1]))
            continue
        limited = candidates is None or candidates.written or candidates.limit(chunk)
        most = max(most, row_bytes_of(candidates if limited else None, chunk.total_seq_lens))
    return int(most)


def select_rows(
    inputs: IndexerInputs,
    positions: Any,
    token_to_req: Any,
    block_table: Any,
    out: Any,
    memory: Memory,
    backend: str | None = None,
    slots: tuple[Any, Any] | None = None,
    is_valid_token: Any = None,
    candidates: Candidates | None = None,
    most_score_bytes: int | None = None,
    pool: int = 1,
) -> None:
    """The rows with each token's best scores, counted within its request, in ascending order, then -1.

    With metadata of a batch-invariant builder, prefills' tokens are scored as decodes' are, by the same kernel, each
    token over its own request's rows alone.

    Args:
        positions: [T] int32 or int64; token_to_req [T] int32
        block_table: [num_reqs, B] int32, of the cache
        out: [T, topk] int32, written
        memory: for scores, gathered keys and their scales
        slots: (slots [D, topk] int32, lens [D] int32) of the D decode tokens, written: slots of the rows that they
            select in a cache with the metadata's block table, and their count; or None
        is_valid_token: [>= D] bool, with slots: a padding token's length is 0
        candidates: the tokens' candidate blocks, to write or to choose from; None: all rows are scored
        most_score_bytes: most memory for the scores of all decodes at once, or of a chunk's prefills, if a request's
            scores take no more; None: MOST_SCORE_BYTES
        pool: rows of a key (GLM-5.3-Flash), without candidates: `out` has pools, and slots [D, topk * pool + pool - 1]
            the slots of the pools' rows and of the incomplete pool's rows
    """
    check_current("indexer.metadata", inputs.metadata)
    q, metadata = dlpack.borrow(inputs.q, "indexer.q")[: len(out)], inputs.metadata
    weights, decodes = dlpack.borrow(inputs.weights, "indexer.weights")[: len(out)], metadata.num_decode_tokens
    most = MOST_SCORE_BYTES if most_score_bytes is None else most_score_bytes
    run = _Run(inputs, q, weights, positions, token_to_req, block_table, out, memory, backend, candidates, most, pool)
    if decodes:
        run.decode(decodes, slots, None if slots is None else is_valid_token[:decodes])
    if metadata.batch_invariant:
        run.prefill_by_token(decodes, len(out))
        return
    chunks = metadata.prefill.chunks if metadata.prefill is not None else ()
    written = decodes  # tokens whose selection is written without the fill below
    for chunk in chunks:
        if chunk.token_start == written:
            written = chunk.token_end
    if written < len(out):
        run.select_none(slice(written, len(out)))
    keys: tuple[Any, Any] | None = None
    for chunk in chunks:
        # If all rows are candidates, they are scored together: the keys are then read once and not for each token.
        if candidates is not None and candidates.limit(chunk):
            run.prefill_by_token(chunk.token_start, chunk.token_end)
            continue
        if keys is None or not chunk.skip_kv_gather:
            keys = run.gather(chunk)
        run.prefill(chunk, *keys)


@dataclass(frozen=True)
class _Run:
    """One step's selection."""

    inputs: IndexerInputs
    q: Any
    weights: Any
    positions: Any
    token_to_req: Any
    block_table: Any
    out: Any
    memory: Memory
    backend: str | None
    candidates: Candidates | None
    most_score_bytes: int
    pool: int

    def decode(self, tokens: int, slots: tuple[Any, Any] | None, is_valid_token: Any) -> None:
        """Select for the step's first tokens."""
        decode = self.inputs.metadata.decode
        if decode is None:  # all tokens of the step are padding
            self.select_none(slice(tokens), slots)
            return
        lens, table = (dlpack.borrow(getattr(decode, name), name) for name in ("seq_lens", "block_table"))
        each, schedule = lens.shape[1] if lens.ndim == 2 else 1, decode.schedule_metadata
        if not decode.packed:  # decodes of different lengths: each token is a separate entry
            each, schedule = 1, None
            lens, table = self.entries(slice(tokens))
        entries = min(len(lens), tokens // each)
        taken = entries * each
        if taken < tokens:
            self.select_none(slice(taken, tokens), slots)
            if slots is not None:
                slots, is_valid_token = (slots[0][:taken], slots[1][:taken]), is_valid_token[:taken]
        options = {"schedule_metadata": schedule, "slots": slots, "is_valid_token": is_valid_token}
        if slots is not None and self.pool > 1:
            options |= {"pool": self.pool, "positions": self.positions[:taken]}
        among_candidates = self.candidates is not None and not self.candidates.written
        self.over_pages(slice(taken), lens[:entries], table[:entries], each, **{} if among_candidates else options)
        if among_candidates and slots is not None and taken:
            compute_global_topk_indices_and_lens(
                self.out[:taken], self.token_to_req[:taken], self.block_table, self.inputs.cache.shape[1],
                is_valid_token, compact=True, out=slots, backend=self.backend,
            )  # fmt: skip

    def select_none(self, padding: slice, slots: tuple[Any, Any] | None = None) -> None:
        """Write that padding tokens select no rows and no blocks."""
        self.out[padding] = -1
        if self.candidates is not None and self.candidates.written:
            self.candidates.blocks[padding] = -1
        if slots is not None:
            slots[0][padding] = -1
            slots[1][padding] = 0

    def prefill_by_token(self, first: int, end: int) -> None:
        """Select for prefills' tokens as for decodes of one token."""
        step = max(1, TABLE_BYTES // max(4 * self.block_table.shape[1], 1))
        for start in range(first, end, step):
            tokens = slice(start, min(start + step, end))
            self.over_pages(tokens, *self.entries(tokens), together=self.inputs.metadata.batch_invariant)

    def entries(self, tokens: slice) -> tuple[Any, Any]:
        """The rows that each token sees, and its block table."""
        lens = (self.positions[tokens] + 1).astype(np.int32) // self.inputs.metadata.compress_ratio
        return lens, self.block_table[self.token_to_req[tokens]]

    def over_pages(
        self, tokens: slice, lens: Any, table: Any, each: int = 1, together: bool = True, **options: Any
    ) -> None:  # fmt: skip
        """Select for entries of `each` tokens, from pages of keys.

        Args:
            together: whether memory for the scores of all tokens at once is asked for
            options: further arguments of indexer_topk
        """
        inputs, candidates, q = self.inputs, self.candidates, self.q[tokens]
        of_all = len(q) * row_bytes_of(candidates, table.shape[1] * inputs.cache.shape[1]) if together else 0
        arguments = q.reshape(-1, each, *q.shape[1:]), inputs.cache, self.weights[tokens]
        options |= {
            "layout": inputs.layout, "out": self.out[tokens], "workspace": self._scores(of_all), "backend": self.backend
        }  # fmt: skip
        if candidates is None or candidates.written:
            options |= self._written(tokens)
            indexer_topk(*arguments, self.out.shape[1], context_lens=lens, block_table=table, **options)
            return
        candidate_topk(
            *arguments, candidates.blocks[tokens], self.out.shape[1], lens, table,
            candidate_block_size=candidates.size, batch_invariant=inputs.metadata.batch_invariant, **options,
        )  # fmt: skip

    def _written(self, tokens: slice) -> dict[str, Any]:
        """Arguments of indexer_topk that make it write candidate blocks, if the layer does."""
        if self.candidates is None or not self.candidates.written:
            return {}
        return {"candidate_blocks": self.candidates.blocks[tokens], "candidate_block_size": self.candidates.size}

    def gather(self, chunk: DeepseekV32IndexerPrefillChunkMetadata) -> tuple[Any, Any]:
        """Keys of the chunk's requests and their scales; later chunks of the same requests read them as well."""
        layout, rows = self.inputs.layout, chunk.total_seq_lens
        if layout is INDEXER_MXFP4 and self.q.dtype != np.uint8:  # FP8 keys take only quantised queries
            keys = self.memory("index_keys", (rows, layout.row_bytes), np.uint8)
            scales = self.memory("index_scales", (rows, layout.scale_bytes), np.uint8)
        else:
            keys = self.memory("index_keys", (rows, layout.head_dim), self.q.dtype)
            scales = self.memory("index_scales", (rows,), np.float32) if layout.num_scales else None
        cp_gather_indexer_k_quant_cache(
            self.inputs.cache, keys, scales, chunk.block_table, chunk.cu_seq_lens, backend=self.backend
        )
        return keys, scales

    def prefill(self, chunk: DeepseekV32IndexerPrefillChunkMetadata, keys: Any, scales: Any) -> None:
        tokens = slice(chunk.token_start, chunk.token_end)
        of_chunk = (chunk.token_end - chunk.token_start) * row_bytes_of(self.candidates, chunk.total_seq_lens)
        indexer_topk(
            self.q[tokens], keys if scales is None else (keys, scales), self.weights[tokens], self.out.shape[1],
            cu_seqlen_ks=chunk.cu_seqlen_ks, cu_seqlen_ke=chunk.cu_seqlen_ke, out=self.out[tokens],
            **self._written(tokens), backend=self.backend, workspace=self._scores(of_chunk),
        )  # fmt: skip

    def _scores(self, of_all: int = 0) -> Any:
        """Memory for scores. of_all: bytes for the scores of all tokens at once, which takes the fewest launches."""
        least, most = WORKSPACE_BYTES, self.most_score_bytes
        if self.candidates is not None and self.candidates.written:  # also holds the blocks' scores
            least, most = (size + -(-size // self.candidates.size) for size in (least, most))
        needed = score_bytes(self.inputs, self.candidates)
        size = max(least, needed, min(of_all, most))
        return self.memory("scores", (size,), np.uint8)
