"""An attention layer of GLM-5, 5.1, 5.2 or 5.3: V3.2's rules with other sizes, and selections that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..dispatch.values import check_choice, check_flags, check_integers, shown
from .attention import SparseAttention
from .config_validation import check_fixed, check_list
from .layer_spec import LayerSpec
from .v4_config import MOST_LAYERS
from .v32_config import COMPUTED, DeepseekV32Config

KINDS = {"F": True, "S": False, "full": True, "shared": False}
SELECTION = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
READ = (*SELECTION, "head_dim", "indexer_rope_interleave", "index_share_for_mtp_iteration")  # head_dim has no effect


@dataclass(frozen=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """Sizes and parameters of a model's attention layers, named as in transformers' configuration.

    Attributes:
        selecting: layers that select for themselves; the others take the selection of the last one before them. Layers
            from num_hidden_layers on, which predict further tokens, select for themselves
        indexer_rope_interleave: whether the indexer's RoPE pairs neighbours, or halves
        rms_norm_eps: also of the norms of the two latents
    """

    published: ClassVar[dict[str, str]] = {}  # by DeepSeek's names; others have transformers' names

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
        check_integers(1, MOST_LAYERS, num_hidden_layers=self.num_hidden_layers)
        check_flags(indexer_rope_interleave=self.indexer_rope_interleave)
        if not self.selecting or self.selecting[0] != 0:
            raise ValueError(f"selecting: got {shown(self.selecting)}, expected layer 0 first, which has no source")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Any:
        """Read a config.json.

        Raises TypeError or ValueError for the configuration of another model, for missing entries, for sizes and
        biases that cumla does not support, and for an entry that changes attention and is not read.
        """
        check_fixed(config, model_type="glm_moe_dsa")
        computed = {name: value for name, value in COMPUTED.items() if name not in READ}
        return cls.from_checked(config, computed, READ, selecting=selecting_layers(config))

    def specs(self) -> tuple[LayerSpec, ...]:
        """The description of every layer, except layers that predict further tokens."""
        return tuple(map(self.spec, range(self.num_hidden_layers)))

    def spec(self, layer: int) -> LayerSpec:
        """The description of a layer; from num_hidden_layers on of a layer that predicts further tokens."""
        check_integers(0, layer=layer)
        found = replace(
            super().spec(layer), index_pairs="neighbours" if self.indexer_rope_interleave else "halves",
            q_eps=self.rms_norm_eps, row_eps=self.rms_norm_eps,
        )  # fmt: skip
        if layer in self.selecting or layer >= self.num_hidden_layers:
            return found
        source = max(selecting for selecting in self.selecting if selecting < layer)
        return replace(found, selection="source", selection_source=source, keys="none")


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
