"""Launches sm80/index_scores.cu and prompt_scores.cu: scores of queries with 16 bits or fewer, on every device."""

from typing import Any

from ...layout import INDEXER_BF16, INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..types.segments import Pages
from .constants import constant
from .dense_attention import large_kernel
from .device import device_sms
from .indices import division
from .launch import C_NAMES, is_aligned, pointer, strides

SOURCE = "sm80/index_scores.cu"
WARPS, TILE = (constant(SOURCE, name) for name in ("WARPS", "KEYS"))
REGISTER_HEADS = {32: 3, 64: 2}  # heads whose operands stay in registers: CTAs per SM
CTAS = 3  # CTAs per SM for other numbers of heads
PROMPTS = "sm80/prompt_scores.cu"  # e4m3 keys that neighbouring queries of PROMPT_HEADS heads share
PROMPT_HEADS, LEAST_PROMPT = 64, 16
GROUP, PROMPT_TILE, PROMPT_THREADS, PROMPT_BYTES = (
    constant(PROMPTS, name, HEADS=PROMPT_HEADS) for name in ("QUERIES", "KEYS", "THREADS", "SHARED_BYTES")
)
PROMPT_WAVES = 4  # least number of waves of CTAs
MOST_BY_LENGTHS = 1024  # most queries for which each warp reads all lengths
MANY_PARTS = 16  # most work ranges of a query: each is then long enough to hide its start
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

    Args:
        seen: the kernel's starts, ends, lens_stride, per_query and next_n
        keys: a paged cache; or packed keys [N, ..] and their scales, or None
        candidates: candidate blocks, their stride and the positions of a block; logits then have a column for each
            position of a block, and `fill` at positions that the query does not see
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
    heads = q.shape[2]
    if (
        layout is INDEXER_FP8
        and not isinstance(keys, Pages)
        and aligned
        and heads == PROMPT_HEADS
        and len(weights) >= LEAST_PROMPT
    ):
        prompt_scores(q, weights, seen, keys, logits, compressed_width)
        return
    shared_bytes = constant(SOURCE, "SHARED_BYTES", LAYOUT=layout)
    ctas = device_sms(device) * REGISTER_HEADS.get(heads, CTAS)
    parts = query_parts(len(weights), columns, ctas)
    run = large_kernel(
        device, shared_bytes, SOURCE, "index_scores", QUERY=query, LAYOUT=layout.name,
        HEADS=heads if heads in REGISTER_HEADS else 0, PAGED=int(isinstance(keys, Pages)),
        CANDIDATES=int(candidates is not None), ALIGNED=int(aligned),
    )  # fmt: skip
    run(
        (-(-len(weights) * parts // WARPS) if parts else ctas,),
        (32 * WARPS,),
        (
            q, *strides(q)[:3], heads, weights, strides(weights)[0], *seen, len(weights),
            *blocks, columns, fill, count, compressed_width, *table, *place, scales, logits, strides(logits)[0], parts,
        ),
        shared_mem=shared_bytes,
        overlap=True,
    )  # fmt: skip


def prompt_scores(
    q: Any, weights: Any, seen: tuple[Any, ...], keys: tuple[Any, Any], logits: Any, compressed_width: int
) -> None:
    """Scores of e4m3 queries [1, n, 64, 128] over packed keys; arguments of index_scores."""
    device, (k, scales), queries = q.data.device_id, keys, len(weights)
    groups, tiles = -(-queries // GROUP), -(-logits.shape[1] // PROMPT_TILE)
    parts = max(1, min(-(-PROMPT_WAVES * device_sms(device) // groups), tiles))
    run = large_kernel(
        device, PROMPT_BYTES, PROMPTS, "prompt_scores", QUERY="uint8", LAYOUT=INDEXER_FP8.name, HEADS=PROMPT_HEADS,
        ALIGNED=1,
    )  # fmt: skip
    run(
        (groups * parts,),
        (PROMPT_THREADS,),
        (
            q, *strides(q)[1:3], weights, strides(weights)[0], *seen[:2], queries, len(k), compressed_width, k,
            k.strides[0], scales, logits, strides(logits)[0], parts,
        ),
        shared_mem=PROMPT_BYTES,
        overlap=True,
    )  # fmt: skip


def layout_of_packed(k: Any) -> CacheLayout:
    """The format of packed keys of one-byte elements: 128 e4m3 bytes, or 64 bytes of e2m1 pairs."""
    if k.dtype.name != "uint8":
        return INDEXER_BF16
    return INDEXER_FP8 if k.shape[1] == INDEXER_FP8.row_bytes else INDEXER_MXFP4


def query_parts(queries: int, columns: int, ctas: int) -> int:
    """Work ranges of a query: several waves of warps for many queries; 0: a range for each warp, by lengths."""
    if queries <= min(MOST_BY_LENGTHS, ctas * WARPS // 4):
        return 0
    return min(-(-columns // TILE), MANY_PARTS)
