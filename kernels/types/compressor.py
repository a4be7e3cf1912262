"""Arguments of the compressors: a layer's arrays, and a step's arrays and sizes."""

from typing import Any, NamedTuple

import numpy as np

from .segments import Pages


def first_state(tokens: Any, ratio: int, overlap: bool) -> Any:
    """The first position whose state a request needs that goes on after `tokens` tokens: positions of the incomplete
    row, and of the row before it if rows overlap.

    Args:
        tokens: a number, or an array of numbers
    """
    complete = tokens // ratio * ratio
    return np.maximum(complete - ratio, 0) if overlap else complete


class CompressorRows(NamedTuple):
    """Arrays of one of a layer's compressors.

    Attributes:
        kv_score: float32 or bfloat16 [T, 2 * coff * D]
        position_bias: float32 [ratio, coff * D]
        norm_weight: float32 or bfloat16 [D]
        state: float32 [num_blocks, state_block_size, 2 * coff * D]
        pages: cache into which the compressor inserts rows
    """

    kv_score: Any
    position_bias: Any
    norm_weight: Any
    state: Any
    pages: Pages


class LatentRows(NamedTuple):
    """The arguments of `cumla.compress_latents`; positions, query_start_loc and state are None for a ratio of 1.

    Attributes:
        restart_rows, restart_positions: both are None, or neither is
    """

    kv_score: Any
    norm_weight: Any
    slots: Any
    latents: Any
    positions: Any
    query_start_loc: Any
    state: Any
    restart_rows: Any
    restart_positions: Any
    eps: float
    round_pooled: bool


class KeyPools(NamedTuple):
    """The arguments of `cumla.indexer_kpool_and_insert`.

    Attributes:
        k, gate: float32 or bfloat16 [T, 128], as projected
        weight, bias: float32 or bfloat16 [128], of the LayerNorm of k
        ape: float32 [pool, 128]
        state: float32 or bfloat16 [rings, capacity, 256]: normalised key, then gate
        state_slots: int32 or int64 [at most T]: ring * capacity + position % capacity
        restart_rows: as a ring's rows [rings, pool - 1, 256], and restart_positions int32 [rings]; or None
        pages: cache into which the keys are inserted
        slots: int32 or int64 [at most T]: slot of the key that a token completes
        hadamard: whether keys are rotated before they are stored
    """

    k: Any
    gate: Any
    weight: Any
    bias: Any
    ape: Any
    state: Any
    state_slots: Any
    restart_rows: Any
    restart_positions: Any
    pages: Pages
    slots: Any
    positions: Any
    query_start_loc: Any
    eps: float
    hadamard: bool


class Compression(NamedTuple):
    """Arguments common to a layer's compressors, for a step of T tokens.

    Attributes:
        state_slots: int32 or int64 [at most T]: where each token's state is saved
        state_block_table: int32 [R, columns]
        slots: int32 or int64 [at most T]: slot of the row that a token completes, -1 if it completes none
        positions: int32 or int64 [T]
        token_to_req: int32 [at least T]
        query_start_loc: int32 [R + 1]
        cos_sin: float32 [max_position, rope_dim]: cosines, then sines; pairs are neighbours at a row's end
        compress_ratio: positions per row
        eps: epsilon of the RMSNorm
    """

    state_slots: Any
    state_block_table: Any
    slots: Any
    positions: Any
    token_to_req: Any
    query_start_loc: Any
    cos_sin: Any
    compress_ratio: int
    eps: float
