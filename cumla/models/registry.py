"""The models whose attention layers cumla has, by the model_type of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dispatch.values import check_choice, check_kind
from .attention import SparseAttention
from .deepseek_v4 import DeepseekV4Attention
from .deepseek_v32 import DeepseekV32Attention
from .deepseek_v41 import DeepseekV41Attention
from .glm5_next import Glm5NextAttention
from .glm_moe_dsa import GlmMoeDsaAttention
from .hy_v4 import HyV4Attention
from .mistral_large4 import MistralLarge4Attention

ATTENTION = (
    DeepseekV32Attention, DeepseekV4Attention, DeepseekV41Attention, GlmMoeDsaAttention, Glm5NextAttention,
    HyV4Attention, MistralLarge4Attention,
)  # fmt: skip
MODELS: dict[str, type[SparseAttention]] = {
    model_type: attention for attention in ATTENTION for model_type in attention.config_type.model_types
}
CONFIGS: dict[str, Any] = {name: attention.config_type for name, attention in MODELS.items()}


def config_from(config: Mapping[str, Any]) -> Any:
    """The configuration of a model's attention layers from its config.json; `spec(layer)` of it describes a layer.

    Raises TypeError or ValueError for the model_type of another model, and for what the model's `from_dict` refuses.
    """
    check_kind(Mapping, config=config)
    check_choice(tuple(CONFIGS), model_type=config.get("model_type"))
    return CONFIGS[config["model_type"]].from_dict(config)
