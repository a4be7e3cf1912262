"""The parameters of the sparse attention kernels by name: SparseProblem of csrc/common/sparse/work.cuh.

Members stand in the order of the struct's, which a test compares.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class List(NamedTuple):
    """The keys of one cache; addresses, strides in elements, counts. NO_LIST: none."""

    pages: int
    page_stride: int
    indices: int
    indices_stride_b: int
    indices_stride_s: int
    lengths: int
    lengths_stride_b: int
    lengths_stride_s: int
    num_slots: int
    block_size: int
    block_shift: int
    topk: int


NO_LIST = List(
    pages=0, page_stride=0, indices=0, indices_stride_b=0, indices_stride_s=0, lengths=0, lengths_stride_b=0,
    lengths_stride_s=0, num_slots=0, block_size=1, block_shift=0, topk=0,
)  # fmt: skip


class SparseProblem(NamedTuple):
    """One call: addresses, strides in elements, counts, and where shares of the work begin."""

    q: int
    q_stride_b: int
    q_stride_s: int
    q_stride_h: int
    lists: tuple[List, List]
    attn_sink: int
    out: int
    out_stride_b: int
    out_stride_s: int
    out_stride_h: int
    lse: int
    lse_stride_b: int
    lse_stride_h: int
    lse_stride_s: int
    max_logits: int
    max_stride_b: int
    max_stride_h: int
    starts: int
    partial_out: int
    partial_lse: int
    unsafe: int
    batch: int
    s_q: int
    heads: int
    groups: int
    shares: int
    cut_tiles: int
    cut_shares: int
    cut_length: int
    cut_rest: int
    cut_units: int
    cut_inverse: int
    softmax_scale: float

    def numbers(self) -> tuple[Any, ...]:
        """One after another, as a launch takes them."""
        at = self._fields.index("lists")
        first, second = self.lists
        return (*self[:at], *first, *second, *self[at + 1 :])
