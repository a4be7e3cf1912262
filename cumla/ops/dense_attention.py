"""Dense attention: over packed sequences with a K and V for each head, and over the rows of a paged MLA cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays.array import Array
from ..dispatch.call import BF16, BYTES, INT32, Call
from ..dispatch.formats import pages_of
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import FLOAT32_MAX, check_flags, check_integers, in_float32
from ..kernels.types.plan import DenseDecodePlan
from ..kernels.types.segments import DenseDecode, PackedAttention
from ..layout import MLA_BF16, plain_rows
from .dense_cache import VALUE_TYPES, checked_scale
from .sparse_attention import V_DIM, check_heads, check_plan

HALVES = (*BF16, np.dtype(np.float16))
FLOAT32 = (np.dtype(np.float32),)
MAX_E4M3 = 448.0


@launch_cached
def mha_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    k_pe: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    accumulate: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attention of packed sequences of different lengths, each over its own keys.

    Args:
        q: [T, h, d] bfloat16 or float16
        k: [N, h, d], or [N, h, d - r] with k_pe, of q's dtype
        v: [N, h, d_v] of q's dtype; d_v may differ from d and is not padded
        cu_seqlens_q: [R + 1] int32, ascending: sequence i has the queries [cu_seqlens_q[i], cu_seqlens_q[i + 1])
        cu_seqlens_k: [R + 1] int32, the same for keys; a sequence may have no queries or no keys
        k_pe: [N, r] of q's dtype: the last r values of each key, the same for all heads
        softmax_scale: above 0; 1 / sqrt(d) if None
        causal: the last query sees all keys of its sequence, the query before it one key fewer, and so on
        accumulate: out and lse contain attention of these queries over other keys: this call's keys are merged into
            them, as by merge_attn_states
        out: [T, h, d_v] of q's dtype, or float32, to write instead of allocating; float32 with accumulate
        lse: [h, T] float32 to write instead of allocating; required with accumulate

    Returns out and lse, the natural logarithm of the sum of exp(softmax_scale * q . k). A query without keys gets
    out 0 and lse +inf; results of queries without a sequence are not written (undefined in arrays allocated here). A
    sequence's results do not depend on the other sequences.

    On CUDA d, r and d_v are multiples of 16, up to 256. All strides except the last axis' are free. NaN in a value may
    also reach queries of its sequence that do not see the key: their weight for it is 0, and 0 times NaN is NaN.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: flash_attn_varlen_func, as vLLM's MLA prefill calls it.
    """
    check_flags(causal=causal, accumulate=accumulate)
    call = Call(backend, stream)
    q = call.array("q", q, HALVES, ("T", "h", "d"))
    same = (q.dtype,)
    check_heads(q.shape[1])
    tokens, heads, head_dim = q.shape
    rope_dim = 0
    if k_pe is not None:
        k_pe = call.array("k_pe", k_pe, same, ("N", -1))
        rope_dim = k_pe.shape[1]
        if rope_dim >= head_dim:
            raise ValueError(f"k_pe: got {rope_dim} values a key, expected fewer than q's {head_dim}")
    k = call.array("k", k, same, ("N", "h", head_dim - rope_dim))
    v = call.array("v", v, same, ("N", "h", -1))
    cu_seqlens_q = call.array("cu_seqlens_q", cu_seqlens_q, INT32, ("R + 1",))
    cu_seqlens_k = call.array("cu_seqlens_k", cu_seqlens_k, INT32, ("R + 1",))
    if not len(cu_seqlens_q):
        raise ValueError("cu_seqlens_q: got no entries, expected one more than the number of sequences")
    if not head_dim:
        raise ValueError("q: got 0 values a head, expected at least one")
    scale = positive_scale(softmax_scale, head_dim)
    for name, array in (("out", out), ("lse", lse)):
        if accumulate and array is None:
            raise ValueError(f"{name}: got None, expected the array to merge these keys' attention into")
    out_array = call.output("out", out, FLOAT32 if accumulate else (q.dtype, *FLOAT32), (tokens, heads, v.shape[2]))
    lse_array = call.output("lse", lse, FLOAT32, (heads, tokens))
    if q.size and len(cu_seqlens_q) > 1:
        with call.kernels("dense_attention") as kernels:
            kernels.mha_varlen(PackedAttention(
                q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, scale, bool(causal), bool(accumulate), out_array, lse_array,
            ))  # fmt: skip
    return call.results()


@launch_cached
def dense_mla_decode(
    q: Array,
    k_cache: Array,
    block_table: Array,
    cache_seqlens: Array,
    *,
    scale: float | Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    max_seqlen: int | None = None,
    plan: DenseDecodePlan | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attention of each request's queries over all of its tokens in a paged cache of latent rows.

    Args:
        q: [b, s_q, h, 576] bfloat16 or float16: absorbed q (512 values), then its RoPE part
        k_cache: [num_blocks, block_size, 576] (or [num_blocks, block_size, 1, 576]) of q's dtype, or uint8: e4m3 of
            value / scale
        block_table: [>= b, B] int32, pages of each request; a page outside of the cache is absent
        cache_seqlens: [>= b] int32, tokens of each request, the queries' own included
        scale: of an FP8 cache: float32 array of one value on the device, or a number; None is 1. At most 7.59e35,
            because values and logits are float32
        softmax_scale: above 0; 1 / sqrt(576) if None; a model's own scale is computed for its unabsorbed heads
        causal: query i of s_q sees the tokens up to its own, the last one sees all
        max_seqlen: an upper bound of cache_seqlens known on the host, for the memory of partial results; the width of
            the table if None. A bound that is too small costs time; results stay correct
        plan: a DenseDecodePlan: the division of keys into splits, and memory for partial results. The calls of a step
            share it; call `plan.renew()` before the next step. Inside CUDA graph capture, pass a plan that has served a
            call of this shape
        batch_invariant: True: a token's result is bit-identical in every batch and with any other queries of its
            request: on a GPU its keys are split by its own length, from 4,097 keys on, which makes small batches
            slower. A plan must be created with batch_invariant=True, and computed for the lengths of the call
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: [b, s_q, h, 512] of q's dtype to write instead of allocating
        lse: [b, h, s_q] float32 to write instead of allocating

    Returns out and lse (natural logarithm). V is the first 512 values of a row. A query without keys gets out 0
    and lse +inf. Without batch_invariant, on a GPU the split of keys depends on the batch's lengths, or on the lengths
    that the plan was computed for: results of a request in two batches differ within the same bounds as from the exact
    result (cumla.bounds.DECODE_OUT and DECODE_LSE).
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: FlashMLA flash_mla_with_kvcache (dense).
    """
    check_flags(causal=causal, batch_invariant=batch_invariant)
    call = Call(backend, stream, early_release)
    q = call.array("q", q, HALVES, ("b", "s_q", "h", MLA_BF16.head_dim))
    check_heads(q.shape[2])
    batch, s_q, heads, head_dim = q.shape
    cache = call.borrow("k_cache", k_cache)
    dtype = cache.native.dtype
    if dtype not in (q.dtype, *BYTES):
        raise TypeError(f"k_cache: got dtype {dtype}, expected q's {q.dtype} or uint8")
    pages = pages_of(call, cache, plain_rows(head_dim, VALUE_TYPES[dtype]))
    tensor_scale = checked_scale(call, scale) if dtype in BYTES else None
    block_table = call.array("block_table", block_table, INT32, (-1, -1))
    cache_seqlens = call.array("cache_seqlens", cache_seqlens, INT32, (-1,))
    for name, array in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if len(array) < batch:
            raise ValueError(f"{name}: got {len(array)} requests, expected at least {batch}, as q has")
    check_plan(call, plan, DenseDecodePlan, q, batch_invariant)
    longest = block_table.shape[1] * pages.block_size
    if max_seqlen is not None:
        check_integers(0, max_seqlen=max_seqlen)
        longest = min(longest, max_seqlen)
    logits_scale = positive_scale(softmax_scale, head_dim)
    if isinstance(tensor_scale, np.generic):
        check_products(float(tensor_scale), logits_scale)
    out_array = call.output("out", out, (q.dtype,), (batch, s_q, heads, V_DIM))
    lse_array = call.output("lse", lse, FLOAT32, (batch, heads, s_q))
    if q.size:
        with call.kernels("dense_attention") as kernels:
            kernels.dense_mla_decode(DenseDecode(
                q, pages, block_table[:batch], cache_seqlens[:batch], tensor_scale,
                logits_scale, bool(causal), longest, plan, out_array, lse_array,
                batch_invariant,
            ))  # fmt: skip
    return call.results()


def positive_scale(softmax_scale: Any, head_dim: int) -> float:
    """softmax_scale, or 1 / sqrt(head_dim) for None. Raises TypeError for no number, ValueError unless it is above 0.

    With a scale that is not positive, the largest product would not belong to the largest logit.
    """
    scale = head_dim**-0.5 if softmax_scale is None else in_float32("softmax_scale", softmax_scale, positive=True)
    check_products(1.0, scale)
    return scale


def check_products(scale: float, softmax_scale: float) -> None:
    """Raise ValueError if a cache's largest value, or the factor of the products, overflows float32."""
    if abs(scale) > FLOAT32_MAX / MAX_E4M3:
        raise ValueError(f"scale: got {scale:g}, expected at most {FLOAT32_MAX / MAX_E4M3:.3g}: values are float32")
    if abs(scale) * softmax_scale > FLOAT32_MAX * math.log(2):
        of_cache = "" if scale == 1.0 else f" times the cache's {scale:g}"
        raise ValueError(
            f"softmax_scale: got {softmax_scale:g}{of_cache}, expected a product that base-2 logits in float32 allow"
        )
