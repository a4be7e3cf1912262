"""An attention layer of GLM-5, 5.1, 5.2 or 5.3: V3.2's rules with other sizes, and selections that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..dispatch.values import check_choice, check_integers, shown
from .attention import SparseAttention
from .config_validation import MOST_LAYERS, check_list
from .deepseek_v32 import DeepseekV32Config
from .layer_spec import LayerSpec

KINDS = {"F": True, "S": False, "full": True, "shared": False}
SELECTION = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


@dataclass(frozen=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """Sizes and parameters of a model's attention layers, named as in transformers' configuration.

    Attributes:
        selecting: layers that select for themselves; the others take the selection of the last one before them. Layers
            from num_hidden_layers on, which predict further tokens, select for themselves
        indexer_rope_interleave: whether the indexer's RoPE pairs neighbours, or halves
        rms_norm_eps: also of the norms of the two latents
    """

    model_types: ClassVar = ("glm_moe_dsa",)
    also_read: ClassVar = (*SELECTION, "head_dim", "index_share_for_mtp_iteration")  # head_dim has no effect
    published: ClassVar[Mapping[str, str]] = {}  # names are transformers'
    frequency: ClassVar = 1  # of layers that select, where a config.json does not say it

    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    index_n_heads: int = 32
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 202752
    num_hidden_layers: int = 78
    selecting: tuple[int, ...] = ()
    indexer_rope_interleave: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_selecting(self.selecting)

    @classmethod
    def read(cls, config: Mapping[str, Any], **fields: Any) -> Self:
        return super().read(config, selecting=selecting_layers(config, cls.frequency))

    def spec(self, layer: int) -> LayerSpec:
        pairs = "neighbours" if self.indexer_rope_interleave else "halves"
        eps, selection = self.rms_norm_eps, selection_of(self, layer)
        return replace(super().spec(layer), **selection, index_pairs=pairs, q_eps=eps, row_eps=eps)


def selection_of(config: Any, layer: int, keys: str = "tokens") -> dict[str, Any]:
    """Fields of a layer's description: it selects by these keys, or takes the selection of the last layer that does."""
    if layer in config.selecting or layer >= config.num_hidden_layers:
        return {"selection": "own", "selection_source": layer, "keys": keys}
    source = max(selecting for selecting in config.selecting if selecting < layer)
    return {"selection": "source", "selection_source": source, "keys": "none"}


def check_selecting(layers: tuple[int, ...]) -> None:
    """Raise ValueError unless the first layer selects."""
    if not layers or layers[0] != 0:
        raise ValueError(f"selecting: got {shown(layers)}, expected layer 0 first, which has no source")


def selecting_layers(config: Mapping[str, Any], freq: int = 1, offset: int = 2) -> tuple[int, ...]:
    """The layers that select for themselves: by indexer_types, else index_topk_pattern, else by frequency and offset.

    Args:
        freq, offset: of a configuration without index_topk_freq, without index_skip_topk_offset
    """
    layers: Any = config.get("num_hidden_layers")
    check_integers(1, MOST_LAYERS, num_hidden_layers=layers)
    for name in SELECTION[:2]:
        kinds = config.get(name)
        if kinds is not None:
            check_list(name, list(kinds) if name == "index_topk_pattern" else kinds, layers)
            allowed = tuple(KINDS)[:2] if name == "index_topk_pattern" else tuple(KINDS)[2:]
            check_choice(allowed, **{f"{name}[{layer}]": kind for layer, kind in enumerate(kinds)})
            return tuple(layer for layer in range(layers) if KINDS[kinds[layer]])
    given = (config.get(name) for name in SELECTION[2:])
    freq, offset = (value if found is None else found for value, found in zip((freq, offset), given, strict=True))
    check_integers(1, index_topk_freq=freq)
    check_integers(0, index_skip_topk_offset=offset)
    return tuple(layer for layer in range(layers) if max(layer - offset + 1, 0) % freq == 0)


class GlmMoeDsaAttention(SparseAttention):
    """`SparseAttention` with a GlmMoeDsaConfig."""

    config_type = GlmMoeDsaConfig
