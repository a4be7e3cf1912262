"""Layers on ranks: a golden layer whose rows are sharded, and valid arguments of sparse and dense layers."""

import dataclasses

import numpy as np

import cumla
from cumla.metadata.builder import ServingConfig
from cumla.metadata.sparse_swa import DeepseekSparseSWAMetadataBuilder
from cumla.parallel import (
    RankRows,
    Shard,
    ShardedAttention,
    ShardedCompressedCache,
    local_slot_mapping,
)

from .batch_kinds import padded
from .lab import BF16
from .models import GoldenLayer, PagedRequests, V4Layer, V32Layer

PAGE = 3  # rows of a rank's page, which need not divide anything
INTERLEAVE = 2


class Ranked:
    """A golden layer whose compressed or latent rows are sharded across ranks. options: of the layer on one device."""

    def __init__(self, case, comm, requests=1, backend="cpu", **options):
        golden = GoldenLayer(case)
        self.is_v32 = golden.record["model"] == "v32"
        self.whole = (V32Layer if self.is_v32 else V4Layer)(golden, requests, backend=backend, **options)
        self.layer = self.whole.layer
        self.ratio = self.layer.ratio
        self.shard = Shard(comm.rank, comm.size, INTERLEAVE)
        self.sharded = ShardedAttention(self.layer, comm)
        self.name = "rows" if self.is_v32 else "compressed"
        self.caches = self.whole.caches
        if self.ratio:
            columns = -(-golden.tokens // self.ratio // (PAGE * comm.size)) + 1
            pages = np.random.default_rng(comm.rank).permutation(requests * columns).astype(np.int32)
            self.table = pages.reshape(requests, columns)
            rows = np.zeros((len(pages), PAGE, getattr(self.caches, self.name).shape[2]), np.float32)
            self.caches = dataclasses.replace(self.caches, **{self.name: rows})

    def arguments(self, first, count):
        """Arguments of `step`, for tokens of the one request."""
        golden = self.whole.golden
        topk = None if golden.topk is None else golden.topk[first : first + count]
        return self.batch([(0, first, count)]) | {"topk_indices": topk}

    def batch(self, scheduled, padding=0):
        """The same for (request, first position, tokens), which select for themselves; `padding` tokens are NaN."""
        golden, whole = self.whole.golden, self.whole
        batch, tables = whole.paged.batch(scheduled)
        tokens, batch, rows = batch.num_actual_tokens, padded(batch, padding), None
        hidden = np.full((tokens + padding, golden.hidden.shape[1]), np.nan, np.float32)
        spans = [golden.hidden[first : first + count] for _, first, count in scheduled]
        hidden[:tokens] = np.concatenate([hidden[:0], *spans])
        if self.ratio:
            table = self.table[[request for request, _, _ in scheduled]]
            slots = local_slot_mapping(
                batch.query_start_loc, batch.seq_lens, table, PAGE, self.shard, num_tokens=len(hidden),
                compress_ratio=self.ratio, backend=self.layer.backend,
            )  # fmt: skip
            rows = RankRows(self.shard, table, slots)
        return {
            "hidden_states": hidden, "layer_caches": self.caches, "metadata": whole.build(batch, tables), "rows": rows
        }  # fmt: skip

    def run(self, splits):
        parts, first = [], 0
        for count in splits:
            parts.append(self.sharded.step(**self.arguments(first, count)))
            first += count
        return np.concatenate(parts)


def sparse_arguments(rng, tokens=5, page=64):
    config = ServingConfig(
        compress_ratios=(4,), block_size=page, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256
    )
    paged = PagedRequests(1, 64, {"window": page})
    batch, _ = paged.batch([(0, 0, tokens)])
    compressed = ShardedCompressedCache(
        cumla.DSV4_FP8.allocate(4, PAGE), np.arange(4, dtype=np.int32)[None], Shard(0, 1),
        rng.standard_normal((1, 512)).astype(BF16), np.array([0]), np.zeros((tokens, 4), np.int32),
    )  # fmt: skip
    return {
        "q": rng.standard_normal((tokens, 8, 512)).astype(BF16), "k": rng.standard_normal((tokens, 512)).astype(BF16),
        "swa_cache": cumla.DSV4_FP8.allocate(64 // page + 1, page),
        "metadata": DeepseekSparseSWAMetadataBuilder(config).build(0, batch), "compressed": compressed,
    }  # fmt: skip


def dense_arguments(rng, layer, tokens=3):
    def rows(*shape):
        return rng.standard_normal(shape).astype(BF16)

    return {
        "q": rows(tokens, 2, 192), "k_c_normed": rows(tokens, 512), "k_pe": rows(tokens, 64),
        "kv_cache": np.zeros((2, PAGE, 576), BF16), "block_table": np.zeros((tokens, 2), np.int32),
        "cache_seqlens": np.arange(1, tokens + 1, dtype=np.int32), "slot_mapping": np.arange(tokens),
    }  # fmt: skip
