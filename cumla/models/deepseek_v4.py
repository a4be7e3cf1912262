"""An attention layer of a DeepSeek V4 model, and its configuration from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..dispatch.values import check_choice, check_integers, check_kind, shown
from .attention import SparseAttention
from .config import AttentionConfig
from .config_validation import (
    MOST_LAYERS,
    OWN_SELECTION,
    check_all_read,
    check_list,
    check_rotated,
    check_same,
    names_of,
    numbers_of,
    rope_of,
    theta_of,
)
from .layer_spec import INDEX_DIM, LATENT, ROPE_DIM, LayerSpec
from .rope import checked_scaling
from .weights import V4_ATTENTION

LAYER_RATIOS = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
HEAD_DIM = LATENT
READ = ("layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")  # besides the fields
RATES = {"compress_rate_csa": 4, "compress_rate_hca": 128}
ONE_ROW = {  # all heads share one row of 512 values as key and value; its last 64 values are rotated
    "head_dim": HEAD_DIM, "qk_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM, "kv_lora_rank": HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM - ROPE_DIM, "qk_rope_head_dim": ROPE_DIM, "num_key_value_heads": 1,
    "attention_bias": False, "rope_interleave": True, "indexer_rope_interleave": True,
}  # fmt: skip


@dataclass(frozen=True)
class WindowConfig(AttentionConfig):
    """The base of V4's and V4.1's configurations.

    Attributes:
        compress_ratios: one a layer
        rope_theta: base of RoPE in layers without compressed rows; compress_rope_theta and rope_scaling in the others
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int = 64
    index_head_dim: int = INDEX_DIM
    index_topk: int = 512
    sliding_window: int = 128
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups: got {self.o_groups}, expected a divisor of {self.num_attention_heads} heads")
        if self.index_head_dim != INDEX_DIM:
            raise ValueError(f"index_head_dim: got {self.index_head_dim}, expected {INDEX_DIM}")

    def one_row(self, has_compressed: bool) -> dict[str, Any]:
        """Fields of a layer's description: layers with compressed rows have a RoPE of their own."""
        rope: dict[str, Any] = {"rope_theta": self.rope_theta}
        if has_compressed:
            rope = {"rope_theta": self.compress_rope_theta, "rope_scaling": self.rope_scaling}
        eps = dict.fromkeys(("q_eps", "row_eps", "key_eps"), self.rms_norm_eps)
        return {
            "hidden_size": self.hidden_size, "heads": self.num_attention_heads, "q_rank": self.q_lora_rank,
            "nope_dim": HEAD_DIM - ROPE_DIM, "rope_dim": ROPE_DIM, "v_dim": HEAD_DIM, "softmax_scale": HEAD_DIM**-0.5,
            "rows": "window", "window": self.sliding_window, "index_heads": self.index_n_heads,
            "topk": self.index_topk, "sink": True, "o_groups": self.o_groups, "o_rank": self.o_lora_rank,
        } | rope | eps  # fmt: skip


@dataclass(frozen=True)
class DeepseekV4Config(WindowConfig):
    """Sizes and parameters of a model's attention layers, named as in transformers' configuration.

    Attributes:
        compress_ratios: one a layer: 1 window only, 4 with an indexer, 128 without
    """

    model_types: ClassVar = ("deepseek_v4",)
    names: ClassVar = V4_ATTENTION

    def __post_init__(self) -> None:
        super().__post_init__()
        check_list("compress_ratios", self.compress_ratios, 1)
        for ratio in self.compress_ratios:
            check_integers(1, compress_ratios=ratio)
            check_choice((1, 4, 128), compress_ratios=ratio)
        object.__setattr__(self, "compress_ratios", tuple(int(ratio) for ratio in self.compress_ratios))

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        check_all_read(config, (*names_of(cls), *READ), ONE_ROW | OWN_SELECTION | RATES)
        numbers = numbers_of(cls, config, besides=("compress_ratios", "rope_scaling"))
        rates = config.get("compress_rates")
        if rates is not None:
            check_kind(Mapping, compress_rates=rates)
            for name, rate in rates.items():
                if rate != LAYER_RATIOS.get(name):
                    expected = LAYER_RATIOS.get(name, "no such entry")
                    raise ValueError(f"compress_rates.{name}: got {shown(rate)}, expected {expected}")
        rope = rope_of(config) or {}
        nested = {name: rope.get(name) or {} for name in ("main", "compress")}
        for name, part in nested.items():
            check_kind(Mapping, **{f"rope_parameters.{name}": part})
        main = nested["main"]
        check_rotated(ROPE_DIM, HEAD_DIM, config, main, nested["compress"] or rope)
        if "compress" in rope:
            if checked_scaling(main) is not None:
                raise ValueError("rope_parameters.main: got YaRN's scaling, expected plain RoPE in layers of ratio 1")
            scaling = nested["compress"]
            numbers |= theta_of("rope_theta", main, config)
            numbers |= theta_of("compress_rope_theta", scaling, config)
        else:  # published: the authors' code has no factor on cosines and sines, unlike YaRN's formula
            checked_scaling(rope)
            scaling = {"attention_factor": 1.0, **rope} if rope.get("rope_type", rope.get("type")) else rope
        # The first and last pair of YaRN's ramp are always rounded.
        scaling = {name: value for name, value in scaling.items() if name not in ("rope_theta", "truncate")}
        found = cls(**numbers, compress_ratios=_ratios(config), rope_scaling=scaling if rope else None)
        if "compress" not in rope:
            check_same("rope_parameters.rope_theta", rope.get("rope_theta"), found.rope_theta)
        return found

    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(map(self.spec, range(len(self.compress_ratios))))

    def spec(self, layer: int) -> LayerSpec:
        check_integers(0, len(self.compress_ratios) - 1, layer=layer)
        ratio = self.compress_ratios[layer] if self.compress_ratios[layer] > 1 else 0
        selection = {0: "none", 4: "own", 128: "all"}[ratio]
        return LayerSpec(
            layer=layer, **self.one_row(ratio > 0), norm_heads=True, row_source=layer if ratio else None, ratio=ratio,
            selection=selection, selection_source=layer if ratio == 4 else None, overlap=ratio == 4,
            states="pages" if ratio else "none", cache_formats="v4", keys="compressor" if ratio == 4 else "none",
        )  # fmt: skip


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The compress ratio of each layer. Further entries belong to layers that predict further tokens."""
    if "num_hidden_layers" not in config:
        raise ValueError("num_hidden_layers: the configuration has none, expected a number")
    layers = config["num_hidden_layers"]
    check_integers(1, MOST_LAYERS, num_hidden_layers=layers)
    types, ratios = config.get("layer_types"), config.get("compress_ratios")
    for name, entries in (("layer_types", types), ("compress_ratios", ratios)):
        if entries is not None:
            check_list(name, entries, layers)
    listed = None
    if ratios is not None:
        check_integers(0, **{f"compress_ratios[{layer}]": ratio for layer, ratio in enumerate(ratios[:layers])})
        listed = tuple(max(1, int(ratio)) for ratio in ratios[:layers])
    if types is None and listed is not None:
        return listed
    if types is None:  # the models' default pattern: two of ratio 128, then 128 and 4 alternating
        return tuple(128 if layer < 2 or layer % 2 == 0 else 4 for layer in range(layers))
    check_choice(tuple(LAYER_RATIOS), **{f"layer_types[{layer}]": name for layer, name in enumerate(types)})
    named = tuple(LAYER_RATIOS[name] for name in types[:layers])
    if listed not in (None, named):
        raise ValueError(f"compress_ratios: got {shown(ratios)}, expected {named}, as layer_types says")
    return named


class DeepseekV4Attention(SparseAttention):
    """`SparseAttention` with a DeepseekV4Config."""

    config_type = DeepseekV4Config
