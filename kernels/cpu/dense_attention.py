"""Dense attention on the CPU: a few queries at a time; matrix products use BLAS."""

import numpy as np

from ..types.segments import V_DIM, DenseDecode, PackedAttention, packed_rows
from .dense_cache import E4M3_VALUES
from .softmax import exponentials
from .sparse_attention import merge_attn_states

SCORES_AT_ONCE = 4 << 20  # 16 MiB of float32


def mha_varlen(args: PackedAttention) -> None:
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, accumulate, out, lse = args
    heads = q.shape[1]
    for queries, keys in zip(packed_rows(cu_seqlens_q, len(q)), packed_rows(cu_seqlens_k, len(k)), strict=True):
        m, n = queries.stop - queries.start, keys.stop - keys.start
        values = np.ascontiguousarray(v[keys].transpose(1, 0, 2), np.float32)
        key = k[keys].transpose(1, 0, 2).astype(np.float32)
        if k_pe is not None:
            shared = np.broadcast_to(k_pe[keys].astype(np.float32), (heads, n, k_pe.shape[1]))
            key = np.concatenate([key, shared], axis=2)
        key = key.transpose(0, 2, 1)
        step = max(1, SCORES_AT_ONCE // max(heads * n, 1))
        for first in range(0, m, step):
            end = min(first + step, m)
            part = slice(queries.start + first, queries.start + end)
            scores = np.matmul(q[part].transpose(1, 0, 2).astype(np.float32) * np.float32(softmax_scale), key)
            if causal:
                scores[:, np.arange(n) > np.arange(first, end)[:, None] + n - m] = -np.inf
            result, log_sum = _attend(scores, values)
            result = result.transpose(1, 0, 2)
            if accumulate:
                merge_attn_states(out[part], out[part], lse[:, part], result, log_sum, lse[:, part])
            else:
                out[part], lse[:, part] = result, log_sum


def dense_mla_decode(args: DenseDecode) -> None:
    q, pages, block_table, cache_seqlens, scale, softmax_scale, causal, _, _, out, lse, batch_invariant = args
    batch, s_q, heads, head_dim = q.shape
    rows = pages.bytes.reshape(len(pages.bytes), pages.block_size, pages.layout.row_bytes)
    for b in range(batch):
        length = int(cache_seqlens[b])
        positions = np.arange(min(max(length, 0), block_table.shape[1] * pages.block_size))
        blocks = block_table[b, positions // pages.block_size]
        positions = positions[(blocks >= 0) & (blocks < len(rows))]
        stored = rows[block_table[b, positions // pages.block_size], positions % pages.block_size]
        if scale is None:
            keys = stored.view(pages.layout.value_type).astype(np.float32)
        else:
            keys = E4M3_VALUES[stored] * np.float32(np.ravel(scale)[0])
        queries = q[b].astype(np.float32) * np.float32(softmax_scale)
        together = None if batch_invariant else (queries.reshape(-1, head_dim) @ keys.T).reshape(s_q, heads, len(keys))
        for i in range(s_q):
            # Masked keys are skipped: 0 times NaN would be NaN.
            visible = np.searchsorted(positions, length - (s_q - 1 - i)) if causal else len(keys)
            seen = keys[:visible]
            scores = queries[i] @ seen.T if together is None else together[i, :, :visible]
            out[b, i], lse[b, :, i] = _attend(scores, seen[:, :V_DIM])


def _attend(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """scores [..., m, k], -inf for masked keys, and values [..., k, d] -> out [..., m, d], lse [..., m]."""
    top = scores.max(axis=-1, initial=-np.inf)
    empty = np.isneginf(top)
    scores -= np.where(empty, np.float32(0), top)[..., None]
    weights = exponentials(scores)
    total = np.where(empty, np.float32(1), weights.sum(axis=-1))
    out = np.matmul(weights, values) / total[..., None]
    return out, np.where(empty, np.float32(np.inf), top + np.log(total))
