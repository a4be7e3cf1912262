"""Layers of one of several ranks over a sharded context: each rank replays all requests with its part of the rows.

Ranks are threads: with NumPy on the CPU, or each with its own GPU and NCCL between them. The schedule depends only on
the requests, so all ranks run the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays.memory import to_host
from ..dispatch.backends import takes_device_arrays
from ..errors import InputError
from ..kernels.types.shard import Shard
from ..layers.sparse import Observer
from ..layout import MLA_BF16
from ..parallel import (
    Communicator,
    RankError,
    ShardedCompressedCache,
    ShardedMLALayer,
    ShardedSparseMLALayer,
    local_block_table,
    local_seq_lens,
    local_slot_mapping,
    run_threads,
)
from ..parallel.models import RankRows, ShardedAttention
from .blocks import BLOCK_TOKENS
from .dense import E4M3, FP8_SCALE, NOPE, DenseInputs, DenseLayer
from .layers import Layer, LayerInputs, SparseStep
from .model_layers import LatentLayer, ModelLayer, V4Layer, V41Layer, cache_bytes
from .options import ReplayOptions
from .scheduler import Sequence
from .step_batch import SWA_BLOCK, StepBatch
from .verify import ROUNDED_PARTS, mean_sizes, quantised

TIME_LIMIT = 600.0  # seconds that a rank waits for another, which may have to compile kernels
T = TypeVar("T")


class Sharding(NamedTuple):
    """The sharding of a layer's compressed rows, such that the rows of a block of tokens stay in the block's pages.

    Attributes:
        shard: shard of a request's rows
        rows: rows of a block that a rank has, if it has any
        table: columns of a request's block table with rows of this rank: (first, step)
    """

    shard: Shard
    rows: int
    table: tuple[int, int]


def sharding_of(rows_of_block: int, rank: int, size: int) -> Sharding:
    """Row by row if ranks divide a block's rows evenly; else block by block, with pages empty on other ranks."""
    if rows_of_block % size == 0:
        return Sharding(Shard(rank, size, 1), rows_of_block // size, (0, 1))
    if size % rows_of_block == 0:
        return Sharding(Shard(rank, size, 1), 1, (rank // rows_of_block, size // rows_of_block))
    return Sharding(Shard(rank, size, rows_of_block), rows_of_block, (rank, size))


def sent_bytes(comm: Communicator) -> int:
    return sum(comm.traffic.values())


class RankLayer(Layer):
    """One sparse layer of one rank: all window rows and indexer keys, and the rank's part of the compressed rows.

    Attributes:
        sent: bytes sent in the last step
    """

    def __init__(self, index: int, name: str, options: ReplayOptions, comm: Communicator) -> None:
        self.comm, self.backend, self.sent = comm, options.backend, 0
        super().__init__(index, name, options)
        self.sharded = ShardedSparseMLALayer(self.attention, comm, backend=options.backend)

    @property
    def sharding(self) -> Sharding:
        return sharding_of(BLOCK_TOKENS // self.ratio, self.comm.rank, self.comm.size)

    def _allocate_compressed(self, blocks: int, rows: int) -> Any:
        return self.attention.compressed_layout.allocate(blocks, self.sharding.rows, self.xp)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the rank's part of the compressed rows."""
        return 0 if self.compressed_cache is None else cache_bytes(self.compressed_cache)

    @property
    def unsharded_compressed_bytes(self) -> int:
        """Bytes of all compressed rows on one device."""
        cache, layout = self.compressed_cache, self.attention.compressed_layout
        return 0 if cache is None else len(cache) * layout.page_bytes(BLOCK_TOKENS // self.ratio)

    @property
    def unsharded_cache_bytes(self) -> int:
        """Bytes of the layer's caches on one device."""
        return self.cache_bytes - self.compressed_bytes + self.unsharded_compressed_bytes

    def step(
        self, batch: StepBatch, inputs: LayerInputs, shared: SparseStep, observe: Observer, picked: SequenceOf[int] = ()
    ) -> Any:
        sharded = None
        if inputs.compressed is not None:
            with observe("map"):
                sharded = self._sharded(inputs, batch)
        before = sent_bytes(self.comm)
        self.sharded.step(inputs.q, inputs.k, self.swa_cache, shared.metadata, sharded, out=shared.out, observe=observe)
        self.sent = sent_bytes(self.comm) - before
        return shared.out

    def _sharded(self, inputs: LayerInputs, batch: StepBatch) -> ShardedCompressedCache:
        compressed, sharding, backend = inputs.compressed, self.sharding, self.backend
        assert compressed is not None
        table = local_block_table(batch.block_table, Shard(*sharding.table), backend=backend)
        by_token = local_slot_mapping(
            batch.common.query_start_loc, batch.common.seq_lens, table, sharding.rows, sharding.shard,
            num_tokens=batch.num_tokens, compress_ratio=self.ratio, backend=backend,
        )  # fmt: skip
        last_tokens = np.flatnonzero((batch.positions + 1) % self.ratio == 0)  # of the step's completed rows
        slots = by_token[self.xp.asarray(last_tokens)]
        return ShardedCompressedCache(
            compressed.cache, table, sharding.shard, compressed.k, slots, compressed.topk_indices
        )

    def moved(self, batch: StepBatch, inputs: LayerInputs, shared: SparseStep) -> dict[str, int]:
        return {"exchange": self.sent}

    def _cached_compressed(self, sequence: Sequence, rows: np.ndarray, original: np.ndarray) -> np.ndarray:
        """The ranks' cached rows, recomputed because a rank lacks some of them."""
        return quantised(original, self.options.formats[1])

    def _allowed(self, query: np.ndarray, keys: np.ndarray, sink: np.ndarray) -> np.ndarray:
        return ROUNDED_PARTS * mean_sizes(query, keys, sink)


class RankDenseLayer(DenseLayer):
    """One dense layer of one rank, with the rank's part of the latent rows. sent: bytes sent in the last step."""

    reads_back = attends_alike = True

    def __init__(self, index: int, name: str, options: ReplayOptions, comm: Communicator) -> None:
        super().__init__(index, name, options)
        self.comm, self.backend, self.sent = comm, options.backend, 0
        self.unsharded_cache_bytes = self.unsharded_compressed_bytes = self.cache_bytes
        self.cache = self.xp.zeros((len(self.cache), self.sharding.rows, MLA_BF16.head_dim), self.cache.dtype)
        self.sharded = ShardedMLALayer(self.attention, comm)

    @property
    def sharding(self) -> Sharding:
        return sharding_of(SWA_BLOCK, self.comm.rank, self.comm.size)

    @property
    def compressed_bytes(self) -> int:
        return self.cache_bytes

    def step(
        self, batch: StepBatch, inputs: DenseInputs, shared: Any, observe: Observer, picked: SequenceOf[int] = ()
    ) -> Any:
        sharding, backend, xp, common = self.sharding, self.backend, self.xp, batch.common
        with observe("map"):
            table = local_block_table(common.block_table_tensor, Shard(*sharding.table), backend=backend)
            slots = local_slot_mapping(
                common.query_start_loc, common.seq_lens, table, sharding.rows, sharding.shard,
                num_tokens=batch.num_tokens, backend=backend,
            )  # fmt: skip
            requests = np.repeat(np.arange(len(batch.scheduled)), np.diff(batch.starts))
            seen = xp.asarray((batch.positions + 1).astype(np.int32))
            lens = local_seq_lens(seen, sharding.shard, backend=backend)
            tables = table[xp.asarray(requests)]
        before = sent_bytes(self.comm)
        out = self.sharded.forward(
            inputs.q, inputs.kv_c, inputs.k_pe, self.cache, tables, lens, slots, k_scale=FP8_SCALE, observe=observe
        )
        self.sent = sent_bytes(self.comm) - before
        return out.reshape(len(out), self.heads, -1)

    def moved(self, batch: StepBatch, inputs: DenseInputs, shared: Any) -> dict[str, int]:
        return {"exchange": self.sent}

    def cached(self, sequence: Sequence, positions: np.ndarray) -> Any:
        """The ranks' cached rows at these positions, recomputed because a rank lacks some of them."""
        rows = self.original(sequence, positions)
        if not self.fp8:
            return rows
        values = np.clip(to_host(rows).astype(np.float32) / np.float32(FP8_SCALE), -448, 448).astype(E4M3)
        return self.xp.asarray((values.astype(np.float32) * np.float32(FP8_SCALE)).astype(rows.dtype))

    def allowed(self, query: Any, rows: Any) -> np.ndarray:
        """The additional error allowed for merged results, [h, 128]: as in sparse layers, in the latent space."""
        weights, latents = self.weights_of(query, rows)
        sizes = weights @ self.xp.abs(latents)
        out = self.xp.matmul(self.xp.abs(self.exact_weight[:, NOPE:]), sizes[:, :, None])[..., 0]
        return ROUNDED_PARTS * to_host(out)


class RankModelLayer(ModelLayer):
    """A model's layer on one rank: a part of the compressed rows, or of latent rows, and all other caches.

    Its outputs are not checked: no rank has all rows. sent: bytes sent in the last step.
    """

    is_checked = False
    sharded_cache: str | None  # the name of the sharded cache
    rows_of_page: int

    def share(self, comm: Communicator, backend: str) -> None:
        """Replace the sharded cache by the rank's part, if the layer owns its rows."""
        self.comm, self.backend, self.sent = comm, backend, 0
        self.sharded = ShardedAttention(self.attention, comm)
        self.unsharded_cache_bytes, self.unsharded_compressed_bytes = self.cache_bytes, 0
        if self.has_part:
            name = str(self.sharded_cache)
            unsharded, layouts = getattr(self.caches, name), self.attention.layouts
            self.unsharded_compressed_bytes = cache_bytes(unsharded)
            layout = layouts.rows if name == "rows" else layouts.compressed
            self.caches = replace(self.caches, **{name: layout.allocate(len(unsharded), self.sharding.rows, self.xp)})

    @property
    def has_part(self) -> bool:
        """Whether the layer owns a sharded cache."""
        return self.sharded_cache is not None and self.attention.spec.owns_rows

    @property
    def sharding(self) -> Sharding:
        return sharding_of(self.rows_of_page, self.comm.rank, self.comm.size)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the rank's part of the sharded cache."""
        return cache_bytes(getattr(self.caches, str(self.sharded_cache))) if self.has_part else 0

    def run(self, batch: StepBatch, hidden: Any, metadata: Any, observe: Observer) -> Any:
        rows = None
        if self.sharded_cache is not None:
            with observe("map"):
                rows = self._rows(batch)
        before = sent_bytes(self.comm)
        out = self.sharded.step(hidden, self.caches, metadata, rows, self.selection, observe=observe)
        self.sent = sent_bytes(self.comm) - before
        return out

    def _rows(self, batch: StepBatch) -> RankRows:
        sharding, common = self.sharding, batch.common
        table = local_block_table(self.pages(batch), Shard(*sharding.table), backend=self.backend)
        slots = local_slot_mapping(
            common.query_start_loc, common.seq_lens, table, sharding.rows, sharding.shard, num_tokens=batch.num_tokens,
            compress_ratio=self.ratio, backend=self.backend,
        )  # fmt: skip
        return RankRows(sharding.shard, table, slots)

    def pages(self, batch: StepBatch) -> Any:
        """The block table of the sharded cache."""
        return batch.common.block_table_tensor if self.sharded_cache == "rows" else batch.block_table

    def moved(self, batch: StepBatch, hidden: Any, shared: Any) -> dict[str, int]:
        return {"exchange": self.sent}


class RankV4Layer(RankModelLayer, V4Layer):
    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any], comm: Communicator
    ) -> None:
        super().__init__(index, name, options, longest, before, comm.rank)
        self.sharded_cache = "compressed" if self.ratio > 1 else None
        self.rows_of_page = BLOCK_TOKENS // self.ratio
        self.share(comm, options.backend)


class RankV41Layer(RankModelLayer, V41Layer):
    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any], comm: Communicator
    ) -> None:
        super().__init__(index, name, options, longest, before, comm.rank)
        self.sharded_cache = "compressed" if self.ratio else None
        self.rows_of_page = BLOCK_TOKENS // max(self.ratio, 1)
        self.share(comm, options.backend)


class RankLatentLayer(RankModelLayer, LatentLayer):
    sharded_cache, rows_of_page = "rows", SWA_BLOCK

    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any], comm: Communicator
    ) -> None:
        super().__init__(index, name, options, longest, before, comm.rank)
        self.share(comm, options.backend)


def run_on_ranks(options: ReplayOptions, function: Callable[[Any], T]) -> list[T]:
    """Call `function` with a communicator on each rank. Returns all results. Raises InputError, RankError."""
    if not takes_device_arrays(options.backend):
        return run_threads(options.ranks, function, TIME_LIMIT)
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if options.ranks > count:
        raise InputError(f"--ranks: got {options.ranks}, but there are {count} GPUs (--backend cpu runs any number)")
    from ..interop.nccl import NcclCommunicator

    comms = NcclCommunicator.in_process(range(options.ranks), time_limit=TIME_LIMIT)
    results: list[Any] = [None] * options.ranks
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            cupy.cuda.Device(rank).use()
            with comms[rank] as comm:
                results[rank] = function(comm)
                comm.wait()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(options.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = min(errors, key=lambda rank: (isinstance(errors[rank], RankError), rank))
        raise errors[first]
    return results
