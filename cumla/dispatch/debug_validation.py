"""The checks of `cumla.debug`: a function for each kernel that reads slots, block tables or indices. They wait for the
device.

`given` has the kernel's arguments by name (kernels/reference), those that a NamedTuple groups one by one, and `first`,
the index of the call's first row in the arrays of the public call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..kernels.types.metadata import C128A_RATIO
from ..kernels.types.segments import Pages
from ..kernels.types.shard import Shard

CHECKS: dict[str, Callable[..., int | None]] = {}


def check(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Check calls of the kernel of this name. The result: rows that it took, if a large call is made in pieces."""
    CHECKS[function.__name__] = function
    return function


def host(array: Any) -> np.ndarray:
    """An array's values, integers as int64."""
    values = array if isinstance(array, np.ndarray) else array.get()
    return values.astype(np.int64) if values.dtype.kind in "iu" else values


def check_equal(name: str, array: Any, twin_name: str, twin: np.ndarray) -> None:
    """Raise ValueError where an array of a batch differs from its copy in host memory."""
    got = host(array)
    r = int(np.argmax(got != twin)) if (got != twin).any() else -1
    if r >= 0:
        raise ValueError(f"{name}: request {r} has {got[r]}, but {twin[r]} in {twin_name}")


def check_slots(
    name: str, slots: Any, num_slots: int | None, positions: Any = None, requests: np.ndarray | None = None
) -> None:
    """Raise ValueError for a slot that is neither -1 nor in the cache, and for a slot that two rows have."""
    values = host(slots)

    def row(i: int) -> str:
        where = [] if requests is None else [f"request {requests[i]}"]
        where += [] if positions is None else [f"position {host(positions)[i]}"]
        return f"row {i}" + (f" ({', '.join(where)})" if where else "")

    last = np.iinfo(np.int64).max if num_slots is None else num_slots - 1
    wrong = (values < -1) | (values > last)
    if wrong.any():
        at = int(np.argmax(wrong))
        expected = "-1 or a slot" if num_slots is None else f"-1 or 0 to {last}"
        raise ValueError(f"{name}: {row(at)} has slot {values[at]}, expected {expected}")
    order = np.argsort(values, kind="stable")
    again = np.flatnonzero((np.diff(values[order]) == 0) & (values[order][1:] >= 0))
    if len(again):
        one, other = order[again[0] : again[0] + 2].tolist()
        raise ValueError(
            f"{name}: {row(one)} and {row(other)} both have slot {values[one]}, expected slots that differ"
        )


def check_pages(
    name: str, block_table: Any, begin: Any, end: Any, block_size: int, num_pages: int | None = None, first: int = 0
) -> None:
    """Raise ValueError where a request has no page of the cache for one of its positions from begin[r] to end[r] - 1.

    num_pages  of the cache; None: unknown, any index that is not negative is a page
    """
    table, begin, end = host(block_table), np.maximum(begin, 0)[:, None], np.asarray(end)[:, None]
    columns = table.shape[1]
    begin, covered = np.broadcast_to(begin, end.shape), columns * block_size
    beyond = (end[:, 0] > covered) & (end[:, 0] > begin[:, 0])
    if beyond.any():
        long = int(np.argmax(beyond))
        raise ValueError(
            f"{name}: request {first + long} has positions {begin[long, 0]} to {end[long, 0] - 1}, but "
            f"{columns} columns of {block_size} cover {covered}"
        )
    column = np.arange(columns)
    used = (end > begin) & (column >= begin // block_size) & (column * block_size < end)
    wrong = used & ((table < 0) | (table >= (np.iinfo(np.int64).max if num_pages is None else num_pages)))
    if wrong.any():
        r, c = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        position = max(int(begin[r, 0]), int(c) * block_size)
        expected = "a page" if num_pages is None else f"0 to {num_pages - 1}"
        raise ValueError(
            f"{name}: request {first + int(r)} has page {table[r, c]} for position {position} (column {c}), "
            f"expected {expected}"
        )


def check_cached(given: Any, begin: Any, end: Any) -> None:
    """The same for the cache whose pages and block table a call has."""
    begin, pages = np.broadcast_to(begin, np.shape(end)), given.pages
    check_pages("block_table", given.block_table, begin, end, pages.block_size, len(pages.bytes), given.first)


def check_indices(name: str, indices: Any, used: Any, limit: int, what: str = "query") -> np.ndarray:
    """Raise ValueError for an entry in use that is neither -1 nor below a limit; the indices [rows, entries].

    used  [rows] the number of first entries in use, or [rows, entries] bool
    """
    values = host(indices)
    used = np.asarray(used)
    if used.dtype != np.bool_:
        used = np.arange(values.shape[1]) < used[:, None]
    wrong = used & ((values < -1) | (values >= limit))
    if wrong.any():
        i, entry = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise ValueError(f"{name}: {what} {i}, entry {entry}: got {values[i, entry]}, expected -1 or 0 to {limit - 1}")
    return values


def check_mapped(
    name: str, indices: Any, used: Any, requests: np.ndarray, table_name: str, block_table: Any, block_size: int
) -> None:
    """The same for rows of requests, which must also have a page; one request for each token, or more."""
    table, requests = host(block_table), requests[: len(indices)]
    values = check_indices(name, indices, used, table.shape[1] * block_size, "token")
    used = used if used.dtype == np.bool_ else np.arange(values.shape[1]) < used[:, None]
    used = used & (values >= 0)
    if not used.any():
        return
    column = np.where(used, values // block_size, 0)
    pages = table[np.where(used.any(axis=1), requests, 0)[:, None], column]
    wrong = used & (pages < 0)
    if wrong.any():
        i, entry = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise ValueError(
            f"{table_name}: request {requests[i]} has page {pages[i, entry]} for row {values[i, entry]} "
            f"(column {column[i, entry]}), which entry {entry} of token {i} in {name} selects, expected a page"
        )


def checked_requests(token_to_req: Any, valid: np.ndarray, num_reqs: int, first: int = 0) -> np.ndarray:
    """The request of each token. Raises ValueError for a valid token whose request does not exist."""
    requests = host(token_to_req)[first : first + len(valid)]
    wrong = valid & ((requests < 0) | (requests >= num_reqs))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"token_to_req_indices: token {first + i} is of request {requests[i]}, expected 0 to {num_reqs - 1}"
        )
    return requests


def last_positions(query_start_loc: Any, seq_lens: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each request's first query token, and the first and end of its positions in this step."""
    starts, lens = host(query_start_loc), host(seq_lens)
    queries = np.maximum(np.diff(starts), 0)
    return starts, np.where(queries > 0, lens - queries, lens), lens


@check
def quantize_and_insert_k_cache(given: Any) -> None:
    check_slots("slot_mapping", given.slot_mapping, given.pages.num_slots)


CHECKS["insert_keys"] = quantize_and_insert_k_cache


@check
def concat_and_cache_mla(given: Any) -> None:
    check_slots("slot_mapping", given.slot_mapping, given.pages.num_slots)


@check
def qnorm_rope_and_insert(given: Any) -> None:
    check_slots("slot_mapping", given.slots, given.pages.num_slots, given.positions)


@check
def norm_rope_and_insert(given: Any) -> None:
    check_slots("slot_mapping", given.slots, given.pages.num_slots, given.positions)


@check
def indexer_knorm_rope_and_insert(given: Any) -> None:
    check_slots("slot_mapping", given.slots, given.pages.num_slots, given.positions)


@check
def compress_and_insert(given: Any) -> None:
    positions, slots, state_table, ratio = given.positions, given.slots, given.state_block_table, given.compress_ratio
    at, states, num_reqs = host(positions), given.compressors[0].state, len(state_table)
    requests = checked_requests(given.token_to_req, at >= 0, num_reqs)
    for prefix, rows in zip(("", "index_"), given.compressors, strict=False):
        check_slots(f"slot_mapping of {prefix}k_cache", slots, rows.pages.num_slots, positions, requests)
        num_states = rows.state.shape[0] * rows.state.shape[1]
        check_slots(f"state_slot_mapping of {prefix}state_cache", given.state_slots, num_states, positions, requests)
    window = ratio * given.compressors[0].kv_score.shape[1] // (2 * given.compressors[0].pages.layout.head_dim)
    begin, end = np.full(num_reqs, np.iinfo(np.int64).max), np.zeros(num_reqs, np.int64)
    for i in np.flatnonzero(at >= 0):  # rows that a step's first tokens complete also read states before the step
        r = requests[i]
        before = at[i] - (i - host(given.query_start_loc)[r])  # the step's first position
        if (at[i] + 1) % ratio == 0 and i < len(slots) and host(slots)[i] >= 0:
            begin[r], end[r] = min(begin[r], at[i] + 1 - window), before
    check_pages("state_block_table", state_table, begin, end, states.shape[1], len(states))


@check
def dequantize_and_gather_k_cache(given: Any) -> None:
    end = host(given.seq_lens) // given.compress_ratio
    begin = np.zeros_like(end) if given.gather_lens is None else end - np.maximum(host(given.gather_lens), 0)
    check_cached(given, begin, end)


@check
def cp_gather_indexer_k_quant_cache(given: Any) -> None:
    lens = np.diff(host(given.cu_seq_lens))
    check_cached(given, 0, lens)


CHECKS["gather_keys"] = cp_gather_indexer_k_quant_cache


@check
def gather_cache(given: Any) -> None:
    lens = np.diff(host(given.cu_seq_lens))
    begin = np.zeros_like(lens) if given.seq_starts is None else host(given.seq_starts)
    check_cached(given, begin, begin + lens)


@check
def dense_mla_decode(given: Any) -> None:
    lens = host(given.cache_seqlens)
    check_cached(given, 0, lens)


@check
def paged_mqa_logits(given: Any) -> int:
    return check_lengths(given)


@check
def paged_logits_and_blocks(given: Any) -> int:
    return check_lengths(given)


def check_lengths(given: Any) -> int:
    """Pages of all rows that the queries see; the number of requests."""
    ends = host(given.context_lens)
    ends = np.minimum(ends.max(axis=1) if ends.ndim == 2 else ends, given.logits.shape[1])
    check_cached(given, 0, ends)
    return len(ends)


@check
def compress_latents(given: Any) -> None:
    if given.state is None:
        return
    rings, capacity, _ = given.state.shape
    slots, at = host(given.slots), host(given.positions)[: len(given.slots)]
    wrong = (slots < -1) | (slots >= rings * capacity) | ((slots >= 0) & (slots % capacity != at % capacity))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"slot_mapping: row {row} (position {at[row]}) has slot {slots[row]}, expected -1 or 0 to "
            f"{rings * capacity - 1} with remainder {at[row] % capacity} modulo the capacity {capacity}"
        )
    starts, owner = host(given.query_start_loc), dict[int, int]()
    for request in range(len(starts) - 1):
        its = slots[max(starts[request], 0) : max(starts[request + 1], 0)]
        for ring in np.unique(its[its >= 0] // capacity).tolist():
            other = owner.setdefault(ring, request)
            if other != request:
                raise ValueError(
                    f"slot_mapping: requests {other} and {request} both have ring {ring}, expected rings that differ"
                )


@check
def candidate_logits(given: Any) -> int:
    ends = host(given.context_lens)
    ends = ends.max(axis=1) if ends.ndim == 2 else ends
    check_cached(given, 0, ends)
    next_n, chosen = given.q.shape[1], host(given.candidates)
    most = np.repeat(-(-np.maximum(ends, 0) // given.block), next_n)[:, None]
    wrong = (chosen < -1) | (chosen >= most)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"candidate_blocks: row {given.first * next_n + row} has block {chosen[row, column]}, expected -1"
            + (f" or 0 to {most[row, 0] - 1}" if most[row, 0] else "")
        )
    return len(ends)


@check
def sparse_mla_decode(given: Any) -> None:
    for prefix, (pages, indices, lengths) in zip(("", "extra_"), given.segments, strict=False):
        batch, queries, entries = indices.shape
        used = np.full((batch, queries), entries) if lengths is None else host(lengths)
        for i in range(queries):
            of = f"query {i} of request" if queries > 1 else "query"
            check_indices(f"{prefix}indices", indices[:, i], used[:, i], pages.num_slots, of)


@check
def sparse_mla_prefill(given: Any) -> None:
    used = np.full(len(given.indices), given.indices.shape[1]) if given.topk_length is None else host(given.topk_length)
    rows = given.kv.num_slots if isinstance(given.kv, Pages) else len(given.kv)
    check_indices("indices", given.indices, used, rows)


@check
def compute_swa_indices_and_lens(given: Any) -> None:
    valid = host(given.is_valid_token)[given.token_offset : given.token_offset + len(given.swa_lens)]
    num_reqs = min(len(host(given.seq_lens)), len(given.block_table))
    requests = np.where(valid, checked_requests(given.token_to_req_indices, valid, num_reqs, given.token_offset), -1)
    _, begin, end = last_positions(given.query_start_loc, given.seq_lens)
    present = np.isin(np.arange(num_reqs), requests)
    begin, end = begin[:num_reqs] - (given.window_size - 1), np.where(present, end[:num_reqs], 0)
    check_pages("block_table", given.block_table[:num_reqs], begin, end, given.block_size)


@check
def compute_global_topk_indices_and_lens(given: Any) -> None:
    values = host(given.topk_indices)
    valid = host(given.is_valid_token)[: len(values)]
    requests = checked_requests(given.token_to_req_indices, valid, len(given.block_table))
    used = np.broadcast_to(valid[:, None], values.shape)
    if given.positions is not None:  # rows that are not complete at the token's position count as absent
        used = used & (values < ((host(given.positions)[: len(values)] + 1) // given.compress_ratio)[:, None])
    check_mapped("topk_indices", given.topk_indices, used, requests, "block_table", given.block_table, given.block_size)


def rows_complete(query_start_loc: Any, seq_lens: Any, first: int, tokens: int, ratio: int) -> np.ndarray:
    """The number of complete rows of its request at each token from `first` on; 0 for a token of no request."""
    starts, begin, _ = last_positions(query_start_loc, seq_lens)
    at = first + np.arange(tokens)
    request = np.searchsorted(starts, at, side="right") - 1
    inside = (request >= 0) & (request < len(begin))
    request = np.where(inside, request, 0)
    position = begin[request] + at - starts[request] if len(begin) else at
    return np.where(inside, np.maximum(position + 1, 0) // ratio, 0)


@check
def combine_topk_swa_indices(given: Any) -> None:
    values = host(given.topk_indices)[:, : given.topk]
    complete = rows_complete(
        given.query_start_loc, given.seq_lens, int(host(given.query_start_loc)[0]), len(values), given.compress_ratio
    )[:, None]
    used = values < complete if given.compact else np.arange(values.shape[1]) < complete
    check_indices("topk_indices", values, used, given.swa_start, "token")


@check
def gather_prefill_rows(given: Any) -> None:
    for gather in (given.windows, given.compressed):
        if gather is not None:
            dequantize_and_gather_k_cache(SimpleNamespace(**gather._asdict(), first=0))
    combine_topk_swa_indices(SimpleNamespace(**given.lists._asdict(), first=0))


@check
def build_flashinfer_mixed_sparse_indices(given: Any) -> None:
    decodes, prefills = len(given.decode_swa_indices), len(given.prefill_topk_indices)
    valid = np.ones(decodes + prefills, np.bool_)
    if given.decode_is_valid_token is not None:
        valid[:decodes] = host(given.decode_is_valid_token)[:decodes]
    requests = checked_requests(given.token_to_req_indices, valid, len(given.swa_block_table))
    table = "compressed_block_table", given.compressed_block_table, given.compressed_block_size
    if given.compressed_block_table is None:
        return
    selected = given.decode_compressed_indices
    if given.decode_compressed_indices_are_local and selected is not None:
        lens = given.decode_compressed_topk_lens
        used = np.full(decodes, selected.shape[1]) if lens is None else host(lens)
        used = np.where(valid[:decodes], used, 0)
        check_mapped("decode_compressed_indices", selected, used, requests, *table)
    complete = rows_complete(given.query_start_loc, given.seq_lens, decodes, prefills, given.compress_ratio)
    used = np.minimum(complete, given.topk)
    check_mapped("prefill_topk_indices", given.prefill_topk_indices, used, requests[decodes:], *table)


@check
def copy_blocks(given: Any) -> None:
    for name, column, pages in (("first", 0, len(given.src)), ("second", 1, len(given.dst))):
        blocks = host(given.src_to_dst)[:, column]
        wrong = (blocks < -1) | (blocks >= pages)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"src_to_dst: pair {i} has {blocks[i]} as its {name} block, expected -1 or 0 to {pages - 1}"
            )


CHECKS["copy_blocks_across"] = copy_blocks


@check
def advance_step(given: Any) -> None:
    lens = host(given.seq_lens)[: given.num_queries]
    check_pages("block_tables", given.block_tables[: given.num_queries], lens, lens + 1, given.block_size)


def of_rank(rows: np.ndarray, shard: Shard) -> np.ndarray:
    """A request's rows as indices among the rank's own rows; -1 for rows of other ranks."""
    turn, within = np.divmod(rows, shard.interleave)
    own = (rows >= 0) & (turn % shard.size == shard.rank)
    return np.where(own, turn // shard.size * shard.interleave + within, -1)


@check
def local_slot_mapping(given: Any) -> None:
    _, first_positions, lens = last_positions(given.query_start_loc, given.seq_lens)
    ranges = []
    firsts, ends = (np.maximum(x, 0) // given.compress_ratio for x in (first_positions, lens))
    for at, stop in zip(firsts, ends, strict=True):
        rows = of_rank(np.arange(at, max(at, stop)), given.shard)
        own = rows[rows >= 0]
        ranges.append((own.min(), own.max() + 1) if len(own) else (0, 0))
    begin, end = np.array(ranges, np.int64).reshape(-1, 2).T
    check_pages("block_table", given.block_table, begin, end, given.block_size)


@check
def localise_indices(given: Any) -> None:
    values = host(given.indices)
    valid = np.ones(len(values), np.bool_) if given.is_valid_token is None else host(given.is_valid_token)
    requests = checked_requests(given.token_to_req, valid, len(given.block_table))
    used = np.broadcast_to(valid[:, None], values.shape)
    check_indices("indices", values, used, np.iinfo(np.int32).max, "token")
    check_mapped(
        "indices", of_rank(values, given.shard), used, requests, "block_table", given.block_table, given.block_size
    )


@check
def build_sparse_swa(given: Any) -> None:
    check_slots("slot_mapping", given.slot_mapping, None)
    starts, begin, lens = last_positions(given.query_start_loc, given.seq_lens)
    end = lens * (np.diff(starts) > 0)  # padding requests read nothing
    reached = np.full(len(lens), given.window_size - 1)
    if given.noncausal:  # the tokens of a decode see the whole window of its first token's predecessor
        reached[: given.counts.num_decodes] += 1
    first = begin - reached
    if given.replay_start is not None:  # whose windows have nothing before it, save those of noncausal decodes
        late = (host(given.replay_start) > begin) & (end > 0)
        if late.any():
            r = int(np.argmax(late))
            raise ValueError(
                f"replay_start: request {r} has {host(given.replay_start)[r]}, expected at most {begin[r]}, its first "
                "position of this step"
            )
        causal = np.arange(len(lens)) >= (given.counts.num_decodes if given.noncausal else 0)
        first = np.where(causal, np.maximum(first, host(given.replay_start)), first)
    check_pages("block_table_tensor", given.block_table, first, end, given.block_size)
    table, rows = given.c128a_block_table, end // C128A_RATIO
    if table is not None:
        check_pages("c128a_block_table", table, np.zeros_like(end), rows, given.c128a_block_size)


@check
def build_indexer(given: Any) -> None:
    starts, __, end = last_positions(given.query_start_loc, given.seq_lens)
    rows = end * (np.diff(starts) > 0) // given.counts.compress_ratio
    check_pages("block_table", given.block_table, np.zeros_like(rows), rows, given.counts.block_size)


@check
def compressed_slot_mapping(given: Any) -> None:
    if given.compress_ratio > 1:  # ratio 1: pages of states, freed when no longer needed
        __, begin, end = last_positions(given.query_start_loc, given.seq_lens)
        begin, end = np.maximum(begin, 0) // given.compress_ratio, end // given.compress_ratio
        check_pages("block_table", given.block_table, begin, end, given.block_size)
