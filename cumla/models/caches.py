"""The paged caches of one layer, and their formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

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
    V32_NOPE_FP8,
    CacheLayout,
)
from ..metadata.builder import ServingConfig
from ..metadata.slots import STATE_BLOCK_SIZES, ring_capacity
from .layer_spec import INDEX_DIM, LATENT, LayerSpec

RING_VALUES = 2 * LATENT  # values of a token in a ring: kv, then score

CacheFormat = Literal["fp4", "fp8", "fp4_split", "fp8_split", "bfloat16", "float32"]
KeyFormat = Literal["fp8", "mxfp4"]
PLAIN_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype("f4")}


@dataclass(frozen=True)
class Formats:
    """The layouts of a layer's latent or window rows, of its compressed rows, and of its index keys."""

    rows: CacheLayout
    compressed: CacheLayout
    indexer: CacheLayout


FORMATS: dict[str, dict[str, Formats]] = {  # by `LayerSpec.cache_formats`; the first one is the default
    "mla": {
        "fp8": Formats(V32_FP8, V32_FP8, INDEXER_FP8),
        "bfloat16": Formats(MLA_BF16, MLA_BF16, INDEXER_BF16),
        "float32": Formats(MLA_F32, MLA_F32, INDEXER_F32),
    },
    "v4": {
        "fp8": Formats(DSV4_FP8, DSV4_FP8, INDEXER_FP8),
        "bfloat16": Formats(DSV4_BF16, DSV4_BF16, INDEXER_BF16),
        "float32": Formats(DSV4_F32, DSV4_F32, INDEXER_F32),
    },
    "v41": {
        "fp4": Formats(DSV41_FP8, DSV41_FP4, INDEXER_FP8),
        "fp8": Formats(DSV41_FP8, DSV41_FP8, INDEXER_FP8),
        "fp4_split": Formats(DSV41_FP8_SPLIT, DSV41_FP4_SPLIT, INDEXER_FP8),
        "fp8_split": Formats(DSV41_FP8_SPLIT, DSV41_FP8_SPLIT, INDEXER_FP8),
        "bfloat16": Formats(DSV4_BF16, DSV4_BF16, INDEXER_BF16),
        "float32": Formats(DSV4_F32, DSV4_F32, INDEXER_F32),
    },
}
WITHOUT_ROPE = {V32_FP8.name: V32_NOPE_FP8, MLA_BF16.name: DSV4_BF16, MLA_F32.name: DSV4_F32}  # of latent rows
KEY_FORMATS = {"fp8": INDEXER_FP8, "mxfp4": INDEXER_MXFP4}


def formats_of(
    spec: LayerSpec, cache_format: str | None, key_format: str | None = None, on_host: bool = True
) -> Formats:  # fmt: skip
    """Raises ValueError for another name, and for a format of keys that such a layer does not have."""
    choices = {name: found for name, found in FORMATS[spec.cache_formats].items() if on_host or name != "float32"}
    cache_format = cache_format or next(iter(choices))
    if cache_format not in choices:
        raise ValueError(f"cache_format: got {cache_format!r}, expected one of {', '.join(choices)}")
    layouts = choices[cache_format]
    if not spec.rope_dim:
        layouts = replace(layouts, rows=WITHOUT_ROPE[layouts.rows.name])
    if key_format is None:
        return layouts
    check_choice(tuple(KEY_FORMATS), key_format=key_format)
    if not layouts.indexer.num_scales or (key_format == "mxfp4" and spec.keys == "tokens"):
        raise ValueError(f"key_format: got {key_format!r} with cache_format {cache_format!r}, expected None")
    return replace(layouts, indexer=KEY_FORMATS[key_format])


class Ring(NamedTuple):
    """A request's ring of a layer.

    Attributes:
        capacity, values, dtype: its rows, the values of one, and their type
        restart: shape of a request's restart_rows
    """

    capacity: int
    values: int
    dtype: np.dtype[Any]
    restart: tuple[int, ...]

    @classmethod
    def of(cls, spec: LayerSpec, layouts: Formats, num_speculative_tokens: int) -> Ring:
        """Of a layer with pooled keys: their raw keys and gates; of another layer: latents and their scores."""
        if spec.keys != "pools":
            return cls(ring_capacity(num_speculative_tokens), RING_VALUES, PLAIN_DTYPES["float32"], (RING_VALUES,))
        dtype = PLAIN_DTYPES["float32" if layouts.indexer is INDEXER_F32 else "bfloat16"]
        capacity = ring_capacity(num_speculative_tokens, spec.pool)
        return cls(capacity, 2 * INDEX_DIM, dtype, (spec.pool - 1, 2 * INDEX_DIM))


class Paged(NamedTuple):
    """A paged cache that a layer reads: the group of its pages, its format, rows of a page; `owned` if it writes it."""

    group: str
    layout: CacheLayout
    rows: int
    owned: bool


def paged_caches(spec: LayerSpec, layouts: Formats, block_size: int, compressed_block_size: int) -> dict[str, Paged]:
    """The paged caches of a layer, except states, by their names in LayerCaches."""
    found, group, layout, rows = dict[str, Paged](), "rows", layouts.rows, block_size
    if spec.rows == "window":
        found["window"] = Paged("window", layouts.rows, block_size, True)
        group, layout, rows = "compressed", layouts.compressed, compressed_block_size // max(spec.ratio, 1)
    if spec.ratio:
        found[group] = Paged(group, layout, rows, spec.owns_rows)
    if spec.selects:
        found["indexer"] = Paged(group, layouts.indexer, keys_of_page(spec, rows), spec.owns_keys)
    return found


def states_of(spec: LayerSpec) -> dict[str, int]:
    """The caches of a layer's unfinished compressed rows: the values of a position."""
    states = (("state", LATENT), ("indexer_state", INDEX_DIM))[: 1 + spec.selects]
    return {name: (4 if spec.overlap else 2) * dim for name, dim in states} if spec.pooling == "compressor" else {}


def keys_of_page(spec: LayerSpec, page_rows: int) -> int:
    """Index keys of a page with page_rows rows. Raises ValueError unless a page has whole pools."""
    if page_rows % spec.pool:
        raise ValueError(f"block_size: got {page_rows}, expected a multiple of {spec.pool}, the rows of an index key")
    return page_rows // spec.pool


def allocate(layout: CacheLayout, num_blocks: int, block_size: int, xp: Any) -> Any:
    """A zeroed cache: bytes of an FP8 or FP4 layout, or rows of 16- or 32-bit values, [num_blocks, block_size, ..]."""
    check_integers(1, block_size=block_size)
    if layout.num_scales:
        return layout.allocate(num_blocks, block_size, xp)
    return xp.zeros((num_blocks, block_size, layout.head_dim), PLAIN_DTYPES[layout.value_type])


@dataclass(frozen=True)
class LayerCaches:
    """The caches of one layer; None where it has no such cache. Layers that share rows have the same arrays for them.

    Attributes:
        rows: latent rows: [num_blocks, block_size, 656] uint8 (or [.., 576] numbers)
        window: rows of the window: [num_blocks, block_size, 584 or 528] uint8 (or [.., 512] numbers)
        compressed: [num_blocks, compressed_block_size / ratio, 584, 528 or 288] uint8 (or [.., 512] numbers)
        indexer: [num_blocks, keys of a page, 132 or 68] uint8 (or [.., 128] numbers), index keys, in the pages of the
            block table of rows or compressed; pooled keys: block_size / pool in a page
        state: float32 [num_blocks, state_block_size, 2 * coff * 512], of the compressor
        indexer_state: float32 [num_blocks, state_block_size, 512], of the indexer's compressor
        ring: float32 [rings, capacity, 1024], tokens that a later step pools: one ring a request. Of pooled keys
            bfloat16 [rings, capacity, 256], or float32 with float32 caches
        restart_rows: float32 [rings, 1024], of pooled keys [rings, pool - 1, 256] of ring's dtype, and
        restart_positions: int32 [rings], arguments of compress_latents and indexer_kpool_and_insert that allow a step
            to be run again. None: a step that begins within a pool and is longer than the ring must not be run again
    """

    rows: Any = None
    window: Any = None
    compressed: Any = None
    indexer: Any = None
    state: Any = None
    indexer_state: Any = None
    ring: Any = None
    restart_rows: Any = None
    restart_positions: Any = None

    @classmethod
    def allocate(
        cls,
        spec: LayerSpec,
        serving: ServingConfig,
        blocks: Mapping[str, int],
        *,
        owner: LayerCaches | None = None,
        cache_format: CacheFormat | None = None,
        key_format: KeyFormat | None = None,
        state_block_size: int | None = None,
        xp: Any = np,
    ) -> LayerCaches:
        """Zeroed caches of a layer.

        Args:
            blocks: pages of each group of `spec.groups()`: "rows" and "window" of serving.block_size positions,
                "compressed" of serving.compressed_block_size, "states4" and "states128" of state_block_size; "rings":
                requests at a time. At least one where the layer owns a cache of the group
            owner: caches of `spec.row_source`, if that is another layer
            cache_format: "fp8", "bfloat16", on the host also "float32"; for V4.1 also "fp4" (compressed rows in
                DSV41_FP4, the window's in DSV41_FP8), "fp4_split" and "fp8_split" (scales at the page's end). None:
                "fp4" for V4.1, "fp8" for others
            key_format: of index keys: "fp8", or for V4.1 "mxfp4" of 68 bytes a row. None: "fp8", or the type of rows
                that are not quantised
            state_block_size: None: STATE_BLOCK_SIZES[ratio]
        """
        check_kind(LayerSpec, spec=spec)
        check_kind(ServingConfig, serving=serving)
        check_kind(Mapping, blocks=blocks)
        check_optional_size(state_block_size=state_block_size)
        layouts, shares = formats_of(spec, cache_format, key_format), not spec.owns_rows and spec.ratio > 0
        if shares != (owner is not None):
            expected = f"the caches of layer {spec.row_source}" if shares else "None"
            raise ValueError(f"owner: got {'None' if owner is None else 'caches'}, expected {expected}")
        if owner is not None:
            check_kind(LayerCaches, owner=owner)
        for group in spec.groups():
            if spec.owns_keys or not (shares and group in ("rows", "compressed")):
                check_integers(1, **{f"blocks[{group!r}]": blocks.get(group, 0)})
        found: dict[str, Any] = {}
        if owner is not None:
            names = ("compressed", "indexer") if spec.rows == "window" else ("rows",)
            found = {name: getattr(owner, name) for name in names}
        paged = paged_caches(spec, layouts, serving.block_size, serving.compressed_block_size)
        found |= {
            name: allocate(cache.layout, blocks[cache.group], cache.rows, xp)
            for name, cache in paged.items() if cache.owned
        }  # fmt: skip
        if states := states_of(spec):
            block = state_block_size or STATE_BLOCK_SIZES[spec.ratio]
            pages = blocks[f"states{spec.ratio}"]
            found |= {name: xp.zeros((pages, block, values), np.float32) for name, values in states.items()}
        elif "rings" in spec.groups():
            rings, ring = blocks["rings"], Ring.of(spec, layouts, serving.num_speculative_tokens)
            found["ring"] = xp.zeros((rings, ring.capacity, ring.values), ring.dtype)
            found["restart_rows"] = xp.zeros((rings, *ring.restart), ring.dtype)
            found["restart_positions"] = xp.zeros(rings, np.int32)
        return cls(**found)
