"""The configuration of DeepSeek V3.2's attention layers, from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config_validation import (
    OWN_SELECTION,
    Choice,
    Each,
    check_absent,
    check_all_read,
    check_fixed,
    check_numbers,
    check_rotated,
    names_of,
    numbers_of,
    rope_of,
    theta_of,
)
from .rope import checked_scaling, cos_sin_table, mscale

LATENT, ROPE = 512, 64
INDEX_DIM = 128
READ = ("rope_parameters", "partial_rotary_factor", "num_key_value_heads")  # besides the fields; the last has no effect
COMPUTED = OWN_SELECTION | {
    "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "index_head_dim": INDEX_DIM, "attention_bias": False,
    "rope_interleave": True, "indexer_rope_interleave": False,
    "layer_types": Choice(Each(f"{kind}_attention") for kind in ("deepseek_sparse", "indexed", "full")),
}  # fmt: skip


@dataclass(frozen=True)
class DeepseekV32Config:
    """Sizes and parameters of a model's attention layers, named as in transformers' configuration.

    Attributes:
        rope_scaling: None, or YaRN's parameters
        rms_norm_eps: epsilon of the norms around the layers; norms within a layer use 1e-6
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    index_n_heads: int = 64
    index_topk: int = 2048
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 163840
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeepseekV32Config:
        """Read a config.json.

        Raises TypeError or ValueError for the configuration of another model, for missing entries, for sizes and
        biases that cumla does not support, and for an entry that changes attention and is not read.
        """
        check_fixed(config, model_type="deepseek_v32")
        check_absent(
            config, "it is of a DeepSeek V4 model", "o_groups", "o_lora_rank", "compress_ratios", "compress_rates"
        )
        numbers = numbers_of(cls, config, besides=("rope_scaling",))
        heads = Choice((ROPE, numbers.get("qk_nope_head_dim", cls.qk_nope_head_dim) + ROPE))
        check_all_read(config, (*names_of(cls), *READ), COMPUTED | {"head_dim": heads, "qk_head_dim": heads[1]})
        rope = rope_of(config)
        check_rotated(ROPE, ROPE, config, rope or {})
        return cls(**numbers | theta_of("rope_theta", rope or {}, config), rope_scaling=rope)

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def softmax_scale(self) -> float:
        scale = float((self.qk_nope_head_dim + ROPE) ** -0.5)
        scaling = checked_scaling(self.rope_scaling)
        if scaling is not None and scaling.get("mscale_all_dim"):
            scale *= mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        return scale

    def cos_sin_table(self, max_position: int) -> np.ndarray:
        """float32 [max_position, 64]."""
        return cos_sin_table(ROPE, self.rope_theta, max_position, self.rope_scaling)
