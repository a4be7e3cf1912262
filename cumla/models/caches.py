"""The paged caches of one layer, and their formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ..dispatch.values import check_choice, check_integers, check_kind, check_optional_size
from ..layout import (
    DSV4_BF16,
    DSV4_F32,
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    INDEXER_BF16,
    INDEXER_F32,
    INDEXER_FP8,
    INDEXER_MXFP4,
    MLA_BF16,
    MLA_F32,
    V32_FP8,
    CacheLayout,
)
from ..metadata.builder import ServingConfig
from ..metadata.slots import ring_capacity
from .step import STATE_BLOCK_SIZES
from .v4_config import HEAD_DIM
from .v41_config import DeepseekV41Config

RING_VALUES = 2 * HEAD_DIM  # values of a token in a V4.1 ring: kv, then score

CacheFormat = Literal["fp8", "bfloat16", "float32"]
PLAIN_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype("f4")}


@dataclass(frozen=True)
class Formats:
    """The layouts of attention's rows in V4 and in V3.2, and of the indexer's keys."""

    v4: CacheLayout
    v32: CacheLayout
    indexer: CacheLayout


FORMATS: dict[str, Formats] = {
    "fp8": Formats(DSV4_FP8, V32_FP8, INDEXER_FP8),
    "bfloat16": Formats(DSV4_BF16, MLA_BF16, INDEXER_BF16),
    "float32": Formats(DSV4_F32, MLA_F32, INDEXER_F32),
}


def formats(cache_format: str) -> Formats:
    """Raises ValueError for another name."""
    if cache_format not in FORMATS:
        raise ValueError(f"cache_format: got {cache_format!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[cache_format]


def allocate(layout: CacheLayout, num_blocks: int, block_size: int, xp: Any) -> Any:
    """A zeroed cache: bytes of an FP8 or FP4 layout, or rows of 16- or 32-bit values, [num_blocks, block_size, ..]."""
    check_integers(1, block_size=block_size)
    if layout.num_scales:
        return layout.allocate(num_blocks, block_size, xp)
    return xp.zeros((num_blocks, block_size, layout.head_dim), PLAIN_DTYPES[layout.value_type])


@dataclass(frozen=True)
class DeepseekV4Caches:
    """The paged caches of one layer.

    Attributes:
        window: [num_blocks, block_size, 584] uint8 (or [.., 512] numbers)
        compressed: the same for compressed rows; at ratio 1 this and all entries below are None
        state: float32 [state_blocks, state_block_size, 2 * coff * 512], of the compressor
        indexer: [compressed_blocks, compressed_block_size / 4, 132] uint8 (or [.., 128] numbers); only at ratio 4
        indexer_state: float32 [state_blocks, state_block_size, 512], of the indexer's compressor; only at ratio 4
    """

    window: Any
    compressed: Any = None
    state: Any = None
    indexer: Any = None
    indexer_state: Any = None

    @classmethod
    def allocate(
        cls,
        compress_ratio: int,
        serving: ServingConfig,
        blocks: int,
        compressed_blocks: int = 0,
        state_blocks: int = 0,
        cache_format: CacheFormat = "fp8",
        xp: Any = np,
        state_block_size: int | None = None,
    ) -> DeepseekV4Caches:
        """Zeroed caches: pages of serving.block_size positions, of serving.compressed_block_size, and of states.

        Args:
            blocks: pages of the window
            compressed_blocks: pages of compressed rows and of the indexer's keys; state_blocks: pages of states. At
                least 1 of each, except at ratio 1, which has neither
            cache_format: "fp8", "bfloat16", or on the host "float32"
        """
        check_choice((1, 4, 128), compress_ratio=compress_ratio)
        check_kind(ServingConfig, serving=serving)
        check_optional_size(state_block_size=state_block_size)
        check_integers(1, blocks=blocks)
        check_integers(int(compress_ratio > 1), compressed_blocks=compressed_blocks, state_blocks=state_blocks)
        layouts = formats(cache_format)
        window = allocate(layouts.v4, blocks, serving.block_size, xp)
        if compress_ratio == 1:
            return cls(window)
        rows, overlap = serving.compressed_block_size // compress_ratio, compress_ratio == 4
        block = state_block_size or STATE_BLOCK_SIZES[compress_ratio]

        def states(dim: int) -> Any:
            return xp.zeros((state_blocks, block, (4 if overlap else 2) * dim), np.float32)

        compressed = allocate(layouts.v4, compressed_blocks, rows, xp)
        if not overlap:
            return cls(window, compressed, states(HEAD_DIM))
        keys = allocate(layouts.indexer, compressed_blocks, rows, xp)
        return cls(window, compressed, states(HEAD_DIM), keys, states(layouts.indexer.head_dim))


V41CacheFormat = Literal["fp4", "fp8", "fp4_split", "fp8_split", "bfloat16", "float32"]
KeyFormat = Literal["fp8", "mxfp4"]


@dataclass(frozen=True)
class V41Formats:
    """The layouts of V4.1's window rows, compressed rows, and index keys."""

    window: CacheLayout
    compressed: CacheLayout
    indexer: CacheLayout


V41_FORMATS: dict[str, V41Formats] = {
    "fp4": V41Formats(DSV41_FP8, DSV41_FP4, INDEXER_FP8),
    "fp8": V41Formats(DSV41_FP8, DSV41_FP8, INDEXER_FP8),
    "fp4_split": V41Formats(DSV41_FP8_SPLIT, DSV41_FP4_SPLIT, INDEXER_FP8),
    "fp8_split": V41Formats(DSV41_FP8_SPLIT, DSV41_FP8_SPLIT, INDEXER_FP8),
    "bfloat16": V41Formats(DSV4_BF16, DSV4_BF16, INDEXER_BF16),
    "float32": V41Formats(DSV4_F32, DSV4_F32, INDEXER_F32),
}


KEY_FORMATS = {"fp8": INDEXER_FP8, "mxfp4": INDEXER_MXFP4}


@dataclass(frozen=True)
class DeepseekV41Caches:
    """The paged caches of one V4.1 layer. Layers that share compressed rows have the same arrays for them.

    Attributes:
        window: [num_blocks, block_size, 528] uint8 (or [.., 512] numbers), the layer's own
        compressed: [compressed_blocks, compressed_block_size / ratio, 288 or 528] uint8 (or [.., 512] numbers), of the
            layer that owns the rows; None at ratio 0
        indexer: [compressed_blocks, compressed_block_size / ratio, 132 or 68] uint8 (or [.., 128] numbers), keys of the
            owner; None at ratio 0
        ring: float32 [rings, capacity, 1024], tokens that a later step pools: one ring a request. Only an owner of
            ratio 2 has it and the two arrays below
        restart_rows: float32 [rings, 1024], and
        restart_positions: int32 [rings], arguments of compress_latents that allow a step to be run again. None: a step
            that begins at an odd position and is longer than the ring must not be run again
    """

    window: Any
    compressed: Any = None
    indexer: Any = None
    ring: Any = None
    restart_rows: Any = None
    restart_positions: Any = None

    @classmethod
    def allocate(
        cls,
        config: DeepseekV41Config,
        layer: int,
        serving: ServingConfig,
        blocks: int,
        compressed_blocks: int = 0,
        rings: int = 0,
        *,
        owner: DeepseekV41Caches | None = None,
        cache_format: V41CacheFormat = "fp4",
        key_format: KeyFormat | None = None,
        xp: Any = np,
    ) -> DeepseekV41Caches:
        """Zeroed caches of a layer: pages of serving.block_size positions, of serving.compressed_block_size, and rings.

        Args:
            blocks: pages of the window
            compressed_blocks: pages of compressed rows, and of keys, at least one for a layer that owns rows
            rings: requests at a time, at least one for an owner of ratio 2
            owner: caches of the layer's kv source, whose compressed rows and keys it shares; None for layers that own
                rows or have none
            cache_format: "fp4": compressed rows in DSV41_FP4, the window's in DSV41_FP8; "fp8": both in DSV41_FP8;
                "fp4_split", "fp8_split": scales at the page's end; "bfloat16", or on the host "float32"
            key_format: of the index keys: "fp8", or "mxfp4" of 68 bytes a row instead of 132. None: "fp8", or the type
                of rows that are not quantised
        """
        check_kind(DeepseekV41Config, config=config)
        check_kind(ServingConfig, serving=serving)
        check_integers(0, layer=layer)
        layouts, ratio, source = v41_formats(cache_format, key_format), config.ratio(layer), config.kv_source(layer)
        shares = source is not None and source != layer
        if shares != (owner is not None):
            expected = f"the caches of layer {source}" if shares else "None"
            raise ValueError(f"owner: got {'None' if owner is None else 'caches'}, expected {expected}")
        owns = bool(ratio) and not shares
        check_integers(1, blocks=blocks)
        check_integers(int(owns), compressed_blocks=compressed_blocks)
        check_integers(int(owns and ratio > 1), rings=rings)
        window = allocate(layouts.window, blocks, serving.block_size, xp)
        if owner is not None:
            check_kind(DeepseekV41Caches, owner=owner)
            return cls(window, owner.compressed, owner.indexer)
        if not ratio:
            return cls(window)
        rows = serving.compressed_block_size // ratio
        compressed, keys = (
            allocate(layout, compressed_blocks, rows, xp) for layout in (layouts.compressed, layouts.indexer)
        )
        if ratio == 1:
            return cls(window, compressed, keys)
        ring = xp.zeros((rings, ring_capacity(serving.num_speculative_tokens), RING_VALUES), np.float32)
        restart = xp.zeros((rings, RING_VALUES), np.float32), xp.zeros(rings, np.int32)
        return cls(window, compressed, keys, ring, *restart)


def v41_formats(cache_format: str, key_format: str | None = None) -> V41Formats:
    """Raises ValueError for another name, and for a format of keys where rows are not quantised."""
    if cache_format not in V41_FORMATS:
        raise ValueError(f"cache_format: got {cache_format!r}, expected one of {', '.join(V41_FORMATS)}")
    layouts = V41_FORMATS[cache_format]
    if key_format is None:
        return layouts
    check_choice(tuple(KEY_FORMATS), key_format=key_format)
    if not layouts.indexer.num_scales:
        raise ValueError(f"key_format: got {key_format!r} with cache_format {cache_format!r}, expected None")
    return replace(layouts, indexer=KEY_FORMATS[key_format])


@dataclass(frozen=True)
class DeepseekV32Caches:
    """The caches of one layer, in pages of the same block table.

    Attributes:
        rows: [num_blocks, block_size, 656] uint8 (or [.., 576] numbers)
        indexer: [num_blocks, block_size, 132] uint8 (or [.., 128] numbers), keys
    """

    rows: Any
    indexer: Any

    @classmethod
    def allocate(
        cls, blocks: int, block_size: int = 64, cache_format: CacheFormat = "fp8", xp: Any = np
    ) -> DeepseekV32Caches:
        """Zeroed caches. cache_format  "fp8", "bfloat16", or on the host "float32"."""
        check_integers(1, blocks=blocks)
        layouts = formats(cache_format)
        return cls(
            allocate(layouts.v32, blocks, block_size, xp),
            allocate(layouts.indexer, blocks, block_size, xp),
        )
