"""Index maps: the cache slots that each query token attends to.

A slot is block * block_size + row. In every map -1 means absent. An entry is absent if its block table lacks it or has
a negative block for it, or if its slot is beyond int32. Padding stays -1.
"""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import BOOL, INT32, Call, without_middle_axis
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_flags, check_integers
from ..kernels.types.indices import CombinedIndices, MixedIndices, TopkSlots, WindowSlots

INT32_MAX = 2**31 - 1


@launch_cached
def compute_swa_indices_and_lens(
    query_start_loc: Array,
    seq_lens: Array,
    token_to_req_indices: Array,
    is_valid_token: Array,
    block_table: Array,
    block_size: int,
    window_size: int,
    num_tokens: int,
    *,
    token_offset: int = 0,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """The sliding window of each token: slots of its own and the window_size - 1 positions before it.

    Args:
        query_start_loc: [R + 1] int32, first query token of each request
        seq_lens: [R] int32, tokens of each request, these queries included
        token_to_req_indices: [>= token_offset + num_tokens] int32
        is_valid_token: [>= token_offset + num_tokens] bool; False for padding
        block_table: [R, B] int32
        block_size: tokens of a page
        window_size: positions of a window, the token's own included
        num_tokens: T, rows to compute; row t is for token t + token_offset
        out: (swa_indices, swa_lens) to write instead of allocating

    Returns swa_indices [T, window_size] int32, oldest position first, and swa_lens [T] int32. A padding
    token has length 0 and a row of -1.
    Source: vLLM sparse_swa, _compute_swa_indices_and_lens_kernel.
    """
    check_integers(1, block_size=block_size, window_size=window_size)
    check_integers(0, num_tokens=num_tokens, token_offset=token_offset)
    call = Call(backend, stream)
    query_start_loc, seq_lens = request_arrays(call, query_start_loc, seq_lens)
    tokens = num_tokens + token_offset
    token_to_req_indices = per_token(call, "token_to_req_indices", token_to_req_indices, INT32, tokens)
    is_valid_token = per_token(call, "is_valid_token", is_valid_token, BOOL, tokens)
    block_table = call.array("block_table", block_table, INT32, (-1, -1))
    outputs = pair("out", out)
    swa_indices = call.output("out[0] (swa_indices)", outputs[0], INT32, (num_tokens, window_size))
    swa_lens = call.output("out[1] (swa_lens)", outputs[1], INT32, (num_tokens,))
    if num_tokens:
        with call.kernels("indices") as kernels:
            kernels.compute_swa_indices_and_lens(WindowSlots(
                query_start_loc, seq_lens, token_to_req_indices, is_valid_token, block_table, block_size, window_size,
                token_offset, swa_indices, swa_lens,
            ))  # fmt: skip
    return call.results()


@launch_cached
def compute_global_topk_indices_and_lens(
    topk_indices: Array,
    token_to_req_indices: Array,
    block_table: Array,
    block_size: int,
    is_valid_token: Array,
    *,
    compact: bool = False,
    positions: Array | None = None,
    compress_ratio: int = 1,
    pool: int = 1,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Map local top-k positions to cache slots, and count the slots present.

    Args:
        topk_indices: [T, K] int32, positions in the request's cache, -1 = none
        token_to_req_indices: [>= T] int32
        block_table: [R, B] int32
        block_size: rows of a page
        is_valid_token: [>= T] bool; a padding token's length is 0 (its indices are still mapped)
        compact: move present entries to the left of each row, in order, so that a reader may stop at the length; False
            leaves every entry in its place, as vLLM 0.26 does
        positions: [>= T] int32, of each token in its sequence. If given, a token sees only the rows complete at its
            position, below (position + 1) // compress_ratio; other entries are absent
        compress_ratio: positions of a row
        pool: positions of a pooled index key (GLM-5.3-Flash): entries are pools, and the slots of the positions of each
            are written, then those of the open pool's positions, from (position + 1) // pool * pool to the token's own.
            With positions and compact, without compress_ratio; a divisor of block_size
        out: (global_topk_indices, topk_lens) to write instead of allocating

    Returns global_topk_indices [T, K * pool + pool - 1] int32 and topk_lens [T] int32.
    Source: vLLM compute_global_topk_indices_and_lens; compaction and bounds as in its later releases.
    """
    check_integers(1, block_size=block_size, compress_ratio=compress_ratio, pool=pool)
    check_flags(compact=compact)
    if pool > 1:
        check_pool(pool, "block_size", block_size, positions)
        if not compact or compress_ratio != 1:
            name, value, one = ("compact", compact, True) if not compact else ("compress_ratio", compress_ratio, 1)
            raise ValueError(f"{name}: got {value} with pool {pool}, expected {one}")
    call = Call(backend, stream)
    topk_indices = call.array("topk_indices", topk_indices, INT32, ("T", "K"))
    num_tokens, topk = topk_indices.shape
    token_to_req_indices = per_token(call, "token_to_req_indices", token_to_req_indices, INT32, num_tokens)
    block_table = call.array("block_table", block_table, INT32, (-1, -1))
    is_valid_token = per_token(call, "is_valid_token", is_valid_token, BOOL, num_tokens)
    positions = None if positions is None else per_token(call, "positions", positions, INT32, num_tokens)
    outputs = pair("out", out)
    global_topk_indices = call.output(
        "out[0] (global_topk_indices)", outputs[0], INT32, (num_tokens, pooled_width(topk, pool))
    )
    topk_lens = call.output("out[1] (topk_lens)", outputs[1], INT32, (num_tokens,))
    if num_tokens:
        with call.kernels("indices") as kernels:
            kernels.compute_global_topk_indices_and_lens(TopkSlots(
                topk_indices, token_to_req_indices, block_table, block_size, is_valid_token, positions,
                compress_ratio * pool, global_topk_indices, topk_lens, bool(compact), int(pool),
            ))  # fmt: skip
    return call.results()


def check_pool(pool: int, name: str, block_size: int, positions: Any) -> None:
    """Raise ValueError unless pools of `pool` positions fit into pages of block_size, the argument `name`."""
    if positions is None:
        raise ValueError(f"positions: got None with pool {pool}, expected the position of each token")
    if block_size % pool:
        raise ValueError(f"{name}: got {block_size}, expected a multiple of pool = {pool}")


def pooled_width(topk: Any, pool: int) -> Any:
    """Slots of `topk` pools and of the open pool."""
    return topk * pool + pool - 1


@launch_cached
def combine_topk_swa_indices(
    topk_indices: Array,
    query_start_loc: Array,
    seq_lens: Array,
    gather_lens: Array,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    compact: bool = False,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Rows of a gathered prefill workspace that each token attends to: its top-k, then its window.

    The workspace has [R, M] rows: compressed rows of request r from M * r on, its last gather_lens[r]
    uncompressed rows from M * r + N on.

    Args:
        topk_indices: [T, >= topk] int32, local compressed positions; < 0 or >= N is absent
        query_start_loc: [R + 1] int32; may start anywhere, row t of the result is token query_start_loc[0] + t
        seq_lens: [R] int32
        gather_lens: [R] int32
        window_size: positions of a window
        compress_ratio: positions of a compressed row; 0 for a layer without compressed rows, whose lists are windows
        topk: most entries of topk_indices to use; 0 for a layer that has only the window
        compact: take those of the first topk entries, in any column, that name a row complete at the token's position,
            below (position + 1) // compress_ratio; False takes the first min((position + 1) // compress_ratio, topk)
            entries unchanged
        out: (combined_indices, combined_lens) to write instead of allocating

    Returns combined_indices [T, pad128(topk + window_size)] int32 and combined_lens [T] int32: the entries of top-k,
    then min(position + 1, window_size) window entries.
    Source: vLLM combine_topk_swa_indices.
    """
    check_integers(1, window_size=window_size, M=M)
    check_integers(0, topk=topk, N=N, compress_ratio=compress_ratio)
    check_flags(compact=compact)
    call = Call(backend, stream)
    topk_indices = call.array("topk_indices", topk_indices, INT32, ("T", -1))
    query_start_loc, seq_lens = request_arrays(call, query_start_loc, seq_lens)
    gather_lens = call.array("gather_lens", gather_lens, INT32, ("R",))
    num_tokens = call.size("T")
    if topk_indices.shape[1] < topk:
        raise ValueError(f"topk_indices: got {topk_indices.shape[1]} columns, expected at least topk = {topk}")
    if N > M:
        raise ValueError(f"N: got {N}, expected at most M = {M}, the rows of a request")
    if len(seq_lens) * M > INT32_MAX:
        raise ValueError(f"M: got {M} rows for each of {len(seq_lens)} requests, expected a workspace within int32")
    outputs = pair("out", out)
    width = -(-(topk + window_size) // 128) * 128
    combined_indices = call.output("out[0] (combined_indices)", outputs[0], INT32, (num_tokens, width))
    combined_lens = call.output("out[1] (combined_lens)", outputs[1], INT32, (num_tokens,))
    if num_tokens:
        with call.kernels("indices") as kernels:
            kernels.combine_topk_swa_indices(CombinedIndices(
                topk_indices, query_start_loc, seq_lens, gather_lens, window_size, max(compress_ratio, 1),
                topk if compress_ratio else 0, M, N, bool(compact), combined_indices, combined_lens,
            ))  # fmt: skip
    return call.results()


@launch_cached
def build_flashinfer_mixed_sparse_indices(
    decode_swa_indices: Array,
    decode_compressed_indices: Array | None,
    decode_compressed_topk_lens: Array | None,
    prefill_topk_indices: Array,
    query_start_loc: Array,
    seq_lens: Array,
    token_to_req_indices: Array,
    swa_block_table: Array,
    swa_block_size: int,
    compressed_block_table: Array | None,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    decode_compressed_indices_are_local: bool = False,
    decode_is_valid_token: Array | None = None,
    swa_block_span: int | None = None,
    compressed_block_span: int | None = None,
    *,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """The sparse-index matrix of FlashInfer's DeepSeek V4 attention for a decode-first batch.

    Columns [0, window_size) are SWA slots, the rest compressed slots. Rows of decode tokens are copied from
    the decode arguments; prefill tokens take their window from their position and map their top-k.

    Args:
        decode_swa_indices: [D, window_size] or [D, 1, window_size] int32 slots
        decode_compressed_indices: [D, Kd] or [D, 1, Kd] int32, slots or local positions; None for SWA-only layers
        decode_compressed_topk_lens: [D] int32, entries in use; None: all entries (if local: present entries)
        prefill_topk_indices: [P, >= topk] int32 local compressed positions of the P prefill tokens
        query_start_loc, seq_lens: [R + 1], [R] int32
        token_to_req_indices: [>= D + P] int32
        swa_block_table: [R, B] int32; compressed_block_table likewise, None for SWA-only layers
        swa_block_size, compressed_block_size: rows of a page
        window_size, compress_ratio: positions of a window, and of a compressed row; ratio 0: prefill tokens have none
        topk: most entries of prefill_topk_indices to use
        decode_compressed_indices_are_local: whether the indices are positions, to be mapped by compressed_block_table
        decode_is_valid_token: [>= D] bool: padding tokens count no compressed entries; None: all valid
        swa_block_span: slots from page to page in the reader's numbering, for packed pages (page stride / token bytes);
            None: swa_block_size. compressed_block_span likewise
        out: (sparse_indices, sparse_topk_lens) to write instead of allocating

    Returns sparse_indices [D + P, window_size + pad4(max(topk, Kd))] int32 and sparse_topk_lens [D + P]
    int32 = window_size + compressed entries: a window shorter than window_size leaves holes of -1.
    Source: vLLM build_flashinfer_mixed_sparse_indices.
    """
    check_integers(
        1,
        swa_block_size=swa_block_size,
        compressed_block_size=compressed_block_size,
        window_size=window_size,
        swa_block_span=swa_block_size if swa_block_span is None else swa_block_span,
        compressed_block_span=compressed_block_size if compressed_block_span is None else compressed_block_span,
    )
    check_integers(0, topk=topk, compress_ratio=compress_ratio)
    check_flags(decode_compressed_indices_are_local=decode_compressed_indices_are_local)
    call = Call(backend, stream)
    decode_swa_indices = two_dimensional(call, "decode_swa_indices", decode_swa_indices, ("D", window_size))
    num_decode_tokens, decode_topk = call.size("D"), 0
    if decode_compressed_indices is not None:
        decode_compressed_indices = two_dimensional(
            call, "decode_compressed_indices", decode_compressed_indices, ("D", "Kd")
        )
        decode_topk = call.size("Kd")
        if decode_compressed_indices_are_local and compressed_block_table is None:
            raise ValueError("compressed_block_table: got None, expected a table to map local indices with")
    lens = call.optional("decode_compressed_topk_lens", decode_compressed_topk_lens, INT32, ("D",))
    prefill_topk_indices = call.array("prefill_topk_indices", prefill_topk_indices, INT32, ("P", -1))
    query_start_loc, seq_lens = request_arrays(call, query_start_loc, seq_lens)
    num_tokens = num_decode_tokens + call.size("P")
    token_to_req_indices = per_token(call, "token_to_req_indices", token_to_req_indices, INT32, num_tokens)
    swa_block_table = call.array("swa_block_table", swa_block_table, INT32, (-1, -1))
    compressed_block_table = call.optional("compressed_block_table", compressed_block_table, INT32, (-1, -1))
    valid = None
    if decode_is_valid_token is not None:
        valid = per_token(call, "decode_is_valid_token", decode_is_valid_token, BOOL, num_decode_tokens)
    if compressed_block_table is not None and call.size("P") and prefill_topk_indices.shape[1] < topk:
        raise ValueError(
            f"prefill_topk_indices: got {prefill_topk_indices.shape[1]} columns, expected at least topk = {topk}"
        )
    outputs = pair("out", out)
    width = window_size + -(-max(topk, decode_topk) // 4) * 4
    sparse_indices = call.output("out[0] (sparse_indices)", outputs[0], INT32, (num_tokens, width))
    sparse_topk_lens = call.output("out[1] (sparse_topk_lens)", outputs[1], INT32, (num_tokens,))
    if num_tokens:
        with call.kernels("indices") as kernels:
            kernels.build_flashinfer_mixed_sparse_indices(MixedIndices(
                decode_swa_indices, decode_compressed_indices, lens, prefill_topk_indices, query_start_loc, seq_lens,
                token_to_req_indices, swa_block_table, swa_block_size, compressed_block_table, compressed_block_size,
                window_size, max(compress_ratio, 1), topk if compress_ratio else 0,
                bool(decode_compressed_indices_are_local), valid,
                swa_block_size if swa_block_span is None else swa_block_span,
                compressed_block_size if compressed_block_span is None else compressed_block_span, sparse_indices,
                sparse_topk_lens,
            ))  # fmt: skip
    return call.results()


def request_arrays(call: Call, query_start_loc: Any, seq_lens: Any) -> tuple[Any, Any]:
    """Check query_start_loc [R + 1] and seq_lens [R]."""
    query_start_loc = call.array("query_start_loc", query_start_loc, INT32, (-1,))
    seq_lens = call.array("seq_lens", seq_lens, INT32, ("R",))
    if len(query_start_loc) != len(seq_lens) + 1:
        raise ValueError(
            f"query_start_loc: got {len(query_start_loc)} entries, expected {len(seq_lens) + 1}, "
            "one more than seq_lens has"
        )
    return query_start_loc, seq_lens


def two_dimensional(call: Call, name: str, value: Any, shape: tuple[int | str, ...]) -> Any:
    """Check an index matrix that may carry an axis of 1 in the middle, as FlashMLA's do."""
    return call.checked(without_middle_axis(call.borrow(name, value)), INT32, shape)


def per_token(call: Call, name: str, value: Any, dtypes: tuple[Any, ...], num_tokens: int) -> Any:
    """The first entries of a vector, one for each token. Raises ValueError for a vector with fewer entries."""
    array = call.array(name, value, dtypes, (-1,))
    if len(array) < num_tokens:
        raise ValueError(f"{name}: got {len(array)} entries, expected at least {num_tokens}, one a token")
    return array[:num_tokens]


def pair(name: str, out: Any, expected: str = "a pair of arrays") -> tuple[Any, Any]:
    """The two output arrays in `out`, or (None, None)."""
    if out is None:
        return None, None
    is_tuple = isinstance(out, (tuple, list))
    if not is_tuple or len(out) != 2:
        got = f"{len(out)} arrays" if is_tuple else type(out).__name__
        raise TypeError(f"{name}: got {got}, expected {expected}")
    return out[0], out[1]
