"""The dense layers of a replay on one of several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.memory import to_host
from ..dispatch.call import BFLOAT16
from ..layers.sparse import Observer
from ..layout import MLA_BF16
from ..parallel import Communicator, Shard, ShardedMLALayer, local_block_table, local_seq_lens, local_slot_mapping
from .dense import E4M3, FP8_SCALE, SCALE, DenseInputs, DenseLayer
from .options import ReplayOptions
from .ranks import Sharding, sharding_of
from .scheduler import Sequence
from .step_batch import SWA_BLOCK, StepBatch
from .verify import ROUNDED_PARTS


class RankDenseLayer(DenseLayer):
    """One dense layer of one rank, with its share of the latent rows."""

    reads_back = attends_alike = True

    def __init__(self, index: int, name: str, options: ReplayOptions, comm: Communicator) -> None:
        super().__init__(index, name, options)
        self.comm, self.backend = comm, options.backend
        self.whole_cache_bytes = self.cache_bytes
        self.cache = self.xp.zeros((len(self.cache), self.sharding.rows, MLA_BF16.head_dim), self.cache.dtype)
        self.sharded = ShardedMLALayer(self.attention, comm)
        self.sent = 0  # bytes, in the last step

    @property
    def sharding(self) -> Sharding:
        return sharding_of(SWA_BLOCK, self.comm.rank, self.comm.size)

    @property
    def compressed_bytes(self) -> int:
        return self.cache_bytes

    @property
    def whole_compressed_bytes(self) -> int:
        return self.whole_cache_bytes

    def sharded_step(self, inputs: DenseInputs, batch: StepBatch, observe: Observer) -> Any:
        """Out [n, h, 128] bfloat16."""
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
        before = sum(self.comm.traffic.values())
        out = self.sharded.forward(
            inputs.q, inputs.kv_c, inputs.k_pe, self.cache, tables, lens, slots, k_scale=FP8_SCALE, observe=observe
        )
        self.sent = sum(self.comm.traffic.values()) - before
        return out.reshape(len(out), self.heads, -1)

    def cached(self, sequence: Sequence, positions: np.ndarray) -> Any:
        """What the ranks' caches hold at these positions, made again: a rank has not all of it."""
        parts = [part.view(np.uint16) for part in self.rows(sequence.token_keys[positions], positions)]
        rows = self.xp.concatenate(parts, axis=1).view(BFLOAT16)
        if not self.fp8:
            return rows
        values = np.clip(to_host(rows).astype(np.float32) / np.float32(FP8_SCALE), -448, 448).astype(E4M3)
        return self.xp.asarray((values.astype(np.float32) * np.float32(FP8_SCALE)).astype(rows.dtype))

    def allowed(self, query: Any, rows: Any) -> np.ndarray:
        """What is allowed beside the bound where results are merged, [h, 128]: as in `verify`, in the latent space."""
        xp = self.xp
        query, rows = (x.astype(np.float32).astype(np.float64) for x in (query, rows))
        nope, latent_dim = self.attention.qk_nope_head_dim, self.attention.kv_lora_rank
        latent = xp.matmul(query[:, None, :nope], self.exact_weight[:, :nope])[:, 0]
        scores = SCALE * (latent @ rows[:, :latent_dim].T + query[:, nope:] @ rows[:, latent_dim:].T)
        weights = xp.exp(scores - scores.max(axis=1, keepdims=True))
        sizes = (weights / weights.sum(axis=1, keepdims=True)) @ xp.abs(rows[:, :latent_dim])
        out = xp.matmul(xp.abs(self.exact_weight[:, nope:]), sizes[:, :, None])[..., 0]
        return ROUNDED_PARTS * to_host(out)
