"""The layers of a trace's steps: caches, a step's arrays, and cumla's calls on them.

Arrays are torch's if torch supports the measured device, otherwise NumPy's or CuPy's. Peers get the same arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from trace_steps import Steps

from cumla.arrays import dlpack, streams
from cumla.dispatch import backends
from cumla.layers.selection import IndexerInputs, select_rows
from cumla.layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer
from cumla.layout import DSV4_FP8, INDEXER_FP8, V32_FP8, CacheLayout
from cumla.metadata import (
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    ServingConfig,
)
from cumla.ops.indexer import fused_indexer_q_rope_quant
from cumla.ops.norm_rope import qnorm_rope_and_insert
from cumla.ops.sparse_cache import indexer_k_quant_and_cache, quantize_and_insert_k_cache
from cumla.replay.blocks import BLOCK_TOKENS
from cumla.replay.scheduler import Scheduled
from cumla.replay.step_batch import SWA_BLOCK, SWA_PAGES, make_batch
from cumla.replay.traffic import attended

V32 = "v32"
KINDS = {"window": 1, "c4a": 4, "c128a": 128, V32: 1}  # compress ratio
WINDOW, INDEX_HEADS, INDEX_DIM, ROPE_DIM = 128, 64, 128, 64
TOPK = {64: 512}  # k by number of heads: Flash has 64; Pro has 128, or a part of them on a device
TOPK_OF_PRO, TOPK_OF_V32 = 1024, 2048
BASE_ROWS = 1 << 16  # random rows that a cache repeats
MODEL_LENGTH = 1 << 17  # the engine's maximum length, independent of its requests' lengths
ANCHOR = 12  # tokens from one random index query to the next: neighbours then select lists that overlap by 90%
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Place:
    """The device and framework of arrays.

    Attributes:
        backend: cumla's backend
        framework: framework of the arguments: "torch", "cupy" or "numpy"
    """

    backend: str
    framework: str

    @classmethod
    def of(cls, backend: str) -> Place:
        """Uses torch's tensors if torch is installed and supports the backend's device."""
        xp = backends.array_module(backend)
        if xp is np:
            return cls(backend, "numpy")
        if not backends.is_installed("torch"):
            return cls(backend, "cupy")
        import torch

        return cls(backend, "torch" if torch.cuda.is_available() else "cupy")

    @functools.cached_property
    def xp(self) -> Any:
        return backends.array_module(self.backend)

    @property
    def on_device(self) -> bool:
        return self.xp is not np

    def give(self, array: Any) -> Any:
        """A NumPy array, or an array of `xp`, in the framework of arguments."""
        return dlpack.give(self.xp.asarray(array), self.framework)

    def normal(self, seed: int, *shape: int) -> Any:
        """Normal values in float32, an array of `xp`."""
        return self.xp.random.default_rng(seed).standard_normal(shape, np.float32)

    def rows(self, seed: int, *shape: int) -> Any:
        """Random bfloat16 rows in the framework of arguments, generated in parts."""
        made, each = self.xp.empty(shape, BF16), max(1, (1 << 28) // int(np.prod(shape[1:])))
        for first in range(0, shape[0], each):
            some = made[first : first + each]
            some[...] = self.normal(seed + first, *some.shape).astype(BF16)
        return self.give(made)


@dataclass(frozen=True)
class Shape:
    """A layer's kind, its heads on this device, and the rows that a token selects at ratio 4."""

    kind: str
    heads: int
    topk: int

    @classmethod
    def of(cls, kind: str, heads: int, topk: int | None = None) -> Shape:
        return cls(kind, heads, topk or (TOPK_OF_V32 if kind == V32 else TOPK.get(heads, TOPK_OF_PRO)))

    @property
    def ratio(self) -> int:
        return KINDS[self.kind]

    @property
    def selects(self) -> bool:
        """Whether an indexer selects rows for each token."""
        return self.kind in ("c4a", V32)

    @property
    def layout(self) -> CacheLayout:
        return V32_FP8 if self.kind == V32 else DSV4_FP8


class Caches:
    """The caches of several layers of one kind, for `blocks` blocks of 256 positions.

    Attributes:
        window: by layer, uint8 [blocks * 4, 64, 584]; in V3.2 all rows, [blocks * 4, 64, 656]
        compressed: by layer, uint8 [blocks, 64 or 2, 584]; none for window layers and V3.2's
        index: by layer, uint8 [blocks, 64, 132] (V3.2: [blocks * 4, 64, 132]), if tokens select rows
    """

    def __init__(self, place: Place, kind: str, blocks: int, layers: int) -> None:
        self.place, shape = place, Shape(kind, 1, 1)
        rows, compressed = BLOCK_TOKENS // shape.ratio, layers if shape.ratio > 1 else 0
        self.window = [self._filled(shape.layout, blocks * SWA_PAGES, SWA_BLOCK, i) for i in range(layers)]
        self.compressed = [self._filled(DSV4_FP8, blocks, rows, 100 + i) for i in range(compressed)]
        pages = (blocks * SWA_PAGES, SWA_BLOCK) if kind == V32 else (blocks, rows)
        self.index = [self._keys(*pages, 200 + i) for i in range(layers if shape.selects else 0)]

    def _filled(self, layout: CacheLayout, pages: int, rows: int, seed: int) -> Any:
        place, base = self.place, max(1, min(pages, BASE_ROWS // rows))
        cache = layout.allocate(pages, rows, place.xp)
        k = dlpack.borrow(place.rows(seed, base * rows, layout.head_dim), "k")
        slots = place.xp.arange(base * rows)
        quantize_and_insert_k_cache(k, cache, slots, rows, layout=layout, backend=place.backend)
        for first in range(base, pages, base):
            some = cache[first : first + base]
            some[...] = cache[: len(some)]
        return place.give(cache)

    def _keys(self, pages: int, rows: int, seed: int) -> Any:
        """Keys that differ: equal keys would have equal scores."""
        place, cache = self.place, INDEXER_FP8.allocate(pages, rows, self.place.xp)
        total, each = pages * rows, 1 << 18
        for first in range(0, total, each):
            slots = place.xp.arange(first, min(first + each, total))
            k = dlpack.borrow(place.rows(seed + first, len(slots), INDEX_DIM), "k")
            indexer_k_quant_and_cache(k, cache, slots, backend=place.backend)
        return place.give(cache)


class Tokens:
    """Random outputs of the projections for `count` tokens.

    Attributes:
        q, kv: [count, h, 512] and [count, 512] bfloat16, inputs of the norm; 576 values in V3.2
        normed: like q, input of attention
        keys: [count, 128] bfloat16, the indexer's keys
        cos_sin: [positions, 64] float32
        sink: [h] float32
    """

    def __init__(self, place: Place, heads: int, count: int, positions: int, width: int = 512) -> None:
        self.q, self.kv = place.rows(1, count, heads, width), place.rows(2, count, width)
        self.normed, self.out = place.rows(3, count, heads, width), place.rows(4, count, heads, 512)
        self.keys = place.rows(9, count, INDEX_DIM)
        angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, 1, 2 / ROPE_DIM))
        self.cos_sin = place.give(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
        self.sink = place.give(place.normal(5, heads))


class StepInputs:
    """One step's arrays for layers of a shape, and cumla's calls for each part of it.

    Each call of `insert`, `select` and `attend` runs all layers; each layer has its own caches.
    """

    def __init__(
        self, place: Place, shape: Shape, caches: Caches, tokens: Tokens, steps: Steps, step: Sequence[Scheduled]
    ) -> None:
        self.place, self.shape, self.caches = place, shape, caches
        batch = make_batch(step, place.xp)
        self.positions, self.starts = batch.positions, batch.starts
        count = batch.num_tokens
        config = ServingConfig(
            window_size=WINDOW, compress_ratios=(shape.ratio,), block_size=SWA_BLOCK, num_heads=shape.heads,
            compressed_block_size=BLOCK_TOKENS, index_topk=shape.topk, num_speculative_tokens=steps.tokens - 1,
            max_num_batched_tokens=steps.most_tokens, max_num_seqs=steps.most_requests,
            max_model_len=max(steps.longest, MODEL_LENGTH),
        )  # fmt: skip
        names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        self.batch: CommonAttentionMetadata = replace(
            batch.common, **{name: place.give(getattr(batch.common, name)) for name in names}
        )
        self.table = place.give(batch.block_table)
        self.builder = DeepseekSparseSWAMetadataBuilder(config, backend=place.backend)
        self.index_builder = None
        self.index_table = self.batch.block_table_tensor if shape.kind == V32 else self.table
        if shape.selects:
            self.index_builder = DeepseekV32IndexerMetadataBuilder(config, backend=place.backend)
        self.build()
        self.q, self.kv, self.normed, self.out, self.keys = (
            array[:count] for array in (tokens.q, tokens.kv, tokens.normed, tokens.out, tokens.keys)
        )
        self.cos_sin, self.sink = tokens.cos_sin, tokens.sink
        self.token_positions = place.give(batch.positions)
        self.workspace = LayerWorkspace.allocate(self.q, shape.topk if shape.selects else 0)
        self.attention = SparseMLALayer(shape.ratio, shape.topk, self.sink)
        self._memory: dict[Any, Any] = {}
        self.index_q: Any = None
        self.index_weights: Any = None
        self.selected: Any = None
        self.decode_slots: Any = None
        self.decode_lens: Any = None
        if shape.selects:
            self.index_q, self.index_weights = self._index_queries()
            self.selected = place.give(place.xp.full((count, shape.topk), -1, np.int32))
            if self.decodes:  # also memory for prefills that take the decode path
                self.decode_slots = place.give(place.xp.full((count, shape.topk), -1, np.int32))
                self.decode_lens = place.give(place.xp.zeros(count, np.int32))

    def build(self) -> None:
        """Build the metadata that all layers share."""
        table = self.table if self.shape.ratio == 128 else None
        self.metadata = self.builder.build(0, self.batch, c128a_block_table=table)
        if self.index_builder is not None:
            self.index_metadata = self.index_builder.build(0, self.batch, block_table=self.index_table)

    def new_plan(self) -> None:
        """Make the next decode compute its plan, as the first layer of a step does."""
        for name, plan in self.builder.build_tile_scheduler(self.metadata.num_decode_tokens).items():
            setattr(self.metadata, f"tile_sched_{name}", plan)

    def insert(self) -> None:
        for cache in self.caches.window:
            qnorm_rope_and_insert(
                self.q, self.kv, cache, self.batch.slot_mapping, self.token_positions, self.cos_sin, out=self.out,
                backend=self.place.backend,
            )  # fmt: skip

    def inserted(self) -> Iterator[tuple[Any, Callable[[Any], Any] | None]]:
        """The caches of a layer that `insert` writes; with a function of pages' values if peers write other bytes."""
        yield dlpack.borrow(self.caches.window[0], "cache"), None

    def select(self) -> None:
        """Select rows, and cumla also decodes' slots. On both sides all layers attend to the last layer's selection."""
        metadata, slots = self.metadata, None
        arrays = (
            metadata.positions, metadata.token_to_req_indices, self.index_table, self.selected, metadata.is_valid_token,
        )  # fmt: skip
        positions, requests, table, selected, is_valid = (dlpack.borrow(x, "step") for x in arrays)
        if self.decodes:
            slots, lens = (
                dlpack.borrow(self.decode_slots, "decode_slots"),
                dlpack.borrow(self.decode_lens, "decode_lens"),
            )
            slots = slots[: self.decodes], lens[: self.decodes]
        with streams.callers(selected, self.place.framework):
            for cache in self.caches.index:
                inputs = IndexerInputs(self.index_q, self.index_weights, cache, self.index_metadata)
                select_rows(
                    inputs, positions, requests, table, selected, self._memory_of, self.place.backend, slots, is_valid
                )

    def attend(self, new_plan: bool = True, path: str | None = None) -> None:
        """path: the path of prefills, as in SparseMLALayer.step."""
        if new_plan:
            self.new_plan()
        for i, cache in enumerate(self.caches.window):
            compressed = None
            if self.shape.ratio > 1:
                compressed = CompressedCache(
                    self.caches.compressed[i], self.table, topk_indices=self.selected,
                    decode_slots=self.decode_slots, decode_lens=self.decode_lens,
                )  # fmt: skip
            self.attention.step(
                self.normed, None, cache, self.metadata, compressed, out=self.out, workspace=self.workspace,
                prefill_path=path, backend=self.place.backend,
            )  # fmt: skip

    def _memory_of(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        key = name, shape
        if key not in self._memory:
            self._memory[key] = self.place.xp.empty(shape, dtype)
        return self._memory[key]

    def _index_queries(self) -> tuple[Any, Any]:
        """Queries that move from one random query to the next within ANCHOR tokens, and the heads' weights."""
        place, xp = self.place, self.place.xp
        requests = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        first, rest = np.divmod(self.positions, ANCHOR)
        names, anchors = np.unique(np.stack([requests, first, requests, first + 1], 1).reshape(-1, 2), axis=0,
                                   return_inverse=True)  # fmt: skip
        rows = place.normal(6, len(names), INDEX_DIM)
        ends = xp.asarray(anchors.reshape(-1, 2))
        fraction = xp.asarray((rest / ANCHOR).astype(np.float32))[:, None]
        angle = np.float32(np.pi / 2) * fraction
        base = rows[ends[:, 0]] * xp.cos(angle) + rows[ends[:, 1]] * xp.sin(angle)
        gains, weights = place.normal(7, INDEX_HEADS, INDEX_DIM), xp.abs(place.normal(8, INDEX_HEADS))
        count = len(self.positions)
        q = xp.empty((count, INDEX_HEADS, INDEX_DIM), BF16)
        for head in range(INDEX_HEADS):
            q[:, head] = (base * gains[head]).astype(BF16)
        table, zeros = xp.zeros((0, ROPE_DIM), np.float32), xp.zeros(count, np.int64)  # without rotation, like keys
        q, weights = fused_indexer_q_rope_quant(
            zeros, q, table, xp.broadcast_to(weights, (count, INDEX_HEADS)).copy(), backend=place.backend
        )
        return place.give(q), place.give(weights)

    # ---- the limits

    @functools.cached_property
    def decodes(self) -> int:
        return int(self.metadata.num_decode_tokens)

    def attended(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of window rows and of other rows that each token attends to."""
        if self.shape.kind == V32:
            return np.zeros_like(self.positions), np.minimum(self.positions + 1, self.shape.topk)
        return attended(self.positions, self.shape.ratio, WINDOW, self.shape.topk)

    def work(self, part: str) -> tuple[int, int]:
        """Least bytes that a layer's part reads and writes, and its FLOP."""
        count, n, heads, ratio = len(self.positions), self.decodes, self.shape.heads, self.shape.ratio
        width, row = self.shape.layout.head_dim, self.shape.layout.token_bytes
        if part == "insert" and self.shape.kind == V32:
            return count * (2 * (width + INDEX_DIM) + row + INDEXER_FP8.token_bytes), 0
        if part == "insert":
            return count * (2 * heads * 2 * width + 2 * width + row), 0
        prefills = range(self.metadata.num_decodes, len(self.starts) - 1)
        new = [int(self.starts[r + 1] - self.starts[r]) for r in prefills]
        ends = [int(self.positions[self.starts[r + 1] - 1]) + 1 for r in prefills]
        if part == "select":
            visible = (self.positions + 1) // ratio
            keys = int(visible[:n].sum()) + sum(end // ratio for end in ends)
            moved = keys * INDEXER_FP8.token_bytes + count * (INDEX_HEADS * INDEX_DIM + 4 * self.shape.topk)
            return moved, int(visible.sum()) * 2 * INDEX_HEADS * INDEX_DIM
        window, others = self.attended()
        listed, rows = window + others, int((window + others)[:n].sum())
        if self.shape.kind == V32:
            rows += sum(ends)
        else:
            rows += sum(k + min(end - k, WINDOW - 1) + (end // ratio if ratio > 1 else 0)
                        for k, end in zip(new, ends, strict=True))  # fmt: skip
        return rows * row + count * heads * 2 * (width + 512), int(listed.sum()) * 2 * heads * (width + 512)

    def overlap(self) -> float | None:
        """Mean fraction of a prefill token's list that the next token's list contains."""
        if self.selected is None or len(self.positions) - self.decodes < 2:
            return None
        prefills = dlpack.borrow(self.selected, "selected")[self.decodes :]
        step = max(1, len(prefills) // 256)
        return shared(self.place.xp, prefills[:-1][::step], prefills[1:][::step])


def shared(xp: Any, a: Any, b: Any) -> float:
    """The fraction of entries in a's rows that b's rows contain; -1 is no entry, and a row has no entry twice."""
    both = xp.sort(xp.concatenate([a, b], axis=1), axis=1)
    same = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum()
    return float(same) / max(int((a >= 0).sum()), 1)
