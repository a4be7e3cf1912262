"""The loop of a replay: builds metadata once a step, then runs every layer with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..dispatch.backends import array_module, takes_device_arrays
from ..parallel import Communicator
from ..timing import Stopwatch
from .blocks import BLOCK_TOKENS, BlockPool
from .dense import DENSE, DenseLayer, DenseMetadata
from .groups import groups_of
from .layers import Layer, SparseMetadata
from .model_layers import LatentLayer, V4Layer, V41Layer
from .models import ModelMetadata
from .offload import Offload
from .options import LAYER_RATIOS, MAX_RUNNING, MODEL_OF, ReplayOptions
from .ranks import RankDenseLayer, RankLatentLayer, RankLayer, RankV4Layer, RankV41Layer
from .scheduler import Scheduler
from .step_batch import StepBatch, make_batch
from .trace import HASH_TOKENS, TraceRequest
from .verify import Sample, Verifier

# Builders of metadata, each with the names of the layers that share it.
METADATA: tuple[tuple[Any, frozenset[str]], ...] = (
    (SparseMetadata, frozenset(LAYER_RATIOS)),
    (DenseMetadata, frozenset([DENSE])),
    (ModelMetadata, frozenset(MODEL_OF)),
)
# Layers of models on one device and on ranks; other models have latent rows.
MODEL_KINDS: dict[str, tuple[Any, Any]] = {"v4": (V4Layer, RankV4Layer), "v41": (V41Layer, RankV41Layer)}
STEP = "step"  # in place of a layer, for work done once for all layers


@dataclass(frozen=True)
class StepRecord:
    """The measurements of a step. Times and bytes by (layer type or "step", op).

    Attributes:
        blocks_held, blocks_idle: blocks of requests that run, and of prefixes of finished requests
        prefixes_on_host: prefixes in host memory
        admitted_tokens, hit_tokens: prompt tokens of the requests that began by now, and prefix hits among them
    """

    step: int
    clock_ms: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    blocks_held: int
    blocks_idle: int
    prefixes_on_host: int
    admitted_tokens: int
    hit_tokens: int
    seconds: dict[tuple[str, str], float]
    bytes: dict[tuple[str, str], int]
    samples: list[Sample]

    def add_bytes(self, layer: str, moved: dict[str, int]) -> None:
        for op, count in moved.items():
            self.bytes[layer, op] = self.bytes.get((layer, op), 0) + count


class Engine:
    """Replays requests. `steps` runs them; the scheduler and the layers can be inspected in between.

    Args:
        groups: the builders of metadata, each with the layers that share it
        comm: the rank's communicator, if ranks share the context: each has an engine and replays the same requests

    Attributes:
        offload: prefixes in host memory; None without host pages
    """

    def __init__(
        self, options: ReplayOptions, requests: Sequence[TraceRequest], verify: bool = True,
        comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.xp = array_module(options.backend)
        longest = max(request.total_length for request in requests)
        self.layers: list[Any] = []
        for index, name in enumerate(options.layers):
            self.layers.append(layer_of(index, name, options, longest, comm, self.layers))
        self.verifier = Verifier(options, comm) if verify else None
        self.groups: list[tuple[Any, list[Any]]] = []
        for metadata, names in METADATA:
            layers = [layer for layer in self.layers if layer.name in names]
            if layers:
                self.groups.append((metadata(options, [layer.name for layer in layers], longest), layers))
        self._stopwatch = Stopwatch(self.xp, holds=comm is None)
        self.offload = None
        if options.host_pages:
            pinned, groups = takes_device_arrays(options.backend), groups_of(self.layers, options)
            self.offload = Offload(groups, options.host_pages, self._stopwatch, options.backend, pinned, verify)
        self.pool = BlockPool(options.num_blocks, self.offload)
        self.scheduler = Scheduler(requests, self.pool, options.batch_tokens, MAX_RUNNING)

    def steps(self) -> Iterator[StepRecord]:
        """Run until every request has finished."""
        step = 0
        while scheduled := self.scheduler.next_step():
            batch = make_batch(scheduled, self.xp)
            record = self._run(step, batch)
            self.scheduler.finish_step(scheduled)
            yield record
            step += 1

    def _run(self, step: int, batch: StepBatch) -> StepRecord:
        scheduler = self.scheduler
        record = StepRecord(
            step=step,
            clock_ms=scheduler.clock_ms,
            prefill_tokens=batch.num_tokens - batch.num_decodes,
            decode_tokens=batch.num_decodes,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_held=self.pool.num_used,
            blocks_idle=self.pool.num_idle,
            prefixes_on_host=0 if self.offload is None else len(self.offload),
            admitted_tokens=scheduler.admitted_tokens,
            hit_tokens=scheduler.hit_tokens,
            seconds={},
            bytes={},
            samples=[],
        )
        for metadata, layers in self.groups:
            with self._queued(metadata), self._stopwatch.measure((STEP, "metadata")):
                shared = metadata.build(batch)
            for layer in layers:
                self._run_layer(layer, batch, shared, record)
        record.seconds.update(self._stopwatch.collect())
        return record

    def _run_layer(self, layer: Any, batch: StepBatch, shared: Any, record: StepRecord) -> None:
        """Run one layer of a step.

        Args:
            shared: the metadata that the layer's builder built
        """
        picked = []
        if self.verifier is not None and layer.is_checked:
            picked = self.verifier.pick(record.step, layer.index, batch)
        inputs = layer.inputs(batch, shared, self._stopwatch)
        observe = functools.partial(self._observe, layer.name)
        with self._queued(layer):
            out = layer.step(batch, inputs, shared, observe, [token for _, token in picked])
        record.add_bytes(layer.name, layer.moved(batch, inputs, shared))
        with self._stopwatch.measure((STEP, "verify")) if picked else nullcontext():
            for kind, token in picked:
                record.samples.append(layer.check(record.step, batch, inputs, out, kind, token))

    def _queued(self, what: Any) -> AbstractContextManager[None]:
        return self._stopwatch.queued() if what.is_queued else nullcontext()

    def _observe(self, layer: str, op: str) -> AbstractContextManager[None]:
        return self._stopwatch.measure((layer, op))


def layer_of(
    index: int, name: str, options: ReplayOptions, longest: int, comm: Communicator | None, before: Sequence[Any]
) -> Any:
    """A layer on one device, or a rank's layer. before: earlier layers, some of which share caches with it."""
    model = MODEL_OF.get(name)
    if model is not None:
        kind, of_rank = MODEL_KINDS.get(model, (LatentLayer, RankLatentLayer))
        if comm is None:
            return kind(index, name, options, longest, before)
        return of_rank(index, name, options, longest, before, comm)
    if comm is None:
        return (DenseLayer if name == DENSE else Layer)(index, name, options)
    return (RankDenseLayer if name == DENSE else RankLayer)(index, name, options, comm)


def warm_up(options: ReplayOptions, comm: Communicator | None = None) -> None:
    """Compile the kernels of a run, by running a few synthetic requests with their own caches.

    The requests overlap, so that steps are all prefill, mixed and all decode.
    """
    lengths = (BLOCK_TOKENS + 1, options.batch_tokens + BLOCK_TOKENS)
    requests = [
        TraceRequest(0.0, length, 4, tuple(range(-(-length // HASH_TOKENS)))).clipped(options.max_len)
        for length in lengths
    ]
    small = replace(options, cache_tokens=sum(-(-r.total_length // BLOCK_TOKENS) for r in requests) * BLOCK_TOKENS)
    engine = Engine(small, requests, False, comm)
    for _ in engine.steps():
        pass
    if engine.offload is not None:
        engine.pool.acquire([], engine.pool.num_blocks)  # swaps out
