"""The indexer's top-k: from logits, or from keys by scoring a few queries at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.array import Array
from ..dispatch.call import BOOL, FLOAT32, INT32, Call
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_given, check_integers, check_optional_size
from ..kernels.types.indexer import PackedScores, PagedScores, Rows, Slots
from ..layout import CacheLayout
from .indexer import UINT8, check_schedule, checked_keys, checked_paged, checked_width, rows_of_table
from .indices import check_pool, pair, pooled_width

WORKSPACE_BYTES = 64 << 20
INDEX_LIMIT = 2**31 - 1
CANDIDATE_BLOCK = 8  # positions of a candidate block in V4.1
BY_TOKEN = ("indices", "lens", "is_valid", "positions")  # of Slots
ALIGNMENT = 16  # bytes to which rows of logits are aligned in a workspace


@launch_cached
def top_k_per_row(
    logits: Array,
    topk: int,
    row_starts: Array | None = None,
    row_ends: Array | None = None,
    *,
    seq_lens: Array | None = None,
    next_n: int = 1,
    out: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """The columns of the largest logits of each row.

    Args:
        logits: [M, N] float32
        topk: how many columns to select
        row_starts, row_ends: [M] int32 or None: choose among the columns row_starts <= n < row_ends (prefill rows);
            indices count from row_starts
        seq_lens: [B] int32: row b * next_n + j has the first seq_lens[b] - next_n + 1 + j columns (decode rows); or [B,
            next_n], columns of each row. M = B * next_n. Not together with row_starts or row_ends
        next_n: query tokens of a request, for seq_lens [B]
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: to write instead of allocating

    Returns int32 [M, topk]: indices in ascending order, then -1 where a row has fewer columns. Among equal logits the
    lowest indices are selected, so every backend selects the same columns. Logits, including subnormal ones, are
    compared by value; -0 equals 0, -inf is a value like any other, and NaN is never selected.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM top_k_per_row_prefill and top_k_per_row_decode, which leave order and ties open.
    """
    check_integers(0, topk=topk)
    check_integers(1, next_n=next_n)
    call = Call(backend, stream, early_release)
    logits, rows = checked_logits(call, logits, row_starts, row_ends, seq_lens, next_n)
    indices = call.output("out", out, INT32, (len(logits), int(topk)))
    if indices.size:
        with call.kernels("indexer_topk") as kernels:
            kernels.top_k_per_row(logits, rows, indices, None)
    return call.results()


def checked_logits(
    call: Call, logits: Any, row_starts: Any, row_ends: Any, seq_lens: Any, next_n: int, writable: bool = False
) -> tuple[Any, Rows]:
    """logits [M, N] and the valid columns of each row."""
    logits = call.array("logits", logits, FLOAT32, ("M", "N"), writable=writable)
    if logits.shape[1] > INDEX_LIMIT:
        raise ValueError(f"logits: got {logits.shape[1]} columns, expected at most {INDEX_LIMIT}")
    starts = call.optional("row_starts", row_starts, INT32, ("M",))
    ends = call.optional("row_ends", row_ends, INT32, ("M",))
    lens = None
    if seq_lens is not None:
        if starts is not None or ends is not None:
            raise ValueError("seq_lens: got an array together with row_starts or row_ends, expected only one of them")
        argument = call.borrow("seq_lens", seq_lens)
        lens = call.checked(argument, INT32, ("B", -1)[: max(argument.native.ndim, 1)])
        next_n = lens.shape[1] if lens.ndim == 2 else next_n
        if len(lens) * next_n != len(logits):
            raise ValueError(
                f"seq_lens: got shape {tuple(lens.shape)} for {next_n} tokens of a request, "
                f"expected lengths of {len(logits)} rows of logits"
            )
    return logits, Rows(starts, ends, lens, next_n)


@launch_cached
def indexer_topk(
    q: Array,
    kv: Array | tuple[Array, Array],
    weights: Array,
    topk: int,
    *,
    cu_seqlen_ks: Array | None = None,
    cu_seqlen_ke: Array | None = None,
    max_seqlen_k: int = 0,
    kv_scales: Array | None = None,
    context_lens: Array | None = None,
    block_table: Array | None = None,
    schedule_metadata: Array | None = None,
    max_context_len: int | None = None,
    layout: CacheLayout | str | None = None,
    max_workspace_bytes: int = WORKSPACE_BYTES,
    workspace: Array | None = None,
    out: Array | None = None,
    slots: tuple[Array, Array] | None = None,
    is_valid_token: Array | None = None,
    slot_block_table: Array | None = None,
    slot_block_size: int | None = None,
    pool: int = 1,
    positions: Array | None = None,
    candidate_blocks: Array | None = None,
    candidate_block_size: int = CANDIDATE_BLOCK,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Score keys and select each query's top-k, without storing the logits of all queries at once.

    Over packed keys (prefill), as fp8_mqa_logits and top_k_per_row:
      q [M, H, 128], kv (k, scales) or one array, weights [M, H], cu_seqlen_ks and cu_seqlen_ke [M];
      kv_scales if kv is only k; max_seqlen_k, if not 0, bounds cu_seqlen_ke - cu_seqlen_ks: keys beyond it are
      left out
    Over a paged cache (decode), as fp8_paged_mqa_logits and top_k_per_row:
      q [B, next_n, H, 128], kv the cache, weights [B * next_n, H], context_lens [B] or [B, next_n], block_table;
      schedule_metadata, max_context_len and layout as in fp8_paged_mqa_logits

    Args:
        topk: how many keys to select
        max_workspace_bytes: most device memory for logits; at least the logits of one request must fit
        workspace: uint8 [bytes] to use instead of allocating; its size is the bound
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: to write instead of allocating
        slots: (slots [M, topk * pool + pool - 1] int32, lens [M] int32) to write as well, for a paged cache only: slots
            of the selected rows, and their count. Bit-identical to compute_global_topk_indices_and_lens(...,
            compact=True) of the result; on GPUs without a further launch. context_lens must count complete rows only
        is_valid_token: [M] bool, with slots: a padding token's length is 0; None: no token is padding
        slot_block_table: [>= B, C'] int32, with slots: pages of the rows that the slots are for; None: block_table
        slot_block_size: rows of such a page, a multiple of pool; None: the keys of a page times pool
        pool: with slots: rows of a key (GLM-5.3-Flash): slots has those of the rows of each selected pool, then of the
            open pool
        positions: [M] int32, of each query, for the open pool's rows; with pool above 1 only. context_lens must then be
            (position + 1) // pool
        candidate_blocks: [M, K] int32 to write as well: the K blocks of candidate_block_size keys with the best scores,
            as select_candidate_blocks selects them from the same logits. A workspace includes memory for the blocks'
            scores; max_workspace_bytes does not count it. Not together with max_seqlen_k

    Returns int32 [M, topk] (M = B * next_n), bit-identical to the two steps, but never an index beyond block_table,
    however large context_lens and max_context_len are. Indices count from cu_seqlen_ks. A query's selection does not
    depend on the other queries of the call, except for packed keys on the CPU, between keys whose scores differ only by
    rounding (fp8_mqa_logits).
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    """
    check_integers(0, topk=topk, max_seqlen_k=max_seqlen_k)
    check_integers(1, candidate_block_size=candidate_block_size, pool=pool)
    check_optional_size(slot_block_size=slot_block_size)
    check_integers(1, 2**63 - 1, max_workspace_bytes=max_workspace_bytes)
    if candidate_blocks is not None and max_seqlen_k:
        raise ValueError(f"max_seqlen_k: got {max_seqlen_k} together with candidate_blocks, expected only one of them")
    call = Call(backend, stream, early_release)
    paged = block_table is not None
    if paged:
        of_keys = {"cu_seqlen_ks": cu_seqlen_ks, "cu_seqlen_ke": cu_seqlen_ke, "kv_scales": kv_scales}
        for name, value in {**of_keys, "max_seqlen_k": max_seqlen_k or None}.items():
            if value is not None:
                raise ValueError(f"{name}: got an array together with block_table, expected only one of them")
        check_given("with block_table", context_lens=context_lens)
        q, pages, weights, lens, table = checked_paged(call, q, kv, weights, context_lens, block_table, layout, "kv")
        check_schedule(call, schedule_metadata)
        next_n, width = q.shape[1], min(checked_width(max_context_len, table, pages), rows_of_table(table, pages))
        tokens = len(q) * next_n
    else:
        of_pages: dict[str, Any] = {
            "context_lens": context_lens,
            "schedule_metadata": schedule_metadata,
            "layout": layout,
        }
        of_pages |= {"max_context_len": max_context_len, "slots": slots, "is_valid_token": is_valid_token}
        of_pages |= {"slot_block_table": slot_block_table, "slot_block_size": slot_block_size, "positions": positions}
        of_pages |= {"pool": pool if pool > 1 else None}
        for name, value in of_pages.items():
            if value is not None:
                raise ValueError(f"{name}: got a value without block_table, expected both or none")
        check_given("without block_table", cu_seqlen_ks=cu_seqlen_ks, cu_seqlen_ke=cu_seqlen_ke)
        q, k, scales, weights = checked_keys(call, q, kv, kv_scales, weights)
        starts = call.array("cu_seqlen_ks", cu_seqlen_ks, INT32, ("M",))
        ends = call.array("cu_seqlen_ke", cu_seqlen_ke, INT32, ("M",))
        tokens, next_n, width = len(q), 1, max_seqlen_k or len(k)
    indices = call.output("out", out, INT32, (tokens, int(topk)))
    mapped = None
    if paged:
        of_slots = {
            "is_valid_token": is_valid_token, "slot_block_table": slot_block_table, "slot_block_size": slot_block_size,
            "positions": positions, "pool": pool if pool > 1 else None,
        }  # fmt: skip
        if slots is None:
            for name, value in of_slots.items():
                if value is not None:
                    what = "a value" if isinstance(value, int) else "an array"
                    raise ValueError(f"{name}: got {what} without slots, expected both or none")
        else:
            mapped = _slots_of_rows(call, slots, pages, table, tokens, next_n, int(topk), of_slots)
    blocks = call.optional("candidate_blocks", candidate_blocks, INT32, (tokens, "K"), writable=True)
    if not indices.size:
        if mapped is not None:
            mapped.lens[...] = 0
        if blocks is None or not blocks.size:
            return call.results()
    row_bytes = logits_row_bytes(width)
    block_columns = 0 if blocks is None else blocks_of(width, candidate_block_size)
    maxima_bytes = 0 if blocks is None else logits_row_bytes(block_columns)
    most = max_workspace_bytes // row_bytes * (row_bytes + maxima_bytes)  # blocks' scores follow the logits
    memory, rows = logits_memory(call, workspace, most, row_bytes + maxima_bytes, tokens, next_n)
    with call.kernels("indexer") as kernels, call.kernels("indexer_topk") as selection:
        places = None
        for first in range(0, tokens, rows):
            part = slice(first, min(first + rows, tokens))
            count = part.stop - first
            logits, rest = rows_in(memory, count, row_bytes, width)
            if paged:
                entries = slice(first // next_n, part.stop // next_n)
                scores = PagedScores(q[entries], pages, weights[part], lens[entries], table[entries], False, logits)
                if blocks is None:
                    kernels.paged_mqa_logits(scores)
                else:
                    maxima, _ = rows_in(rest, count, maxima_bytes, block_columns)
                    score_with_blocks(call, scores, candidate_block_size, maxima, blocks[part])
                choose_from = Rows(lens=lens[entries], next_n=next_n)
                if mapped is not None:
                    places = mapped._replace(
                        block_table=mapped.block_table[entries],
                        **{name: x[part] for name, x in mapped._asdict().items() if name in BY_TOKEN and x is not None},
                    )
            else:
                compressed = max_seqlen_k > 0
                kernels.mqa_logits(PackedScores(
                    q[part], k, scales, weights[part], starts[part], ends[part], compressed, False, logits
                ))  # fmt: skip
                choose_from = Rows(starts[part], ends[part], num_keys=len(k) if compressed else None)
            if blocks is not None and not paged:
                maxima, _ = rows_in(rest, count, maxima_bytes, block_columns)
                with call.kernels("candidates") as of_blocks:
                    of_blocks.select_candidate_blocks(logits, choose_from, candidate_block_size, maxima, blocks[part])
            if indices.size:
                selection.top_k_per_row(logits, choose_from, indices[part], places)
    return call.results()


def score_with_blocks(call: Call, scores: PagedScores, block: int, maxima: Any, candidates: Any) -> None:
    """Score the rows of pages, and select the candidate blocks with the best scores."""
    with call.kernels("candidates") as kernels:
        kernels.paged_logits_and_blocks(scores, block, maxima, candidates)


def _slots_of_rows(
    call: Call, slots: tuple[Any, Any], pages: Any, table: Any, tokens: int, next_n: int, topk: int,
    given: dict[str, Any],
) -> Slots:  # fmt: skip
    """Check the arrays that slots are written to, and the rows that they are for."""
    pool = given["pool"] or 1
    block_size = given["slot_block_size"] or pages.block_size * pool
    if pool > 1:
        check_pool(pool, "slot_block_size", block_size, given["positions"])
        if not topk:
            raise ValueError(f"topk: got 0 with pool {pool}, expected at least 1")
    elif given["positions"] is not None:
        raise ValueError("positions: got an array without pool, expected both or none")
    indices, lens = pair("slots", slots)
    indices = call.array("slots[0] (slots)", indices, INT32, (tokens, pooled_width(topk, pool)), writable=True)
    lens = call.array("slots[1] (lens)", lens, INT32, (tokens,), writable=True)
    is_valid = call.optional("is_valid_token", given["is_valid_token"], BOOL, (tokens,))
    if given["slot_block_table"] is not None:
        table = call.array("slot_block_table", given["slot_block_table"], INT32, (-1, -1))
        if len(table) * next_n < tokens:
            raise ValueError(f"slot_block_table: got {len(table)} rows, expected at least {tokens // next_n}")
    positions = call.optional("positions", given["positions"], INT32, (tokens,))
    return Slots(indices, lens, table, block_size, is_valid, int(pool), positions)


def logits_row_bytes(width: Any) -> Any:
    """Bytes of a row of logits in a workspace."""
    return (max(width, 1) * 4 + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def rows_in(memory: Any, count: int, row_bytes: int, width: int) -> tuple[Any, Any]:
    """Rows [count, width] at the beginning of a workspace, float32 [..], and the rest of the workspace."""
    values = row_bytes // 4
    return memory[: count * values].reshape(-1, values)[:, :width], memory[count * values :]


def blocks_of(width: Any, block: int) -> Any:
    """Blocks of `block` columns in a row."""
    return (width + block - 1) // block


def logits_memory(
    call: Call, workspace: Any, most_bytes: int, row_bytes: int, tokens: int, next_n: int
) -> tuple[Any, int]:
    """Memory for the logits of one pass, float32 [..], and the tokens of a pass, which has whole requests."""
    name = "max_workspace_bytes"
    if workspace is not None:
        name = "workspace"
        workspace = call.array(name, workspace, UINT8, (-1,), writable=True)
        most_bytes = len(workspace)
        address = workspace.ctypes.data if isinstance(workspace, np.ndarray) else workspace.data.ptr
        if address % ALIGNMENT:
            raise ValueError(f"workspace: got the address {address:#x}, expected a multiple of {ALIGNMENT}")
    requests = most_bytes // (row_bytes * next_n)
    if not requests:
        raise ValueError(
            f"{name}: got {most_bytes} bytes, expected at least {row_bytes * next_n}, the logits of one request"
        )
    passes = -(-tokens // (requests * next_n))
    rows = min(-(-tokens // (passes * next_n)) * next_n, tokens)  # passes of equal size: no small last pass
    if workspace is None:
        workspace = call.scratch(name, rows * row_bytes)
    return workspace[: rows * row_bytes].view(np.float32), rows
