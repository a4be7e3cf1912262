"""The page groups of a replay's layers, and what prefix hits need of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..layout import INDEXER_FP8, MLA_BF16
from ..pages import Description, Group, PagedCache, describe
from ..pages.describe import cache_of
from .blocks import BLOCK_TOKENS
from .dense import DENSE
from .model_layers import CACHE_FORMAT
from .models import model_config
from .options import LAYER_RATIOS, MODEL_LAYERS, MODEL_OF, V41_CACHE_FORMATS, ReplayOptions
from .step_batch import SWA_BLOCK


class LayerGroups(NamedTuple):
    """Layers that share block tables.

    Attributes:
        name: "sparse", "mla" or the model
        description: of their page groups; a block of the replay is whole pages of each
        caches: of each layer, by the description's names
    """

    name: str
    description: Description
    caches: list[Any]


def groups_of(layers: Sequence[Any], options: ReplayOptions) -> list[LayerGroups]:
    """The page groups of an engine's layers on one device."""
    found = []
    sparse = [layer for layer in layers if layer.name in LAYER_RATIOS]
    if sparse:
        found.append(LayerGroups("sparse", _sparse(sparse, options), [_sparse_caches(layer) for layer in sparse]))
    dense = [layer for layer in layers if layer.name == DENSE]
    if dense:
        found.append(LayerGroups(DENSE, _dense(dense), [SimpleNamespace(rows=layer.cache) for layer in dense]))
    models = [layer for layer in layers if layer.name in MODEL_OF]
    while models:
        model = models[0].model
        count = len(MODEL_LAYERS[model])
        caches = [layer.caches for layer in models[:count]]
        found.append(LayerGroups(model, _model(model, count, options), caches))
        models = models[count:]
    return found


def hits_by_group(layers: Iterable[LayerGroups], hits: Iterable[int]) -> list[dict[str, Any]]:
    """What hits of these numbers of tokens need of each group, all together."""
    lengths, rows = [tokens for tokens in hits if tokens], []
    for name, description, _ in layers:
        for group in description:
            parts = [group.part(tokens) for tokens in lengths]
            pages = sum(len(part.pages) for part in parts)
            rows.append(
                {
                    "layers": name,
                    "group": group.name,
                    "page_tokens": group.tokens,
                    "page_bytes": group.page_bytes,
                    "hits": len(lengths),
                    "positions": sum(part.end - part.first for part in parts),
                    "pages": pages,
                    "bytes": pages * group.page_bytes,
                }
            )
    return rows


def _model(model: str, count: int, options: ReplayOptions) -> Description:
    formats: dict[str, Any] = {"cache_format": CACHE_FORMAT}
    if model == "v41":
        formats = {"cache_format": V41_CACHE_FORMATS[options.v41_layout], "key_format": options.index_keys}
    return describe(
        model_config(model, options), layers=count, block_size=SWA_BLOCK, compressed_block_size=BLOCK_TOKENS,
        name=model, **formats,
    )  # fmt: skip


def _sparse(layers: Sequence[Any], options: ReplayOptions) -> Description:
    first, second = options.formats
    window = cache_of(first, "window", tuple(range(len(layers))), SWA_BLOCK)
    groups = [Group(name="window", tokens=SWA_BLOCK, lifetime="window", reach=options.window - 1, caches=(window,))]
    rows = []
    for number, layer in enumerate(layers):
        for name, layout in (("compressed", second), ("indexer", INDEXER_FP8)):
            if getattr(_sparse_caches(layer), name) is not None:
                rows.append(cache_of(layout, name, (number,), BLOCK_TOKENS // layer.ratio, layer.ratio))
    if rows:
        groups.append(Group(name="compressed", tokens=BLOCK_TOKENS, lifetime="request", reach=0, caches=tuple(rows)))
    return Description(model="sparse", digest="", layers=len(layers), drafts=0, groups=tuple(groups))


def _sparse_caches(layer: Any) -> SimpleNamespace:
    indexer = None if layer.indexer is None else layer.indexer.cache
    return SimpleNamespace(window=layer.swa_cache, compressed=layer.compressed_cache, indexer=indexer)


def _dense(layers: Sequence[Any]) -> Description:
    row, cache = layers[0].row_bytes, layers[0].cache
    rows = PagedCache(
        cache="rows", layers=tuple(range(len(layers))), layout=f"{cache.dtype} [{MLA_BF16.head_dim}]", positions=1,
        rows=SWA_BLOCK, row_bytes=row, tail_bytes=0, page_bytes=SWA_BLOCK * row, stride=SWA_BLOCK * row, alignment=1,
    )  # fmt: skip
    group = Group(name="rows", tokens=SWA_BLOCK, lifetime="request", reach=0, caches=(rows,))
    return Description(model=DENSE, digest="", layers=len(layers), drafts=0, groups=(group,))
