"""Arguments of the preparation of a prefill over gathered rows."""

from typing import NamedTuple

from .indices import CombinedIndices
from .segments import GatheredRows


class PrefillRows(NamedTuple):
    """The arguments of `gather_prefill_rows`: two gathers into one workspace, and the lists of its rows.

    Attributes:
        windows: gather of rows from the window's cache
        compressed: gather of rows from the compressed cache, or None
        lists: each token's list of rows of the workspace
    """

    windows: GatheredRows
    compressed: GatheredRows | None
    lists: CombinedIndices
