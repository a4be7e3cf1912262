"""An attention layer of a DeepSeek V3.2 model, and its configuration from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from .attention import SparseAttention
from .config import AttentionConfig
from .config_validation import (
    OWN_SELECTION,
    Choice,
    Each,
    check_all_read,
    check_rotated,
    names_of,
    numbers_of,
    rope_of,
    theta_of,
)
from .layer_spec import INDEX_DIM, LATENT, ROPE_DIM, LayerSpec
from .rope import checked_scaling, mscale
from .weights import V32_ATTENTION

READ = ("rope_parameters", "partial_rotary_factor", "num_key_value_heads")  # besides the fields; the last has no effect
COMPUTED = {
    "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": INDEX_DIM, "attention_bias": False,
    "index_kpool": 1, "rope_interleave": True,
}  # fmt: skip


class LatentConfig(AttentionConfig):
    """The base of a configuration of layers with latent rows.

    Attributes of a class:
        also_read, computed: of `check_all_read`, in addition to the fields, READ and COMPUTED
    """

    also_read: ClassVar[tuple[str, ...]] = ()
    computed: ClassVar[dict[str, Any]] = {}
    qk_nope_head_dim: int
    rope_scaling: Mapping[str, Any] | None

    @classmethod
    def read(cls, config: Mapping[str, Any], **fields: Any) -> Self:
        """fields: those that are not entries of config.json."""
        numbers = numbers_of(cls, config, besides=("rope_scaling", *fields))
        width = numbers.get("qk_nope_head_dim", cls.qk_nope_head_dim) + ROPE_DIM
        known = {"head_dim": Choice((ROPE_DIM, width)), "qk_head_dim": width, **COMPUTED, **cls.computed}
        check_all_read(config, (*names_of(cls), *READ, *cls.also_read), known)
        rope = rope_of(config)
        check_rotated(ROPE_DIM, ROPE_DIM, config, rope or {})
        return cls(**numbers | theta_of("rope_theta", rope or {}, config) | {"rope_scaling": rope} | fields)

    @property
    def softmax_scale(self) -> float:
        scale = float((self.qk_nope_head_dim + ROPE_DIM) ** -0.5)
        scaling = checked_scaling(self.rope_scaling)
        if scaling is not None and scaling.get("mscale_all_dim"):
            scale *= mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        return scale


@dataclass(frozen=True)
class DeepseekV32Config(LatentConfig):
    """Sizes and parameters of a model's attention layers, named as in transformers' configuration.

    Attributes:
        rope_scaling: None, or YaRN's parameters
        rms_norm_eps: epsilon of the norms around the layers; norms within a layer use 1e-6
    """

    model_types: ClassVar = ("deepseek_v32",)
    foreign: ClassVar = ("o_groups", "o_lora_rank", "compress_ratios", "compress_rates")
    computed: ClassVar[dict[str, Any]] = OWN_SELECTION | {
        "indexer_rope_interleave": False,
        "layer_types": Choice(Each(f"{kind}_attention") for kind in ("deepseek_sparse", "indexed", "full")),
    }  # fmt: skip
    names: ClassVar = V32_ATTENTION
    module: ClassVar = "model.layers.{}.self_attn."  # of a checkpoint

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    index_n_heads: int = 64
    index_topk: int = 2048
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 163840
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None

    def spec(self, layer: int) -> LayerSpec:
        """The description of a layer, of any number: the configuration does not say how many there are."""
        return LayerSpec(
            layer=layer, hidden_size=self.hidden_size, heads=self.num_attention_heads, q_rank=self.q_lora_rank,
            nope_dim=self.qk_nope_head_dim, rope_dim=ROPE_DIM, v_dim=self.v_head_dim, softmax_scale=self.softmax_scale,
            rows="latent", row_source=layer, selection="own", selection_source=layer, keys="tokens",
            index_heads=self.index_n_heads, topk=self.index_topk, index_pairs="halves", index_part="first",
            rope_theta=self.rope_theta, rope_scaling=self.rope_scaling,
        )  # fmt: skip


class DeepseekV32Attention(SparseAttention):
    """`SparseAttention` with a DeepseekV32Config."""

    config_type = DeepseekV32Config
