"""Attention layers of models, from hidden states to output, with weights under their published names."""

from ..metadata.slots import STATE_BLOCK_SIZES
from .attention import SparseAttention
from .caches import LayerCaches
from .deepseek_v4 import DeepseekV4Attention, DeepseekV4Config
from .deepseek_v32 import DeepseekV32Attention, DeepseekV32Config
from .deepseek_v41 import DeepseekV41Attention, DeepseekV41Config
from .glm5_next import Glm5NextAttention, Glm5NextConfig
from .glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaConfig
from .hy_v4 import HyV4Attention, HyV4Config
from .layer_spec import LayerSpec
from .mistral_large4 import MistralLarge4Attention, MistralLarge4Config
from .registry import config_from
from .safetensors import Checkpoint
from .scratch import Scratch
from .shared_selection import SharedSelection, selected_tokens
from .step import StepBuilder, StepMetadata, serving_of
from .weight_shapes import expected_weights
from .weights import ExpectedWeight

__all__ = [
    "STATE_BLOCK_SIZES",
    "Checkpoint",
    "DeepseekV4Attention",
    "DeepseekV4Config",
    "DeepseekV32Attention",
    "DeepseekV32Config",
    "DeepseekV41Attention",
    "DeepseekV41Config",
    "ExpectedWeight",
    "Glm5NextAttention",
    "Glm5NextConfig",
    "GlmMoeDsaAttention",
    "GlmMoeDsaConfig",
    "HyV4Attention",
    "HyV4Config",
    "LayerCaches",
    "LayerSpec",
    "MistralLarge4Attention",
    "MistralLarge4Config",
    "Scratch",
    "SharedSelection",
    "SparseAttention",
    "StepBuilder",
    "StepMetadata",
    "config_from",
    "expected_weights",
    "selected_tokens",
    "serving_of",
]
