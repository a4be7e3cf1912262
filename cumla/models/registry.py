"""The models whose attention layers cumla has, by the model_type of their config.json. A model is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dispatch.values import check_choice, check_kind
from .attention import SparseAttention
from .deepseek_v4 import DeepseekV4Attention
from .deepseek_v32 import DeepseekV32Attention
from .deepseek_v41 import DeepseekV41Attention
from .glm5_next import MODEL_TYPES as GLM5_NEXT
from .glm5_next import Glm5NextAttention
from .glm_moe_dsa import GlmMoeDsaAttention
from .hy_v4 import HyV4Attention
from .mistral_large4 import MODEL_TYPES as MISTRAL_LARGE4
from .mistral_large4 import MistralLarge4Attention
from .v41_config import MODEL_TYPES

MODELS: dict[str, type[SparseAttention]] = {
    "deepseek_v32": DeepseekV32Attention,
    "deepseek_v4": DeepseekV4Attention,
    **dict.fromkeys(MODEL_TYPES, DeepseekV41Attention),
    "glm_moe_dsa": GlmMoeDsaAttention,
    **dict.fromkeys(GLM5_NEXT, Glm5NextAttention),
    "hy_v4": HyV4Attention,
    **dict.fromkeys(MISTRAL_LARGE4, MistralLarge4Attention),
}
CONFIGS: dict[str, Any] = {name: attention.config_type for name, attention in MODELS.items()}


def config_from(config: Mapping[str, Any]) -> Any:
    """The configuration of a model's attention layers from its config.json; `spec(layer)` of it describes a layer.

    Raises TypeError or ValueError for the model_type of another model, and for what the model's `from_dict` refuses.
    """
    check_kind(Mapping, config=config)
    check_choice(tuple(CONFIGS), model_type=config.get("model_type"))
    return CONFIGS[config["model_type"]].from_dict(config)
