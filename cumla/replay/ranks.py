"""Ranks that share the context: each replays all requests, with its share of the compressed rows.

Ranks are threads: with NumPy on the CPU, with a GPU each and NCCL between them on a machine that has as many. The
schedule follows from the requests alone, so all ranks run the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..dispatch.backends import takes_device_arrays
from ..errors import InputError
from ..layers.sparse import Observer
from ..parallel import (
    Communicator,
    RankError,
    Shard,
    ShardedCompressedCache,
    ShardedSparseMLALayer,
    local_block_table,
    local_slot_mapping,
    run_threads,
)
from .blocks import BLOCK_TOKENS
from .layers import Layer, LayerInputs
from .options import ReplayOptions
from .step_batch import Groups, StepBatch

TIME_LIMIT = 600.0  # seconds that a rank waits for another: kernels may have to be compiled
T = TypeVar("T")


class Sharding(NamedTuple):
    """How a layer's compressed rows are sharded, so that the rows of a block of tokens stay in that block's pages.

    shard   of a request's rows
    rows    that a rank has of a block, if any
    table   which columns of a request's block table have rows of this rank: (first, step)
    """

    shard: Shard
    rows: int
    table: tuple[int, int]


def sharding_of(rows_of_block: int, rank: int, size: int) -> Sharding:
    """In turn where a block's rows can be sharded evenly; else by blocks, whose pages other ranks leave empty."""
    if rows_of_block % size == 0:
        return Sharding(Shard(rank, size, 1), rows_of_block // size, (0, 1))
    if size % rows_of_block == 0:
        return Sharding(Shard(rank, size, 1), 1, (rank // rows_of_block, size // rows_of_block))
    return Sharding(Shard(rank, size, rows_of_block), rows_of_block, (rank, size))


class RankLayer(Layer):
    """One sparse layer of one rank: the window's cache and the indexer's whole, of the compressed rows a share."""

    def __init__(self, index: int, name: str, options: ReplayOptions, comm: Communicator) -> None:
        self.comm = comm
        super().__init__(index, name, options)
        self.sharded = ShardedSparseMLALayer(self.attention, comm, backend=options.backend)
        self.backend = options.backend
        self._sent = 0  # bytes

    @property
    def sharding(self) -> Sharding:
        return sharding_of(BLOCK_TOKENS // self.ratio, self.comm.rank, self.comm.size)

    def _allocate_compressed(self, blocks: int, rows: int) -> Any:
        return self.attention.compressed_layout.allocate(blocks, self.sharding.rows, self.xp)

    @property
    def compressed_bytes(self) -> int:
        """What the rank's share of the compressed rows takes."""
        cache = self.compressed_cache
        return 0 if cache is None else int(len(cache) * cache.strides[0])

    @property
    def whole_compressed_bytes(self) -> int:
        """What all of them take where one device has them."""
        cache = self.compressed_cache
        layout = self.attention.compressed_layout
        return 0 if cache is None else len(cache) * layout.page_bytes(BLOCK_TOKENS // self.ratio)

    @property
    def whole_cache_bytes(self) -> int:
        """What the layer's caches take where one device has them all."""
        return self.cache_bytes - self.compressed_bytes + self.whole_compressed_bytes

    def step(
        self, q: Any, inputs: LayerInputs, batch: StepBatch, metadata: Any, out: Any, options: ReplayOptions,
        observe: Observer,
    ) -> None:  # fmt: skip
        sharded = None
        if inputs.compressed is not None:
            with observe("map"):
                sharded = self._sharded(inputs, batch)
        before = sum(self.comm.traffic.values())
        self.sharded.step(q, inputs.k, self.swa_cache, metadata, sharded, out=out, observe=observe)
        self._sent = sum(self.comm.traffic.values()) - before

    def _sharded(self, inputs: LayerInputs, batch: StepBatch) -> ShardedCompressedCache:
        compressed, sharding, backend = inputs.compressed, self.sharding, self.backend
        assert compressed is not None
        first, step = sharding.table
        table = local_block_table(batch.block_table, Shard(first, step), backend=backend)
        by_token = local_slot_mapping(
            batch.common.query_start_loc, batch.common.seq_lens, table, sharding.rows, sharding.shard,
            num_tokens=batch.num_tokens, compress_ratio=self.ratio, backend=backend,
        )  # fmt: skip
        last_tokens = np.flatnonzero((batch.positions + 1) % self.ratio == 0)  # of the rows that the step completes
        slots = by_token[self.xp.asarray(last_tokens)]
        return ShardedCompressedCache(
            compressed.cache, table, sharding.shard, compressed.k, slots, compressed.topk_indices
        )

    def moved(self, batch: StepBatch, metadata: Any, groups: Groups | None, options: ReplayOptions) -> dict[str, int]:
        """What this rank sent in the last step."""
        return {"exchange": self._sent}


def run_on_ranks(options: ReplayOptions, function: Callable[[Any], T]) -> list[T]:
    """Call `function` with a communicator on each rank. Returns what each returned. Raises InputError, RankError."""
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
