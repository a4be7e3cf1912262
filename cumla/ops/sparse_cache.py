"""Inserts rows into the paged caches, and gathers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.array import Array
from ..arrays.dlpack import Argument
from ..dispatch.call import BYTES, FLOAT32, FLOATS, INT32, SLOTS, Call
from ..dispatch.formats import bytes_of, cache_layout, cache_pages, check_row_width, pages_of
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_choice, check_flags, check_given, check_integers, check_optional_size
from ..kernels.types.segments import GatheredRows, Pages
from ..layout import INDEXER_BF16, INDEXER_F32, INDEXER_FP8, INDEXER_MXFP4, CacheLayout


@launch_cached
def quantize_and_insert_k_cache(
    k: Array,
    k_cache: Array,
    slot_mapping: Array,
    block_size: int | None = None,
    is_ue8m0: bool = True,
    *,
    layout: CacheLayout | str | None = None,
    min_exponent: int | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Quantise rows to FP8 or FP4 and write each into its slot of a paged cache.

    Args:
        k: [T, head_dim] bfloat16, float16 or float32; RoPE applied already
        k_cache: uint8 [num_blocks, block_size, token_bytes], or raw pages [num_blocks, page_bytes], written
        slot_mapping: [N] int64 or int32, N <= T: slot = block * block_size + row. Slots outside the cache, such as -1,
            skip their row; rows of `k` beyond N are ignored. The slots of one call must differ: see below
        block_size: tokens of a page; None: the cache's own; for raw pages of DSV4_FP8 64, if the pages have that size
        is_ue8m0: scales are powers of two; False, for float32 scales only: amax / 448, not rounded to a power of two.
            No effect on e4m3 scales
        layout: DSV4_FP8, V32_FP8, V32_NOPE_FP8, DSV41_FP8, DSV41_FP4, DSV41_FP8_SPLIT, DSV41_FP4_SPLIT, INDEXER_FP8 or
            INDEXER_MXFP4, or the name of one; None: inferred from the bytes per token, for raw pages from the width of
            `k` (formats of V3.2 and V4). Tokens of 528 and 288 bytes do not identify the format
        min_exponent: the smallest power of two that is written as a scale, as an exponent from -126 to 0; None: the
            layout's. Engines differ for V4.1: vLLM has -22, as DSV41_FP8; FlashMLA and SGLang have -13, as
            DSV41_FP8_SPLIT
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)

    A tile's scale comes from its finite values: an infinity saturates and a NaN is stored as NaN, and neither changes
    another byte. e2m1 has no NaN: a NaN makes the tile's scale NaN and its values 0. Values are divided by the scale in
    float32 and rounded to nearest even. Bytes of other slots and padding are not written.

    Two tokens for one slot are the caller's error: the slot then has bytes of both, mixed differently from call to call
    (in host memory: the last token's), and nothing else is touched. Equal tokens write that token's row. Each byte is
    written once, with its final value, so rewriting a row with its present content is invisible to concurrent readers.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM quantize_and_insert_k_cache (DeepSeek V4 and V4.1), concat_and_cache_mla fp8_ds_mla (V3.2) and
    indexer_k_quant_and_cache.
    """
    check_optional_size(block_size=block_size)
    if min_exponent is not None:
        check_integers(-126, 0, min_exponent=min_exponent)
    check_flags(is_ue8m0=is_ue8m0)
    call = Call(backend, stream, early_release)
    k = call.array("k", k, FLOATS, ("T", -1))
    cache = call.borrow("k_cache", k_cache, writable=True)
    layout = cache_layout(cache, layout, block_size, k.shape[1])
    if not layout.num_scales:
        raise ValueError(f"layout: got {layout.name}, expected one with FP8 or FP4 values")
    if min_exponent is not None and (layout.scale_type not in ("ue8m0", "float32") or not is_ue8m0):
        raise ValueError(f"min_exponent: got {min_exponent}, but scales of {layout.name} are not powers of two here")
    if layout.scale_type == "ue8m0" and not is_ue8m0:
        raise ValueError(f"is_ue8m0: got False, but {layout.name} stores scales as powers of two")
    if not is_ue8m0 and layout.scale_type == "float32" and not layout.min_scale:
        raise ValueError(f"is_ue8m0: got False, but {layout.name} has no min_scale: its scales are powers of two")
    check_row_width("k", k.shape[1], layout)
    pages = cache_pages(call, cache, layout, block_size)
    if min_exponent is not None:
        pages = pages._replace(layout=replace(layout, min_exponent=min_exponent))
    quantize_and_insert(call, k, pages, slot_mapping, bool(is_ue8m0))


def quantize_and_insert(call: Call, k: Any, pages: Pages, slot_mapping: Any, power_of_two_scales: bool) -> None:
    slots = checked_slots(call, slot_mapping, "k")
    if len(slots):
        with call.kernels("sparse_cache") as kernels:
            kernels.quantize_and_insert_k_cache(k, pages, slots, power_of_two_scales)


def checked_slots(call: Call, slot_mapping: Any, rows_name: str) -> Any:
    """Check slot_mapping [N] against the T rows to insert."""
    slots = call.array("slot_mapping", slot_mapping, SLOTS, ("N",))
    num_rows = call.size("T")
    if len(slots) > num_rows:
        raise ValueError(f"slot_mapping: got {len(slots)} slots, expected at most {num_rows}, the rows of {rows_name}")
    return slots


@launch_cached
def dequantize_and_gather_k_cache(
    out: Array,
    k_cache: Array,
    seq_lens: Array,
    gather_lens: Array | None,
    block_table: Array,
    block_size: int | None = None,
    offset: int = 0,
    *,
    compress_ratio: int = 1,
    layout: CacheLayout | str | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Dequantise the last rows of each request into a dense workspace.

    Args:
        out: [R, max_tokens, head_dim] bfloat16, float16 or float32, written: out[r, offset + i] = row of position
            seq_lens[r] - gather_lens[r] + i
        k_cache: uint8 [num_blocks, block_size, token_bytes], raw pages [num_blocks, page_bytes], or rows [num_blocks,
            block_size, head_dim] bfloat16, on the host also float32
        seq_lens: [R] int32, tokens of each request in the cache
        gather_lens: [R] int32, how many of the last positions to gather, or None for all of them
        block_table: [R, B] int32, page of each block_size positions
        block_size: tokens of a page; None: the cache's own; for raw pages of DSV4_FP8 64, if the pages have that size
        offset: first row of `out` to write
        compress_ratio: positions that a row of the cache represents: a request has seq_lens[r] // compress_ratio rows;
            gather_lens and block_size count rows
        layout: a CacheLayout or the name of one; None: inferred from the bytes per token, for raw pages from the width
            of `out` (formats of V3.2 and V4)

    A value is e4m3 or e2m1 times scale in float32, or a float32 row's, rounded once to out's type, to nearest even;
    bfloat16 represents V4.1's values exactly. Values that a cache stores in bfloat16 keep their bits. Lengths are
    clamped to the rows that exist and to the rows of `out`; a position whose block is absent becomes zeros; other rows
    are not written.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM dequantize_and_gather_k_cache.
    """
    check_optional_size(block_size=block_size)
    check_integers(0, offset=offset)
    check_integers(1, 2**31 - 1, compress_ratio=compress_ratio)
    call = Call(backend, stream)
    out = call.array("out", out, FLOATS, ("R", -1, -1), writable=True)
    cache = call.borrow("k_cache", k_cache)
    layout = cache_layout(cache, layout, block_size, out.shape[2])
    if not layout.num_scales and layout.value_type not in ("bfloat16", "float32"):
        raise ValueError(f"layout: got {layout.name}, expected one with FP8 or FP4 values and their scales")
    check_row_width("out", out.shape[2], layout)
    pages = cache_pages(call, cache, layout, block_size)
    call.check_float32("layout", layout.value_type)
    seq_lens = call.array("seq_lens", seq_lens, INT32, ("R",))
    gather_lens = call.optional("gather_lens", gather_lens, INT32, ("R",))
    block_table = call.array("block_table", block_table, INT32, ("R", -1))
    if offset > out.shape[1]:
        raise ValueError(f"offset: got {offset}, expected at most {out.shape[1]}, the rows of out")
    if out.size:
        with call.kernels("sparse_cache") as kernels:
            kernels.dequantize_and_gather_k_cache(
                GatheredRows(out, pages, seq_lens, gather_lens, block_table, offset, compress_ratio)
            )


@launch_cached
def indexer_k_quant_and_cache(
    k: Array,
    kv_cache: Array,
    slot_mapping: Array,
    quant_block_size: int = 128,
    scale_fmt: str | None = "ue8m0",
    *,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Quantise the indexer's keys to FP8 or MXFP4 and write each into its slot.

    Args:
        k: [T, 128] bfloat16, float16 or float32
        kv_cache: uint8 [num_blocks, block_size, 132] (or [num_blocks, block_size, 1, 132]), written; 68 bytes a token
            for MXFP4 (INDEXER_MXFP4); or, for keys that are not quantised, bfloat16 or float32 [num_blocks, block_size,
            128], or their bytes, 256 or 512 a token (INDEXER_BF16, INDEXER_F32)
        slot_mapping: [N] int64 or int32, N <= T; a slot outside the cache skips its row
        quant_block_size: values that share a scale: 128; 32 for MXFP4
        scale_fmt: "ue8m0": scales are powers of two, as always in MXFP4; None: amax / 448, not rounded to a power of
            two
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)

    Source: vLLM indexer_k_quant_and_cache. As quantize_and_insert_k_cache with INDEXER_FP8 or INDEXER_MXFP4.
    """
    check_choice((INDEXER_FP8.scale_tile, INDEXER_MXFP4.scale_tile), quant_block_size=quant_block_size)
    check_choice(("ue8m0", None), scale_fmt=scale_fmt)
    call = Call(backend, stream, early_release)
    k = call.array("k", k, FLOATS, ("T", INDEXER_FP8.head_dim))
    pages = indexer_pages(call, kv_cache, writable=True)
    tile = pages.layout.scale_tile or INDEXER_FP8.scale_tile
    if quant_block_size != tile:
        raise ValueError(f"quant_block_size: got {quant_block_size}, expected {tile} for a {pages.layout.name} cache")
    if pages.layout == INDEXER_MXFP4 and scale_fmt is None:
        raise ValueError("scale_fmt: got None, but INDEXER_MXFP4 stores scales as powers of two")
    if pages.layout.num_scales:
        quantize_and_insert(call, k, pages, slot_mapping, scale_fmt == "ue8m0")
        return
    slots = checked_slots(call, slot_mapping, "k")
    if len(slots):
        with call.kernels("indexer") as kernels:
            kernels.insert_keys(k, pages, slots)


def indexer_pages(call: Call, kv_cache: Any, writable: bool = False) -> Pages:
    """A cache of the indexer's keys; its format is inferred from its dtype or its bytes per token."""
    cache = call.borrow("kv_cache", kv_cache, writable)
    native = cache.native
    layout = {"bfloat16": INDEXER_BF16, "float32": INDEXER_F32}.get(native.dtype.name, INDEXER_FP8)
    if native.dtype in BYTES and native.ndim > 2:
        known = (INDEXER_MXFP4, INDEXER_BF16, INDEXER_F32)
        layout = {x.token_bytes: x for x in known}.get(native.shape[-1], INDEXER_FP8)
    return pages_of(call, cache, layout)


@launch_cached
def cp_gather_indexer_k_quant_cache(
    kv_cache: Array,
    dst_k: Array,
    dst_scale: Array | None,
    block_table: Array,
    cu_seq_lens: Array,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Gather the indexer's keys of whole sequences, packed, as FP8 or MXFP4 values and their scales.

    Args:
        kv_cache: uint8 [num_blocks, block_size, 132] (or [num_blocks, block_size, 1, 132]), 68 bytes a token for MXFP4;
            or a cache of keys that are not quantised, as indexer_k_quant_and_cache takes it
        dst_k: uint8 [N, 128], [N, 64] for MXFP4, or bfloat16 or float32 as in a cache of that type; written: rows
            [cu_seq_lens[r], cu_seq_lens[r + 1]) are positions 0, 1, ... of request r; rows without a request, as at the
            end of a longer array, are not written
        dst_scale: float32 [N] or [N, 1], or their bytes, uint8 [N, 4]; for MXFP4 the four scales, uint8 [N, 4]; written
            likewise. None without scales
        block_table: [>= R, B] int32
        cu_seq_lens: [R + 1] int32, ascending

    With dst_k [N, 128], keys of an MXFP4 cache become FP8: e4m3 and one float32 scale, 2^-6 of the key's largest scale,
    which fp8_mqa_logits scores fastest. The values are exact, except in tiles whose scale is less than 2^-14 of the
    largest, which are rounded.
    A position whose block is absent becomes zeros.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM cp_gather_indexer_k_quant_cache.
    """
    call = Call(backend, stream)
    pages = indexer_pages(call, kv_cache)
    if not pages.layout.num_scales:
        gather_plain_keys(call, pages, dst_k, dst_scale, block_table, cu_seq_lens)
        return
    is_mxfp4 = pages.layout == INDEXER_MXFP4
    width = pages.layout.quantized_bytes
    keys = call.borrow("dst_k", dst_k, writable=True)
    if is_mxfp4 and keys.native.shape[-1:] == (pages.layout.head_dim,):
        width, is_mxfp4 = pages.layout.head_dim, False
    dst_k = call.checked(keys, BYTES, ("N", width))
    check_given(f"for a {pages.layout.name} cache", dst_scale=dst_scale)
    argument = call.borrow("dst_scale", dst_scale, writable=True)
    as_bytes = argument.native.dtype in BYTES or is_mxfp4
    shape = ("N", INDEXER_FP8.scale_bytes) if as_bytes else ("N", 1)[: max(argument.native.ndim, 1)]
    scales = call.checked(argument, BYTES if as_bytes else FLOAT32, shape)
    block_table = call.array("block_table", block_table, INT32, (-1, -1))
    cu_seq_lens = call.array("cu_seq_lens", cu_seq_lens, INT32, (-1,))
    block_table = requests_of(block_table, cu_seq_lens)
    if len(dst_k) and len(block_table):
        with call.kernels("sparse_cache") as kernels:
            kernels.cp_gather_indexer_k_quant_cache(
                pages, dst_k, bytes_of(scales, len(scales), INDEXER_FP8.scale_bytes), block_table, cu_seq_lens
            )


def gather_plain_keys(
    call: Call, pages: Pages, dst_k: Any, dst_scale: Any | None, block_table: Any, cu_seq_lens: Any
) -> None:
    if dst_scale is not None:
        raise ValueError(f"dst_scale: got an array, expected None for a {pages.layout.name} cache")
    dtypes = tuple(dtype for dtype in FLOATS if dtype.name == pages.layout.value_type)
    dst_k = call.array("dst_k", dst_k, dtypes, ("N", pages.layout.head_dim), writable=True)
    block_table = call.array("block_table", block_table, INT32, (-1, -1))
    cu_seq_lens = call.array("cu_seq_lens", cu_seq_lens, INT32, (-1,))
    block_table = requests_of(block_table, cu_seq_lens)
    if len(dst_k) and len(block_table):
        with call.kernels("indexer") as kernels:
            kernels.gather_keys(pages, dst_k, block_table, cu_seq_lens)


def requests_of(block_table: Any, cu_seq_lens: Any) -> Any:
    """The R rows of a block table that `cu_seq_lens` [R + 1] covers. Raises ValueError for a table with fewer rows."""
    requests = len(cu_seq_lens) - 1
    if requests < 0:
        raise ValueError("cu_seq_lens: got no entries, expected one more than the number of requests")
    if len(block_table) < requests:
        raise ValueError(f"block_table: got {len(block_table)} rows, expected at least {requests}, one a request")
    return block_table if len(block_table) == requests else block_table[:requests]


def vector(argument: Argument, dtypes: tuple[np.dtype[Any], ...], entries: int) -> Any:
    """Check a 1-D array of any stride with at least `entries` entries."""
    name, native = argument.name, argument.native
    if native.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {native.dtype}, expected {' or '.join(str(dtype) for dtype in dtypes)}")
    if native.ndim != 1 or len(native) < entries:
        raise ValueError(f"{name}: got shape {tuple(native.shape)}, expected at least {entries} entries")
    return native
