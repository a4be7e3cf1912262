"""Arguments of the kernels of resident rows, in named tuples."""

from typing import Any, NamedTuple

from .segments import Pages


class Selection(NamedTuple):
    """The arguments of `cumla.resolve_resident`, and the arrays of its results."""

    topk_indices: Any
    query_start_loc: Any
    seq_lens: Any
    lanes: Any
    slot_of_row: Any
    row_of_slot: Any
    last_use: Any
    clock: Any
    compress_ratio: int
    slots: Any
    misses: Any


class Fetch(NamedTuple):
    """The arguments of `cumla.fetch_resident`.

    Attributes:
        source, target: pages of the same format
    """

    misses: Any
    slots: Any
    query_start_loc: Any
    block_table: Any
    source: Pages
    target: Pages

    @property
    def tail_bytes(self) -> int:
        """Bytes of a row at the end of its page."""
        layout = self.source.layout
        return layout.token_bytes - layout.row_bytes
