"""An attention layer of a DeepSeek V4.1 model, and its configuration from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..dispatch.values import check_choice, check_integers
from .attention import SparseAttention
from .config_validation import check_all_read, check_list, check_rotated, check_same, names_of, numbers_of, rope_of
from .deepseek_v4 import HEAD_DIM, ONE_ROW, WindowConfig
from .layer_spec import ROPE_DIM, LayerSpec
from .rope import checked_scaling
from .weights import V41_ATTENTION

LISTS = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")


@dataclass(frozen=True)
class DeepseekV41Config(WindowConfig):
    """Sizes and parameters of a model's attention layers, named as in the published configuration.

    Attributes:
        compress_ratios: one a layer: 0 window only, 1 or 2 with compressed rows. Layers from num_hidden_layers on
            predict further tokens and have ratio 0
        kv_source_layer_ids: layers that own compressed rows and index keys. Layers up to the next owner read them
        index_source_layer_ids: layers that select rows; a layer takes the selection of the last one up to itself. Every
            owner of rows selects
        candidate_source_layer_id: layer that chooses candidate blocks. Later selections are limited to these; -1: none
        candidate_topk_blocks: number of candidate blocks, of candidate_block_size rows each
    """

    model_types: ClassVar = ("deepseek_v41", "deepseek_v41_text")
    names: ClassVar = V41_ATTENTION
    scale_block: ClassVar = (32, 32)
    in_bfloat16: ClassVar = ("wo_a.", "indexer.wk.")
    draft_module: ClassVar = "mtp.{}.attn."

    kv_source_layer_ids: tuple[int, ...] = field(kw_only=True)
    index_source_layer_ids: tuple[int, ...] = field(kw_only=True)
    num_hidden_layers: int = field(kw_only=True)
    candidate_source_layer_id: Any = -1
    candidate_topk_blocks: Any = 0
    candidate_block_size: int = 8
    index_n_heads: int = 32
    rms_norm_eps: float = 1e-20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(-1, candidate_source_layer_id=self.candidate_source_layer_id)
        check_integers(0, candidate_topk_blocks=self.candidate_topk_blocks)
        check_list("compress_ratios", self.compress_ratios, self.num_hidden_layers)
        for name in LISTS:
            check_list(name, getattr(self, name), 0)
            check_integers(0, **{f"{name}[{i}]": value for i, value in enumerate(getattr(self, name))})
            object.__setattr__(self, name, tuple(int(value) for value in getattr(self, name)))
        for layer, ratio in enumerate(self.compress_ratios):
            check_choice((0, 1, 2), **{f"compress_ratios[{layer}]": ratio})
            if ratio and layer >= self.num_hidden_layers:
                raise ValueError(
                    f"compress_ratios[{layer}]: got {ratio}, expected 0 for a layer from num_hidden_layers on"
                )
        self._check_sources()

    def _check_sources(self) -> None:
        for name in LISTS[1:]:
            for layer in getattr(self, name):
                if not self.ratio(layer):
                    raise ValueError(f"{name}: got {layer}, expected layers of ratio 1 or 2")
        for layer in self.kv_source_layer_ids:
            if layer not in self.index_source_layer_ids:
                raise ValueError(f"index_source_layer_ids: got none for {layer}, expected every kv_source_layer_ids")
        for layer in range(self.num_hidden_layers):
            if not self.ratio(layer):
                continue
            source = self.kv_source(layer)
            if source is None or self.ratio(source) != self.ratio(layer):
                found = "no layer" if source is None else f"layer {source} of ratio {self.ratio(source)}"
                raise ValueError(
                    f"kv_source_layer_ids: got {found} for layer {layer}, expected one of ratio {self.ratio(layer)}"
                )
        source = self.candidate_source_layer_id
        if source < 0:
            return
        if source not in self.index_source_layer_ids:
            raise ValueError(f"candidate_source_layer_id: got {source}, expected one of index_source_layer_ids, or -1")
        check_integers(1, candidate_topk_blocks=self.candidate_topk_blocks)
        for layer in self.index_source_layer_ids:
            if layer > source and self.ratio(layer) != self.ratio(source):
                raise ValueError(
                    f"candidate_source_layer_id: got {source} of ratio {self.ratio(source)}, but layer {layer} after "
                    f"it selects rows of ratio {self.ratio(layer)}"
                )

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        check_all_read(config, (*names_of(cls), "rope_parameters", "partial_rotary_factor"), ONE_ROW)
        for name in LISTS:
            if name not in config:
                raise ValueError(f"{name}: the configuration has none, expected a list")
        numbers = numbers_of(cls, config, besides=("rope_scaling",))
        rope = rope_of(config)
        checked_scaling(rope)
        check_rotated(ROPE_DIM, HEAD_DIM, config, rope or {})
        # The published code has no factor on cosines and sines, unlike YaRN's formula, and rounds the ramp's ends.
        scaling = None
        if rope is not None:
            scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "truncate")}
            if scaling.get("rope_type", scaling.get("type")):
                scaling = {"attention_factor": 1.0, **scaling}
        found = cls(**numbers, rope_scaling=scaling)
        check_same("rope_scaling.rope_theta", (rope or {}).get("rope_theta"), found.rope_theta)
        return found

    def ratio(self, layer: int) -> int:
        """The layer's compress ratio; 0 after the end of the list."""
        return self.compress_ratios[layer] if layer < len(self.compress_ratios) else 0

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed rows this one reads; None at ratio 0."""
        return self._source(layer, self.kv_source_layer_ids)

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection this one takes; None at ratio 0."""
        return self._source(layer, self.index_source_layer_ids)

    def reads_candidates(self, layer: int) -> bool:
        """Whether the layer selects rows of the candidate blocks alone."""
        return layer in self.index_source_layer_ids and 0 <= self.candidate_source_layer_id < layer

    def _source(self, layer: int, sources: tuple[int, ...]) -> int | None:
        if not self.ratio(layer):
            return None
        return max((source for source in sources if source <= layer), default=None)

    def spec(self, layer: int) -> LayerSpec:
        check_integers(0, layer=layer)
        ratio, selects = self.ratio(layer), layer in self.index_source_layer_ids
        candidates = "read" if self.reads_candidates(layer) else "none"
        if layer == self.candidate_source_layer_id:
            candidates = "written"
        return LayerSpec(
            layer=layer, **self.one_row(ratio > 0), row_source=self.kv_source(layer), ratio=ratio,
            selection=("own" if selects else "source") if ratio else "none", selection_source=self.index_source(layer),
            states="ring" if ratio > 1 else "none", keys="latents" if selects else "none", candidates=candidates,
            candidate_source=self.candidate_source_layer_id if candidates != "none" else None,
            candidate_blocks=self.candidate_topk_blocks, candidate_block_size=self.candidate_block_size,
            cache_formats="v41",
        )  # fmt: skip


class DeepseekV41Attention(SparseAttention):
    """`SparseAttention` with a DeepseekV41Config."""

    config_type = DeepseekV41Config
