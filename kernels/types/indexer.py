"""Arguments of the indexer's kernels, in named tuples."""

from typing import Any, Literal, NamedTuple

from .segments import HeadFactors, Pages

QueryFormat = Literal["fp8", "mxfp4", "mxfp4_rows"]


class Rows(NamedTuple):
    """The valid columns of each row of logits.

    Attributes:
        starts, ends: [M] int32, or None: first column, and the one after the last. Indices count from `starts`
        lens: int32 [M / next_n], for which row j of next_n has lens - next_n + 1 + j; or [M / next_n, next_n]; or None:
            starts and ends are used
        num_keys: None, or for compressed rows, whose first column is at `starts`: columns without compression
    """

    starts: Any = None
    ends: Any = None
    lens: Any = None
    next_n: int = 1
    num_keys: int | None = None


class IndexQueries(NamedTuple):
    """The arguments of `cumla.fused_indexer_q_rope_quant`, and the arrays of its results.

    Attributes:
        table: cosines, then sines; or None: queries are not rotated
        scale: factor of the weights
        least_exponent: smallest exponent of a query's scale
        q_format: format of quantised queries
        ssmax: factors of the heads, by position; None: 1
        hadamard: whether queries are rotated as the keys in the cache
    """

    positions: Any
    index_q: Any
    table: Any
    index_weights: Any
    scale: float
    rope_first: bool
    is_neox: bool
    least_exponent: int
    q_format: QueryFormat
    ssmax: HeadFactors | None
    hadamard: bool
    q_out: Any
    weights: Any


class PackedScores(NamedTuple):
    """The arguments of `cumla.fp8_mqa_logits`, and the array of its results.

    Attributes:
        scales: scales of e4m3 keys, else None
        compressed: column j of query m is key starts[m] + j
        clean: write -inf for keys that a query does not see
    """

    q: Any
    k: Any
    scales: Any
    weights: Any
    starts: Any
    ends: Any
    compressed: bool
    clean: bool
    logits: Any


class PagedScores(NamedTuple):
    """The arguments of `cumla.fp8_paged_mqa_logits`, and the array of its result; clean as in PackedScores."""

    q: Any
    pages: Pages
    weights: Any
    context_lens: Any
    block_table: Any
    clean: bool
    logits: Any


class CandidateScores(NamedTuple):
    """The arguments of `cumla.candidate_logits`, and the array of its result.

    Attributes:
        block: positions of a candidate block
        fill: logit of columns without a position that the query sees
        batch_invariant: whether one kernel must compute the logits of any number of queries
    """

    q: Any
    pages: Pages
    weights: Any
    candidates: Any
    context_lens: Any
    block_table: Any
    block: int
    fill: float
    logits: Any
    batch_invariant: bool = False


class Slots(NamedTuple):
    """Outputs of top-k in addition to the columns: slots of the selected rows in a paged cache.

    Attributes:
        indices: [M, topk] int32, written: slots in the columns' order, without absent rows, then -1; as the compact
            form of compute_global_topk_indices_and_lens maps the columns
        lens: [M] int32, written: number of slots; 0 where is_valid is False
        block_table: [M / next_n, C] int32, row b is for the rows of logits from b * next_n on
        block_size: rows of a page
        is_valid: [M] bool, or None: all are
        pool: rows of a column: `indices` has their slots, then those of the open pool, [M, topk * pool + pool - 1];
            block_size is a multiple of it
        positions: [M] int32, of each query, where pool is not 1
    """

    indices: Any
    lens: Any
    block_table: Any
    block_size: int
    is_valid: Any = None
    pool: int = 1
    positions: Any = None
