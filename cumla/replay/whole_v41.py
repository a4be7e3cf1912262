"""V4.1's layers of a replay: one of each kind, which share compressed rows, index keys and selections.

Six layers stand for the model's forty. Two own compressed rows, of ratios 2 and 1; the second of them also chooses
candidate blocks, in which the layer after it selects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dispatch.backends import array_module, takes_device_arrays
from ..metadata.builder import ServingConfig
from ..models.caches import DeepseekV41Caches
from ..models.deepseek_v41 import DeepseekV41Attention, DeepseekV41Config
from ..models.v41_step import DeepseekV41Selection, DeepseekV41StepBuilder, serving_of
from .blocks import BLOCK_TOKENS
from .options import MAX_RUNNING, V41_CACHE_FORMATS, V41_RATIOS, ReplayOptions
from .scheduler import Sequence
from .step_batch import SWA_BLOCK, SWA_PAGES, StepBatch
from .whole import LEAST_REACH, Sizes, WholeLayer, cache_bytes, random_weights, scratch_of

V41 = "v41"
NAMES = tuple(V41_RATIOS)
SIZES, TINY_SIZES = Sizes(5120, 1280, 8, 1024, 32), Sizes(256, 128, 2, 64, 8)
CANDIDATE_BLOCKS, TINY_CANDIDATE_BLOCKS = 2048, 16
# The published model's RoPE of layers with compressed rows.
YARN = {
    "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    "attention_factor": 1.0,
}  # fmt: skip


@dataclass
class V41Shared:
    """What the layers of one engine share. layers: by their number in `config`, as far as they are made."""

    config: DeepseekV41Config
    serving: ServingConfig
    selection: DeepseekV41Selection
    layers: list[V41Layer] = field(default_factory=list)


class V41Layer(WholeLayer):
    """One layer with its caches: those that it owns, and its owner's."""

    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any] = ()
    ) -> None:
        self.index, self.name, self.xp, self.seed = index, name, array_module(options.backend), options.seed
        self.model, self.attends_alike = V41, False
        number, ratio = NAMES.index(name), V41_RATIOS[name]
        self.shared = before[-1].shared if number else _shared(options, longest)
        self.shared.layers.append(self)
        shared, blocks = self.shared, options.num_blocks
        cache_format = V41_CACHE_FORMATS[options.v41_layout]
        self.attention: Any = made_layer(
            index, number, is_tiny(options), options.heads, options.topk, options.window, options.seed, options.backend,
            longest if is_tiny(options) else max(LEAST_REACH, longest), cache_format, options.index_keys,
        )  # fmt: skip
        self.hidden_size, self.selects = shared.config.hidden_size, ratio > 0
        self.chooses_candidates = number == shared.config.candidate_source_layer_id
        source = shared.config.kv_source(number)
        self.owner = self if source is None else shared.layers[source]
        self.caches: Any = DeepseekV41Caches.allocate(
            shared.config, number, shared.serving, blocks * SWA_PAGES, blocks if ratio else 0, MAX_RUNNING,
            owner=None if self.owner is self else self.owner.caches, cache_format=cache_format,
            key_format=options.index_keys, xp=self.xp,
        )  # fmt: skip

    def step(self, hidden: Any, metadata: Any, observe: Any) -> Any:
        return self.attention.step(hidden, self.caches, metadata, self.shared.selection, observe=self.observed(observe))

    @property
    def makes_index_queries(self) -> bool:
        return self.attention.mode in ("full", "reindex")

    def selected(self, tokens: int) -> Any:
        return self.shared.selection.topk_indices[:tokens] if self.selects else None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches that the layer owns, padding of their pages included."""
        owned = vars(self.caches) if self.owner is self else {"window": self.caches.window}
        return sum(cache_bytes(cache) for cache in owned.values() if cache is not None)


class V41Metadata:
    """The metadata of a step's layers; each running request has a ring for its whole life."""

    def __init__(self, options: ReplayOptions, longest: int) -> None:
        self.xp = array_module(options.backend)
        self._builder = DeepseekV41StepBuilder(_config_and_serving(options, longest)[1], options.backend)
        self._rings: dict[Sequence, int] = {}

    def build(self, batch: StepBatch) -> Any:
        return self._builder.build(batch.common, batch.block_table, self.xp.asarray(self.rings(batch)))

    def rings(self, batch: StepBatch) -> np.ndarray:
        """[num_reqs] int32, host. Rings of finished requests are given to new ones."""
        self._rings = {sequence: ring for sequence, ring in self._rings.items() if not sequence.is_finished}
        free = iter(sorted(set(range(MAX_RUNNING)) - set(self._rings.values())))
        for scheduled in batch.scheduled:
            if scheduled.sequence not in self._rings:
                self._rings[scheduled.sequence] = next(free)
        return np.array([self._rings[scheduled.sequence] for scheduled in batch.scheduled], np.int32)


def is_tiny(options: ReplayOptions) -> bool:
    return options.tiny or not takes_device_arrays(options.backend)


def _config(tiny: bool, heads: int, topk: int, window: int) -> DeepseekV41Config:
    sizes = TINY_SIZES if tiny else SIZES
    return DeepseekV41Config(
        sizes.hidden, heads, sizes.q_rank, math.gcd(sizes.o_groups, heads), sizes.o_rank,
        tuple(V41_RATIOS.values()), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 4),
        num_hidden_layers=len(NAMES), candidate_source_layer_id=3,
        candidate_topk_blocks=TINY_CANDIDATE_BLOCKS if tiny else CANDIDATE_BLOCKS,
        index_n_heads=sizes.index_heads, index_topk=topk, sliding_window=window, rope_scaling=YARN,
    )  # fmt: skip


def _config_and_serving(options: ReplayOptions, longest: int) -> tuple[DeepseekV41Config, ServingConfig]:
    config = _config(is_tiny(options), options.heads, options.topk, options.window)
    return config, serving_of(
        config, block_size=SWA_BLOCK, compressed_block_size=BLOCK_TOKENS, max_num_batched_tokens=options.batch_tokens,
        max_num_seqs=MAX_RUNNING, max_model_len=longest,
    )  # fmt: skip


def _shared(options: ReplayOptions, longest: int) -> V41Shared:
    config, serving = _config_and_serving(options, longest)
    return V41Shared(config, serving, DeepseekV41Selection(config, serving, array_module(options.backend)))


@functools.lru_cache(maxsize=64)
def made_layer(
    index: int, number: int, tiny: bool, heads: int, topk: int, window: int, seed: int, backend: str, reach: int,
    cache_format: Any, key_format: Any,
) -> DeepseekV41Attention:  # fmt: skip
    """A layer with its weights, for `reach` positions; kept, as a warm-up has the same ones as the run."""
    config = _config(tiny, heads, topk, window)
    return DeepseekV41Attention(
        config, number, random_weights(config, number, seed + index),
        activations="bfloat16" if takes_device_arrays(backend) else "float32", cache_format=cache_format,
        key_format=key_format, max_position=reach, scratch=scratch_of(backend, 0), xp=array_module(backend),
        backend=backend,
    )  # fmt: skip
