"""A sparse attention layer of GLM-5.3-Flash: latent rows without RoPE, and an index key for several tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..dispatch.values import check_choice, check_integers, shown
from ..ops.key_pools import MOST_POOLED
from .attention import SparseAttention
from .config import AttentionConfig
from .config_validation import MOST_LAYERS, Choice, check_all_read, check_list, names_of, numbers_of
from .glm_moe_dsa import SELECTION, selecting_layers, selection_of
from .layer_spec import INDEX_DIM, LATENT, LayerSpec
from .weights import V32_ATTENTION

SPARSE, LINEAR = ("indexed_attention", "full_attention"), "linear_attention"
# Besides the fields. RoPE's entries, the widths of heads and num_key_value_heads have no effect.
READ = (
    *SELECTION, "layer_types", "linear_attn_config", "head_dim", "num_key_value_heads", "rope_interleave",
    "indexer_rope_interleave", "index_share_for_mtp_iteration", "rope_theta",
)  # fmt: skip
COMPUTED = {
    "kv_lora_rank": LATENT, "qk_rope_head_dim": 0, "index_head_dim": INDEX_DIM, "attention_bias": False,
    "index_kpool_compress": True, "index_kpool_always_select_tail": True, "rope_parameters": Choice(({},)),
    "rope_scaling": Choice(({},)), "nope_on_full_attention": True,
}  # fmt: skip


@dataclass(frozen=True)
class Glm5NextConfig(AttentionConfig):
    """Sizes and parameters of a model's sparse attention layers, named as in transformers' configuration.

    Attributes:
        sparse: numbers of the sparse attention layers; the others are linear attention (KDA), which cumla does not have
        selecting: the sparse layers that select for themselves; the others take the selection of the one before them.
            Layers from num_hidden_layers on, which predict further tokens, select for themselves
        index_topk: tokens that a token selects, index_topk / index_kpool keys
        index_kpool: tokens of an index key
        rms_norm_eps: also of the norms of the two latents
    """

    model_types: ClassVar = ("glm5_next", "glm5_next_text")
    foreign: ClassVar = ("o_groups", "compress_ratios", "compress_rates")
    names: ClassVar = V32_ATTENTION | {
        "indexer.kpool_gate.weight": "indexer.index_kpool_compress_gate",
        "indexer.kpool_ape": "indexer.index_kpool_compress_ape",
    }  # fmt: skip
    published: ClassVar[Mapping[str, str]] = {}  # names are transformers'
    module: ClassVar = "model.language_model.layers.{}.self_attn."
    in_bfloat16: ClassVar = ("indexer.", "wkv_b.")  # in FP8 checkpoints, too
    rope_scaling: ClassVar[None] = None

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    num_hidden_layers: int
    sparse: tuple[int, ...]
    selecting: tuple[int, ...]
    qk_nope_head_dim: int = 256
    v_head_dim: int = 256
    index_n_heads: int = 32
    index_topk: int = 2048
    index_kpool: int = 16
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(2, MOST_POOLED, index_kpool=self.index_kpool)
        if self.index_topk % self.index_kpool:
            raise ValueError(
                f"index_topk: got {self.index_topk}, expected a multiple of index_kpool {self.index_kpool}"
            )
        if not self.sparse:
            raise ValueError("sparse: got no layers, expected at least one sparse attention layer")
        for before, layer in zip((None, *self.sparse), self.sparse, strict=False):
            check_integers(0, self.num_hidden_layers - 1, sparse=layer)
            if layer not in self.selecting and before != layer - 1:
                got = (
                    "the first sparse layer" if before is None else f"a layer of linear attention before layer {layer}"
                )
                raise ValueError(
                    f"selecting: got {shown(self.selecting)} without {layer}, expected layer {layer} among them, or a "
                    f"sparse layer {layer - 1} whose selection it takes: it is {got}"
                )

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        numbers = numbers_of(cls, config, besides=("sparse", "selecting"))
        sparse = sparse_layers(config)
        selecting = tuple(layer for layer in selecting_layers(config) if layer in sparse)
        width = numbers.get("qk_nope_head_dim", cls.qk_nope_head_dim)
        check_all_read(config, (*names_of(cls), *READ), {"qk_head_dim": width, **COMPUTED})
        return cls(**numbers, sparse=sparse, selecting=selecting)

    @property
    def softmax_scale(self) -> float:
        return float(self.qk_nope_head_dim**-0.5)

    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(map(self.spec, self.sparse))

    def spec(self, layer: int) -> LayerSpec:
        check_integers(0, layer=layer)
        if layer < self.num_hidden_layers and layer not in self.sparse:
            raise ValueError(
                f"layer: got {layer}, a layer of linear attention (KDA), expected a sparse one: {shown(self.sparse)}"
            )
        return LayerSpec(
            layer=layer, hidden_size=self.hidden_size, heads=self.num_attention_heads, q_rank=self.q_lora_rank,
            nope_dim=self.qk_nope_head_dim, rope_dim=0, v_dim=self.v_head_dim, softmax_scale=self.softmax_scale,
            rows="latent", row_source=layer, **selection_of(self, layer, "pools"), pool=self.index_kpool,
            index_heads=self.index_n_heads, topk=self.index_topk, rope_pairs="none", index_pairs="none",
            q_eps=self.rms_norm_eps, row_eps=self.rms_norm_eps,
        )  # fmt: skip


def sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The sparse attention layers: by layer_types, else linear_attn_config.full_attn_layers, else all."""
    count: Any = config.get("num_hidden_layers")
    check_integers(1, MOST_LAYERS, num_hidden_layers=count)
    kinds = config.get("layer_types")
    if kinds is not None:
        check_list("layer_types", kinds, count)
        check_choice((*SPARSE, LINEAR), **{f"layer_types[{layer}]": kind for layer, kind in enumerate(kinds)})
        return tuple(layer for layer in range(count) if kinds[layer] != LINEAR)
    linear = config.get("linear_attn_config")
    layers = linear.get("full_attn_layers") if isinstance(linear, Mapping) else None
    if layers is None:
        return tuple(range(count))
    check_list("linear_attn_config.full_attn_layers", layers, 0)
    check_integers(0, count - 1, **{f"full_attn_layers[{i}]": layer for i, layer in enumerate(layers)})
    return tuple(sorted(map(int, layers)))


class Glm5NextAttention(SparseAttention):
    """`SparseAttention` with a Glm5NextConfig."""

    config_type = Glm5NextConfig
