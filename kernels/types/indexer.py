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
