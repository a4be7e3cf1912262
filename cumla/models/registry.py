"""The models whose attention layers cumla has, by the model_type of their config.json. A model is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dispatch.values import check_choice, check_kind
from .v4_config import DeepseekV4Config
from .v32_config import DeepseekV32Config
from .v41_config import MODEL_TYPES, DeepseekV41Config

CONFIGS: dict[str, Any] = {
    "deepseek_v32": DeepseekV32Config,
    "deepseek_v4": DeepseekV4Config,
    **dict.fromkeys(MODEL_TYPES, DeepseekV41Config),
}


def config_from(config: Mapping[str, Any]) -> Any:
    """The configuration of a model's attention layers from its config.json; `spec(layer)` of it describes a layer.

    Raises TypeError or ValueError for the model_type of another model, and for what the model's `from_dict` refuses.
    """
    check_kind(Mapping, config=config)
    check_choice(tuple(CONFIGS), model_type=config.get("model_type"))
    return CONFIGS[config["model_type"]].from_dict(config)
