"""The loop: a step's metadata once, then every layer over it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ..dispatch.backends import array_module
from ..dispatch.call import BFLOAT16
from ..metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from ..parallel import Communicator
from ..timing import Stopwatch
from . import whole_verify
from .activations import HEAD_DIM
from .blocks import BLOCK_TOKENS, BlockPool
from .dense import DENSE, DenseLayer, DenseMetadata, dense_bytes_moved
from .dense_ranks import RankDenseLayer
from .layers import Layer
from .options import MAX_RUNNING, V41_RATIOS, WHOLE_LAYERS, ReplayOptions
from .ranks import RankLayer
from .scheduler import Scheduler
from .step_batch import SWA_BLOCK, StepBatch, completed_groups, make_batch
from .trace import HASH_TOKENS, TraceRequest
from .verify import Sample, Verifier
from .whole import WholeLayer, WholeMetadata
from .whole_ranks import RankWholeLayer
from .whole_traffic import whole_bytes_moved
from .whole_v41 import V41, V41Layer, V41Metadata
from .whole_verify import Recorder

WHOLE = {name for names in WHOLE_LAYERS.values() for name in names}
STEP = "step"  # stands for the layer where something is done once for all of them


@dataclass(frozen=True)
class StepRecord:
    """What happened in a step. Times and bytes by (layer type or "step", op)."""

    step: int
    clock_ms: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    blocks_held: int
    blocks_idle: int
    seconds: dict[tuple[str, str], float]
    bytes: dict[tuple[str, str], int]
    samples: list[Sample]

    def add_bytes(self, layer: str, moved: dict[str, int]) -> None:
        for op, count in moved.items():
            self.bytes[layer, op] = self.bytes.get((layer, op), 0) + count


class Engine:
    """Replays requests. `steps` runs them; the scheduler and the layers can be inspected in between.

    comm  of a rank that shares the context with others, each of which has an engine and replays the same requests
    """

    def __init__(
        self, options: ReplayOptions, requests: Sequence[TraceRequest], verify: bool = True,
        comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.xp = array_module(options.backend)
        self.pool = BlockPool(options.num_blocks)
        self.scheduler = Scheduler(requests, self.pool, options.batch_tokens, MAX_RUNNING)
        longest = max(request.total_length for request in requests)
        self.layers: list[Any] = []
        for index, name in enumerate(options.layers):
            self.layers.append(layer_of(index, name, options, longest, comm, self.layers))
        self.verifier = Verifier(options, comm) if verify else None
        config = ServingConfig(
            window_size=options.window,
            compress_ratios=tuple(layer.ratio for layer in self._sparse) or (1,),
            block_size=SWA_BLOCK,
            compressed_block_size=BLOCK_TOKENS,
            index_topk=options.topk,
            num_heads=options.heads,
            max_num_batched_tokens=options.batch_tokens,
            max_num_seqs=MAX_RUNNING,
            max_model_len=longest,
        )
        self._dense_metadata = DenseMetadata(options, longest) if DENSE in options.layers else None
        whole = [name for name in options.layers if name in WHOLE]
        self._whole_metadata = WholeMetadata(options, whole, longest) if whole else None
        self._v41_metadata = V41Metadata(options, longest) if V41_RATIOS.keys() & set(whole) else None
        self._builder = DeepseekSparseSWAMetadataBuilder(config, backend=options.backend)
        shape = (options.batch_tokens, options.heads, HEAD_DIM)
        self._q, self._out = self.xp.empty(shape, BFLOAT16), self.xp.empty(shape, BFLOAT16)
        self._stopwatch = Stopwatch(self.xp, holds=comm is None)

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
            blocks_held=self.pool.num_held,
            blocks_idle=self.pool.num_idle,
            seconds={},
            bytes={},
            samples=[],
        )
        self._run_sparse(step, batch, record)
        self._run_dense(step, batch, record)
        self._run_whole(step, batch, record)
        record.seconds.update(self._stopwatch.collect())
        return record

    @property
    def _sparse(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _run_sparse(self, step: int, batch: StepBatch, record: StepRecord) -> None:
        options, layers = self.options, self._sparse
        if not layers:
            return
        with self._stopwatch.queued(), self._stopwatch.measure((STEP, "metadata")):
            metadata = self._builder.build(0, batch.common, c128a_block_table=batch.block_table)
        ratios = {layer.ratio for layer in layers if layer.ratio > 1}
        groups = {ratio: completed_groups(batch, ratio) for ratio in ratios}
        q, out = self._q[: batch.num_tokens], self._out[: batch.num_tokens]
        for layer in layers:
            completed = groups.get(layer.ratio)
            inputs = layer.inputs(batch, completed, q, self._stopwatch)
            with self._stopwatch.queued():
                layer.step(q, inputs, batch, metadata, out, options, functools.partial(self._observe, layer.name))
            record.add_bytes(layer.name, layer.moved(batch, metadata, completed, options))
            if self.verifier is not None:
                with self._stopwatch.measure((STEP, "verify")):
                    record.samples.extend(self.verifier.check(step, layer, batch, inputs, q, out))

    def _run_dense(self, step: int, batch: StepBatch, record: StepRecord) -> None:
        if self._dense_metadata is None:
            return
        with self._stopwatch.measure((STEP, "metadata")):
            metadata = self._dense_metadata.build(batch)
        for layer in self.layers:
            if not isinstance(layer, DenseLayer):
                continue
            inputs = layer.inputs(batch, self._stopwatch)
            observe = functools.partial(self._observe, layer.name)
            if isinstance(layer, RankDenseLayer):
                out, moved = layer.sharded_step(inputs, batch, observe), {"exchange": layer.sent}
            else:
                out = layer.step(inputs, metadata, observe)
                moved = dense_bytes_moved(batch, layer.heads, layer.row_bytes)
            record.add_bytes(layer.name, moved)
            if self.verifier is not None:
                with self._stopwatch.measure((STEP, "verify")):
                    for kind, token in self.verifier.pick(step, layer.index, batch):
                        record.samples.append(layer.check(step, batch, inputs, out, kind, token))

    def _run_whole(self, step: int, batch: StepBatch, record: StepRecord) -> None:
        if self._whole_metadata is None:
            return
        with self._stopwatch.measure((STEP, "metadata")):
            metadata = self._whole_metadata.build(batch)
            if self._v41_metadata is not None:
                metadata[V41] = self._v41_metadata.build(batch)
        for layer in self.layers:
            if not isinstance(layer, WholeLayer):
                continue
            with self._stopwatch.measure((layer.name, "activations")):
                hidden = layer.hidden(batch)
            observe = functools.partial(self._observe, layer.name)
            if isinstance(layer, RankWholeLayer):
                layer.step_of_rank(hidden, batch, metadata[layer.model], observe)
                record.add_bytes(layer.name, {"exchange": layer.sent})
                continue
            picked = [] if self.verifier is None else self.verifier.pick(step, layer.index, batch)
            recorder = Recorder(layer, batch, picked)
            with self._stopwatch.queued():
                out = layer.step(hidden, metadata[layer.model], recorder.observed(observe))
            record.add_bytes(layer.name, whole_bytes_moved(layer, batch, metadata[layer.model], self.options))
            with self._stopwatch.measure((STEP, "verify")):
                for recorded in recorder.records():
                    record.samples.append(whole_verify.check(step, layer, batch, hidden, out, recorded))

    def _observe(self, layer: str, op: str) -> AbstractContextManager[None]:
        return self._stopwatch.measure((layer, op))


def layer_of(
    index: int, name: str, options: ReplayOptions, longest: int, comm: Communicator | None, before: Sequence[Any]
) -> Any:
    """A layer on one device, or on a rank's. before: the layers before it, some of which share caches with it."""
    if name in V41_RATIOS:
        return V41Layer(index, name, options, longest, before)
    if name in WHOLE:
        return (
            WholeLayer(index, name, options, longest)
            if comm is None
            else RankWholeLayer(index, name, options, longest, comm)
        )
    if comm is None:
        return (DenseLayer if name == DENSE else Layer)(index, name, options)
    return (RankDenseLayer if name == DENSE else RankLayer)(index, name, options, comm)


def warm_up(options: ReplayOptions, comm: Communicator | None = None) -> None:
    """Compile what a run needs, on a few requests of made-up tokens with caches of their own.

    They overlap so that steps are all prefill, mixed and all decode.
    """
    lengths = (BLOCK_TOKENS + 1, options.batch_tokens + BLOCK_TOKENS)
    requests = [
        TraceRequest(0.0, length, 4, tuple(range(-(-length // HASH_TOKENS)))).clipped(options.max_len)
        for length in lengths
    ]
    small = replace(options, cache_tokens=sum(-(-r.total_length // BLOCK_TOKENS) for r in requests) * BLOCK_TOKENS)
    for _ in Engine(small, requests, False, comm).steps():
        pass
