"""What a DeepSeek V4 attention layer needs to know, out of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dispatch.values import check_integers
from .config_checks import check_fixed, check_numbers, numbers_of, rope_of
from .rope import checked_scaling, cos_sin_table

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
        check_numbers(self)
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

        Raises ValueError for what is missing, and for a layer type, a size or a way to compress or to turn that cumla
        does not have.
        """
        numbers = numbers_of(cls, config, besides=("compress_ratios", "rope_scaling"))
        check_fixed(
            config, head_dim=HEAD_DIM, qk_rope_head_dim=ROPE_DIM, num_key_value_heads=1, compress_rate_csa=4,
            compress_rate_hca=128,
        )  # fmt: skip
        for name, rate in (config.get("compress_rates") or {}).items():
            if rate != LAYER_RATIOS.get(name):
                raise ValueError(
                    f"compress_rates.{name}: got {rate}, expected {LAYER_RATIOS.get(name, 'no such entry')}"
                )
        rope = rope_of(config) or {}
        main = rope.get("main") or {}
        for part in (config, main, rope.get("compress") or rope):
            if int(HEAD_DIM * (part.get("partial_rotary_factor") or ROPE_DIM / HEAD_DIM)) != ROPE_DIM:
                raise ValueError(
                    f"partial_rotary_factor: got {part['partial_rotary_factor']}, expected {ROPE_DIM / HEAD_DIM}"
                )
        if "compress" in rope:
            if checked_scaling(main) is not None:
                raise ValueError("rope_parameters.main: got YaRN's scaling, expected that of ratios 4 and 128 alone")
            scaling = rope["compress"]
            numbers |= {"rope_theta": main["rope_theta"]} if "rope_theta" in main else {}
            numbers |= {"compress_rope_theta": scaling["rope_theta"]} if "rope_theta" in scaling else {}
        else:  # published: the authors' code has no factor on cosines and sines, whatever YaRN's formula says
            scaling = {"attention_factor": 1.0, **rope}
        # Where YaRN's ramp begins and ends is rounded always.
        scaling = {name: value for name, value in scaling.items() if name not in ("rope_theta", "truncate")}
        return cls(**numbers, compress_ratios=_ratios(config), rope_scaling=scaling if rope else None)

    def cos_sin_table(self, compress_ratio: int, max_position: int) -> np.ndarray:
        """float32 [max_position, 64], of a layer with this ratio."""
        if compress_ratio == 1:
            return cos_sin_table(ROPE_DIM, self.rope_theta, max_position)
        return cos_sin_table(ROPE_DIM, self.compress_rope_theta, max_position, self.rope_scaling)


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """One a layer. A list that is longer goes on with layers that predict further tokens."""
    if "num_hidden_layers" not in config:
        raise ValueError("num_hidden_layers: the configuration has none, expected a number")
    layers = config["num_hidden_layers"]
    check_integers(1, num_hidden_layers=layers)
    types, ratios = config.get("layer_types"), config.get("compress_ratios")
    for name, given in (("layer_types", types), ("compress_ratios", ratios)):
        if given is not None and len(given) < layers:
            raise ValueError(f"{name}: got {len(given)} entries, expected one for each of {layers} layers")
    if types is None and ratios is not None:
        return tuple(max(1, ratio) for ratio in ratios[:layers])
    if types is None:  # the models' own pattern: two of ratio 128, then 128 and 4 in turns
        return tuple(128 if layer < 2 or layer % 2 == 0 else 4 for layer in range(layers))
    unknown = [name for name in types if name not in LAYER_RATIOS]
    if unknown:
        raise ValueError(f"layer_types: got {unknown[0]!r}, expected one of {', '.join(LAYER_RATIOS)}")
    return tuple(LAYER_RATIOS[name] for name in types[:layers])
