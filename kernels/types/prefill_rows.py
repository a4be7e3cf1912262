"""Arguments of the preparation of a prefill over gathered rows."""

from typing import NamedTuple

from .indices import CombinedIndices
from .segments import GatheredRows


class PrefillRows(NamedTuple):
    """The arguments of `gather_prefill_rows`: two gathers into one workspace, and the lists of its rows.

    windows     rows of the window's cache
    compressed  of the compressed cache, or None
    lists       of the workspace's rows that each token attends to
    """

    windows: GatheredRows
    compressed: GatheredRows | None
    lists: CombinedIndices
