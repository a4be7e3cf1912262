"""Insert rows into the paged caches, and gather them back."""

from __future__ import annotations

from typing import Any

from .call import FLOATS, INT32, SLOTS, Call, check_integers
from .layout import DSV4_FP8, CacheLayout


def quantize_and_insert_k_cache(
    k: Any,
    k_cache: Any,
    slot_mapping: Any,
    block_size: int = 64,
    is_ue8m0: bool = True,
    *,
    layout: CacheLayout = DSV4_FP8,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Quantise rows to FP8 and write each into its slot of a paged cache.

    k             [T, head_dim] bfloat16, float16 or float32; RoPE applied already
    k_cache       uint8 [num_blocks, block_size, token_bytes] or raw pages [num_blocks, page_bytes], written
    slot_mapping  [N] int64 or int32, N <= T: slot = block * block_size + row. A slot outside the cache
                  (-1 above all) skips its row; rows of `k` beyond N are not looked at
    block_size    tokens of a page
    is_ue8m0      scales are powers of two; False, for float32 scales only, takes amax / 448 as it is
    layout        DSV4_FP8, V32_FP8 or INDEXER_FP8

    A tile's scale comes from its finite values: an infinity saturates and a NaN is stored as NaN, and
    neither changes another byte. Bytes of other slots and padding keep what they hold.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM quantize_and_insert_k_cache (DeepSeek V4), concat_and_cache_mla fp8_ds_mla (V3.2) and
    indexer_k_quant_and_cache.
    """
    check_integers(1, block_size=block_size)
    if not layout.quantized_dim:
        raise ValueError(f"layout: got {layout.name}, expected one with FP8 values")
    if layout.scale_type == "ue8m0" and not is_ue8m0:
        raise ValueError(f"is_ue8m0: got False, but {layout.name} stores scales as powers of two")
    call = Call(backend, stream)
    k = call.array("k", k, FLOATS, ("T", layout.head_dim))
    pages = call.pages("k_cache", k_cache, layout, block_size, writable=True)
    slots = call.array("slot_mapping", slot_mapping, SLOTS, ("N",))
    if len(slots) > len(k):
        raise ValueError(f"slot_mapping: got {len(slots)} slots, expected at most {len(k)}, the rows of k")
    if len(slots):
        with call.kernels("cache") as kernels:
            kernels.quantize_and_insert_k_cache(k, pages, slots, bool(is_ue8m0))


def dequantize_and_gather_k_cache(
    out: Any,
    k_cache: Any,
    seq_lens: Any,
    gather_lens: Any | None,
    block_table: Any,
    block_size: int,
    offset: int,
    *,
    layout: CacheLayout = DSV4_FP8,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Dequantise the last rows of each request into a dense workspace.

    out          [R, max_tokens, head_dim] bfloat16, float16 or float32, written:
                 out[r, offset + i] = row of position seq_lens[r] - gather_lens[r] + i
    k_cache      uint8 [num_blocks, block_size, token_bytes] or raw pages [num_blocks, page_bytes]
    seq_lens     [R] int32, tokens of each request in the cache
    gather_lens  [R] int32, how many of the last positions to gather, or None for all of them
    block_table  [R, B] int32, page of each block_size positions
    block_size   tokens of a page
    offset       first row of `out` that is written

    A value is e4m3 times scale in float32, rounded once to out's type. Lengths are clamped to what exists
    and to the rows of `out`; a position whose block is absent gives zeros; other rows keep what they hold.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM dequantize_and_gather_k_cache.
    """
    check_integers(1, block_size=block_size)
    check_integers(0, offset=offset)
    call = Call(backend, stream)
    out = call.array("out", out, FLOATS, ("R", -1, layout.head_dim), writable=True)
    pages = call.pages("k_cache", k_cache, layout, block_size)
    seq_lens = call.array("seq_lens", seq_lens, INT32, ("R",))
    gather_lens = call.optional("gather_lens", gather_lens, INT32, ("R",))
    block_table = call.array("block_table", block_table, INT32, ("R", -1))
    if offset > out.shape[1]:
        raise ValueError(f"offset: got {offset}, expected at most {out.shape[1]}, the rows of out")
    if out.size:
        with call.kernels("cache") as kernels:
            kernels.dequantize_and_gather_k_cache(out, pages, seq_lens, gather_lens, block_table, offset)
