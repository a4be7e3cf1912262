"""An attention layer of Mistral Large 4: queries from hidden states, rows that layers share, layers without RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..dispatch.values import check_choice, check_integers, shown
from .attention import SparseAttention
from .config_validation import check_list, rope_of
from .deepseek_v32 import LatentConfig
from .glm_moe_dsa import SELECTION, check_selecting, selecting_layers, selection_of
from .layer_spec import ROPE_DIM, LayerSpec
from .weights import V32_ATTENTION

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "original_max_position_embeddings": 512,
    "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
}  # fmt: skip
EVERY = 4  # layers, of which the last has no RoPE
PUBLISHED = {
    "wq.weight": "q_proj.weight", "wkv_a_with_mqa.weight": "kv_a_proj_with_mqa.weight",
    "kv_a_norm.weight": "kv_a_layernorm.weight", "ssmax_scaling.s": "softmax_scaling.scale",
    "ssmax_scaling.b": "softmax_scaling.bias", "indexer.ssmax_scaling.s": "indexer.softmax_scaling.scale",
    "indexer.ssmax_scaling.b": "indexer.softmax_scaling.bias",
    **{name: name for name in ("indexer.q_input_norm.weight", "indexer.q_input_norm.bias")},
}  # fmt: skip


@dataclass(frozen=True)
class MistralLarge4Config(LatentConfig):
    """Sizes and parameters of a model's attention layers, named as in transformers' configuration.

    Attributes:
        qk_nope_head_dim: of a layer with RoPE; without RoPE all values of a head are not rotated
        selecting: layers that select for themselves; the others take the selection of the last one before them
        no_rope_layers: 1 for a layer with RoPE, 0 for a layer without
        kv_source_layers: the layer whose rows each layer reads, its own number for an owner
        rms_norm_eps: also of the norm of rows
    """

    model_types: ClassVar = ("mistral_large4", "mistral_large4_text")
    also_read: ClassVar = (*SELECTION, "head_dim")  # head_dim has no effect
    computed: ClassVar = {"indexer_rope_interleave": True}
    names: ClassVar = V32_ATTENTION | PUBLISHED
    model_names: ClassVar = {"lerope.alpha": "rotary_emb.alpha"}  # of a weight that all layers share
    published: ClassVar = {
        **{name: name for name in (*V32_ATTENTION, *PUBLISHED, *model_names)},
        "wkv_a.weight": "wkv_a_with_mqa.weight", "kv_norm.weight": "kv_a_norm.weight",
    }  # fmt: skip
    module: ClassVar = "layers.{}.attention."

    hidden_size: int
    num_attention_heads: int
    num_hidden_layers: int
    selecting: tuple[int, ...]
    no_rope_layers: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    qk_nope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 32
    index_topk: int = 2048
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default_factory=lambda: dict(YARN))

    def __post_init__(self) -> None:
        super().__post_init__()
        factors = {name: (self.rope_scaling or {}).get(name) for name in ("attention_factor", "mscale_all_dim")}
        for (name, value), fixed in zip(factors.items(), (1, 0), strict=True):
            if (value if value is not None else fixed) != fixed:
                raise ValueError(f"rope_scaling.{name}: got {shown(value)}, expected {fixed}")
        check_selecting(self.selecting)
        for name in ("no_rope_layers", "kv_source_layers"):
            check_list(name, getattr(self, name), self.num_hidden_layers)
        for layer in range(self.num_hidden_layers):
            source = self.kv_source_layers[layer]
            check_choice((0, 1), **{f"no_rope_layers[{layer}]": self.no_rope_layers[layer]})
            check_integers(0, layer, **{f"kv_source_layers[{layer}]": source})
            if self.kv_source_layers[source] != source:
                raise ValueError(f"kv_source_layers[{layer}]: got {source}, which has no rows, expected an owner")
            if self.no_rope_layers[source] != self.no_rope_layers[layer]:
                raise ValueError(
                    f"kv_source_layers[{layer}]: got {source}, expected a layer that has RoPE as layer {layer} has, or "
                    "lacks it"
                )

    @classmethod
    def read(cls, config: Mapping[str, Any], **fields: Any) -> Self:
        selecting, layers = selecting_layers(config), config["num_hidden_layers"]
        rope = rope_of(config) or YARN
        if rope.get("attention_factor") is None:
            rope = {**rope, "attention_factor": 1.0}
        lists = {"no_rope_layers": [int((layer + 1) % EVERY != 0) for layer in range(layers)]}
        lists["kv_source_layers"] = list(range(layers))
        for name in lists:
            if config.get(name) is not None:
                check_list(name, config[name], layers)
                lists[name] = config[name]
        tuples = {name: tuple(entries[:layers]) for name, entries in lists.items()}
        return super().read({**config, "rope_parameters": rope, "rope_scaling": None}, selecting=selecting, **tuples)

    def spec(self, layer: int) -> LayerSpec:
        check_integers(0, layer=layer)
        if layer >= self.num_hidden_layers:
            raise ValueError(
                f"layer: got {layer}, expected at most {self.num_hidden_layers - 1}: the attention of Mistral's draft "
                "layers (mtp_dspark) is dense, and is not served"
            )
        rotates = bool(self.no_rope_layers[layer])
        pairs, rope_dim = ("neighbours", ROPE_DIM) if rotates else ("none", 0)
        return LayerSpec(
            layer=layer, hidden_size=self.hidden_size, heads=self.num_attention_heads,
            nope_dim=self.qk_nope_head_dim + ROPE_DIM - rope_dim, rope_dim=rope_dim, v_dim=self.v_head_dim,
            softmax_scale=self.softmax_scale, rows="latent", row_source=self.kv_source_layers[layer],
            **selection_of(self, layer), index_heads=self.index_n_heads, topk=self.index_topk,
            index_queries="hidden", index_pairs=pairs, index_part="first", rope_pairs=pairs,
            rope_theta=self.rope_theta, rope_scaling=self.rope_scaling, learned_rope=rotates, position_scale=True,
            row_eps=self.rms_norm_eps,
        )  # fmt: skip


class MistralLarge4Attention(SparseAttention):
    """`SparseAttention` with a MistralLarge4Config."""

    config_type = MistralLarge4Config
