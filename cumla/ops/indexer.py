"""The indexer: scores the rows of its cache for each query of a sparse layer, and selects the best.

    logits[m, n] = scale[n] * sum over heads h of weights[m, h] * relu(q[m, h] . k[n])

q and k are e4m3 bytes: k has a float32 scale for each row, q a scale for each head, which `fused_indexer_q_rope_quant`
folds into `weights`. MXFP4 keys (DeepSeek V4.1) have a scale for each 32 values instead. For exact scores both may be
float32 or bfloat16, without scales.
"""

from __future__ import annotations

from typing import Any, get_args

import ml_dtypes
import numpy as np

from ..arrays.array import Array
from ..dispatch.call import FLOAT32, FLOATS, INT32, SLOTS, Call
from ..dispatch.formats import named_layout, pages_of
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_choice, check_flags, check_integers, finite, in_float32
from ..kernels.types.indexer import IndexQueries, PackedScores, PagedScores, QueryFormat
from ..kernels.types.metadata import SPLIT_PAGES
from ..layout import INDEXER_BF16, INDEXER_F32, INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from .indices import pair
from .norm_rope import head_factors

HEAD_DIM = INDEXER_FP8.head_dim
ROPE_DIM = 64
Q_FORMATS = get_args(QueryFormat)
UINT8 = (np.dtype(np.uint8),)
PLAIN = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))  # keys without scales
TABLE = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
# Exponents of the smallest scales of a query: amax is at least 1e-4 (V4) or 1e-10 (V3.2).
LEAST_EXPONENT, LEAST_EXPONENT_ROPE_FIRST = INDEXER_FP8.min_exponent, -42


@launch_cached
def fused_indexer_q_rope_quant(
    positions: Array,
    index_q: Array,
    index_q_cos_sin_cache: Array | None,
    index_weights: Array,
    index_weights_softmax_scale: float | None = None,
    index_weights_head_scale: float | None = None,
    *,
    rope_first: bool = False,
    is_neox: bool = False,
    quantize: bool = True,
    q_format: QueryFormat = "fp8",
    hadamard: bool = False,
    ssmax_scale: Array | None = None,
    ssmax_bias: Array | None = None,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Rotate the indexer's queries, quantise them to FP8 or MXFP4 and fold their scales into the weights of the heads.

    Args:
        positions: [T] int64 or int32
        index_q: [T, H, 128] bfloat16, float16 or float32
        index_q_cos_sin_cache: [P, 64] float32 or bfloat16: 32 cosines, then 32 sines of each position; None:
            queries are not rotated (GLM-5.3-Flash)
        index_weights: [T, H] bfloat16, float16 or float32
        index_weights_softmax_scale, index_weights_head_scale: 128 ** -0.5 and H ** -0.5 if None
        rope_first: whether the first 64 values are rotated (V3.2) or the last 64 (V4)
        is_neox: whether value i is paired with value i + 32 or neighbours are paired
        quantize: False: the queries are not quantised after RoPE, and the weights do not contain their scales
        q_format: "fp8"; "mxfp4": MXFP4 values converted to e4m3, as the logits take them (DeepSeek V4.1); or
            "mxfp4_rows": MXFP4 as stored
        hadamard: whether queries are rotated (Hadamard, Sylvester's order, times 128 ** -0.5) after RoPE, as the keys
            in the cache are: the flag of indexer_knorm_rope_and_insert or indexer_kpool_and_insert
        ssmax_scale, ssmax_bias: [H] float32, both or none: a head is multiplied by scale * ln(position + 1) + bias, in
            float32 before RoPE (SSMax of Mistral Large 4); a negative position counts as 0
        out: (q, weights) to write instead of allocating

    Returns q uint8 [T, H, 128], e4m3 (float32 unless quantised; bfloat16 if `out` says so), and weights float32
    [T, H] = index_weights * scale of q * softmax_scale * head_scale; subnormal factors and products (below 2^-126)
    count as 0. A head's scale is the smallest power of two with which the head's largest magnitude, at least 1e-4
    (1e-10 with rope_first), fits in e4m3. RoPE is computed in float32, and its result is rounded to bfloat16 before
    quantisation; before a Hadamard rotation, too, unless the results are float32. Queries at a position outside the
    table are not rotated.

    In MXFP4, 32 values share a scale: the smallest power of two, at least 2^-126, with which their largest finite
    magnitude is at most 6. Values are rounded to nearest even, an infinity to 6; a NaN makes all 32 NaN. "mxfp4"
    returns the values as e4m3 with one scale a head, 2^-6 of the head's largest scale, folded into the weights. These
    are exact, except in tiles whose scale is less than 2^-14 of the head's largest, which are rounded again.
    "mxfp4_rows" returns q uint8 [T, H, 68], rows of INDEXER_MXFP4: 64 bytes of two values each, the first in the lower
    half, and four UE8M0 scales, which are not folded into the weights.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM fused_indexer_q_rope_quant (DeepSeek V4) and its V3.2 indexer's forward.
    """
    check_flags(rope_first=rope_first, is_neox=is_neox, quantize=quantize, hadamard=hadamard)
    check_choice(Q_FORMATS, q_format=q_format)
    if not quantize and q_format != "fp8":
        raise ValueError(f"q_format: got {q_format!r} for queries that are not quantised")
    scales = {
        "index_weights_softmax_scale": index_weights_softmax_scale, "index_weights_head_scale": index_weights_head_scale
    }  # fmt: skip
    softmax_scale, head_scale = (None if x is None else finite(name, x) for name, x in scales.items())
    call = Call(backend, stream)
    positions = call.array("positions", positions, SLOTS, ("T",))
    index_q = call.array("index_q", index_q, FLOATS, ("T", "H", HEAD_DIM))
    table = call.optional("index_q_cos_sin_cache", index_q_cos_sin_cache, TABLE, (-1, ROPE_DIM))
    index_weights = call.array("index_weights", index_weights, FLOATS, ("T", "H"))
    tokens, heads = index_weights.shape
    ssmax = head_factors(call, ssmax_scale, ssmax_bias, heads)
    scale = HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale
    scale *= max(heads, 1) ** -0.5 if head_scale is None else head_scale
    in_float32("index_weights_softmax_scale * index_weights_head_scale", scale)
    outputs = pair("out", out, "(q, weights)")
    row = INDEXER_MXFP4.token_bytes if q_format == "mxfp4_rows" else HEAD_DIM
    q_out = call.output("out[0] (q)", outputs[0], UINT8 if quantize else PLAIN, (tokens, heads, row))
    weights = call.output("out[1] (weights)", outputs[1], FLOAT32, (tokens, heads))
    least = LEAST_EXPONENT_ROPE_FIRST if rope_first else LEAST_EXPONENT
    if q_format != "fp8":
        least = INDEXER_MXFP4.min_exponent
    if tokens and heads:
        with call.kernels("indexer") as kernels:
            kernels.fused_indexer_q_rope_quant(IndexQueries(
                positions, index_q, table, index_weights, scale, bool(rope_first), bool(is_neox), least, q_format,
                ssmax, bool(hadamard), q_out, weights,
            ))  # fmt: skip
    return call.results()


@launch_cached
def fp8_mqa_logits(
    q: Array,
    kv: Array | tuple[Array, Array],
    weights: Array,
    cu_seqlen_ks: Array,
    cu_seqlen_ke: Array,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    *,
    kv_scales: Array | None = None,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Scores of packed keys; each query sees a range of keys.

    Args:
        q: uint8 [M, H, 128], e4m3; or float32 or bfloat16 as the keys are. With MXFP4 keys any of the three
        kv: (k, scales): uint8 [N, 128], e4m3, and float32 [N] or [N, 1]; or uint8 [N, 64], MXFP4, and uint8 [N, 4], as
            from cp_gather_indexer_k_quant_cache; or only keys, float32 or bfloat16 [N, 128]
        weights: [M, H] float32
        cu_seqlen_ks, cu_seqlen_ke: [M] int32: query m sees the keys ks[m] <= n < ke[m], and none beyond N
        clean_logits: write -inf for keys that a query does not see; False leaves these logits unwritten
        max_seqlen_k: 0, or the width of compressed rows: column j is key ks[m] + j; keys beyond the width are left out
        kv_scales: the scales, if kv is only k
        out: to write instead of allocating

    Returns logits float32 [M, N], or [M, max_seqlen_k]. Subnormal weights and scales (below 2^-126) count as 0. A
    query's logits do not depend on the other queries of the call, except by rounding on the CPU (cumla.bounds.SCORES),
    where one product serves several queries.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: DeepGEMM fp8_mqa_logits.
    """
    check_integers(0, max_seqlen_k=max_seqlen_k)
    check_flags(clean_logits=clean_logits)
    call = Call(backend, stream)
    q, k, scales, weights = checked_keys(call, q, kv, kv_scales, weights)
    starts = call.array("cu_seqlen_ks", cu_seqlen_ks, INT32, ("M",))
    ends = call.array("cu_seqlen_ke", cu_seqlen_ke, INT32, ("M",))
    logits = call.output("out", out, FLOAT32, (len(q), max_seqlen_k or len(k)))
    if logits.size:
        with call.kernels("indexer") as kernels:
            compressed, clean = max_seqlen_k > 0, bool(clean_logits)
            kernels.mqa_logits(PackedScores(q, k, scales, weights, starts, ends, compressed, clean, logits))
    return call.results()


def check_queries_of_bytes(q: Any, of: str) -> None:
    """Raise TypeError unless queries are e4m3 where the keys are e4m3."""
    if q.dtype != np.uint8:
        raise TypeError(
            f"q: got dtype {q.dtype.name} for {of} in e4m3, expected uint8 (e4m3), as from fused_indexer_q_rope_quant"
        )


def checked_keys(call: Call, q: Any, kv: Any, kv_scales: Any, weights: Any) -> tuple[Any, Any, Any, Any]:
    """q [M, H, 128], k [N, 128], k's scales [N] or None, weights [M, H]; with MXFP4 k [N, 64] and scales [N, 4]."""
    pair = isinstance(kv, (tuple, list))
    if pair and len(kv) != 2:
        raise ValueError(f"kv: got {len(kv)} arrays, expected (k, scales) or one array")
    of_k, of_scales = "kv[0] (k)", "kv[1] (scales)"
    if kv_scales is not None:
        if pair:
            raise ValueError("kv_scales: got an array, but kv is a pair with scales, expected only one of the two")
        kv, pair, of_k, of_scales = (kv, kv_scales), True, "kv", "kv_scales"
    queries = call.borrow("q", q)
    if not pair:
        keys = call.borrow("kv", kv)
        if keys.native.dtype == np.uint8:
            check_queries_of_bytes(queries.native, "keys")
            raise ValueError("kv_scales: got None for e4m3 keys, expected their scales, or kv (k, scales)")
        q = call.checked(queries, PLAIN, ("M", "H", HEAD_DIM))
        k = call.checked(keys, (q.dtype,), ("N", HEAD_DIM))
        return q, k, None, call.array("weights", weights, FLOAT32, ("M", "H"))
    keys, of_keys = call.borrow(of_k, kv[0]), call.borrow(of_scales, kv[1])
    if keys.native.shape[1:] == (INDEXER_MXFP4.row_bytes,) and of_keys.native.dtype == np.uint8:
        q = call.checked(queries, UINT8 + PLAIN, ("M", "H", HEAD_DIM))
        k = call.checked(keys, UINT8, ("N", INDEXER_MXFP4.row_bytes))
        scales = call.checked(of_keys, UINT8, ("N", INDEXER_MXFP4.scale_bytes))
        check_contiguous_scales(of_scales, scales, INDEXER_MXFP4.scale_bytes)
        return q, k, scales, call.array("weights", weights, FLOAT32, ("M", "H"))
    q = call.checked(queries, UINT8, ("M", "H", HEAD_DIM))
    k = call.checked(keys, UINT8, ("N", HEAD_DIM))
    scales = call.checked(of_keys, FLOAT32, ("N", 1)[: max(of_keys.native.ndim, 1)])
    if scales.ndim == 2:
        scales = scales[:, 0]
    check_contiguous_scales(of_scales, scales, INDEXER_FP8.scale_bytes)
    return q, k, scales, call.array("weights", weights, FLOAT32, ("M", "H"))


def check_contiguous_scales(name: str, scales: Any, row_bytes: int) -> None:
    if scales.strides[0] != row_bytes and len(scales) > 1:
        raise ValueError(f"{name}: got strides {scales.strides} bytes, expected contiguous scales")


@launch_cached
def fp8_paged_mqa_logits(
    q: Array,
    kv_cache: Array,
    weights: Array,
    context_lens: Array,
    block_table: Array,
    schedule_metadata: Array | None = None,
    max_context_len: int | None = None,
    clean_logits: bool = False,
    *,
    layout: CacheLayout | str | None = None,
    out: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Scores of the rows of a paged cache for a few queries of each request.

    Args:
        q: uint8 [B, next_n, H, 128], e4m3; or float32 or bfloat16 as the cache's rows are. With INDEXER_MXFP4 any of
            the three
        kv_cache: uint8 [num_blocks, block_size, 132] (or [num_blocks, block_size, 1, 132]) in INDEXER_FP8, or 68 bytes
            in INDEXER_MXFP4; or float32 or bfloat16 [num_blocks, block_size, 128], or their bytes with `layout`
        weights: [B * next_n, H] float32
        context_lens: [B] int32, rows of each request: query j sees the first context_lens - next_n + 1 + j rows; or [B,
            next_n], rows that each query sees
        block_table: [>= B, C] int32, page of each block_size rows
        schedule_metadata: int32 [num_sms + 1, 2] of get_paged_mqa_logits_metadata, or None. Accepted for compatibility
            and ignored: cumla's kernels schedule the rows by the lengths
        max_context_len: width of the logits; None: all rows of the block table. Rows beyond it are left out
        clean_logits: write -inf for rows that a query does not see; False leaves these logits unwritten
        layout: INDEXER_FP8, INDEXER_MXFP4, INDEXER_BF16 or INDEXER_F32, or the name of one; by kv_cache and q if None
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: to write instead of allocating

    Returns logits float32 [B * next_n, max_context_len]. A row whose page is absent (not in the table, or the table's
    entry outside of the cache) scores -inf. Subnormal weights and scales (below 2^-126) count as 0.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: DeepGEMM fp8_paged_mqa_logits.
    """
    check_flags(clean_logits=clean_logits)
    call = Call(backend, stream, early_release)
    q, pages, weights, lens, table = checked_paged(call, q, kv_cache, weights, context_lens, block_table, layout)
    check_schedule(call, schedule_metadata)
    width = checked_width(max_context_len, table, pages)
    logits = call.output("out", out, FLOAT32, (q.shape[0] * q.shape[1], width))
    if logits.size:
        with call.kernels("indexer") as kernels:
            kernels.paged_mqa_logits(PagedScores(q, pages, weights, lens, table, bool(clean_logits), logits))
    return call.results()


def checked_paged(
    call: Call, q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any, layout: Any,
    cache_name: str = "kv_cache",
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """q [B, next_n, H, 128], Pages, weights [B * next_n, H], context_lens and block_table [B, C]."""
    known = (INDEXER_FP8, INDEXER_MXFP4, INDEXER_BF16, INDEXER_F32)
    queries, cache = call.borrow("q", q), call.borrow(cache_name, kv_cache)
    by_dtype = {"float32": INDEXER_F32, "bfloat16": INDEXER_BF16}
    layout = named_layout(layout)
    if layout is None:
        native = cache.native
        token_bytes = native.shape[-1] if native.dtype == np.uint8 and native.ndim > 2 else 0
        if token_bytes == INDEXER_FP8.token_bytes:
            check_queries_of_bytes(queries.native, "a cache of keys")
        layout = by_dtype.get(queries.native.dtype.name, INDEXER_FP8)
        if token_bytes == INDEXER_MXFP4.token_bytes:
            layout = INDEXER_MXFP4
    elif layout not in known:
        *names, last = (x.name for x in known)
        raise ValueError(f"layout: got {layout.name}, expected {', '.join(names)} or {last}")
    wanted = UINT8 if layout.num_scales else tuple(dtype for dtype in PLAIN if dtype.name == layout.value_type)
    wanted = UINT8 + PLAIN if layout is INDEXER_MXFP4 else wanted
    q = call.checked(queries, wanted, ("B", "next_n", "H", HEAD_DIM))
    pages = pages_of(call, cache, layout)
    batch, next_n, heads, _ = q.shape
    weights = call.array("weights", weights, FLOAT32, (batch * next_n, heads))
    argument = call.borrow("context_lens", context_lens)
    lens = call.checked(argument, INT32, ("B", "next_n") if argument.native.ndim == 2 else ("B",))
    table = call.array("block_table", block_table, INT32, (-1, -1))
    if len(table) < batch:
        raise ValueError(f"block_table: got {len(table)} rows, expected at least {batch}, one a request")
    return q, pages, weights, lens, table[:batch]


def check_schedule(call: Call, schedule_metadata: Any) -> None:
    schedule = call.optional("schedule_metadata", schedule_metadata, INT32, (-1, 2))
    if schedule is not None and len(schedule) < 2:
        raise ValueError(
            f"schedule_metadata: got {len(schedule)} rows, expected one more than the number of multiprocessors"
        )


def checked_width(max_context_len: int | None, block_table: Any, pages: Any) -> int:
    if max_context_len is None:
        max_context_len = rows_of_table(block_table, pages)
    check_integers(0, max_context_len=max_context_len)
    return int(max_context_len)


def rows_of_table(block_table: Any, pages: Any) -> int:
    """Rows of a request that have an entry in the block table."""
    return int(block_table.shape[1] * pages.block_size)


@launch_cached
def get_paged_mqa_logits_metadata(
    context_lens: Array,
    block_kv: int,
    num_sms: int,
    *,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """The start of each multiprocessor's work range in the paged logits of a batch.

    Args:
        context_lens: [B] int32, or [B, next_n], of which the last length of an entry counts
        block_kv: rows of a page
        num_sms: multiprocessors
        out: to write instead of allocating

    Returns int32 [num_sms + 1, 2]: (entry, split), where a split is four pages. The splits of all entries are divided
    in order into ranges of almost equal size, larger ones first. A range ends where the next one starts and may be
    empty; the last row is the end, (B, 0).
    Source: DeepGEMM get_paged_mqa_logits_metadata.
    """
    check_integers(1, block_kv=block_kv, num_sms=num_sms)
    call = Call(backend, stream)
    argument = call.borrow("context_lens", context_lens)
    lens = call.checked(argument, INT32, (-1, -1)[: max(argument.native.ndim, 1)])
    if lens.ndim == 2 and not lens.shape[1]:
        raise ValueError(f"context_lens: got shape {tuple(lens.shape)}, expected a length for each query of an entry")
    schedule = call.output("out", out, INT32, (num_sms + 1, 2))
    with call.kernels("indexer") as kernels:
        split = min(SPLIT_PAGES * block_kv, 2**31 - 1)  # a split of 2**31 - 1 rows holds any entry
        kernels.paged_mqa_logits_metadata(lens[:, -1] if lens.ndim == 2 else lens, split, schedule)
    return call.results()
