"""Attention layers of models, from hidden states to output, with weights under their published names."""

from .caches import DeepseekV4Caches, DeepseekV32Caches, DeepseekV41Caches
from .deepseek_v4 import DeepseekV4Attention
from .deepseek_v32 import DeepseekV32Attention
from .deepseek_v41 import DeepseekV41Attention
from .layer_spec import LayerSpec
from .registry import config_from
from .safetensors import Checkpoint
from .scratch import Scratch
from .step import (
    STATE_BLOCK_SIZES,
    DeepseekV4StepBuilder,
    DeepseekV4StepMetadata,
    DeepseekV32StepBuilder,
    DeepseekV32StepMetadata,
)
from .v4_config import DeepseekV4Config
from .v32_config import DeepseekV32Config
from .v41_config import DeepseekV41Config
from .v41_step import DeepseekV41Selection, DeepseekV41StepBuilder, DeepseekV41StepMetadata, serving_of
from .weight_shapes import expected_weights
from .weights import ExpectedWeight

__all__ = [
    "STATE_BLOCK_SIZES",
    "Checkpoint",
    "DeepseekV4Attention",
    "DeepseekV4Caches",
    "DeepseekV4Config",
    "DeepseekV4StepBuilder",
    "DeepseekV4StepMetadata",
    "DeepseekV32Attention",
    "DeepseekV32Caches",
    "DeepseekV32Config",
    "DeepseekV32StepBuilder",
    "DeepseekV32StepMetadata",
    "DeepseekV41Attention",
    "DeepseekV41Caches",
    "DeepseekV41Config",
    "DeepseekV41Selection",
    "DeepseekV41StepBuilder",
    "DeepseekV41StepMetadata",
    "ExpectedWeight",
    "LayerSpec",
    "Scratch",
    "config_from",
    "expected_weights",
    "serving_of",
]
