"""The sparse layers of a replay: their caches, their inputs in a step, and their outputs in float64."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.memory import to_host
from ..dispatch.backends import array_module
from ..dispatch.call import BFLOAT16
from ..kernels.reference.sparse_attention import attend
from ..layers.prefill_path import chunk_paths, first_tokens
from ..layers.sparse import CompressedCache, Observer, SparseMLALayer
from ..metadata import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder, ServingConfig
from ..timing import Stopwatch
from .activations import HEAD_DIM, Activations, apply_rope
from .blocks import BLOCK_TOKENS
from .indexer import Indexer
from .options import LAYER_RATIOS, MAX_RUNNING, ReplayOptions
from .scheduler import Sequence
from .step_batch import SWA_BLOCK, SWA_PAGES, Groups, StepBatch, completed_groups
from .traffic import bytes_moved
from .verify import Sample, cached_rows, measured

TOPK_RATIO = 4  # the ratio at which a token selects compressed rows; at 128 it takes all rows
KNOWN_ROWS = 1 << 16  # compressed rows of a layer that are cached for further checks: 64 MiB


@dataclass(frozen=True)
class SparseStep:
    """Metadata, and memory for q and out, [num_tokens, h, 512] bfloat16, that a step's sparse layers share."""

    metadata: DeepseekSparseSWAMetadata
    q: Any
    out: Any


class SparseMetadata:
    """Builds a SparseStep."""

    is_queued = True  # a device may wait until the host has queued the whole build

    def __init__(self, options: ReplayOptions, names: SequenceOf[str], longest: int) -> None:
        config = ServingConfig(
            window_size=options.window, compress_ratios=tuple(LAYER_RATIOS[name] for name in names),
            block_size=SWA_BLOCK, compressed_block_size=BLOCK_TOKENS, index_topk=options.topk, num_heads=options.heads,
            max_num_batched_tokens=options.batch_tokens, max_num_seqs=MAX_RUNNING, max_model_len=longest,
            batch_invariant=options.batch_invariant,
        )  # fmt: skip
        self._builder = DeepseekSparseSWAMetadataBuilder(config, backend=options.backend)
        xp, shape = array_module(options.backend), (options.batch_tokens, options.heads, HEAD_DIM)
        self._q, self._out = xp.empty(shape, BFLOAT16), xp.empty(shape, BFLOAT16)

    def build(self, batch: StepBatch) -> SparseStep:
        metadata = self._builder.build(0, batch.common, c128a_block_table=batch.block_table)
        return SparseStep(metadata, self._q[: batch.num_tokens], self._out[: batch.num_tokens])


@dataclass(frozen=True)
class LayerInputs:
    """A step's inputs of a layer, in place of a model's projections, compressor and indexer.

    Attributes:
        k: [num_tokens, 512] bfloat16, rotated
        q: [num_tokens, h, 512] bfloat16
        compressed: cache, new rows and selection, or None for a window-only layer
        groups: the compressed rows that the step completes, or None for a window-only layer
    """

    k: Any
    q: Any
    compressed: CompressedCache | None = None
    groups: Groups | None = None


class Layer:
    """One attention layer.

    Attributes:
        swa_cache: uint8 [num_blocks * 4, 64, 584 or 528], in the first of the run's formats
        compressed_cache: uint8 [num_blocks, 64 or 2, 584, 528 or 288], in the second; None for a window-only layer
        indexer: selects compressed rows, with its cache of keys; None except at ratio 4
        attends_alike: whether prefill tokens use the decode kernel
        is_queued: whether a device begins a step only when the host has queued the whole step
        is_checked: whether outputs are compared with float64
    """

    is_queued, attends_alike, is_checked = True, False, True

    def __init__(self, index: int, name: str, options: ReplayOptions) -> None:
        self.name, self.index, self.ratio, self.options = name, index, LAYER_RATIOS[name], options
        self.xp = xp = array_module(options.backend)
        self.activations = Activations(options.seed, index, options.heads, xp)
        first, second = options.formats
        sink = self.activations.attn_sink
        self.attends_alike = self.attends_alike or options.batch_invariant
        self.attention = SparseMLALayer(
            self.ratio, options.topk, sink, layout=first, extra_layout=second, batch_invariant=options.batch_invariant
        )
        blocks, rows = options.num_blocks, BLOCK_TOKENS // self.ratio
        self.swa_cache = first.allocate(blocks * SWA_PAGES, SWA_BLOCK, xp)
        self.compressed_cache = self._allocate_compressed(blocks, rows) if self.ratio > 1 else None
        self.indexer = None
        if self.ratio == TOPK_RATIO:
            self.indexer = Indexer(options.seed, index, blocks, rows, options.topk, options.backend, xp)
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def _allocate_compressed(self, blocks: int, rows: int) -> Any:
        return self.attention.compressed_layout.allocate(blocks, rows, self.xp)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the paged caches, including the padding of pages."""
        caches = [cache for cache in (self.swa_cache, self.compressed_cache) if cache is not None]
        return sum(cache.shape[0] * cache.strides[0] for cache in caches)

    def inputs(self, batch: StepBatch, shared: SparseStep, stopwatch: Stopwatch) -> LayerInputs:
        """A step's rows, and its Q in the shared memory."""
        xp, activations, q = self.xp, self.activations, shared.q
        groups = completed_groups(batch, self.ratio) if self.ratio > 1 else None
        with stopwatch.measure((self.name, "activations")):
            rows = activations.k_rows(batch.token_keys)
            base = apply_rope(activations.q_rows(batch.token_keys), batch.positions, xp)
            activations.queries(base, q)
            k = apply_rope(rows, batch.positions, xp).astype(BFLOAT16)
            if groups is None:
                return LayerInputs(k, q)
            means = rows[:0]
            if len(groups.slots):
                rows = xp.concatenate([rows, activations.k_rows(groups.earlier_keys)])
                means = rows[xp.asarray(groups.members)].mean(axis=1)
            compressed_k = apply_rope(means, groups.positions, xp).astype(BFLOAT16)
            slots = xp.asarray(groups.slots)
        selected = None
        if self.indexer is not None:
            if len(means):
                with stopwatch.measure((self.name, "index k")):
                    self.indexer.insert(means, slots)
            visible = (batch.positions + 1) // self.ratio
            selected = self.indexer.select(batch, base, visible, stopwatch, self.name)
        compressed = CompressedCache(self.compressed_cache, batch.block_table, compressed_k, slots, selected)
        return LayerInputs(k, q, compressed, groups)

    def step(
        self, batch: StepBatch, inputs: LayerInputs, shared: SparseStep, observe: Observer, picked: SequenceOf[int] = ()
    ) -> Any:
        """Insert and attend: out [num_tokens, h, 512] bfloat16."""
        self.attention.step(
            inputs.q, inputs.k, self.swa_cache, shared.metadata, inputs.compressed, out=shared.out,
            prefill_path=self.options.prefill_path, backend=self.options.backend, observe=observe,
        )  # fmt: skip
        return shared.out

    def moved(self, batch: StepBatch, inputs: LayerInputs, shared: SparseStep) -> dict[str, int]:
        """Bytes that each op of a step has to move."""
        options, topk = self.options, self.options.topk if self.ratio == TOPK_RATIO else None
        paths = list(chunk_paths(
            shared.metadata, self.ratio, options.heads, topk, options.backend, self.attention.layout,
            "pages" if options.batch_invariant else options.prefill_path,
        ))  # fmt: skip
        over_pages = [x.path == "pages" for x in paths for _ in range(x.prefills.start, x.prefills.stop)]
        return bytes_moved(
            batch, self.ratio, options.heads, options.window, options.topk, inputs.groups, over_pages, options.formats,
            first_tokens(batch.num_decodes, self.ratio, paths) - batch.num_decodes,
        )  # fmt: skip

    def check(self, step: int, batch: StepBatch, inputs: LayerInputs, out: Any, kind: str, token: int) -> Sample:
        """Check one token of a finished step."""
        (scheduled, position), (first, second) = batch.at(token), self.options.formats
        sequence = scheduled.sequence
        window = np.arange(max(position - self.options.window + 1, 0), position + 1)
        cached = [cached_rows(self.swa_cache, sequence.slots(window), self.xp, first)]
        original = [self._window_rows(sequence, window)]
        if inputs.compressed is not None:
            rows = np.arange((position + 1) // self.ratio)
            if self.ratio == TOPK_RATIO:
                rows = to_host(inputs.compressed.topk_indices[token]).astype(np.int64)
                rows = rows[rows >= 0]
            original.append(self._compressed_rows(sequence, rows))
            cached.append(self._cached_compressed(sequence, rows, original[-1]))
        query, got = (to_host(array[token]).astype(np.float64) for array in (inputs.q, out))
        sink, keys = to_host(self.activations.attn_sink), np.concatenate(cached)
        exact, _, _ = attend(query, keys, sink, HEAD_DIM**-0.5)
        unquantised, _, _ = attend(query, np.concatenate(original), sink, HEAD_DIM**-0.5)
        largest = max(float(np.abs(rows).max(initial=1.0)) for rows in cached) if kind == "prefill" else 1.0
        fp4 = inputs.compressed is not None and second.value_type == "e2m1"
        return measured(
            step, self.name, sequence.index, position, kind, got, exact, unquantised, largest,
            self._allowed(query, keys, sink), fp4,
        )  # fmt: skip

    def _allowed(self, query: np.ndarray, keys: np.ndarray, sink: np.ndarray) -> float | np.ndarray:
        """The error that an out may have in addition to its bound."""
        return 0.0

    def _cached_compressed(self, sequence: Sequence, rows: np.ndarray, original: np.ndarray) -> np.ndarray:
        """The cache's compressed rows, float64 [n, 512]."""
        slots = sequence.slots(rows, BLOCK_TOKENS // self.ratio)
        return cached_rows(self.compressed_cache, slots, self.xp, self.options.formats[1])

    def _window_rows(self, sequence: Sequence, positions: np.ndarray) -> np.ndarray:
        rows = self.activations.k_rows(sequence.token_keys[positions])
        return to_host(apply_rope(rows, positions, self.xp).astype(BFLOAT16)).astype(np.float64)

    def _compressed_rows(self, sequence: Sequence, rows: np.ndarray) -> np.ndarray:
        """Compressed rows before quantisation, float64 [n, 512], cached by their last token and their number."""
        ratio, known = self.ratio, self._known
        last_keys = sequence.token_keys[rows * ratio + ratio - 1]
        names = [(int(key), int(row)) for key, row in zip(last_keys, rows, strict=True)]
        if len(known) > KNOWN_ROWS:
            known.clear()
        missing = [i for i, name in enumerate(names) if name not in known]
        if missing:
            first = rows[missing] * ratio
            members = first[:, None] + np.arange(ratio)
            pooled = self.activations.k_rows(sequence.token_keys[members.ravel()])
            means = pooled.reshape(-1, ratio, HEAD_DIM).mean(axis=1)
            rotated = to_host(apply_rope(means, first, self.xp).astype(BFLOAT16))
            known.update((names[i], row) for i, row in zip(missing, rotated, strict=True))
        values = np.array([known[name] for name in names], dtype=BFLOAT16)
        return values.reshape(-1, HEAD_DIM).astype(np.float64)
