"""An attention layer of a DeepSeek V4.1 model."""

from __future__ import annotations

from .attention import SparseAttention
from .v41_config import DeepseekV41Config


class DeepseekV41Attention(SparseAttention):
    """`SparseAttention` with a DeepseekV41Config."""

    config_type = DeepseekV41Config
