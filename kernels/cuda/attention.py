"""Sparse MLA decode and prefill, and merging of partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...layout import DSV4_BF16, MLA_BF16
from ..segments import Pages, Segment
from .compile import kernel
from .launch import C_NAMES, int32, is_aligned, pointer, strides

EXACT_HEADS, EXACT_KEYS, EXACT_THREADS = 4, 16, 128  # as in attention_exact.cu
NO_SEGMENT = (0, 0, 0, int32(1), 0, 0, 0, int32(0), 0, 0, 0)


def sparse_mla_decode(
    q: Any, segments: Sequence[Segment], attn_sink: Any | None, softmax_scale: float, out: Any, lse: Any
) -> None:
    lse_strides = strides(lse)
    _exact(q, segments, attn_sink, softmax_scale, out, None, (0, 0), lse, lse_strides)


def sparse_mla_prefill(
    q: Any,
    kv: Any,
    indices: Any,
    topk_length: Any | None,
    attn_sink: Any | None,
    softmax_scale: float,
    out: Any,
    max_logits: Any,
    lse: Any,
) -> None:
    # A workspace row is a page of one token.
    row_bytes = kv.shape[1] * kv.dtype.itemsize
    rows = type(kv)((len(kv), row_bytes), "uint8", kv.data, (kv.strides[0], 1))
    pages = Pages(rows, 1, {512: DSV4_BF16, 576: MLA_BF16}[kv.shape[1]])
    lengths = None if topk_length is None else topk_length[:, None]
    segment = Segment(pages, indices[:, None], lengths)
    lse_stride_s, lse_stride_h = strides(lse)
    _exact(
        q[:, None], [segment], attn_sink, softmax_scale, out[:, None],
        max_logits, strides(max_logits), lse, (lse_stride_s, lse_stride_h, 0),
    )  # fmt: skip


def _exact(
    q: Any,
    segments: Sequence[Segment],
    attn_sink: Any | None,
    softmax_scale: float,
    out: Any,
    max_logits: Any | None,
    max_strides: tuple[int, ...],
    lse: Any,
    lse_strides: tuple[int, ...],
) -> None:
    batch, s_q, heads, head_dim = q.shape
    layout = segments[0].pages.layout
    exact = kernel(
        "attention_exact.cu",
        "sparse_mla_exact",
        LAYOUT=layout.name,
        ALIGNED=int(is_aligned(*(segment.pages.bytes for segment in segments))),
    )
    shared_bytes = 8 * (EXACT_KEYS * (head_dim + 1) + EXACT_HEADS * (head_dim + EXACT_KEYS + 1)) + 4 * EXACT_KEYS
    exact.max_dynamic_shared_size_bytes = shared_bytes
    arguments = [segment_arguments(segment) for segment in segments]
    if len(arguments) == 1:
        arguments.append(NO_SEGMENT)
    exact(
        (batch * s_q * -(-heads // EXACT_HEADS),),
        (EXACT_THREADS,),
        (
            q, *strides(q)[:3], int32(s_q), int32(heads), *arguments[0], *arguments[1],
            pointer(attn_sink), softmax_scale, out, *strides(out)[:3],
            pointer(max_logits), *max_strides, lse, *lse_strides,
        ),
        shared_mem=shared_bytes,
    )  # fmt: skip


def segment_arguments(segment: Segment) -> tuple[Any, ...]:
    pages, indices, lengths = segment
    stride_b, stride_s, _ = strides(indices)
    length_strides = (0, 0) if lengths is None else strides(lengths)
    return (
        pages.bytes, pages.bytes.strides[0], pages.num_slots, int32(pages.block_size),
        indices, stride_b, stride_s, int32(indices.shape[2]), pointer(lengths), *length_strides,
    )  # fmt: skip


def merge_attn_states(
    output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, output_lse: Any | None
) -> None:
    tokens, heads, dim = output.shape
    kernel("merge.cu", "merge_attn_states", VALUE=C_NAMES[output.dtype.name])(
        (tokens * heads,),
        (128,),
        (
            output, *strides(output)[:2], prefix_output, *strides(prefix_output)[:2], prefix_lse, *strides(prefix_lse),
            suffix_output, *strides(suffix_output)[:2], suffix_lse, *strides(suffix_lse),
            pointer(output_lse), *((0, 0) if output_lse is None else strides(output_lse)), int32(heads), int32(dim),
        ),
    )  # fmt: skip
