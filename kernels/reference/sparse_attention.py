"""Sparse multi-head latent attention, the plain formula in float64.

    score[h, n] = softmax_scale * q[h] . k[n]           over the tokens that are present
    out[h]      = sum_n exp(score[h, n] - lse[h]) v[n]   v is the first 512 values of k
    out[h]     *= 1 / (1 + exp(attn_sink[h] - lse[h]))   with a sink

A token whose keys are all absent has out 0 and lse +inf. A key listed twice counts twice.
"""

import ml_dtypes
import numpy as np

from ..types.segments import V_DIM, Pages, Segment, SparseDecode, SparsePrefill
from .rows import read_tokens, scale_exponent


@np.errstate(over="ignore")  # overflow of bfloat16 or float32 gives infinite results, without a warning
def sparse_mla_decode(args: SparseDecode) -> None:
    """The plan is not used: every token is computed on its own."""
    q, segments, attn_sink, softmax_scale, out, lse, _, _ = args
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            keys = np.concatenate([read_tokens(x.pages, attended_slots(x, b, s)) for x in segments])
            result, _, log_sum = attend(q[b, s].astype(np.float64), keys, attn_sink, softmax_scale)
            out[b, s] = result.astype(out.dtype)
            lse[b, :, s] = log_sum


@np.errstate(over="ignore")
def sparse_mla_prefill(args: SparsePrefill) -> None:
    """Queries, rows and softmax weights are rounded to e4m3 where the Hopper kernel multiplies FP8 values."""
    q, kv, indices, topk_length, attn_sink, softmax_scale, out, max_logits, lse, fp8, _ = args
    in_fp8 = fp8 and rounds_to_e4m3(*q.shape[1:])
    for s in range(q.shape[0]):
        listed = indices[s] if topk_length is None else indices[s, : max(0, int(topk_length[s]))]
        listed = listed[(listed >= 0) & (listed < args.num_rows)]
        keys = read_tokens(kv, listed) if isinstance(kv, Pages) else kv[listed].astype(np.float64)
        queries = q[s].astype(np.float64)
        if in_fp8:
            most = 50 - np.log2(abs(softmax_scale) / np.log(2)) if softmax_scale else 100
            rounded = e4m3_rows(queries, 1, -100, most), e4m3_rows(keys, 8, -44, 44)
            if all(x is not None for x in rounded):  # else they are computed exactly
                queries, keys = rounded
        result, max_logits[s], lse[s] = attend(queries, keys, attn_sink, softmax_scale)
        out[s] = result.astype(out.dtype)


def rounds_to_e4m3(heads: int, width: int) -> bool:
    return heads > 32 and width == V_DIM


def e4m3_rows(rows: np.ndarray, step: int, least: int, most: float) -> np.ndarray | None:
    """Rows rounded to e4m3, each times a power of two: the smallest of 2^4, 2^(4 + step), 2^(4 - step), ... with which
    no value saturates. None if a row has values that are not finite, or needs a power outside 2^least to 2^most.
    """
    largest = np.abs(rows).max(axis=1, initial=0.0)
    if not np.isfinite(largest).all():
        return None
    exponents = np.array([scale_exponent(x, least - 1) if x else 4 - step for x in largest], np.int32)
    small = (exponents < least).any()
    exponents += (4 - exponents) % step
    if small or (exponents > most).any():
        return None
    scales = np.ldexp(1.0, exponents)[:, None]
    rounded: np.ndarray = (rows / scales).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    return rounded


def attended_slots(segment: Segment, b: int, s: int) -> np.ndarray:
    """The slots that token (b, s) attends to: listed, within its length and in the cache."""
    listed = segment.indices[b, s]
    if segment.lengths is not None:
        listed = listed[: max(0, int(segment.lengths[b, s]))]
    return listed[(listed >= 0) & (listed < segment.pages.num_slots)]


def attend(
    q: np.ndarray, keys: np.ndarray, attn_sink: np.ndarray | None, softmax_scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [h, d], keys [n, d], all float64 -> out [h, 512], max_logits [h], lse [h]."""
    if len(keys) == 0:
        heads = len(q)
        return np.zeros((heads, V_DIM)), np.full(heads, -np.inf), np.full(heads, np.inf)
    scores = softmax_scale * (q @ keys.T)
    max_logits = scores.max(axis=1)
    weights = np.exp(scores - max_logits[:, None])
    total = weights.sum(axis=1)
    lse = max_logits + np.log(total)
    out = (weights @ keys[:, :V_DIM]) / total[:, None]
    if attn_sink is not None:
        with np.errstate(over="ignore"):
            out = out / (1 + np.exp(attn_sink.astype(np.float64) - lse))[:, None]
    return out, max_logits, lse


def merge_attn_states(
    output: np.ndarray,
    prefix_output: np.ndarray,
    prefix_lse: np.ndarray,
    suffix_output: np.ndarray,
    suffix_lse: np.ndarray,
    output_lse: np.ndarray | None,
) -> None:
    lse = np.stack([prefix_lse, suffix_lse]).astype(np.float64)  # [2, heads, tokens]
    lse[np.isposinf(lse)] = -np.inf  # +inf means that no key was attended
    top = lse.max(axis=0)
    empty = np.isneginf(top)
    weights = np.exp(lse - np.where(empty, 0.0, top))
    total = weights.sum(axis=0)
    fraction = (weights / np.where(empty, 1.0, total)).transpose(0, 2, 1)[..., None]  # [2, tokens, heads, 1]
    parts = np.stack([prefix_output, suffix_output]).astype(np.float64)
    merged = np.where(fraction > 0, fraction * parts, np.where(np.isnan(fraction), np.nan, 0.0)).sum(axis=0)
    output[:] = merged.astype(output.dtype)
    if output_lse is not None:
        output_lse[:] = np.where(empty, np.inf, top + np.log(np.where(empty, 1.0, total)))
