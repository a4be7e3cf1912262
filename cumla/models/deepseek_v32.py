"""An attention layer of a DeepSeek V3.2 model."""

from __future__ import annotations

from .attention import SparseAttention
from .v32_config import DeepseekV32Config


class DeepseekV32Attention(SparseAttention):
    """`SparseAttention` with a DeepseekV32Config."""

    config_type = DeepseekV32Config
