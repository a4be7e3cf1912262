"""Dense attention, the plain formula in float64.

    score[i, n] = softmax_scale * q[i] . k[n]           over the keys that query i may see
    out[i]      = sum_n exp(score[i, n] - lse[i]) v[n]

A query without keys has out 0 and lse +inf.
"""

import numpy as np

from ..types.segments import V_DIM, DenseDecode, PackedAttention, packed_rows
from .dense_cache import gather_cache
from .rows import lookup_slot
from .sparse_attention import merge_attn_states


def mha_varlen(args: PackedAttention) -> None:
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, accumulate, out, lse = args
    for queries, keys in zip(packed_rows(cu_seqlens_q, len(q)), packed_rows(cu_seqlens_k, len(k)), strict=True):
        part, part_lse = np.empty(out[queries].shape), np.empty(lse[:, queries].shape)
        for head in range(q.shape[1]):
            key = k[keys, head]
            if k_pe is not None:
                key = np.concatenate([key, k_pe[keys]], axis=1)
            part[:, head], part_lse[head] = attend(q[queries, head], key, v[keys, head], softmax_scale, causal)
        if accumulate:
            merge_attn_states(out[queries], out[queries], lse[:, queries], part, part_lse, lse[:, queries])
        else:
            out[queries], lse[:, queries] = part, part_lse


def dense_mla_decode(args: DenseDecode) -> None:
    q, pages, block_table, cache_seqlens, scale, softmax_scale, causal, _, _, out, lse, _ = args
    for b in range(q.shape[0]):
        length = min(max(int(cache_seqlens[b]), 0), block_table.shape[1] * pages.block_size)
        found = [lookup_slot(block_table, b, position, pages.block_size) for position in range(length)]
        present = np.array([0 <= slot < pages.num_slots for slot in found], np.bool_)
        keys = np.zeros((length, q.shape[3]), np.float32 if scale is not None else pages.layout.value_type)
        stored = keys if scale is not None else keys.view(np.uint8)
        gather_cache(pages, stored, block_table[b : b + 1], np.array([0, length]), None, scale)
        for i in range(q.shape[1]):
            # The request's length determines how many tokens the query sees, not the entries of the table.
            visible = int(cache_seqlens[b]) - (q.shape[1] - 1 - i if causal else 0)
            seen = keys[: max(visible, 0)][present[: max(visible, 0)]]
            out[b, i], lse[b, :, i] = attend(q[b, i], seen, seen[:, :V_DIM], softmax_scale, False)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """q [m, d], k [n, d], v [n, d_v] -> out [m, d_v], lse [m], float64."""
    scores = softmax_scale * (q.astype(np.float64) @ k.astype(np.float64).T)
    m, n = scores.shape
    if causal:
        scores[np.arange(n) > np.arange(m)[:, None] + n - m] = -np.inf
    top = scores.max(axis=1, initial=-np.inf)
    empty = np.isneginf(top)
    weights = np.exp(scores - np.where(empty, 0, top)[:, None])
    total = np.where(empty, 1, weights.sum(axis=1))
    out = (weights / total[:, None]) @ v.astype(np.float64)
    return out, np.where(empty, np.inf, top + np.log(total))
