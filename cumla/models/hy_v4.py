"""An attention layer of Hy4: GLM's rules with a sink, an output gate, and RoPE on the last values of the indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from .attention import SparseAttention
from .config_validation import check_fixed
from .glm_moe_dsa import GlmMoeDsaConfig
from .layer_spec import LayerSpec
from .weights import V32_ATTENTION

GATE_AND_SINK = {"learnable_sink": True, "gated_mla": True, "gating_type": "elementwise"}


@dataclass(frozen=True)
class HyV4Config(GlmMoeDsaConfig):
    """Sizes and parameters of a model's attention layers, as in GlmMoeDsaConfig.

    Attributes:
        rope_interleave: whether attention's RoPE pairs neighbours, as engines do, or halves, as transformers
        indexer_rope_interleave: the same of the indexer
    """

    model_types: ClassVar = ("hy_v4",)
    computed: ClassVar = GlmMoeDsaConfig.computed | GATE_AND_SINK
    frequency: ClassVar = 4  # from layer 1 on
    names: ClassVar = V32_ATTENTION | {
        "attn_sink": "sinks", "learnable_sink_param": "sinks", "linear_gate.weight": "gate_proj.weight"
    }  # fmt: skip
    draft_module: ClassVar = "model.mtp_layers.{}.self_attn."
    published: ClassVar = {"attn_sink": "learnable_sink_param", "linear_gate.weight": "linear_gate.weight"}

    index_n_heads: int = 16
    max_position_embeddings: int = 262144
    num_hidden_layers: int = 34
    rope_theta: float = 1e7
    rope_interleave: bool = True

    @classmethod
    def read(cls, config: Mapping[str, Any], **fields: Any) -> Self:
        """Another gate, and a model without gate or sink, are refused."""
        check_fixed(config, **GATE_AND_SINK)
        return super().read(config)

    def spec(self, layer: int) -> LayerSpec:
        pairs = "neighbours" if self.rope_interleave else "halves"
        return replace(super().spec(layer), sink=True, gate=True, index_part="last", rope_pairs=pairs)


class HyV4Attention(SparseAttention):
    """`SparseAttention` with a HyV4Config."""

    config_type = HyV4Config
