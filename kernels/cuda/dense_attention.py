"""Dense attention: packed sequences, and paged MLA rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..plan import DecodePlan
from ..segments import Pages
from .compile import kernel
from .launch import C_NAMES, is_aligned, pointer, strides
from .mla_cache import scale_arguments

V_DIM = 512
MAX_HEAD_DIM = 256
QUERIES, MHA_THREADS = 64, 128  # as in mha_varlen.cu
LOG2_E = 1.4426950408889634


def mha_varlen(
    q: Any,
    k: Any,
    k_pe: Any | None,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: float,
    causal: bool,
    out: Any,
    lse: Any,
) -> None:
    (tokens, heads, head_dim), v_dim = q.shape, v.shape[2]
    rope_dim = head_dim - k.shape[2]
    if head_dim % 16 or rope_dim % 16 or v_dim % 16 or max(head_dim, v_dim) > MAX_HEAD_DIM:
        raise ValueError(
            f"q, k_pe, v: got {head_dim}, {rope_dim} and {v_dim} values a head, "
            f"expected multiples of 16 up to {MAX_HEAD_DIM} on CUDA"
        )
    sequences = len(cu_seqlens_q) - 1
    mha = kernel(
        "mha_varlen.cu",
        "mha_varlen",
        VALUE=C_NAMES[q.dtype.name],
        OUTPUT=C_NAMES[out.dtype.name],
        QK_DIM=head_dim,
        ROPE_DIM=rope_dim,
        V_DIM=v_dim,
        CAUSAL=int(causal),
        ALIGNED=int(is_aligned(q, k, v, out) and (k_pe is None or is_aligned(k_pe))),
    )
    shared_bytes = QUERIES * (2 * (2 * head_dim + 16) + 2 * v_dim + 16)
    mha.max_dynamic_shared_size_bytes = shared_bytes
    mha(
        (-(-tokens // QUERIES) + sequences, heads),
        (MHA_THREADS,),
        (
            q, *strides(q)[:2], k, *strides(k)[:2], pointer(k_pe), 0 if k_pe is None else strides(k_pe)[0],
            v, *strides(v)[:2], cu_seqlens_q, cu_seqlens_k, sequences, tokens, len(k), softmax_scale * LOG2_E,
            out, *strides(out)[:2], lse, *strides(lse),
        ),
        shared_mem=shared_bytes,
    )  # fmt: skip


# As in mla_decode.cu.
HEADS, KEYS, DECODE_THREADS = 32, 32, 256
DECODE_SHARED_BYTES = (HEADS + KEYS) * (2 * 576 + 16) + HEADS * (2 * KEYS + 16 + 4 * (KEYS + 1) + 4) + 8 * KEYS
BLOCK_COST, MERGE_COST = 6, 0.5  # of starting on a tile and of merging a part, in blocks of keys


def dense_mla_decode(
    q: Any,
    pages: Pages,
    block_table: Any,
    cache_seqlens: Any,
    scale: Any | None,
    softmax_scale: float,
    causal: bool,
    max_seqlen: int,
    plan: DecodePlan | None,
    out: Any,
    lse: Any,
) -> None:
    batch, s_q, heads, _ = q.shape
    groups = -(-heads // HEADS)
    tiles = batch * s_q * groups
    splits = split_count(tiles, -(-max_seqlen // KEYS), 2 * device_sms(q.device.id))
    parts, parts_lse = partial_results(plan, batch * s_q * splits * heads) if splits > 1 else (None, None)
    value = C_NAMES[q.dtype.name]
    aligned = int(is_aligned(q, pages.bytes, out))
    decode = kernel(
        "mla_decode.cu",
        "mla_decode",
        VALUE=value,
        CACHE=value if scale is None else "e4m3",
        ALIGNED=aligned,
    )
    decode.max_dynamic_shared_size_bytes = DECODE_SHARED_BYTES
    decode(
        (tiles * splits,),
        (DECODE_THREADS,),
        (
            q, *strides(q)[:3], s_q, heads, pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size,
            block_table, strides(block_table)[0], block_table.shape[1], batch, cache_seqlens, int(causal), splits,
            softmax_scale, *scale_arguments(scale), out, *strides(out)[:3], lse, *strides(lse), pointer(parts),
            pointer(parts_lse),
        ),
        shared_mem=DECODE_SHARED_BYTES,
    )  # fmt: skip
    if splits > 1:
        kernel("mla_decode_merge.cu", "mla_decode_merge", VALUE=value, ALIGNED=aligned)(
            (batch * s_q * heads,),
            (V_DIM // 4,),
            (parts, parts_lse, splits, s_q, heads, out, *strides(out)[:3], lse, *strides(lse)),
        )


@functools.lru_cache(maxsize=1024)
def split_count(tiles: int, blocks: int, slots: int) -> int:
    """Into how many parts to split the keys of each tile.

    tiles   pieces of work, each of up to `blocks` blocks of keys
    slots   thread blocks that run at a time
    """

    def cost(splits: int) -> float:
        waves = -(-tiles * splits // slots)
        return waves * (-(-blocks // splits) + BLOCK_COST) + (splits * MERGE_COST if splits > 1 else 0)

    most = max(1, min(blocks, 2 * slots // tiles if tiles < 2 * slots else 1))
    return min(range(1, most + 1), key=cost)


@functools.cache
def device_sms(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def partial_results(plan: DecodePlan | None, rows: int) -> tuple[Any, Any]:
    """float32 [rows, 512] and [rows], kept by the plan if there is one.

    Raises RuntimeError where they would have to be allocated while a CUDA graph is being captured.
    """
    import cupy

    held = None if plan is None else plan.memory
    if held is None or len(held[1]) < rows:
        if cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr):
            raise RuntimeError(
                "plan: memory would have to be allocated while a CUDA graph is captured; "
                "give plan=, a DecodePlan that has served a call of this shape before"
            )
        held = cupy.empty((rows, V_DIM), np.float32), cupy.empty(rows, np.float32)
        if plan is not None:
            plan.memory = held
    return held
