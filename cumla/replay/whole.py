"""Whole attention layers of a replay, from hidden states to their output: those of V4 and V3.2 (whole_v41: V4.1's).

Hidden states are made from tokens as the sparse layers' rows are, as wide as the model's. Weights follow from the seed.
On the CPU sizes are a tiny model's, on a device those of the published ones; heads and topk are the replay's.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dispatch.backends import array_module, takes_device_arrays
from ..layers.sparse import Observer
from ..layout import DSV4_FP8, V32_FP8
from ..metadata.builder import ServingConfig
from ..models.caches import CacheFormat
from ..models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Caches, DeepseekV4Config
from ..models.deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32Caches,
    DeepseekV32Config,
    DeepseekV32StepBuilder,
)
from ..models.scratch import Scratch
from ..models.step import STATE_BLOCK_SIZES, DeepseekV4StepBuilder
from ..models.weight_shapes import expected_weights
from .activations import token_rows
from .blocks import BLOCK_TOKENS
from .options import MAX_RUNNING, WHOLE_RATIOS, ReplayOptions
from .step_batch import SWA_BLOCK, SWA_PAGES, StepBatch
from .trace import HASH_TOKENS

V32 = "v32"
CACHE_FORMAT: CacheFormat = "fp8"
LEAST_REACH = 1 << 17  # positions
# Parts of a layer whose names other layers use for something else.
PARTS = {"project": "projections"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, without its heads and its top-k."""

    hidden: int
    q_rank: int
    o_groups: int  # of V4
    o_rank: int
    index_heads: int


DEVICE_SIZES = {"v4": Sizes(4096, 1024, 8, 1024, 64), V32: Sizes(7168, 1536, 0, 0, 64)}
HOST_SIZES = {"v4": Sizes(256, 128, 2, 64, 8), V32: Sizes(256, 128, 0, 0, 8)}


class WholeLayer:
    """One layer with its caches."""

    def __init__(self, index: int, name: str, options: ReplayOptions, longest: int, rank: int = 0) -> None:
        self.index, self.name, self.xp = index, name, array_module(options.backend)
        self.model = V32 if name == V32 else "v4"
        self.attends_alike = name == V32  # tokens of prompts and decodes
        self.selects = name == V32 or WHOLE_RATIOS[name] == 4
        self.seed = options.seed
        reach = max(LEAST_REACH, longest)
        sizes = options.heads, options.topk, options.window
        made = made_layer(index, name, *sizes, options.seed, options.backend, reach, rank)
        self.attention, self.hidden_size = made, made.config.hidden_size
        blocks, xp = options.num_blocks, self.xp
        if name == V32:
            self.caches: Any = DeepseekV32Caches.allocate(blocks * SWA_PAGES, SWA_BLOCK, CACHE_FORMAT, xp)
            return
        ratio = WHOLE_RATIOS[name]
        states = 0 if ratio == 1 else blocks * (BLOCK_TOKENS // STATE_BLOCK_SIZES[ratio])
        serving = serving_config(options, (ratio,), longest)
        self.caches = DeepseekV4Caches.allocate(ratio, serving, blocks * SWA_PAGES, blocks, states, CACHE_FORMAT, xp)

    def hidden(self, batch: StepBatch) -> Any:
        """Hidden states of a step's tokens, [num_tokens, hidden_size] of the layer's activations."""
        rows = token_rows(batch.token_keys, self.seed, self.index, self.hidden_size, self.xp)
        return rows.astype(self.attention.activations)

    def step(self, hidden: Any, metadata: Any, observe: Any) -> Any:
        """Run the layer. observe: called with a part's name around each part."""
        return self.attention.step(hidden, self.caches, metadata, observe=self.observed(observe))

    @property
    def makes_index_queries(self) -> bool:
        """Whether the layer's choice is checked by the index queries that it made."""
        return False

    def selected(self, tokens: int) -> Any:
        """The rows that a step's tokens selected, [tokens, topk] int32; None for a layer without selection."""
        if not self.selects:
            return None
        attention = self.attention
        shape = tokens, attention.config.index_topk
        return attention.scratch.shaped("topk_indices", shape, np.int32, attention.cos_sin)

    @staticmethod
    def observed(observe: Any) -> Observer:
        """The same by the layer's own names of its parts."""
        return lambda part: observe(PARTS.get(part, part))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the paged caches and states, padding of their pages included."""
        return sum(cache_bytes(cache) for cache in vars(self.caches).values() if cache is not None)


def cache_bytes(cache: Any) -> int:
    """Bytes of a paged cache, padding of its pages included."""
    return int(cache.shape[0] * cache.strides[0])


def allocated_like(cache: Any, rows: int, xp: Any) -> Any:
    """A zeroed cache with pages of so many rows."""
    layout = next((x for x in (DSV4_FP8, V32_FP8) if cache.dtype == np.uint8 and cache.shape[2] == x.token_bytes), None)
    if layout is None:
        return xp.zeros((len(cache), rows, cache.shape[2]), cache.dtype)
    return layout.allocate(len(cache), rows, xp)


class WholeMetadata:
    """The metadata of a step's whole layers, by model."""

    def __init__(self, options: ReplayOptions, names: list[str], longest: int) -> None:
        self.xp = array_module(options.backend)
        ratios = tuple(WHOLE_RATIOS[name] for name in names if name in WHOLE_RATIOS)
        self.ratios = [ratio for ratio in sorted(set(ratios)) if ratio > 1]
        self._v4 = self._v32 = None
        if ratios:
            self._v4 = DeepseekV4StepBuilder(serving_config(options, ratios, longest), options.backend)
        if V32 in names:
            self._v32 = DeepseekV32StepBuilder(serving_config(options, (1,), longest), options.backend)

    def build(self, batch: StepBatch) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self._v4 is not None:
            tables = {ratio: self.xp.asarray(state_table(batch, ratio)) for ratio in self.ratios}
            made["v4"] = self._v4.build(batch.common, batch.block_table, tables)
        if self._v32 is not None:
            made[V32] = self._v32.build(batch.common)
        return made


def state_table(batch: StepBatch, ratio: int) -> np.ndarray:
    """Pages of compressors' states, host [num_reqs, S] int32: pages that this step or a later one reads, -1 for others.

    Read are the states of the row that is being made, at ratio 4 also those of the row before; a later request may go
    on after any HASH_TOKENS tokens of a shared prefix.
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
        held = wanted[: len(blocks) * per_block]
        pages = (blocks[:, None] * per_block + np.arange(per_block, dtype=np.int32)).ravel()
        row[: len(held)] = np.where(held, pages, -1)
    return table


def serving_config(options: ReplayOptions, ratios: tuple[int, ...], longest: int) -> ServingConfig:
    return ServingConfig(
        window_size=options.window, compress_ratios=ratios, block_size=SWA_BLOCK, compressed_block_size=BLOCK_TOKENS,
        index_topk=options.topk, num_heads=options.heads, max_num_batched_tokens=options.batch_tokens,
        max_num_seqs=MAX_RUNNING, max_model_len=longest,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def scratch_of(backend: str, rank: int) -> Scratch:
    """A rank's layers run one after another."""
    return Scratch()


@functools.lru_cache(maxsize=256)
def made_layer(
    index: int, name: str, heads: int, topk: int, window: int, seed: int, backend: str, reach: int, rank: int
) -> Any:
    """A layer of a rank with its weights, for `reach` positions; kept, as a warm-up has the same ones as the run."""
    on_device = takes_device_arrays(backend)
    sizes = (DEVICE_SIZES if on_device else HOST_SIZES)[V32 if name == V32 else "v4"]
    options: dict[str, Any] = {
        "activations": "bfloat16" if on_device else "float32", "cache_format": CACHE_FORMAT,
        "xp": array_module(backend), "backend": backend, "max_position": reach,
        "scratch": scratch_of(backend, rank),
    }  # fmt: skip
    if name == V32:
        v32 = DeepseekV32Config(
            sizes.hidden, heads, sizes.q_rank, index_n_heads=sizes.index_heads, index_topk=topk
        )  # fmt: skip
        return DeepseekV32Attention(v32, 0, random_weights(v32, 0, seed + index), **options)
    ratio = WHOLE_RATIOS[name]
    groups = math.gcd(sizes.o_groups, heads)
    v4 = DeepseekV4Config(
        sizes.hidden, heads, sizes.q_rank, groups, sizes.o_rank, (ratio,), index_n_heads=sizes.index_heads,
        index_topk=topk, sliding_window=window,
    )  # fmt: skip
    return DeepseekV4Attention(v4, 0, random_weights(v4, 0, seed + index), **options)


def random_weights(config: Any, layer: int, seed: int) -> dict[str, np.ndarray]:
    """Weights of a layer's attention, float32: vectors near 1, matrices that keep the variance of their input."""
    rng, weights = np.random.default_rng(seed), {}
    for name, weight in expected_weights(config, layer).items():
        n = rng.standard_normal(weight.shape, np.float32)
        weights[name] = 1 + np.float32(0.1) * n if n.ndim == 1 else n / np.float32(math.sqrt(n.shape[-1]))
    return weights
