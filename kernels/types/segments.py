"""Inputs of attention: lists of token indices into paged caches, and packed sequences."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...layout import DSV4_BF16, MLA_BF16, CacheLayout
from .plan import DecodePlan, DenseDecodePlan

V_DIM = 512  # values of a result: a latent row's values, without RoPE unless they include it
ROW_LAYOUTS = {512: DSV4_BF16, 576: MLA_BF16}  # layouts of gathered rows, by their width


class Pages(NamedTuple):
    """A paged cache as raw bytes.

    Attributes:
        bytes: uint8 [num_blocks, block_size * token_bytes]; the first stride is the page stride
        block_size: tokens of a page
        layout: offsets of a token's bytes in a page
    """

    bytes: Any
    block_size: int
    layout: CacheLayout

    @property
    def num_slots(self) -> int:
        return int(self.bytes.shape[0]) * self.block_size


class HeadFactors(NamedTuple):
    """SSMax: a token's head is multiplied by scale * ln(position + 1) + bias; a negative position counts as 0.

    Attributes:
        scale, bias: float32 [h]
    """

    scale: Any
    bias: Any


class RopeKind(NamedTuple):
    """Which values of a row RoPE rotates.

    Attributes:
        first: the first values, else the last ones
        halves: the two values of a pair are half of the rotated values apart, else they are neighbours
    """

    first: bool = False
    halves: bool = False


class Insertion(NamedTuple):
    """Where T tokens' rows are inserted after RoPE.

    Attributes:
        pages: the cache
        slots: int32 or int64 [N], N <= T: slot of each row; out of range skips its row
        positions: int32 or int64 [T], clamped to the table
        cos_sin: float32 [max_position, rope_dim]: cosines, then sines; None: no RoPE (only index keys)
        eps: epsilon of the norm before RoPE
        round_rows: whether rows are rounded to bfloat16 before they are quantised
    """

    pages: Pages
    slots: Any
    positions: Any
    cos_sin: Any
    eps: float
    round_rows: bool = True


class Segment(NamedTuple):
    """The tokens of one cache that each query attends to.

    Attributes:
        pages: the cache
        indices: int32 [b, s_q, topk]: slots (page * block_size + row); out of range counts as absent
        lengths: int32 [b, s_q] (a stride may be 0): entries of `indices` in use, or None for all
    """

    pages: Pages
    indices: Any
    lengths: Any | None


class SparseDecode(NamedTuple):
    """The arguments of `cumla.sparse_mla_decode`, and the arrays of its results."""

    q: Any
    segments: Sequence[Segment]
    attn_sink: Any
    softmax_scale: float
    out: Any
    lse: Any
    plan: DecodePlan | None = None
    batch_invariant: bool = False


class SparsePrefill(NamedTuple):
    """The arguments of `cumla.sparse_mla_prefill`, and the arrays of its results.

    Attributes:
        kv: [s_kv, d] of q's dtype, or Pages of quantised rows
        fp8: whether kernels may multiply e4m3 values
        workspace: uint8 on the device: fp8_workspace_bytes(s_kv) for kernels that multiply e4m3 values, s_kv rows in
            bfloat16 if kv is Pages; None: neither
    """

    q: Any
    kv: Any
    indices: Any
    topk_length: Any
    attn_sink: Any
    softmax_scale: float
    out: Any
    max_logits: Any
    lse: Any
    fp8: bool = False
    workspace: Any | None = None

    @property
    def num_rows(self) -> int:
        return self.kv.num_slots if isinstance(self.kv, Pages) else len(self.kv)

    def pages(self, row_bytes: Any) -> Pages:
        """`kv` as pages; bfloat16 rows, whose bytes are `row_bytes` [s_kv, 2 d], are pages of a single token."""
        return self.kv if isinstance(self.kv, Pages) else Pages(row_bytes, 1, ROW_LAYOUTS[self.kv.shape[1]])


def fp8_workspace_bytes(rows: int) -> int:
    """Bytes of `rows` rows of 512 e4m3 values with a four-byte scale each."""
    return rows * (V_DIM + 4)


class GatheredRows(NamedTuple):
    """The arguments of `cumla.dequantize_and_gather_k_cache`; gather_lens may be None."""

    out: Any
    pages: Pages
    seq_lens: Any
    gather_lens: Any
    block_table: Any
    offset: int
    compress_ratio: int


class PackedAttention(NamedTuple):
    """The arguments of `cumla.mha_varlen`, and the arrays of its results."""

    q: Any
    k: Any
    k_pe: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    softmax_scale: float
    causal: bool
    accumulate: bool
    out: Any
    lse: Any


class DenseDecode(NamedTuple):
    """The arguments of `cumla.dense_mla_decode`, and the arrays of its results.

    Attributes:
        scale: scale of e4m3 rows: a number or float32 [1]; None: the rows are 16-bit
        max_seqlen: upper bound of cache_seqlens
        batch_invariant: whether a token's result must not depend on the other tokens of the call
    """

    q: Any
    pages: Pages
    block_table: Any
    cache_seqlens: Any
    scale: Any
    softmax_scale: float
    causal: bool
    max_seqlen: int
    plan: DenseDecodePlan | None
    out: Any
    lse: Any
    batch_invariant: bool = False


def packed_rows(cu_seqlens: np.ndarray, num_rows: int) -> list[slice]:
    """The rows of each packed sequence, clamped to the array."""
    starts = np.clip(cu_seqlens.astype(np.int64), 0, num_rows).tolist()
    return [slice(first, max(first, end)) for first, end in itertools.pairwise(starts)]
