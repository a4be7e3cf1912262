"""Sparse MLA decode and prefill, and merging of partial results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..numba_common.numbers import from_float32, to_float32
from ..types.segments import Pages, SparseDecode, SparsePrefill
from .compiler import cuda
from .latent_attention import KeyList, Results, attend
from .launch import MAX_BLOCKS, NO_PARTS, kind_of, launch
from .log_sums import ONE, bits_of_log_sum, joined, log_sum_of

MERGE_THREADS = 128


def sparse_mla_decode(args: SparseDecode) -> None:
    """The plan provides memory for partial results only; the shapes determine the number of parts."""
    q, segments, attn_sink, softmax_scale, out, lse, plan, batch_invariant = args
    lists = [KeyList(x.pages, x.indices, x.lengths) for x in segments]
    most_keys = sum(x.indices.shape[2] for x in segments)
    attend(q, lists, most_keys, attn_sink, softmax_scale, Results(out, None, lse), plan, not batch_invariant)


def sparse_mla_prefill(args: SparsePrefill) -> None:
    """Tokens are a batch with one query each; a workspace row is a page of one token. Multiplies without FP8."""
    q, kv, indices, topk_length, attn_sink, softmax_scale, out, max_logits, lse, _, _ = args
    pages = args.pages(None if isinstance(kv, Pages) else row_bytes_of(kv))
    lengths = None if topk_length is None else topk_length[:, None]
    results = Results(out[:, None], max_logits[..., None], lse[..., None])
    keys = KeyList(pages, indices[:, None], lengths)
    attend(q[:, None], [keys], indices.shape[1], attn_sink, softmax_scale, results, None, may_split=False)


def row_bytes_of(kv: Any) -> Any:
    """A uint8 view [s_kv, 2 d] of 16-bit rows."""
    if isinstance(kv, np.ndarray):
        return np.lib.stride_tricks.as_strided(kv.view(np.uint8), (len(kv), 2 * kv.shape[1]), (kv.strides[0], 1))
    return type(kv)((len(kv), 2 * kv.shape[1]), "uint8", kv.data, (kv.strides[0], 1))


def merge_attn_states(
    output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, output_lse: Any | None
) -> None:
    tokens, heads, _ = output.shape
    launch(
        merge_states_kernel, min(tokens * heads, MAX_BLOCKS), MERGE_THREADS,
        output, prefix_output, prefix_lse, suffix_output, suffix_lse, kind_of(output),
        NO_PARTS if output_lse is None else output_lse,
    )  # fmt: skip


def merge_states_kernel(output, prefix_output, prefix_lse, suffix_output, suffix_lse, kind, output_lse):
    """A thread block takes every gridDim.x-th head of a token, a thread every blockDim.x-th value of its output."""
    tokens, heads, dim = output.shape
    for row in range(cuda.blockIdx.x, tokens * heads, cuda.gridDim.x):
        token, head = row // heads, row % heads
        first, second = log_sum_of(prefix_lse[head, token]), log_sum_of(suffix_lse[head, token])
        log_sum, first, second = joined(first, second)
        for i in range(cuda.threadIdx.x, dim, cuda.blockDim.x):
            value = np.float32(0)
            if first != 0:  # a part of weight 0 may hold any value; NaN must propagate
                value += first * to_float32(prefix_output[token, head, i], kind)
            if second != 0:
                value += second * to_float32(suffix_output[token, head, i], kind)
            output[token, head, i] = from_float32(value, kind)
        if cuda.threadIdx.x == 0 and len(output_lse):
            output_lse[head, token] = bits_of_log_sum(log_sum, ONE)
