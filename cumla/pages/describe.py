"""The page groups of a model, from its configuration and the sizes of its pages."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.values import check_choice, check_integers, check_kind, check_optional_size
from ..layout import CacheLayout
from ..metadata.slots import STATE_BLOCK_SIZES
from ..models.caches import Formats, Ring, formats_of, paged_caches, states_of
from ..models.layer_spec import LayerSpec
from ..models.registry import CONFIGS, config_from
from .description import Description, Group, PagedCache

ORDER = ("rows", "window", "compressed", "rank_rows", "states4", "states128", "rings")
SHARDED = {"rows": "rows", "compressed": "compressed"}  # by group, the cache whose rows are sharded across ranks
DRAFT = "draft_"
FLOAT32_BYTES = 4


class _Found(NamedTuple):
    """A cache of a layer, and its group."""

    group: str
    cache: PagedCache


@dataclass(frozen=True)
class _Sizes:
    """Positions of pages, and rows of rings."""

    block: int
    compressed: int
    states: Mapping[int, int]
    speculative: int


def describe(
    config: Any,
    ranks: int = 1,
    *,
    rank: int = 0,
    interleave: int = 1,
    layers: int | None = None,
    drafts: int = 0,
    cache_format: str | None = None,
    key_format: str | None = None,
    block_size: int = 64,
    compressed_block_size: int = 256,
    state_block_sizes: Mapping[int, int] = STATE_BLOCK_SIZES,
    num_speculative_tokens: int = 0,
    name: str | None = None,
) -> Description:
    """The page groups of a model: what their pages hold, how long they are needed, and what a prefix hit needs.

    Args:
        config: a model's configuration (`DeepseekV4Config`), or the contents of its config.json
        ranks: ranks that the context is sharded across (`cumla.parallel`); the description is of one of them, `rank`
        interleave: neighbouring rows that go to the same rank (`cumla.parallel.Shard`)
        layers: number of layers; None: the configuration's. DeepseekV32Config has none
        drafts: draft layers, numbered after the others
        cache_format: of the caches, as of the model's layers; None: "fp8", for V4.1 "fp4"
        key_format: of V4.1's index keys
        block_size: positions of a page of latent rows or of window rows; compressed_block_size of compressed rows
        state_block_sizes: positions of a page of V4's states, by compress ratio
        num_speculative_tokens: draft tokens that a step verifies, by which rings grow
        name: of the checkpoint, for the headers of `pack`; None: the configuration's type

    Raises TypeError or ValueError for an argument that does not fit, and for the configuration of another model.
    """
    if isinstance(config, Mapping):
        layers = config.get("num_hidden_layers") if layers is None else layers
        config = config_from(config)
    if type(config) not in set(CONFIGS.values()):
        raise TypeError(f"config: got {type(config).__name__}, expected the configuration of a model")
    check_integers(1, ranks=ranks)
    check_integers(0, ranks - 1, rank=rank)
    check_integers(1, interleave=interleave, block_size=block_size, compressed_block_size=compressed_block_size)
    check_integers(0, drafts=drafts, num_speculative_tokens=num_speculative_tokens)
    check_optional_size(layers=layers)
    check_kind(Mapping, state_block_sizes=state_block_sizes)
    count = _num_layers(config, layers)
    sizes = _Sizes(block_size, compressed_block_size, state_block_sizes, num_speculative_tokens)
    numbers = (*getattr(config, "sparse", range(count)), *range(count, count + int(drafts)))
    specs = [config.spec(layer) for layer in numbers]
    found = [
        item._replace(group=DRAFT + item.group) if spec.layer >= count else item
        for spec in specs
        for item in _caches(spec, formats_of(spec, cache_format, key_format), sizes)
    ]
    if ranks > 1:
        found = [_sharded(item) for item in found]
    window = max((spec.window for spec in specs), default=0)
    pool = max(spec.pool if spec.rows == "latent" else spec.ratio for spec in specs)
    names = sorted({item.group for item in found}, key=lambda x: (x.startswith(DRAFT), ORDER.index(_plain(x))))
    groups = []
    for group in names:
        caches = _merged([item.cache for item in found if item.group == group])
        groups.append(_group(group, caches, window, pool, (int(rank), int(ranks), int(interleave))))
    return Description(
        model=name or type(config).__name__, digest=_digest(specs), layers=count, drafts=int(drafts),
        groups=tuple(groups),
    )  # fmt: skip


def cache_of(layout: CacheLayout, name: str, layers: tuple[int, ...], rows: int, positions: int = 1) -> PagedCache:
    """A cache of a format, in these layers, with so many rows of a page and positions of a row."""
    tail = layout.scale_bytes if layout.scale_placement == "page_tail" else 0
    return PagedCache(
        cache=name, layers=layers, layout=layout.name, positions=positions, rows=rows, row_bytes=layout.row_bytes,
        tail_bytes=tail, page_bytes=rows * layout.token_bytes, stride=layout.page_bytes(rows),
        alignment=math.lcm(layout.page_alignment, layout.stride_multiple),
    )  # fmt: skip


def _num_layers(config: Any, layers: int | None) -> int:
    known = getattr(config, "num_hidden_layers", None) or len(getattr(config, "compress_ratios", ())) or layers
    if known is None:
        raise ValueError(f"layers: got None, expected the number of layers, which {type(config).__name__} lacks")
    if layers is not None and layers != known:
        raise ValueError(f"layers: got {layers}, expected {known} as the configuration has, or None")
    return int(known)


def _caches(spec: LayerSpec, layouts: Formats, sizes: _Sizes) -> Iterator[_Found]:
    """The caches that a layer owns."""
    layer = (spec.layer,)

    def of_numbers(group: str, cache: str, rows: int, width: int, kind: str = "float32", whole: bool = False) -> _Found:
        size = np.dtype(kind).itemsize * width
        return _Found(group, PagedCache(
            cache=cache, layers=layer, layout=f"{kind} [{width}]", positions=1, rows=rows, row_bytes=size,
            tail_bytes=0, page_bytes=rows * size, stride=rows * size, alignment=FLOAT32_BYTES, whole=whole,
        ))  # fmt: skip

    def of_ring() -> Iterator[_Found]:
        ring = Ring.of(spec, layouts, sizes.speculative)
        yield of_numbers("rings", "ring", ring.capacity, ring.values, ring.dtype.name)
        yield of_numbers("rings", "restart_rows", 1, math.prod(ring.restart), ring.dtype.name, whole=True)
        yield of_numbers("rings", "restart_positions", 1, 1, "int32", whole=True)

    if spec.rows == "window" and spec.ratio:
        _divided("compressed_block_size", sizes.compressed, spec.ratio)
    for name, cache in paged_caches(spec, layouts, sizes.block, sizes.compressed).items():
        positions = {"window": 1, "indexer": spec.ratio * spec.pool}.get(name, spec.ratio)
        if cache.owned:
            yield _Found(cache.group, cache_of(cache.layout, name, layer, cache.rows, positions))
    if states := states_of(spec):
        if spec.ratio not in sizes.states:
            raise ValueError(f"state_block_sizes: got {dict(sizes.states)}, expected one for ratio {spec.ratio}")
        block, group = sizes.states[spec.ratio], f"states{spec.ratio}"
        check_integers(1, **{f"state_block_sizes[{spec.ratio}]": block})
        for name, values in states.items():
            yield of_numbers(group, name, block, values)
    elif "rings" in spec.groups():
        yield from of_ring()


def _divided(name: str, size: int, ratio: int) -> int:
    if size % ratio:
        raise ValueError(f"{name}: got {size}, expected a multiple of {ratio}, the positions of a row")
    return size // ratio


def _sharded(item: _Found) -> _Found:
    """A cache on one of several ranks: those of rows have a block table of the rank's own."""
    if SHARDED.get(_plain(item.group)) != item.cache.cache:
        return item
    draft = DRAFT if item.group.startswith(DRAFT) else ""
    return _Found(draft + "rank_rows", dataclasses.replace(item.cache, sharded=True))


def _merged(caches: list[PagedCache]) -> tuple[PagedCache, ...]:
    """Caches that are equal but for their layers, as one with all their layers."""
    layers: dict[PagedCache, list[int]] = {}
    for cache in caches:
        layers.setdefault(dataclasses.replace(cache, layers=()), []).extend(cache.layers)
    return tuple(dataclasses.replace(cache, layers=tuple(its)) for cache, its in layers.items())


def _group(name: str, caches: tuple[PagedCache, ...], window: int, pool: int, shard: tuple[int, int, int]) -> Group:
    plain, first = _plain(name), caches[0]
    tokens, lifetime, reach, overlap = first.rows * first.positions, "request", 0, False
    if plain == "window":
        # A block of drafts sees the whole window before its first token; other tokens are within their own windows.
        lifetime, reach = "window", window if name.startswith(DRAFT) else window - 1
    elif plain.startswith("states"):
        lifetime, reach = "states", int(plain.removeprefix("states"))
        overlap = any(cache.cache == "indexer_state" for cache in caches)
    elif plain == "rings":
        tokens, lifetime, reach = 0, "ring", pool
    if any(cache.sharded for cache in caches):
        tokens *= shard[1]
    return Group(
        name=name, tokens=tokens, lifetime=lifetime, reach=reach, overlap=overlap, caches=caches,
        rank=shard[0], ranks=shard[1], interleave=shard[2],
    )  # fmt: skip


def _plain(group: str) -> str:
    name = group.removeprefix(DRAFT)
    check_choice(ORDER, group=name)
    return name


def _digest(specs: list[LayerSpec]) -> str:
    """Identifies how layers compute with caches: weights are not part of it."""
    text = json.dumps([dataclasses.asdict(spec) for spec in specs], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
