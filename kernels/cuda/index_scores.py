"""Launches of sm80/index_scores.cu: scores of queries of 16 bits and fewer by tensor cores, on every device."""

from typing import Any

from ...layout import INDEXER_BF16, INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..types.segments import Pages
from .constants import constant
from .dense_attention import large_kernel
from .device import device_sms
from .indices import division
from .launch import C_NAMES, is_aligned, pointer, strides

SOURCE = "sm80/index_scores.cu"
WARPS, TILE, HEADS = (constant(SOURCE, name) for name in ("WARPS", "KEYS", "CHUNK_HEADS"))
CTAS = 3  # on an SM, at most
MANY_PARTS = 16  # work ranges of a query where there are many: long enough to hide their beginning
NO_CANDIDATES = (0, 0, *division(1))  # blocks, their stride, and positions of a block


def index_scores(
    q: Any,
    weights: Any,
    seen: tuple[Any, ...],
    keys: Pages | tuple[Any, Any],
    table: tuple[Any, ...],
    logits: Any,
    *,
    candidates: tuple[Any, ...] | None = None,
    fill: float = 0.0,
    compressed_width: int = 0,
) -> None:
    """Scores for q [B, n, H, 128], e4m3 or bfloat16.

    seen        the kernel's starts, ends, lens_stride, per_query and next_n
    keys        a paged cache; or packed keys [N, ..] and their scales, or None
    candidates  candidate blocks, their stride and the positions of a block; logits then have a column for each position
                of a block, with `fill` where the query sees none
    """
    device, query = q.data.device_id, "uint8" if q.dtype.name == "uint8" else C_NAMES[q.dtype.name]
    columns = logits.shape[1]
    blocks = NO_CANDIDATES if candidates is None else (*candidates[:2], *division(candidates[2]))
    if isinstance(keys, Pages):
        layout, count, scales = keys.layout, 0, 0
        place = (keys.bytes, keys.bytes.strides[0], keys.num_slots, *division(keys.block_size))
        aligned = is_aligned(q, keys.bytes)
    else:
        k, scale = keys
        layout, count, scales, place = layout_of_packed(k), len(k), pointer(scale), (k, k.strides[0], 0, *division(1))
        aligned = is_aligned(q, k) and scales % 4 == 0
    shared_bytes = constant(SOURCE, "SHARED_BYTES", LAYOUT=layout)
    parts = query_parts(len(weights), columns, device_sms(device))
    run = large_kernel(
        device, shared_bytes, SOURCE, "index_scores", QUERY=query, LAYOUT=layout.name,
        HEADS=HEADS if q.shape[2] == HEADS else 0, PAGED=int(isinstance(keys, Pages)),
        CANDIDATES=int(candidates is not None), ALIGNED=int(aligned),
    )  # fmt: skip
    run(
        (-(-len(weights) * parts // WARPS),),
        (32 * WARPS,),
        (
            q, *strides(q)[:3], q.shape[2], weights, strides(weights)[0], *seen, len(weights),
            *blocks, columns, fill, count, compressed_width, *table, *place, scales, logits, strides(logits)[0], parts,
        ),
        shared_mem=shared_bytes,
        overlap=True,
    )  # fmt: skip


def layout_of_packed(k: Any) -> CacheLayout:
    """The format of packed keys: bytes are e4m3, or e2m1 with half as many."""
    if k.dtype.name != "uint8":
        return INDEXER_BF16
    return INDEXER_FP8 if k.shape[1] == INDEXER_FP8.row_bytes else INDEXER_MXFP4


def query_parts(queries: int, columns: int, sms: int) -> int:
    """Work ranges of a query: one for each warp that the device holds, or several waves of them."""
    parts = sms * CTAS * WARPS // queries
    return min(-(-columns // TILE), parts if parts >= 4 else MANY_PARTS)
