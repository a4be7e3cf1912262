"""What a DeepSeek V4 attention layer needs to know, out of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .rope import cos_sin_table

LAYER_RATIOS = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
HEAD_DIM, ROPE_DIM = 512, 64


@dataclass(frozen=True)
class DeepseekV4Config:
    """Sizes and numbers of the attention layers of a model.

    compress_ratios  one a layer: 1 window only, 4 with an indexer, 128 without
    rope_theta       base of RoPE in layers of ratio 1; compress_rope_theta and rope_scaling in the others
    The rest is named as in transformers' configuration.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    sliding_window: int = 128
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for ratio in self.compress_ratios:
            if ratio not in LAYER_RATIOS.values():
                raise ValueError(f"compress_ratios: got {ratio}, expected 1, 4 or 128")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups: got {self.o_groups}, expected a divisor of {self.num_attention_heads} heads")
        if self.index_head_dim != 128:
            raise ValueError(f"index_head_dim: got {self.index_head_dim}, expected 128")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeepseekV4Config:
        """Of a config.json, transformers' or the published one (compress_ratios, rope_scaling).

        Raises ValueError for a layer type or a head size that there is not.
        """
        if config.get("head_dim", HEAD_DIM) != HEAD_DIM:
            raise ValueError(f"head_dim: got {config['head_dim']}, expected {HEAD_DIM}")
        names = set(cls.__dataclass_fields__) - {"compress_ratios", "rope_scaling"}
        numbers = {name: config[name] for name in names if name in config}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if "compress" in rope:
            main, rope = rope.get("main", {}), rope["compress"]
            numbers["rope_theta"] = main.get("rope_theta", 10000.0)
            numbers["compress_rope_theta"] = rope.get("rope_theta", 160000.0)
        # The authors' code has no factor on cosines and sines, whatever YaRN's formula says.
        scaling = {"attention_factor": 1.0, **{k: v for k, v in rope.items() if k != "rope_theta"}} if rope else None
        return cls(**numbers, compress_ratios=_ratios(config), rope_scaling=scaling)

    def cos_sin_table(self, compress_ratio: int, max_position: int) -> np.ndarray:
        """float32 [max_position, 64], of a layer with this ratio."""
        if compress_ratio == 1:
            return cos_sin_table(ROPE_DIM, self.rope_theta, max_position)
        return cos_sin_table(ROPE_DIM, self.compress_rope_theta, max_position, self.rope_scaling)


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    if types is None and "compress_ratios" in config:
        return tuple(max(1, ratio) for ratio in config["compress_ratios"][:layers])
    if types is None:  # the models' own pattern: two of ratio 128, then 128 and 4 in turns
        return tuple(128 if layer < 2 or layer % 2 == 0 else 4 for layer in range(layers))
    unknown = [name for name in types if name not in LAYER_RATIOS]
    if unknown:
        raise ValueError(f"layer_types: got {unknown[0]!r}, expected one of {', '.join(LAYER_RATIOS)}")
    return tuple(LAYER_RATIOS[name] for name in types)
