"""The models whose attention layers a replay runs: their configurations, layers and metadata.

The seed determines weights. Sizes are a tiny model's on the CPU and the published models' on a device; heads and topk
are the replay's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.backends import array_module, takes_device_arrays
from ..metadata.builder import ServingConfig
from ..models import (
    STATE_BLOCK_SIZES,
    DeepseekV4Attention,
    DeepseekV4Config,
    DeepseekV32Attention,
    DeepseekV32Config,
    DeepseekV41Attention,
    DeepseekV41Config,
    Glm5NextAttention,
    Glm5NextConfig,
    GlmMoeDsaAttention,
    GlmMoeDsaConfig,
    HyV4Attention,
    HyV4Config,
    MistralLarge4Attention,
    MistralLarge4Config,
    Scratch,
    StepBuilder,
    expected_weights,
    serving_of,
)
from .blocks import BLOCK_TOKENS
from .options import MAX_RUNNING, MODEL_LAYERS, MODEL_OF, V4_RATIOS, V41_RATIOS, ReplayOptions
from .scheduler import Sequence
from .step_batch import SWA_BLOCK, StepBatch
from .trace import HASH_TOKENS

LEAST_REACH = 1 << 17  # least positions of RoPE's tables
CANDIDATE_BLOCKS, TINY_CANDIDATE_BLOCKS = 2048, 16
# The published V4.1's RoPE of layers with compressed rows.
YARN = {
    "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    "attention_factor": 1.0,
}  # fmt: skip


class Sizes(NamedTuple):
    """Sizes of a model, without its heads and its top-k. Models with latent rows do not use o_groups and o_rank."""

    hidden: int
    q_rank: int
    index_heads: int
    o_groups: int = 1
    o_rank: int = 1


SIZES = {
    "v4": Sizes(4096, 1024, 64, 8, 1024), "v32": Sizes(7168, 1536, 64), "v41": Sizes(5120, 1280, 32, 8, 1024),
    "glm52": Sizes(6144, 2048, 32), "glm53": Sizes(4096, 1536, 32), "hy4": Sizes(2816, 1536, 16),
    "mistral4": Sizes(6144, 0, 32),
}  # fmt: skip
TINY, TINY_GROUPED = Sizes(256, 128, 8), Sizes(256, 128, 8, 2, 64)
ATTENTION: dict[str, Any] = {
    "v4": DeepseekV4Attention, "v32": DeepseekV32Attention, "v41": DeepseekV41Attention, "glm52": GlmMoeDsaAttention,
    "glm53": Glm5NextAttention, "hy4": HyV4Attention, "mistral4": MistralLarge4Attention,
}  # fmt: skip
SHARING = {"glm52": GlmMoeDsaConfig, "hy4": HyV4Config}  # a layer that selects, and one with its selection
# The last two layers have no RoPE, and the last one reads the rows of the one before.
MISTRAL_LAYERS: dict[str, Any] = {
    "selecting": (0, 3), "no_rope_layers": (1, 1, 0, 0), "kv_source_layers": (0, 1, 2, 2)
}  # fmt: skip
SSMAX_SCALE = 0.1  # of SSMax's logarithm: queries near their size without SSMax
POOL = 4  # tokens of an index key of GLM-5.3-Flash


def is_tiny(options: ReplayOptions) -> bool:
    return options.tiny or not takes_device_arrays(options.backend)


def reach_of(options: ReplayOptions, longest: int) -> int:
    """Positions of RoPE's tables."""
    return longest if is_tiny(options) else max(LEAST_REACH, longest)


def config_of(model: str, tiny: bool, heads: int, topk: int, window: int) -> Any:
    """The configuration of a model with the layers MODEL_LAYERS[model]; all layers of V3.2 are of one kind."""
    sizes = SIZES[model]
    if tiny:
        sizes = TINY_GROUPED if sizes.o_groups > 1 else TINY
    latent: dict[str, Any] = {"index_n_heads": sizes.index_heads, "index_topk": topk}
    if model == "v32":
        return DeepseekV32Config(sizes.hidden, heads, sizes.q_rank, **latent)
    if model in SHARING:
        return SHARING[model](
            sizes.hidden, heads, sizes.q_rank, num_hidden_layers=len(MODEL_LAYERS[model]), selecting=(0,), **latent
        )
    if model == "glm53":
        return Glm5NextConfig(
            sizes.hidden, heads, sizes.q_rank, 1, sparse=(0,), selecting=(0,), index_kpool=POOL, **latent
        )
    if model == "mistral4":
        return MistralLarge4Config(sizes.hidden, heads, num_hidden_layers=4, **MISTRAL_LAYERS, **latent)
    first = sizes.hidden, heads, sizes.q_rank, math.gcd(sizes.o_groups, heads), sizes.o_rank
    last: dict[str, Any] = {"index_n_heads": sizes.index_heads, "index_topk": topk, "sliding_window": window}
    if model == "v4":
        return DeepseekV4Config(*first, tuple(V4_RATIOS.values()), **last)
    return DeepseekV41Config(
        *first, tuple(V41_RATIOS.values()), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 4),
        num_hidden_layers=len(V41_RATIOS), candidate_source_layer_id=3,
        candidate_topk_blocks=TINY_CANDIDATE_BLOCKS if tiny else CANDIDATE_BLOCKS, rope_scaling=YARN, **last,
    )  # fmt: skip


def model_config(model: str, options: ReplayOptions) -> Any:
    """`config_of` a replay."""
    return config_of(model, is_tiny(options), options.heads, options.topk, options.window)


@functools.lru_cache(maxsize=64)
def scratch_of(backend: str, rank: int) -> Scratch:
    """The scratch that a rank's layers share: they run one after another."""
    return Scratch()


@functools.lru_cache(maxsize=256)
def attention_of(
    model: str, number: int, tiny: bool, heads: int, topk: int, window: int, seed: int, backend: str, reach: int,
    rank: int, formats: tuple[tuple[str, Any], ...],
) -> Any:  # fmt: skip
    """A layer with its weights, for `reach` positions; cached, because a warm-up has the same layers as the run."""
    config = config_of(model, tiny, heads, topk, window)
    return ATTENTION[model](
        config, number, random_weights(config, number, seed), xp=array_module(backend), backend=backend,
        activations="bfloat16" if takes_device_arrays(backend) else "float32", max_position=reach,
        scratch=scratch_of(backend, rank), **dict(formats),
    )  # fmt: skip


def random_weights(config: Any, number: int, seed: int) -> dict[str, np.ndarray]:
    """Weights of a layer's attention, float32: vectors near 1 (SSMax's scales near SSMAX_SCALE, the exponents of RoPE's
    factors near 0), matrices that preserve the variance of their input.
    """
    rng, weights = np.random.default_rng(seed), {}
    for name, weight in expected_weights(config, number).items():
        n = rng.standard_normal(weight.shape, np.float32)
        weights[name] = 1 + np.float32(0.1) * n if n.ndim == 1 else n / np.float32(math.sqrt(n.shape[-1]))
        if name.endswith("ssmax_scaling.s"):
            weights[name] *= np.float32(SSMAX_SCALE)
        elif name.endswith("lerope.alpha"):
            weights[name] -= 1
    return weights


class ModelMetadata:
    """Builds the metadata of a step's layers, by model. Each running request has a ring for its lifetime."""

    is_queued = False

    def __init__(self, options: ReplayOptions, names: SequenceOf[str], longest: int) -> None:
        self.xp = array_module(options.backend)
        ratios = tuple(V4_RATIOS[name] for name in names if name in V4_RATIOS)
        self._state_ratios = [ratio for ratio in sorted(set(ratios)) if ratio > 1]
        self._builders: dict[str, Any] = {}
        if ratios:
            specs = [spec for spec, name in zip(self._specs("v4", options), V4_RATIOS, strict=True) if name in names]
            self._builders["v4"] = StepBuilder(specs, serving_config(options, ratios, longest), options.backend)
        for model in dict.fromkeys(MODEL_OF[name] for name in names if name not in V4_RATIOS):
            config = model_config(model, options)
            serving = model_serving(config, options, longest)
            self._builders[model] = StepBuilder(config.specs(), serving, options.backend)
        self._rings: dict[Sequence, int] = {}

    @staticmethod
    def _specs(model: str, options: ReplayOptions) -> Any:
        return model_config(model, options).specs()

    def build(self, batch: StepBatch) -> dict[str, Any]:
        return {
            name: builder.build(batch.common, self._tables(name, batch), self._rings_of(builder, batch))
            for name, builder in self._builders.items()
        }

    def _tables(self, model: str, batch: StepBatch) -> dict[str, Any]:
        """Block tables of a builder's groups, in addition to the batch's own."""
        states = self._state_ratios if model == "v4" else ()
        tables = {f"states{ratio}": self.xp.asarray(state_table(batch, ratio)) for ratio in states}
        return {"compressed": batch.block_table, **tables} if model in ("v4", "v41") else {}

    def _rings_of(self, builder: StepBuilder, batch: StepBatch) -> Any:
        return self.xp.asarray(self.rings(batch)) if builder.has_rings else None

    def rings(self, batch: StepBatch) -> np.ndarray:
        """[num_reqs] int32, host. New requests get the rings of finished requests."""
        self._rings = {sequence: ring for sequence, ring in self._rings.items() if not sequence.is_finished}
        free = iter(sorted(set(range(MAX_RUNNING)) - set(self._rings.values())))
        for scheduled in batch.scheduled:
            if scheduled.sequence not in self._rings:
                self._rings[scheduled.sequence] = next(free)
        return np.array([self._rings[scheduled.sequence] for scheduled in batch.scheduled], np.int32)


def state_table(batch: StepBatch, ratio: int) -> np.ndarray:
    """Pages of compressor states, host [num_reqs, S] int32: pages that this step or a later one reads, -1 for others.

    A step reads the states of the incomplete row, at ratio 4 also the states of the row before; a later request may
    continue after any HASH_TOKENS tokens of a shared prefix.
    """
    size = STATE_BLOCK_SIZES[ratio]
    per_block, reach = BLOCK_TOKENS // size, 2 * ratio if ratio == 4 else ratio
    columns = max(len(s.sequence.blocks) for s in batch.scheduled) * per_block
    table = np.full((len(batch.scheduled), columns), -1, np.int32)
    page = np.arange(columns)
    for row, s in zip(table, batch.scheduled, strict=True):
        blocks = np.array(s.sequence.blocks, np.int32)
        first, last = page * size, page * size + size - 1  # positions of each page
        wanted = np.zeros(columns, bool)
        for end in (s.start, s.end):
            wanted |= (last >= end - reach) & (first < end)
        wanted |= (last % HASH_TOKENS >= HASH_TOKENS - reach) & (last >= s.start) & (first < s.end)
        needed = wanted[: len(blocks) * per_block]
        pages = (blocks[:, None] * per_block + np.arange(per_block, dtype=np.int32)).ravel()
        row[: len(needed)] = np.where(needed, pages, -1)
    return table


def serving_config(options: ReplayOptions, ratios: tuple[int, ...], longest: int) -> ServingConfig:
    return ServingConfig(
        window_size=options.window, compress_ratios=ratios, block_size=SWA_BLOCK, compressed_block_size=BLOCK_TOKENS,
        index_topk=options.topk, num_heads=options.heads, max_num_batched_tokens=options.batch_tokens,
        max_num_seqs=MAX_RUNNING, max_model_len=longest, batch_invariant=options.batch_invariant,
    )  # fmt: skip


def model_serving(config: Any, options: ReplayOptions, longest: int) -> ServingConfig:
    return serving_of(
        config, block_size=SWA_BLOCK, compressed_block_size=BLOCK_TOKENS, max_num_batched_tokens=options.batch_tokens,
        max_num_seqs=MAX_RUNNING, max_model_len=longest, batch_invariant=options.batch_invariant,
    )  # fmt: skip
