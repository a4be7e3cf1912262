"""The chunks of the indexer's prefills, and the rows of a chunk that each query sees."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dlpack
from ..dispatch.call import INT32, Call
from ..dispatch.values import check_integers, check_kind, plain_integers, shown
from ..kernels.types.metadata import IndexerChunk
from .batch import HostLens, check_lengths, host_integers
from .builder import ServingConfig

INT32_MAX = 2**31 - 1
MOST_PARTS = 256  # cached views: slicing a buffer takes longer than filling it


@dataclass
class DeepseekV32IndexerPrefillChunkMetadata:
    """Prefill requests whose rows are gathered into one workspace, and the queries that are scored against them.

    Attributes:
        block_table: [num_reqs, B] int32
        cu_seqlen_ks: [token_end - token_start] int32, first row of the workspace that each query sees
        cu_seqlen_ke: [token_end - token_start] int32, one past the last row that each query sees
        cu_seq_lens: [num_reqs + 1] int32, first row of each request
        token_to_seq: [total_seq_lens] int32, the request of each row, counted within the chunk
        total_seq_lens: rows of the chunk
        token_start, token_end: the chunk's queries among the tokens of the step
        num_reqs: requests of the chunk
        skip_kv_gather: the previous chunk had the same requests: the workspace has their rows already
        max_seq_len: rows of the chunk's longest request
    """

    block_table: Any
    cu_seqlen_ks: Any
    cu_seqlen_ke: Any
    cu_seq_lens: Any
    token_to_seq: Any
    total_seq_lens: int
    token_start: int
    token_end: int
    num_reqs: int
    skip_kv_gather: bool = False
    max_seq_len: int = INT32_MAX


@dataclass
class DeepseekV32IndexerPrefillMetadata:
    """The chunks of a step's prefills; requests without rows have no chunk."""

    chunks: list[DeepseekV32IndexerPrefillChunkMetadata]


def get_max_prefill_buffer_size(config: ServingConfig) -> int:
    """Rows of the workspace of a prefill chunk: the rows of 40 sequences of the longest kind.

    Source: vLLM get_max_prefill_buffer_size.
    """
    return 40 * config.max_model_len


@plain_integers
def split_indexer_prefill_chunks(
    seq_lens_cpu: Any, query_lens_cpu: Any, workspace_size: int, max_logits_bytes: int, request_offset: int = 0
) -> list[tuple[slice, slice]]:
    """Divide prefills into chunks whose rows fit a workspace and whose logits fit a budget.

    Args:
        seq_lens_cpu: [R] host integers, rows of each request
        query_lens_cpu: [R] host integers
        workspace_size: rows of a chunk
        max_logits_bytes: bytes for a chunk's logits, float32 [queries, rows]
        request_offset: offset added to the requests' indices

    Returns (requests, queries) slices, the queries counted within the requests. A chunk has all following requests
    that fit. A request that does not fit alone has chunks of its own, each with all following queries whose logits
    fit, at least one. Requests without queries get no chunk of their own.
    Raises TypeError or ValueError unless both are lengths of the same requests.
    Source: vLLM split_indexer_prefill_chunks.
    """
    check_integers(0, 2**63 - 1, workspace_size=workspace_size, max_logits_bytes=max_logits_bytes)
    check_integers(0, request_offset=request_offset)
    query_lens = host_integers("query_lens_cpu", query_lens_cpu)
    seq_lens = host_integers("seq_lens_cpu", seq_lens_cpu)
    if len(seq_lens) != len(query_lens):
        raise ValueError(
            f"seq_lens_cpu: got {len(seq_lens)} requests, expected {len(query_lens)} as query_lens_cpu has"
        )
    for name, lens in (("seq_lens_cpu", seq_lens), ("query_lens_cpu", query_lens)):
        if lens.min(initial=0) < 0:
            raise ValueError(f"{name}: got {lens.min()} for request {lens.argmin()}, expected at least 0")
    return _split(seq_lens.tolist(), query_lens.tolist(), workspace_size, max_logits_bytes, request_offset)


def _split(
    seq_lens: list[int], query_lens: list[int], workspace_size: int, max_logits_bytes: int, request_offset: int
) -> list[tuple[slice, slice]]:
    max_logits, all_queries, all_rows = max_logits_bytes // 4, sum(query_lens), sum(seq_lens)
    if all_queries and all_rows <= workspace_size and all_queries * all_rows <= max_logits:  # the usual case
        return [(slice(request_offset, request_offset + len(seq_lens)), slice(0, all_queries))]
    chunks: list[tuple[slice, slice]] = []
    start = 0
    while start < len(seq_lens):
        stop, queries, rows = start + 1, query_lens[start], seq_lens[start]
        fits = rows <= workspace_size and queries * rows <= max_logits
        while fits and stop < len(seq_lens):
            next_queries, next_rows = queries + query_lens[stop], rows + seq_lens[stop]
            fits = next_rows <= workspace_size and next_queries * next_rows <= max_logits
            if fits:
                stop, queries, rows = stop + 1, next_queries, next_rows
        requests = slice(start + request_offset, stop + request_offset)
        step = max(max_logits // rows if rows else queries, 1)
        chunks += [(requests, slice(first, min(first + step, queries))) for first in range(0, queries, step)]
        start = stop
    return chunks


@plain_integers
def kv_spans_from_batches(start_seq_loc: Any, seq_len_per_batch: Any, device: int | None = None) -> tuple[Any, Any]:
    """The first and one past the last of each query's keys in the packed rows of all requests.

    Args:
        start_seq_loc: [B + 1] host integers, first query of each request; the queries are a sequence's last
        seq_len_per_batch: [B] host integers, rows of each request
        device: CUDA ordinal to put the results on; None leaves them in host memory

    Returns start and end, int32 [N]: query i sees rows [start[i], end[i]).
    Raises ValueError for lengths that do not fit together and for more rows than int32 counts.
    Source: vLLM kv_spans_from_batches, whose results are int64 where there are no queries.
    """
    starts = host_integers("start_seq_loc", start_seq_loc)
    seq_lens = host_integers("seq_len_per_batch", seq_len_per_batch)
    check_lengths("start_seq_loc", starts, "seq_len_per_batch", seq_lens)
    counts, row_ends = np.diff(starts), np.cumsum(seq_lens, dtype=np.int64)
    if len(row_ends) and row_ends[-1] > INT32_MAX:
        raise ValueError(f"seq_len_per_batch: got {row_ends[-1]} rows in all, expected at most {INT32_MAX}")
    queries_after = np.repeat(starts[1:], counts) - np.arange(starts[0], starts[-1])
    start = np.repeat(row_ends - seq_lens, counts).astype(np.int32)
    end = (np.repeat(row_ends, counts) - queries_after + 1).astype(np.int32)
    framework = dlpack.framework_of(start_seq_loc)
    return dlpack.give(_put(start, device), framework), dlpack.give(_put(end, device), framework)


def check_part(name: str, part: Any, count: int) -> None:
    """Raise TypeError or ValueError unless `part` is a contiguous slice within `count`."""
    check_kind(slice, **{name: part})
    check_integers(0, count, **{f"{name}.start": part.start, f"{name}.stop": part.stop})
    if part.start > part.stop or part.step not in (None, 1):
        raise ValueError(f"{name}: got {shown(part)}, expected slice(start, stop) with start <= stop")


def _put(array: np.ndarray, device: int | None) -> Any:
    if device is None:
        return array
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(array)


class ChunkArrays(NamedTuple):
    """The arrays of some prefill requests with all queries, as in DeepseekV32IndexerPrefillChunkMetadata."""

    cu_seqlen_ks: Any
    cu_seqlen_ke: Any
    cu_seq_lens: Any
    token_to_seq: Any

    def metadata(
        self,
        requests: slice,
        queries: slice,
        first_token: int,
        block_table: Any,
        skip_kv_gather: bool,
        max_seq_len: int,
    ) -> DeepseekV32IndexerPrefillChunkMetadata:
        """The metadata of a chunk with some of the queries."""
        ks, ke = self.cu_seqlen_ks, self.cu_seqlen_ke
        if queries.stop - queries.start < len(ks):
            ks, ke = ks[queries], ke[queries]
        return DeepseekV32IndexerPrefillChunkMetadata(
            block_table=block_table[requests],
            cu_seqlen_ks=ks,
            cu_seqlen_ke=ke,
            cu_seq_lens=self.cu_seq_lens,
            token_to_seq=self.token_to_seq,
            total_seq_lens=len(self.token_to_seq),
            token_start=first_token + queries.start,
            token_end=first_token + queries.stop,
            num_reqs=requests.stop - requests.start,
            skip_kv_gather=skip_kv_gather,
            max_seq_len=max_seq_len,
        )


class LaidOut(NamedTuple):
    """A chunk to be filled by kernels.

    Attributes:
        chunk: the arrays that kernels fill
        part: the arrays' offsets in the step's buffers, see ChunkBuilder._cut
        first_token: the first token of the chunk's requests
        requests: the chunk's requests
        queries: slices of the requests' queries, each to become a chunk
    """

    chunk: IndexerChunk
    part: tuple[int, ...]
    first_token: int
    requests: slice
    queries: list[slice]


class ChunkBuilder:
    """Lays out the chunks of a step's prefills for kernels to fill, one for the requests that share a workspace.

    Four buffers contain the arrays of all chunks of a step. Three keep their addresses; the buffer of rows grows with
    the longest step.
    """

    def __init__(self, config: ServingConfig, compress_ratio: int) -> None:
        self.config, self.compress_ratio = config, compress_ratio
        self.workspace_rows = get_max_prefill_buffer_size(config)
        self._space: ChunkArrays | None = None
        self._row_capacity = -1  # no buffers yet: the first step allocates them even if it has no rows
        self._native = functools.lru_cache(MOST_PARTS)(self._cut)
        self._cached = functools.lru_cache(MOST_PARTS)(self._give)

    def lay_out(self, lens: HostLens, num_decodes: int, like: Any) -> list[LaidOut]:
        """The chunks of the requests after the decodes, on `like`'s device. Raises ValueError for too many rows."""
        rows = [seq_len // self.compress_ratio for seq_len in lens.seq_lens[num_decodes:].tolist()]
        starts = lens.starts[num_decodes:].tolist()
        query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
        specs = _split(rows, query_lens, self.workspace_rows, self.config.max_logits_bytes, num_decodes)
        all_rows = sum(rows)
        if all_rows > self._row_capacity:
            self._make_room(all_rows, like)
        laid_out: list[LaidOut] = []
        before, number, row = None, -1, 0
        for requests, queries in specs:
            if requests is not before:
                first, stop = requests.start - num_decodes, requests.stop - num_decodes
                before, number, parts = requests, number + 1, [queries]
                request_rows = rows[first:stop]
                total_rows = sum(request_rows)
                if total_rows > self.workspace_rows:
                    raise self._too_many(total_rows, requests)
                if total_rows:
                    part = (starts[first], starts[stop], first + number, stop + number + 1, row, row + total_rows)
                    row += total_rows
                    chunk = IndexerChunk(requests.start, stop - first, max(request_rows), *self._native(part))
                    laid_out.append(LaidOut(chunk, part, starts[first], requests, parts))
            else:
                parts.append(queries)
        return laid_out

    def metadata(self, laid_out: list[LaidOut], block_table: Any, framework: str) -> DeepseekV32IndexerPrefillMetadata:
        """Metadata of chunks that kernels filled; `block_table` is the step's in the caller's `framework`."""
        chunks = []
        for chunk, part, first_token, requests, chunk_queries in laid_out:
            arrays = ChunkArrays(*chunk[3:]) if framework in ("cupy", "numpy") else self._parts(framework, part)
            for queries in chunk_queries:
                again = queries.start > 0
                chunks.append(arrays.metadata(requests, queries, first_token, block_table, again, chunk.longest))
        return DeepseekV32IndexerPrefillMetadata(chunks)

    def build_one(
        self,
        call: Call,
        requests: slice,
        queries: slice,
        query_start_loc_cpu: Any,
        seq_lens_cpu: Any,
        block_table: Any,
        skip_kv_gather: bool,
    ) -> DeepseekV32IndexerPrefillChunkMetadata | None:
        """One chunk in new arrays, from host values only."""
        starts = host_integers("query_start_loc_cpu", query_start_loc_cpu)
        seq_lens = host_integers("seq_lens_cpu", seq_lens_cpu)
        check_part("req_slice", requests, len(seq_lens))
        starts, seq_lens = starts[requests.start : requests.stop + 1], seq_lens[requests]
        check_lengths("query_start_loc_cpu", starts, "seq_lens_cpu", seq_lens)
        check_part("query_slice", queries, int(starts[-1] - starts[0]))
        rows = seq_lens // self.compress_ratio
        total_rows = int(rows.sum())
        if total_rows > self.workspace_rows:
            raise self._too_many(total_rows, requests)
        table = call.array("block_table", block_table, INT32, (-1, -1))
        if len(table) < requests.stop:
            raise ValueError(f"block_table: got {len(table)} rows, expected at least {requests.stop}, one a request")
        if not total_rows:
            return None
        xp, num_tokens = dlpack.namespace_of(table), int(starts[-1] - starts[0])
        with call.kernels("indexer_metadata") as kernels:
            sizes = (num_tokens, num_tokens, len(starts), total_rows)
            chunk = ChunkArrays(*(dlpack.empty((size,), np.dtype(np.int32), table) for size in sizes))
            kernels.build_indexer_chunk(
                xp.asarray(starts.astype(np.int32)), xp.asarray(seq_lens.astype(np.int32)), self.compress_ratio,
                IndexerChunk(0, len(seq_lens), int(rows.max()), *chunk),
            )  # fmt: skip
        framework = dlpack.framework_of(block_table)
        chunk = ChunkArrays(*(dlpack.give(array, framework) for array in chunk))
        return chunk.metadata(requests, queries, int(starts[0]), block_table, skip_kv_gather, int(rows.max()))

    def _make_room(self, total_rows: int, like: Any) -> None:
        xp, tokens = dlpack.namespace_of(like), self.config.max_num_batched_tokens
        if self._space is None:
            sizes = (tokens, tokens, 2 * self.config.max_num_seqs, tokens)
            self._space = ChunkArrays(*(xp.zeros(size, np.int32) for size in sizes))
        if len(self._space.token_to_seq) < total_rows:
            rows = xp.zeros(1 << (total_rows - 1).bit_length(), np.int32)
            self._space = self._space._replace(token_to_seq=rows)
            self._native.cache_clear()
            self._cached.cache_clear()
        self._row_capacity = len(self._space.token_to_seq)

    def _parts(self, framework: str, part: tuple[int, ...]) -> ChunkArrays:
        """A chunk's part of the buffers as arrays of `framework`."""
        return (self._give if framework == "jax" else self._cached)(framework, part)

    def _cut(self, part: tuple[int, ...]) -> ChunkArrays:
        """A chunk's part of the buffers: its tokens, entries of cu_seq_lens and rows, each by first and end."""
        space = self._space
        assert space is not None
        first_token, last_token, first_entry, last_entry, first_row, last_row = part
        return ChunkArrays(
            space.cu_seqlen_ks[first_token:last_token],
            space.cu_seqlen_ke[first_token:last_token],
            space.cu_seq_lens[first_entry:last_entry],
            space.token_to_seq[first_row:last_row],
        )

    def _give(self, framework: str, part: tuple[int, ...]) -> ChunkArrays:
        return ChunkArrays(*(dlpack.give_shared(view, framework) for view in self._native(part)))

    def _too_many(self, total_rows: int, requests: slice) -> ValueError:
        return ValueError(
            f"seq_lens_cpu: requests {requests.start} to {requests.stop - 1} have {total_rows} rows, expected at "
            f"most the {self.workspace_rows} of the workspace"
        )
