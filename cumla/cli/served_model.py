"""What decides which kernels a model's attention calls."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..dispatch.values import check_integers
from ..errors import InputError
from ..layout import DSV4_FP8, INDEXER_FP8, INDEXER_MXFP4, V32_FP8, V32_NOPE_FP8, CacheLayout
from ..models.config_validation import check_fixed, numbers_of
from ..models.deepseek_v4 import DeepseekV4Config
from ..models.deepseek_v32 import DeepseekV32Config
from ..models.deepseek_v41 import DeepseekV41Config
from ..models.glm5_next import Glm5NextConfig
from ..models.registry import CONFIGS
from ..ops.indices import pooled_width
from ..ops.sparse_attention import MAX_HEADS, V_DIM
from ..replay.options import FORMATS, V41_LAYOUT
from ..specs.inputs import Size
from ..specs.self_test import Case

# Cases that are for other kinds of models, by what their variant begins with.
FOREIGN = {
    "v4": ("V32", "MLA_BF16", "576"), "v41": ("V32", "MLA_BF16", "576"),
    "v32": ("DSV4", "MLA_BF16", "512", INDEXER_MXFP4.name),
    "glm5_next": ("DSV4", "MLA_BF16", "576", V32_FP8.name, INDEXER_MXFP4.name),
    "mla": ("DSV4", "V32", INDEXER_MXFP4.name),
}  # fmt: skip
V4_OPS = ("compress_and_insert", "qnorm_rope_and_insert")  # not of V4.1
INDEX_HEADS = {"v4": 64, "v41": 32, "v32": 64, "glm5_next": 32, "mla": 1}  # of the published models
Q_RANKS = {"v4": 1024, "v41": 1280, "v32": 1536, "glm5_next": 1536}
GROUPED, HEADS_OF_GROUP = ("v4", "v41"), 8  # outputs of heads are projected by groups
POOLED = {"glm5_next": 4}  # tokens of an index key in the published model
MOST_ROWS = 1 << 20  # among which a selection is made: their keys take 128 MiB
DENSE_OPS = ("concat_and_cache_mla", "gather_cache", "mha_varlen", "dense_mla_decode")


@dataclass(frozen=True)
class DenseConfig:
    """What the calls of V2's and V3's attention depend on, of a config.json."""

    num_attention_heads: int
    max_position_embeddings: int = MOST_ROWS

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DenseConfig:
        """Raises TypeError or ValueError for missing heads, wrong sizes, and latent rows of another width."""
        check_fixed(config, kv_lora_rank=V_DIM)
        sizes = cls(**numbers_of(cls, config, besides=()))
        check_integers(1, 2**31 - 1, **vars(sizes))
        return sizes


# How models read their config.json: a model that refuses one would not run what is compiled for it.
READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "v4": DeepseekV4Config.from_dict, "v41": DeepseekV41Config.from_dict, "v32": DeepseekV32Config.from_dict,
    "glm5_next": Glm5NextConfig.from_dict, "mla": DenseConfig.from_dict,
}  # fmt: skip
MODEL_TYPES = {
    "deepseek_v4": "v4", "deepseek_v41": "v41", "deepseek_v41_text": "v41", "deepseek_v32": "v32",
    "deepseek_v2": "mla", "deepseek_v3": "mla", "glm_moe_dsa": "v32", "hy_v4": "v32",
    "mistral_large4": "v32", "mistral_large4_text": "v32",
    "glm5_next": "glm5_next", "glm5_next_text": "glm5_next",
}  # fmt: skip


def _kind_of(config: Mapping[str, Any], path: Path) -> str:
    """One of WARM_KINDS, by model_type or by the entries. Raises InputError."""
    kind = MODEL_TYPES.get(str(config.get("model_type")))
    if kind is not None:
        return kind
    if "kv_source_layer_ids" in config:
        return "v41"
    if "compress_ratios" in config or "compressed" in str(config.get("layer_types")):
        return "v4"
    if "index_topk" in config:
        return "v32"
    if "kv_lora_rank" in config:
        return "mla"
    raise InputError(f"--config: {path} is no model of DeepSeek's V2, V3, V3.2, V4 or V4.1 attention")


@dataclass(frozen=True)
class Model:
    """The sizes and formats of a model on one rank.

    Attributes:
        kind: one of WARM_KINDS; "mla" is dense
        heads: query heads of one rank
        topk: compressed rows (v4, v41) or tokens (v32, glm5_next) that a token selects
        window: of V4's and V4.1's window caches
        layout: of these models' caches, one of FORMATS; of V4.1 one of V41_CACHE_FORMATS
        index_heads: heads of the indexer, which ranks do not share; 0: as the published model has
        context: positions of the longest context, or MOST_ROWS
        candidate_blocks: that V4.1's index layers choose
        pool: tokens of an index key; 0: as the published model has
        batch_invariant: of layers and calls
        q_rank: values of the queries' latent; 0: as the published model has, or none
        o_groups: groups of heads of one rank whose outputs are projected together; 0: as the published model has, or
            none
    """

    kind: str
    heads: int
    topk: int
    window: int = 128
    layout: str = DSV4_FP8.name
    index_heads: int = 0
    context: int = MOST_ROWS
    candidate_blocks: int = 2048
    pool: int = 0
    batch_invariant: bool = False
    q_rank: int = 0
    o_groups: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "index_heads", self.index_heads or INDEX_HEADS[self.kind])
        object.__setattr__(self, "pool", self.pool or POOLED.get(self.kind, 1))
        object.__setattr__(self, "q_rank", self.q_rank or Q_RANKS.get(self.kind, 0))
        if self.kind in GROUPED:
            groups = self.o_groups or max(self.heads // HEADS_OF_GROUP, 1)
            object.__setattr__(self, "o_groups", math.gcd(groups, self.heads))

    @property
    def formats(self) -> tuple[CacheLayout, CacheLayout]:
        """Formats of the first list's cache and of the second's."""
        if self.has_window:
            return FORMATS[self.layout]
        return (V32_NOPE_FP8, V32_NOPE_FP8) if self.kind == "glm5_next" else (V32_FP8, V32_FP8)

    @property
    def index_formats(self) -> tuple[CacheLayout, ...]:
        """Formats that the cache of index keys may have."""
        return (INDEXER_FP8, INDEXER_MXFP4) if self.kind == "v41" else (INDEXER_FP8,)

    def size(self, batch: int, block_size: int) -> Size:
        """Of a step of `batch` requests."""
        pages = 4
        context = pages * block_size
        return Size(
            batch, rows=min(batch, context), heads=self.heads, topk=pooled_width(self.topk // self.pool, self.pool),
            window=self.window, context=context, block_size=block_size, pages=pages,
        )  # fmt: skip

    @property
    def decode_tokens(self) -> int:
        """Tokens of a decode that verifies the guesses of the model's draft layers."""
        return 6 if self.kind == "v41" else 2

    @property
    def has_window(self) -> bool:
        return self.kind in ("v4", "v41")

    def needs(self, case: Case) -> bool:
        """Whether a case of `cumla check` is of operations and formats that the model calls on one rank."""
        if case.kernels == "shards" or case.op in {"mla": (), "v41": (*DENSE_OPS, *V4_OPS)}.get(self.kind, DENSE_OPS):
            return False
        formats = {layout.name for pair in FORMATS.values() for layout in pair} - {x.name for x in self.formats}
        if self.layout == DSV4_FP8.name:
            formats.add(INDEXER_MXFP4.name)
        of_others = self.has_window and formats & set(case.variant.split(", "))
        return not (of_others or case.variant.startswith(FOREIGN[self.kind]))

    @classmethod
    def from_config(cls, path: Path, ranks: int) -> Model:
        """The calls of a checkpoint's config.json, its heads split over `ranks`.

        Raises InputError for what is no config.json, and for one that the model's own `from_dict` refuses.
        """
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
            config = json.loads(text.removeprefix("\ufeff"))
        except OSError as error:
            raise InputError(f"--config: cannot read {path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"--config: {path} is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise InputError(f"--config: {path} holds no object")
        kind = _kind_of(config, path)
        named = CONFIGS.get(str(config.get("model_type")))
        read = READERS[kind] if named is None else named.from_dict
        try:
            sizes = read(config)
        except (TypeError, ValueError) as error:
            raise InputError(f"--config: {error}") from None
        heads = sizes.num_attention_heads
        if heads % ranks:
            raise InputError(f"--ranks: got {ranks}, expected a divisor of num_attention_heads, {heads}")
        if heads // ranks > MAX_HEADS:
            raise InputError(f"--ranks: got {ranks}, expected at most {MAX_HEADS} of {heads} heads a rank")
        model = cls(
            kind, heads // ranks, getattr(sizes, "index_topk", 512), getattr(sizes, "sliding_window", 128),
            index_heads=getattr(sizes, "index_n_heads", 0), context=min(sizes.max_position_embeddings, MOST_ROWS),
            candidate_blocks=getattr(sizes, "candidate_topk_blocks", 0) or 2048, pool=getattr(sizes, "index_kpool", 0),
            q_rank=getattr(sizes, "q_lora_rank", 0), o_groups=getattr(sizes, "o_groups", 0) // ranks,
        )  # fmt: skip
        return replace(model, layout=V41_LAYOUT) if kind == "v41" else model
