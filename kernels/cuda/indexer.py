"""The indexer: queries, keys without scales, and scores."""

from collections.abc import Callable, Sequence
from typing import Any

from ...layout import INDEXER_F32, INDEXER_FP8, INDEXER_MXFP4
from ..types.indexer import IndexQueries, PackedScores, PagedScores
from ..types.segments import Pages
from .compile import kernel
from .constants import constant
from .dense_attention import large_kernel
from .device import device_sms, is_hopper
from .index_scores import index_scores
from .indices import table_arguments
from .launch import C_NAMES, MAX_BLOCKS, is_aligned, pointer, strides
from .tma import NO_MAP, Words, box_rows, map_of_pages

DIM = INDEXER_FP8.head_dim
MAX_GRID_Y = 65_535
VALUES = {"uint8": "uint8", "bfloat16": "bf16", "float32": "float"}
NO_TABLE = (0, 0, 0, 0)
NO_PAGES = (0, 0, 0, 1)
LANES_PER_HEAD = 16  # in common/indexer_queries.cu; a lane has eight values
QUERY_THREADS = constant("common/indexer_queries.cu", "THREADS")
KEY_THREADS = constant("common/indexer_keys.cu", "THREADS")


def fused_indexer_q_rope_quant(queries: IndexQueries) -> None:
    positions, index_q, table, index_weights, scale, rope_first, is_neox, least, q_format, *_, q_out, weights = queries
    tokens, heads = weights.shape
    rotation = (0, 0, 0) if table is None else (table, strides(table)[0], len(table))
    factors = queries.ssmax or (0, 0)
    kernel(
        "common/indexer_queries.cu",
        "fused_indexer_q_rope_quant",
        INPUT=C_NAMES[index_q.dtype.name],
        WEIGHT=C_NAMES[index_weights.dtype.name],
        TABLE="float" if table is None else C_NAMES[table.dtype.name],
        SSMAX=int(queries.ssmax is not None),
        HADAMARD=int(queries.hadamard),
        POSITION=C_NAMES[positions.dtype.name],
        OUTPUT=VALUES[q_out.dtype.name],
        Q_FORMAT=q_format.upper(),
        ALIGNED=int(is_aligned(index_q) if q_format == "mxfp4_rows" else is_aligned(index_q, q_out)),
    )(
        (-(-tokens * heads * LANES_PER_HEAD // QUERY_THREADS),),
        (QUERY_THREADS,),
        (
            positions, index_q, *strides(index_q)[:2], *rotation, *factors, index_weights,
            strides(index_weights)[0], scale, rope_first, is_neox, least, tokens, heads, q_out, *strides(q_out)[:2],
            weights, strides(weights)[0],
        ),
        overlap=True,
    )  # fmt: skip


# ---- keys without scales


def insert_keys(k: Any, pages: Pages, slot_mapping: Any) -> None:
    value = VALUES[pages.layout.value_type]
    kernel(
        "common/indexer_keys.cu", "insert_keys", INPUT=C_NAMES[k.dtype.name], VALUE=value,
        SLOT=C_NAMES[slot_mapping.dtype.name], LAYOUT=pages.layout.name,
    )(
        (-(-len(slot_mapping) * 32 // KEY_THREADS),),
        (KEY_THREADS,),
        (
            k, strides(k)[0], slot_mapping, len(slot_mapping), pages.bytes, pages.bytes.strides[0], pages.num_slots,
            pages.block_size,
        ),
        overlap=True,
    )  # fmt: skip


def gather_keys(pages: Pages, dst_k: Any, block_table: Any, cu_seq_lens: Any) -> None:
    value = VALUES[pages.layout.value_type]
    kernel(
        "common/indexer_keys.cu", "gather_keys", INPUT=value, VALUE=value, SLOT="int64", LAYOUT=pages.layout.name
    )(
        (min(-(-len(dst_k) * 32 // KEY_THREADS), MAX_BLOCKS),),
        (KEY_THREADS,),
        (
            pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size, dst_k, strides(dst_k)[0],
            len(dst_k), block_table, strides(block_table)[0], block_table.shape[1], cu_seq_lens, len(block_table),
        ),
        overlap=True,
    )  # fmt: skip


# ---- scores


def mqa_logits(args: PackedScores) -> None:
    q, k, scales, weights, starts, ends, compressed, clean, logits = args
    room = logits.shape[1] if compressed else 0
    seen = (starts, ends, 0, False, len(q))
    if clean:
        clean_logits(seen, len(k), room, logits, paged=False)
    if not len(k):
        return
    maps, heads = None, q.shape[1]
    of_product = min(PACKED_COLUMNS // max(heads, 1), MOST_OF_PRODUCT)
    size = HopperSize(max(heads, 1), of_product, query_groups=2 if len(q) < MANY_QUERIES else 4)
    if kernel_for_packed(args, q.data.device_id) == "hopper" and k.strides[0] == DIM:
        maps = query_map(q), map_of_pages(k.data.ptr, 1, len(k) * DIM, len(k), DIM, size.keys)
    if maps is not None and NO_MAP not in maps:
        score_on_hopper(size, False, q, weights, seen, maps, (scales, len(k), room), NO_TABLE, (0, 0, 0, 1, 1), logits)
        return
    score(q[None], weights, seen, (k, scales), NO_TABLE, room, logits)


def paged_mqa_logits(args: PagedScores) -> None:
    if args.clean:
        clean_logits(lengths_of(args), args.logits.shape[1], 0, args.logits, paged=True)
    scores_of_pages(args)


def lengths_of(args: PagedScores) -> tuple[Any, ...]:
    lens = args.context_lens
    return lens, 0, strides(lens)[0], lens.ndim == 2, args.q.shape[1]


def scores_of_pages(args: PagedScores, maxima: Any | None = None) -> bool:
    """Write scores. Returns whether the kernel has also written each eight logits' maximum to `maxima`, if given."""
    q, pages, weights, _, block_table, _, logits = args
    next_n, width, seen = q.shape[1], logits.shape[1], lengths_of(args)
    table, inputs = table_arguments(block_table), pages_for_hopper(q, pages, BOX_ROWS)
    if inputs is None:
        score(q, weights, seen, pages, table, 0, logits)
        return False
    size = queries_at_once(q.shape[2], next_n, pages.layout is INDEXER_MXFP4)
    queries, maps, place = inputs
    score_on_hopper(size, True, queries, weights, seen, maps, (0, width, 0), table, place, logits, maxima)
    return maxima is not None


def candidates_on_hopper(
    q: Any, weights: Any, seen: tuple[Any, ...], pages: Pages, table: tuple[Any, ...], logits: Any,
    candidates: tuple[Any, ...], fill: float, batch_invariant: bool = False,
) -> bool:  # fmt: skip
    """Score candidate blocks by Hopper's kernel if it can; returns whether it did. Arguments as in index_scores."""
    fits = candidates_fit_hopper(len(weights), pages, candidates[2], batch_invariant)
    inputs = pages_for_hopper(q, pages, CANDIDATE_ROWS) if fits else None
    if inputs is None:
        return False
    size = HopperSize(q.shape[2], 1, mxfp4=pages.layout is INDEXER_MXFP4, candidates=True)
    queries, maps, place = inputs
    score_on_hopper(
        size, True, queries, weights, seen, maps, (0, logits.shape[1], 0), table, place, logits,
        candidates=(*candidates[:2], fill),
    )  # fmt: skip
    return True


def score(
    q: Any,
    weights: Any,
    seen: tuple[Any, ...],
    keys: Pages | tuple[Any, Any],
    table: tuple[Any, ...],
    room: int,
    logits: Any,
) -> None:
    """Scores by the portable kernels: q [B, n, H, 128]; keys in pages, or packed keys and their scales."""
    if q.dtype.name != "float32":
        index_scores(q, weights, seen, keys, table, logits, compressed_width=room)
        return
    width, num_queries = logits.shape[1], len(weights)
    paged = isinstance(keys, Pages)
    if isinstance(keys, Pages):
        layout, packed = keys.layout, (0, 0, 0, width, 0)
        place = (keys.bytes, keys.bytes.strides[0], keys.num_slots, keys.block_size)
    else:
        k, scales = keys
        layout = INDEXER_F32 if scales is None else INDEXER_MXFP4
        packed, place = (k, k.strides[0], pointer(scales), len(k), room), NO_PAGES
    kernel("common/indexer_logits.cu", "indexer_logits", PAGED=int(paged), LAYOUT=layout.name)(
        (min(-(-width // 32), MAX_BLOCKS), min(num_queries, MAX_GRID_Y)),
        (128,),
        (
            q, *strides(q)[:3], q.shape[2], weights, strides(weights)[0], *seen, num_queries, *packed, *table, *place,
            logits, strides(logits)[0],
        ),
        overlap=True,
    )  # fmt: skip


def clean_logits(seen: tuple[Any, ...], keys: int, room: int, logits: Any, paged: bool) -> None:
    """Write -inf for keys that a query does not see."""
    kernel("common/indexer_logits.cu", "clean_logits", PAGED=int(paged), LAYOUT="INDEXER_F32")(
        (min(-(-logits.shape[1] // 512), MAX_BLOCKS), min(len(logits), MAX_GRID_Y)),
        (128,),
        (*seen, len(logits), keys, room, logits, strides(logits)[0]),
        overlap=True,
    )


# ---- scores on Hopper

HEADS = (16, 32, 64)  # heads of a query that the kernel supports; for MXFP4 keys not 16
MOST_OF_PRODUCT = 4  # queries of a product: the lanes that share a key's sums
PACKED_COLUMNS = 128  # columns of a product with packed keys: heads of several queries
MANY_QUERIES = 64  # from this number of queries on, groups of eight leave little idle
BOX_ROWS = 64  # most rows of a page in one copy
NO_CANDIDATES = (0, 0, 0.0)
CANDIDATE_ROWS = 8  # rows of the candidate blocks that the kernel supports
FEW_CANDIDATE_QUERIES = 31  # most queries for e4m3 keys: with more, index_scores is nearer the memory bandwidth
HOPPER_THREADS = constant("sm90/indexer/work.cuh", "THREADS")


def kernel_for_packed(args: PackedScores, device: int) -> str:
    """The kernel of mqa_logits for aligned arrays: "hopper" or "portable"."""
    fits = args.scales is not None and args.k.shape[1] == DIM and args.q.shape[1] in HEADS
    return "hopper" if fits and is_hopper(device) else "portable"


def kernel_for_pages(q: Any, pages: Pages, rows: int, device: int) -> str:
    """The kernel that scores aligned paged keys by boxes of at most `rows` rows: "hopper" or "portable"."""
    heads = {INDEXER_FP8: HEADS, INDEXER_MXFP4: HEADS[1:]}.get(pages.layout, ())
    fits = q.dtype.name == "uint8" and q.shape[2] in heads
    return "hopper" if fits and is_hopper(device) and box_rows(rows, pages.block_size) else "portable"


KERNEL_FOR: dict[str, Callable[..., str]] = {
    "mqa_logits": kernel_for_packed,
    "paged_mqa_logits": lambda args, device: kernel_for_pages(args.q, args.pages, BOX_ROWS, device),
}


def candidates_fit_hopper(queries: int, pages: Pages, block: int, batch_invariant: bool = False) -> bool:
    """Whether Hopper's kernel scores candidate blocks of `block` rows for `queries` queries, if the pages allow it.

    Args:
        batch_invariant: whether the answer must not depend on the number of queries
    """
    few = not batch_invariant and queries <= FEW_CANDIDATE_QUERIES
    return block == CANDIDATE_ROWS and (pages.layout is INDEXER_MXFP4 or few)


def pages_for_hopper(q: Any, pages: Pages, rows: int) -> tuple[Any, list[Words], tuple[Any, ...]] | None:
    """Queries, tensor maps and pages for boxes that divide `rows` rows; None if another kernel has to score them."""
    layout, next_n, heads = pages.layout, q.shape[1], q.shape[2]
    page_bytes, at = pages.bytes.strides[0], pages.bytes.data.ptr
    in_rows = next_n == 1 or q.strides[0] == next_n * q.strides[1]  # q[:, None] has a stride of 0 there
    aligned = page_bytes % 16 == 0 and at % 16 == 0
    if not (in_rows and aligned and kernel_for_pages(q, pages, rows, q.data.device_id) == "hopper"):
        return None
    queries, rows = q.reshape(-1, heads, DIM), box_rows(rows, pages.block_size)
    maps = [query_map(queries)] * 2
    if layout is INDEXER_FP8:
        maps[1] = map_of_pages(at, len(pages.bytes), page_bytes, pages.block_size, layout.row_bytes, rows)
    place = (pages.bytes, page_bytes, pages.num_slots, pages.block_size, rows)
    return None if NO_MAP in maps else (queries, maps, place)


class HopperSize:
    """Sizes of sm90/indexer/logits.cu: queries in a product, products of MXFP4 keys, groups of queries, candidates."""

    def __init__(
        self,
        heads: int,
        of_product: int,
        products: int = 1,
        query_groups: int = 1,
        mxfp4: bool = False,
        candidates: bool = False,
    ) -> None:
        self.macros = {
            "HEADS": heads, "PASS": of_product, "PASSES": products, "QUERY_GROUPS": query_groups, "MXFP4": int(mxfp4),
            "CANDIDATES": int(candidates),
        }  # fmt: skip
        self.keys, self.shared_bytes = (
            constant("sm90/indexer/work.cuh", name, **self.macros) for name in ("KEYS", "SHARED_BYTES")
        )


def queries_at_once(heads: int, next_n: int, mxfp4: bool) -> HopperSize:
    """Sizes for a request's queries; up to 6 queries (4 of 64 e4m3 heads) read the request's keys once."""
    if mxfp4:
        of_product = min(next_n, 64 // heads)
        return HopperSize(heads, of_product, min(-(-next_n // of_product), 6 // of_product), mxfp4=True)
    if heads == 64:
        return HopperSize(heads, min(next_n, 2), query_groups=1 if next_n <= 2 else 2)
    if next_n <= 4:
        return HopperSize(heads, (next_n, 4)[next_n > 2])
    return HopperSize(heads, 3 if heads == 32 and next_n <= 6 else 4, query_groups=2)


def query_map(q: Any) -> Words:
    """The tensor map of queries [n, H, 128], or NO_MAP if heads are not contiguous."""
    heads = q.shape[1]
    if q.strides[1] != DIM or not len(q):
        return NO_MAP
    stride = q.strides[0] if len(q) > 1 else heads * DIM
    return map_of_pages(q.data.ptr, len(q), stride, heads, DIM, heads)


def score_on_hopper(
    size: HopperSize,
    paged: bool,
    q: Any,
    weights: Any,
    seen: tuple[Any, ...],
    maps: Sequence[Words],
    keys: tuple[Any, ...],
    table: tuple[Any, ...],
    place: tuple[Any, ...],
    logits: Any,
    maxima: Any | None = None,
    candidates: tuple[Any, ...] | None = None,
) -> None:
    """candidates: candidate blocks, their stride and the logit of positions that the query does not see."""
    device = q.data.device_id
    largest = (0, 0, 0) if maxima is None else (maxima, strides(maxima)[0], maxima.shape[1])
    run = large_kernel(
        device, size.shared_bytes, "sm90/indexer/logits.cu", "indexer_logits_sm90", "sm_90a", PAGED=int(paged),
        MAXIMA=int(maxima is not None), **size.macros,
    )  # fmt: skip
    run(
        (device_sms(device),),
        (HOPPER_THREADS,),
        (
            weights, strides(weights)[0], *seen, *maps[0], *maps[1], *keys, *table, *place,
            logits, strides(logits)[0], q, q.strides[0], *largest, *(candidates or NO_CANDIDATES),
        ),
        shared_mem=size.shared_bytes,
        overlap=True,
    )  # fmt: skip


def paged_mqa_logits_metadata(lens: Any, split: int, schedule: Any) -> None:
    kernel("common/indexer_metadata.cu", "paged_mqa_logits_metadata")(
        (1,),
        (1024,),
        (lens, strides(lens)[0], len(lens), split, schedule, len(schedule) - 1),
        overlap=True,
    )
