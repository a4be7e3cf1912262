"""What decides which kernels a model's attention calls."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InputError
from ..layout import DSV4_FP8, INDEXER_FP8, INDEXER_MXFP4, V32_FP8, CacheLayout
from ..ops.sparse_attention import V_DIM
from ..replay.options import FORMATS, V41_LAYOUT
from ..specs.inputs import Size
from ..specs.self_test import Case

# Cases that are for other kinds of models, by what their variant begins with.
FOREIGN = {
    "v4": ("V32", "MLA_BF16", "576"), "v41": ("V32", "MLA_BF16", "576"),
    "v32": ("DSV4", "MLA_BF16", "512", INDEXER_MXFP4.name),
    "mla": ("DSV4", "V32", INDEXER_MXFP4.name),
}  # fmt: skip
V4_OPS = ("compress_and_insert", "qnorm_rope_and_insert")  # not of V4.1
INDEX_HEADS = {"v4": 64, "v41": 32, "v32": 64, "mla": 1}  # of the published models
MOST_ROWS = 1 << 20  # among which a selection is made: their keys take 128 MiB
DENSE_OPS = ("concat_and_cache_mla", "gather_cache", "mha_varlen", "dense_mla_decode")


@dataclass(frozen=True)
class Model:
    """The sizes and formats of a model on one rank.

    kind    one of WARM_KINDS; "mla" is dense
    heads   query heads of one rank
    topk    compressed rows (v4, v41) or tokens (v32) that a token selects
    window  of V4's and V4.1's window caches
    layout  of these models' caches, one of FORMATS; of V4.1 one of V41_CACHE_FORMATS
    index_heads  heads of the indexer, which ranks do not share; 0: as the published model has
    context      positions of the longest context, or MOST_ROWS
    candidate_blocks  that V4.1's index layers choose
    """

    kind: str
    heads: int
    topk: int
    window: int = 128
    layout: str = DSV4_FP8.name
    index_heads: int = 0
    context: int = MOST_ROWS
    candidate_blocks: int = 2048

    def __post_init__(self) -> None:
        object.__setattr__(self, "index_heads", self.index_heads or INDEX_HEADS[self.kind])

    @property
    def formats(self) -> tuple[CacheLayout, CacheLayout]:
        """Formats of the first list's cache and of the second's."""
        return FORMATS[self.layout] if self.has_window else (V32_FP8, V32_FP8)

    @property
    def index_formats(self) -> tuple[CacheLayout, ...]:
        """Formats that the cache of index keys may have."""
        return (INDEXER_FP8, INDEXER_MXFP4) if self.kind == "v41" else (INDEXER_FP8,)

    def size(self, batch: int, block_size: int) -> Size:
        """Of a step of `batch` requests."""
        pages = 4
        context = pages * block_size
        return Size(batch, min(batch, context), self.heads, context, block_size, pages)

    @property
    def decode_tokens(self) -> int:
        """Tokens of a decode that verifies the guesses of the model's draft layers."""
        return 6 if self.kind == "v41" else 2

    @property
    def has_window(self) -> bool:
        return self.kind in ("v4", "v41")

    def needs(self, case: Case) -> bool:
        """Whether a case of `cumla check` is of operations and formats that the model calls."""
        if case.op in {"mla": (), "v41": (*DENSE_OPS, *V4_OPS)}.get(self.kind, DENSE_OPS):
            return False
        formats = {layout.name for pair in FORMATS.values() for layout in pair} - {x.name for x in self.formats}
        if self.layout == DSV4_FP8.name:
            formats.add(INDEXER_MXFP4.name)
        of_others = self.has_window and formats & set(case.variant.split(", "))
        return not (of_others or case.variant.startswith(FOREIGN[self.kind]))

    @classmethod
    def from_config(cls, path: Path, ranks: int) -> Model:
        """The calls of a checkpoint's config.json, its heads split over `ranks`. Raises InputError."""
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
            config = json.loads(text.removeprefix("\ufeff"))
        except OSError as error:
            raise InputError(f"--config: cannot read {path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"--config: {path} is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise InputError(f"--config: {path} holds no object")
        if config.get("model_type") == "deepseek_v41" and isinstance(config.get("text_config"), dict):
            config = config["text_config"]
        if "kv_source_layer_ids" in config:
            kind = "v41"
        elif "compress_ratios" in config or "compressed" in str(config.get("layer_types")):
            kind = "v4"
        elif "index_topk" in config:
            kind = "v32"
        elif "kv_lora_rank" in config:
            kind = "mla"
        else:
            raise InputError(f"--config: {path} is no model of DeepSeek's V2, V3, V3.2, V4 or V4.1 attention")

        def count(name: str, default: int | None, most: int = 2**20) -> int:
            value = config.get(name) or default
            if type(value) is not int or not 1 <= value <= most:
                raise InputError(f"--config: {name}: got {value!r}, expected an integer from 1 to {most}")
            return value

        rank = count("kv_lora_rank", V_DIM)
        if rank != V_DIM:
            raise InputError(f"--config: kv_lora_rank: got {rank}, expected {V_DIM}")
        heads = count("num_attention_heads", None)
        if heads % ranks:
            raise InputError(f"--ranks: got {ranks}, expected a divisor of num_attention_heads, {heads}")
        if not 1 <= heads // ranks <= 128:
            raise InputError(f"--ranks: got {ranks}, expected at most 128 of {heads} heads a rank")
        context = min(count("max_position_embeddings", MOST_ROWS, 2**31), MOST_ROWS)
        model = cls(
            kind, heads // ranks, count("index_topk", 512), count("sliding_window", 128),
            index_heads=count("index_n_heads", INDEX_HEADS[kind]), context=context,
            candidate_blocks=count("candidate_topk_blocks", 2048),
        )  # fmt: skip
        return replace(model, layout=V41_LAYOUT) if kind == "v41" else model
