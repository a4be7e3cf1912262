"""What the indexer's kernels take beside arrays."""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Columns of each row of logits that there are to choose from.

    starts, ends  [M] int32, or None: from the first on, up to the last. Indices count from `starts`
    lens          int32 [M / next_n], of which row j of next_n has lens - next_n + 1 + j; or [M / next_n, next_n],
                  or None: by starts and ends
    num_keys      None, or of compressed rows, whose first column is that of `starts`: how many columns there would be
    """

    starts: Any = None
    ends: Any = None
    lens: Any = None
    next_n: int = 1
    num_keys: int | None = None


class Slots(NamedTuple):
    """What a choice writes beside the columns: where in a paged cache the rows of these numbers are.

    indices      [M, topk] int32, written: slots in the columns' order, without those of absent rows, then -1; as the
                 compact form of compute_global_topk_indices_and_lens maps the columns
    lens         [M] int32, written: how many slots; 0 where is_valid is False
    block_table  [M / next_n, C] int32, row b of which is for the rows of logits from b * next_n on
    block_size   rows of a page
    is_valid     [M] bool, or None: all are
    """

    indices: Any
    lens: Any
    block_table: Any
    block_size: int
    is_valid: Any = None
