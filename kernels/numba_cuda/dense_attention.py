"""Dense attention: packed sequences, and the rows of a paged MLA cache."""

import functools
from typing import Any

import numpy as np

from ..numba_common.numbers import from_float32, to_float32
from ..types.segments import DenseDecode, PackedAttention
from .attention_tile import ABSENT, Tile, attention_of
from .compiler import cuda, float32, int32, uint32
from .dense_cache import scale_arguments
from .latent_attention import KeyList, Results, attend
from .launch import NO_SCALE, SIMULATED, device_function, is_aligned, kind_of, launch
from .log_sums import MINUS_INFINITY, ONE, bits_of_log_sum, joined, log_sum_of, summary
from .plain_rows import plain_rows_of
from .products import GROUP, THREADS
from .rows import find_request, rows_of

ROWS, KEYS = (8, 16) if SIMULATED else (64, 64)  # of a tile of mha_varlen
MAX_HEAD_DIM = 256
UNSCALED = (NO_SCALE, np.float32(1))


def dense_mla_decode(args: DenseDecode) -> None:
    q, pages, block_table, cache_seqlens, scale, softmax_scale, causal, max_seqlen, plan, out, lse, batch_invariant = (
        args
    )
    keys = KeyList(pages, block_table, cache_seqlens)
    scale = UNSCALED if scale is None else scale_arguments(scale)
    results, may_split = Results(out, None, lse), not batch_invariant
    attend(q, [keys], max_seqlen, None, softmax_scale, results, plan, may_split, causal, scale)


def mha_varlen(args: PackedAttention) -> None:
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, accumulate, out, lse = args
    (tokens, heads, head_dim), v_dim = q.shape, v.shape[2]
    rope_dim = head_dim - k.shape[2]
    if head_dim % 16 or rope_dim % 16 or v_dim % 16 or max(head_dim, v_dim) > MAX_HEAD_DIM:
        raise ValueError(
            f"q, k_pe, v: got {head_dim}, {rope_dim} and {v_dim} values a head, "
            f"expected multiples of 16 up to {MAX_HEAD_DIM} on CUDA"
        )
    v_groups = 2 if v_dim <= 2 * GROUP else 4
    tile = Tile(ROWS, KEYS, -(-head_dim // GROUP), v_groups, True, False, q.dtype == np.float16)
    shared_k = [] if k_pe is None else [k_pe]
    kernel = mha_kernel_of(tile, head_dim, rope_dim, v_dim, is_aligned(q, k, v, *shared_k))
    launch(
        kernel, -(-tokens // ROWS) * heads, THREADS,
        q, k, NO_HALVES if k_pe is None else k_pe, v, cu_seqlens_q, cu_seqlens_k, np.float32(softmax_scale), causal,
        accumulate, out, kind_of(out), lse,
        shared_bytes=tile.shared_bytes,
    )  # fmt: skip


NO_HALVES = np.empty((0, 0), np.float16)


@functools.cache
def mha_kernel_of(tile: Tile, head_dim: int, rope_dim: int, v_dim: int, aligned: bool) -> Any:
    """The kernel for these head sizes; all heads share the last `rope_dim` values of a key."""
    rows, keys, own_dim = tile.rows, tile.keys, head_dim - rope_dim
    growing, count, stride, memory, score, weigh, mix, finish = attention_of(tile)
    copy_q, copy_k = (plain_rows_of(n, dim, tile.groups, aligned) for n, dim in ((rows, head_dim), (keys, own_dim)))
    copy_k_pe = plain_rows_of(keys, rope_dim, tile.groups, aligned)
    copy_v = plain_rows_of(keys, v_dim, tile.v_groups, aligned)
    padded, operand_words = head_dim % GROUP + v_dim % (GROUP * tile.v_groups) > 0, tile.products_at

    @device_function
    def attend_to(m, sums, q, k, k_pe, v, first, count_q, first_key, n, end, softmax_scale):
        """Queries from `first` on attend to the first `end` of their sequence's n keys, which start at `first_key`."""
        if padded:
            for i in range(cuda.threadIdx.x, operand_words, THREADS):
                m.q[i] = 0
            cuda.syncthreads()
        copy_q(q, first, count_q, m.q)
        for i in range(count):
            sums[i] = 0
        top, total = MINUS_INFINITY, np.float32(0)
        for key in range(0, end, keys):
            cuda.syncthreads()
            copy_k(k, first_key + key, n - key, m.k)
            if rope_dim:
                copy_k_pe(k_pe, first_key + key, n - key, m.k[own_dim // 2 :])
            copy_v(v, first_key + key, n - key, m.v)
            for i in range(cuda.threadIdx.x, keys, THREADS):
                m.positions[i] = key + i if key + i < n else ABSENT
            cuda.syncthreads()
            score(m, softmax_scale)
            cuda.syncthreads()
            top, total = weigh(m, top, total)
            cuda.syncthreads()
            mix(m, sums)
        finish(m, sums, top, total)

    def mha_kernel(q, k, k_pe, v, starts_q, starts_k, softmax_scale, causal, accumulate, out, kind, lse):
        """A thread block takes a tile of a head's queries, and processes their sequences one by one."""
        m = memory(cuda.shared.array(0, uint32), cuda.shared.array(0, float32), cuda.shared.array(0, int32))
        sums = cuda.local.array(count, np.float32)
        tokens, heads = q.shape[0], q.shape[1]
        head, tile_start = cuda.blockIdx.x % heads, cuda.blockIdx.x // heads * rows
        tile_end = min(tile_start + rows, tokens)
        sequences = len(starts_q) - 1
        for sequence in range(max(find_request(starts_q, tile_start), 0), sequences):
            start, stop = rows_of(starts_q, sequence, tokens)
            if start >= tile_end:
                break
            first, end = max(start, tile_start), min(stop, tile_end)
            if first >= end:
                continue
            first_key, key_stop = rows_of(starts_k, sequence, k.shape[0])
            n = key_stop - first_key
            # The last query sees all keys, the previous one a key less, and so on.
            hidden = stop - end if causal else 0
            cuda.syncthreads()
            for row in range(cuda.threadIdx.x, rows, THREADS):
                seen = n - (stop - 1 - first - row) if causal else n
                m.limits[row] = seen if first + row < end else 0
            attend_to(
                m, sums, q[:, head], k[:, head], k_pe, v[:, head], first, end - first, first_key, n,
                max(n - hidden, 0), softmax_scale,
            )  # fmt: skip
            for row in range(cuda.threadIdx.x, end - first, THREADS):
                log_sum, inv_sum = summary(m.tops[row], m.totals[row], ONE)
                former_weight = np.float32(0)
                if accumulate:
                    log_sum, former_weight, taken = joined(log_sum_of(lse[head, first + row]), log_sum)
                    inv_sum *= taken
                lse[head, first + row] = bits_of_log_sum(log_sum, ONE)
                m.factors[row], m.tops[row] = inv_sum * growing, former_weight
            cuda.syncthreads()
            for i in range(cuda.threadIdx.x, (end - first) * v_dim, THREADS):
                row, dim = i // v_dim, i % v_dim
                value = m.result[row * stride + dim] * m.factors[row]
                if m.tops[row] != 0:
                    value += m.tops[row] * to_float32(out[first + row, head, dim], kind)
                out[first + row, head, dim] = from_float32(value, kind)

    return mha_kernel
