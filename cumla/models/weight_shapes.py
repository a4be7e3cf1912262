"""The weights that an attention layer of each model takes: their names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from ..dispatch.values import check_integers
from .layer_spec import INDEX_DIM, LATENT
from .layer_spec import ROPE_DIM as ROPE
from .v4_config import HEAD_DIM, DeepseekV4Config
from .v32_config import DeepseekV32Config
from .v41_config import DeepseekV41Config, mode_of
from .weights import V4_ATTENTION, V32_ATTENTION, V41_ATTENTION, ExpectedWeight

Config = DeepseekV4Config | DeepseekV32Config | DeepseekV41Config


def expected_weights(config: Config, layer: int) -> dict[str, ExpectedWeight]:
    """The weights that a layer's attention takes, by published name within the attention module ("wq_a.weight").

    Args:
        config: of the model
        layer: the layer's number; V4.1's draft layers are numbered from num_hidden_layers on

    Raises TypeError or ValueError for the configuration of another model, and for a layer that the model lacks.
    """
    if isinstance(config, DeepseekV4Config):
        check_integers(0, len(config.compress_ratios) - 1, layer=layer)
        shapes, names = _v4(config, config.compress_ratios[layer]), V4_ATTENTION
    elif isinstance(config, DeepseekV32Config):
        check_integers(0, layer=layer)
        shapes, names = _v32(config), V32_ATTENTION
    elif isinstance(config, DeepseekV41Config):
        check_integers(0, layer=layer)
        shapes, names = _v41(config, layer), V41_ATTENTION
    else:
        raise TypeError(
            f"config: got {type(config).__name__}, expected a DeepseekV4Config, DeepseekV32Config or DeepseekV41Config"
        )
    return {name: ExpectedWeight(shape, names[name]) for name, shape in shapes.items()}


def _one_row(config: DeepseekV4Config | DeepseekV41Config) -> dict[str, tuple[int, ...]]:
    """Shapes in V4 and V4.1, whose heads share one row of keys and values."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    groups, width = config.o_groups, config.o_groups * config.o_lora_rank
    return {
        "wq_a.weight": (rank, hidden), "q_norm.weight": (rank,), "wq_b.weight": (heads * HEAD_DIM, rank),
        "wkv.weight": (HEAD_DIM, hidden), "kv_norm.weight": (HEAD_DIM,), "attn_sink": (heads,),
        "wo_a.weight": (width, heads * HEAD_DIM // groups), "wo_b.weight": (hidden, width),
    }  # fmt: skip


def _indexer(config: Config, dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the indexer's queries and of the weights of their heads."""
    return {
        "indexer.wq_b.weight": (config.index_n_heads * dim, config.q_lora_rank),
        "indexer.weights_proj.weight": (config.index_n_heads, config.hidden_size),
    }


def _v4(config: DeepseekV4Config, ratio: int) -> Mapping[str, tuple[int, ...]]:
    shapes, hidden = _one_row(config), config.hidden_size
    overlap = 2 if ratio == 4 else 1  # rows of ratio 4 also pool the positions of the row before
    pooled = {1: {}, 4: {"": HEAD_DIM, "indexer.": config.index_head_dim}, 128: {"": HEAD_DIM}}[ratio]
    for prefix, dim in pooled.items():
        shapes |= {
            f"{prefix}compressor.wkv.weight": (overlap * dim, hidden),
            f"{prefix}compressor.wgate.weight": (overlap * dim, hidden),
            f"{prefix}compressor.ape": (ratio, overlap * dim), f"{prefix}compressor.norm.weight": (dim,),
        }  # fmt: skip
    return shapes | (_indexer(config, config.index_head_dim) if ratio == 4 else {})


def _v32(config: DeepseekV32Config) -> Mapping[str, tuple[int, ...]]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    nope, v_dim = config.qk_nope_head_dim, config.v_head_dim
    return {
        "wq_a.weight": (rank, hidden), "q_norm.weight": (rank,), "wq_b.weight": (heads * (nope + ROPE), rank),
        "wkv_a.weight": (LATENT + ROPE, hidden), "kv_norm.weight": (LATENT,),
        "wkv_b.weight": (heads * (nope + v_dim), LATENT), "wo.weight": (hidden, heads * v_dim),
        "indexer.wk.weight": (INDEX_DIM, hidden), "indexer.k_norm.weight": (INDEX_DIM,),
        "indexer.k_norm.bias": (INDEX_DIM,), **_indexer(config, INDEX_DIM),
    }  # fmt: skip


def _v41(config: DeepseekV41Config, layer: int) -> Mapping[str, tuple[int, ...]]:
    shapes, mode, dim = _one_row(config), mode_of(config, layer), config.index_head_dim
    if mode == "full":
        names = ("wkv", "wgate")[: config.ratio(layer)]
        shapes |= {f"compressor.{name}.weight": (HEAD_DIM, config.hidden_size) for name in names}
        shapes |= {
            "compressor.norm.weight": (HEAD_DIM,), "indexer.wk.weight": (dim, HEAD_DIM), "indexer.k_norm.weight": (dim,)
        }  # fmt: skip
    return shapes | (_indexer(config, dim) if mode in ("full", "reindex") else {})
