"""An attention layer of a DeepSeek V4 model."""

from __future__ import annotations

from .attention import SparseAttention
from .v4_config import DeepseekV4Config


class DeepseekV4Attention(SparseAttention):
    """`SparseAttention` with a DeepseekV4Config."""

    config_type = DeepseekV4Config
