"""The weights that an attention layer takes: their names, shapes and types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..dispatch.values import check_integers, shown
from .config import AttentionConfig
from .layer_spec import INDEX_DIM, LATENT, ROPE_DIM, LayerSpec
from .weights import FLOAT8, ExpectedWeight

Shapes = dict[str, tuple[int, ...]]
FACTORS = ("ssmax_scaling.s", "ssmax_scaling.b")  # of SSMax: of the logarithm, and without it
FLOAT32 = ("attn_sink", "ape")  # ends of names
WIDE = ("indexer.weights_proj.", "compressor.", "indexer.compressor.")  # never in FP8


def expected_weights(config: Any, layer: int, *, rank: int = 0, ranks: int = 1) -> dict[str, ExpectedWeight]:
    """The weights that a layer's attention takes, by published name within the attention module ("wq_a.weight").

    Args:
        config: of a model
        layer: the layer's number; V4.1's draft layers are numbered from num_hidden_layers on
        rank, ranks: of tensor parallelism: each rank has a part of the heads, and the sum of the ranks' outputs is the
            layer's. Rows, norms and the whole indexer are on every rank

    Raises TypeError or ValueError for what is no model's configuration, for a layer that the model lacks, and for ranks
    that do not divide the heads, or the groups of heads of the output projection.
    """
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"config: got {shown(config)}, expected the configuration of a model's attention layers")
    spec = config.spec(layer)
    found = named(config, layer, shapes_of(spec))
    check_integers(1, ranks=ranks)
    check_integers(0, ranks - 1, rank=rank)
    if ranks > 1:
        for name, count in (("heads", spec.heads), ("groups of heads", spec.o_groups)):
            if count % ranks:
                raise ValueError(f"ranks: got {ranks}, expected a divisor of {count} {name}")
        own = shapes_of(replace(spec, heads=spec.heads // ranks, o_groups=spec.o_groups // ranks))
        found = {name: part_of(weight, own[name], rank) for name, weight in found.items()}
    if config.published is None:
        return found
    return {config.published.get(name, weight.transformers): weight for name, weight in found.items()}


def part_of(weight: ExpectedWeight, shape: tuple[int, ...], rank: int) -> ExpectedWeight:
    """A rank's part of a weight: consecutive rows, or columns."""
    if shape == weight.shape:
        return weight
    pairs = zip(shape, weight.shape, strict=True)
    part = tuple(slice(None) if n == whole else slice(rank * n, rank * n + n) for n, whole in pairs)
    return replace(weight, shape=shape, part=part)


def named(config: AttentionConfig, layer: int, shapes: Shapes) -> dict[str, ExpectedWeight]:
    """Weights of these shapes with a model's names and types, by DeepSeek's names."""
    module, wide = config.module.format(layer), config.in_bfloat16
    if config.draft_module is not None and layer >= config.num_hidden_layers:
        module = config.draft_module.format(layer - config.num_hidden_layers)
    found = {}
    for name, shape in shapes.items():
        transformers = {**config.names, **config.model_names}[name]
        within = name if module.endswith(".attn.") else (config.published or {}).get(name, transformers)
        weight = ExpectedWeight(shape, transformers, tensor=name if name in config.model_names else module + within)
        if name.endswith(FLOAT32) and not name.startswith(wide):
            weight = replace(weight, dtype="float32")
        elif len(shape) == 2 and not name.startswith((*WIDE, *wide)):
            weight = replace(weight, dtype=FLOAT8, block=config.scale_block)
        found[name] = weight
    return found


def shapes_of(spec: LayerSpec) -> Shapes:
    """Shapes by DeepSeek's names, whatever a model's own names are."""
    hidden, heads, rank = spec.hidden_size, spec.heads, spec.q_rank
    found: Shapes = {
        "wq_a.weight": (rank, hidden), "q_norm.weight": (rank,), "wq_b.weight": (heads * spec.head_dim, rank)
    } if rank else {"wq.weight": (heads * spec.head_dim, hidden)}  # fmt: skip
    if spec.rows == "window":
        found |= {"wkv.weight": (LATENT, hidden), "kv_norm.weight": (LATENT,)}
    else:
        if spec.owns_rows:
            found |= {"wkv_a.weight": (spec.row_dim, hidden), "kv_norm.weight": (LATENT,)}
        found["wkv_b.weight"] = heads * (spec.nope_dim + spec.v_dim), LATENT
    if spec.position_scale:
        found |= dict.fromkeys(FACTORS, (heads,))
    if spec.learned_rope:
        found["lerope.alpha"] = (ROPE_DIM // 2,)
    if spec.sink:
        found["attn_sink"] = (heads,)
    if spec.gate:
        found["linear_gate.weight"] = (heads * spec.v_dim, hidden)
    if spec.o_groups:
        width = spec.o_groups * spec.o_rank
        found |= {"wo_a.weight": (width, heads * spec.v_dim // spec.o_groups), "wo_b.weight": (hidden, width)}
    else:
        found["wo.weight"] = (hidden, heads * spec.v_dim)
    return found | _pooled(spec) | (_indexer(spec) if spec.selects else {})


def _pooled(spec: LayerSpec) -> Shapes:
    """Of the compressors: the rows', and one of the indexer's own."""
    hidden, found, times = spec.hidden_size, Shapes(), 2 if spec.overlap else 1
    if spec.pooling == "latents":
        names = ("wkv", "wgate")[: spec.ratio]
        return {f"compressor.{name}.weight": (LATENT, hidden) for name in names} | {"compressor.norm.weight": (LATENT,)}
    if spec.pooling == "compressor":
        for prefix, dim in (("", LATENT), ("indexer.", INDEX_DIM))[: 1 + spec.selects]:
            found |= {
                f"{prefix}compressor.wkv.weight": (times * dim, hidden),
                f"{prefix}compressor.wgate.weight": (times * dim, hidden),
                f"{prefix}compressor.ape": (spec.ratio, times * dim), f"{prefix}compressor.norm.weight": (dim,),
            }  # fmt: skip
    return found


def _indexer(spec: LayerSpec) -> Shapes:
    found = Shapes()
    if spec.keys in ("tokens", "pools"):
        found = {"indexer.wk.weight": (INDEX_DIM, spec.hidden_size)}
        found |= {f"indexer.k_norm.{name}": (INDEX_DIM,) for name in ("weight", "bias")}
    if spec.keys == "pools":
        found |= {
            "indexer.kpool_gate.weight": (INDEX_DIM, spec.hidden_size),
            "indexer.kpool_ape": (spec.pool, INDEX_DIM),
        }
    elif spec.keys == "latents" and spec.owns_rows:
        found = {"indexer.wk.weight": (INDEX_DIM, LATENT), "indexer.k_norm.weight": (INDEX_DIM,)}
    if spec.index_queries == "hidden":
        found |= {f"indexer.q_input_norm.{name}": (spec.hidden_size,) for name in ("weight", "bias")}
    if spec.position_scale:
        found |= {f"indexer.{name}": (spec.index_heads,) for name in FACTORS}
    return found | {
        "indexer.wq_b.weight": (spec.index_heads * INDEX_DIM, spec.q_rank or spec.hidden_size),
        "indexer.weights_proj.weight": (spec.index_heads, spec.hidden_size),
    }  # fmt: skip
