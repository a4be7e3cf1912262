"""An attention layer of Hy4: GLM's rules with a sink, an output gate, and RoPE on the last values of the indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..dispatch.values import check_flags
from .attention import SparseAttention
from .config_validation import check_fixed
from .glm_moe_dsa import READ, GlmMoeDsaConfig, selecting_layers
from .layer_spec import LayerSpec
from .v32_config import COMPUTED
from .weights import V32_ATTENTION

GATE_AND_SINK = {"learnable_sink": True, "gated_mla": True, "gating_type": "elementwise"}
FREQUENCY = 4  # of layers that select, from layer 1 on


@dataclass(frozen=True)
class HyV4Config(GlmMoeDsaConfig):
    """Sizes and parameters of a model's attention layers, as in GlmMoeDsaConfig.

    Attributes:
        rope_interleave: whether attention's RoPE pairs neighbours, as engines do, or halves, as transformers
        indexer_rope_interleave: the same of the indexer
    """

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(rope_interleave=self.rope_interleave)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Any:
        """`GlmMoeDsaConfig.from_dict` of a Hy4 model. Another gate, and a model without gate or sink, are refused."""
        check_fixed(config, model_type="hy_v4", **GATE_AND_SINK)
        computed = {name: value for name, value in (COMPUTED | GATE_AND_SINK).items() if name not in READ}
        return cls.from_checked(config, computed, READ, selecting=selecting_layers(config, FREQUENCY))

    def spec(self, layer: int) -> LayerSpec:
        """The description of a layer; from num_hidden_layers on of a layer that predicts further tokens."""
        pairs = "neighbours" if self.rope_interleave else "halves"
        return replace(super().spec(layer), sink=True, gate=True, index_part="last", rope_pairs=pairs)


class HyV4Attention(SparseAttention):
    """`SparseAttention` with a HyV4Config."""

    config_type = HyV4Config
