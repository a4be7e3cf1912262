"""The operations that every backend has: one Protocol for each file of a backend's folder.

Arrays are NumPy's or CuPy's, depending on the backend, with shapes, dtypes and devices checked; the docstrings of
the public functions and of kernels/reference define each operation. FILES maps files to Protocols; mypy
(`make types`) and a test check the backends against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .compressor import Compression, CompressorRows
from .index_operations import Advance, Array, IndexerMetadata, Indices, WindowMetadata
from .indexer import Rows, Slots
from .plan import DecodePlan, DenseDecodePlan
from .segments import Pages, Segment
from .shard import Shard


class Blocks(Protocol):
    """Pages copied from cache to cache."""

    def copy_blocks(self, src: Array, dst: Array, src_to_dst: Array) -> None: ...

    def copy_blocks_across(self, src: Array, dst: Array, src_to_dst: Array) -> None: ...


class Compressor(Protocol):
    """Compresses keys of several tokens into one, and inserts it into a paged cache."""

    def compress_and_insert(
        self,
        compressors: Sequence[CompressorRows],
        state_slots: Array,
        state_block_table: Array,
        slot_mapping: Array,
        positions: Array,
        token_to_req: Array,
        query_start_loc: Array,
        compression: Compression,
    ) -> None: ...


class NormRope(Protocol):
    """Norms and rotations of queries, keys and results."""

    def fused_q_kv_rmsnorm(
        self, qr: Array, kv: Array, q_weight: Array, kv_weight: Array, eps: float, q_out: Array, kv_out: Array
    ) -> None: ...

    def qnorm_rope_and_insert(
        self,
        q: Array,
        kv: Array,
        pages: Pages,
        slot_mapping: Array,
        positions: Array,
        cos_sin: Array,
        eps: float,
        q_out: Array,
    ) -> None: ...

    def norm_rope_and_insert(
        self,
        kv: Array,
        weight: Array | None,
        pages: Pages,
        slot_mapping: Array,
        positions: Array,
        cos_sin: Array,
        eps: float,
    ) -> None: ...

    def indexer_knorm_rope_and_insert(
        self,
        k: Array,
        weight: Array,
        bias: Array,
        pages: Pages,
        slot_mapping: Array,
        positions: Array,
        cos_sin: Array,
        eps: float,
    ) -> None: ...

    def apply_rope(self, x: Array, positions: Array, cos_sin: Array, inverse: bool, out: Array) -> None: ...

    def inverse_rope_and_quantize(
        self, o: Array, positions: Array, cos_sin: Array, powers_of_two: bool, values: Array, scales: Array
    ) -> None: ...


class DenseAttention(Protocol):
    """Attention of packed sequences, and of decodes over paged latent rows."""

    def mha_varlen(
        self,
        q: Array,
        k: Array,
        k_pe: Array | None,
        v: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        softmax_scale: float,
        causal: bool,
        accumulate: bool,
        out: Array,
        lse: Array,
    ) -> None: ...

    def dense_mla_decode(
        self,
        q: Array,
        pages: Pages,
        block_table: Array,
        cache_seqlens: Array,
        scale: float | Array | None,
        softmax_scale: float,
        causal: bool,
        max_seqlen: int,
        plan: DenseDecodePlan | None,
        out: Array,
        lse: Array,
    ) -> None: ...


class DenseCache(Protocol):
    """Rows of one format into and out of paged caches."""

    def concat_and_cache_mla(
        self, kv_c: Array, k_pe: Array, pages: Pages, slot_mapping: Array, scale: float | Array | None
    ) -> None: ...

    def gather_cache(
        self,
        pages: Pages,
        dst: Array,
        block_table: Array,
        cu_seq_lens: Array,
        seq_starts: Array | None,
        scale: float | Array | None,
    ) -> None: ...


class Indexer(Protocol):
    """The indexer's queries, keys, scores and top-k."""

    def fused_indexer_q_rope_quant(
        self,
        positions: Array,
        index_q: Array,
        table: Array,
        index_weights: Array,
        scale: float,
        rope_first: bool,
        is_neox: bool,
        least_exponent: int,
        q_out: Array,
        weights: Array,
    ) -> None: ...

    def insert_keys(self, k: Array, pages: Pages, slot_mapping: Array) -> None: ...

    def gather_keys(self, pages: Pages, dst_k: Array, block_table: Array, cu_seq_lens: Array) -> None: ...

    def mqa_logits(
        self,
        q: Array,
        k: Array,
        scales: Array | None,
        weights: Array,
        starts: Array,
        ends: Array,
        compressed: bool,
        clean: bool,
        logits: Array,
    ) -> None: ...

    def paged_mqa_logits(
        self,
        q: Array,
        pages: Pages,
        weights: Array,
        context_lens: Array,
        block_table: Array,
        clean: bool,
        logits: Array,
    ) -> None: ...

    def paged_mqa_logits_metadata(self, lens: Array, split: int, schedule: Array) -> None: ...

    def top_k_per_row(self, logits: Array, rows: Rows, indices: Array, slots: Slots | None = None) -> None: ...


class Projection(Protocol):
    """The batched products beside dense attention."""

    def batched_product(self, a: Array, b: Array, out: Array) -> None: ...


class Shards(Protocol):
    """One rank's part of tokens that are sharded across ranks, and the merge of all ranks' results."""

    def local_seq_lens(self, seq_lens: Array, s_q: int, shard: Shard, out: Array) -> None: ...

    def local_block_table(self, block_table: Array, s_q: int, first: int, step: int, out: Array) -> None: ...

    def local_slot_mapping(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        block_table: Array,
        block_size: int,
        compress_ratio: int,
        shard: Shard,
        out: Array,
    ) -> None: ...

    def localise_indices(
        self,
        indices: Array,
        token_to_req: Array,
        is_valid_token: Array | None,
        block_table: Array,
        block_size: int,
        shard: Shard,
        slots: Array,
        lens: Array,
    ) -> None: ...

    def merge_partials(self, parts: Array, lses: Array, attn_sink: Array | None, out: Array, lse: Array) -> None: ...


class SparseAttention(Protocol):
    """Attention to listed rows, and merges of partial results."""

    def sparse_mla_decode(
        self,
        q: Array,
        segments: Sequence[Segment],
        attn_sink: Array | None,
        softmax_scale: float,
        out: Array,
        lse: Array,
        plan: DecodePlan | None = None,
        batch_invariant: bool = False,
    ) -> None: ...

    def sparse_mla_prefill(
        self,
        q: Array,
        kv: Array,
        indices: Array,
        topk_length: Array | None,
        attn_sink: Array | None,
        softmax_scale: float,
        out: Array,
        max_logits: Array,
        lse: Array,
    ) -> None: ...

    def merge_attn_states(
        self,
        output: Array,
        prefix_output: Array,
        prefix_lse: Array,
        suffix_output: Array,
        suffix_lse: Array,
        output_lse: Array | None,
    ) -> None: ...


class SparseCache(Protocol):
    """Quantised rows into and out of paged caches."""

    def quantize_and_insert_k_cache(
        self, k: Array, pages: Pages, slot_mapping: Array, power_of_two_scales: bool
    ) -> None: ...

    def dequantize_and_gather_k_cache(
        self,
        out: Array,
        pages: Pages,
        seq_lens: Array,
        gather_lens: Array | None,
        block_table: Array,
        offset: int,
        compress_ratio: int,
    ) -> None: ...

    def cp_gather_indexer_k_quant_cache(
        self, pages: Pages, dst_k: Array, dst_scale: Array, block_table: Array, cu_seq_lens: Array
    ) -> None: ...


FILES: dict[str, type] = {
    "advance": Advance,
    "blocks": Blocks,
    "compressor": Compressor,
    "dense_attention": DenseAttention,
    "dense_cache": DenseCache,
    "indexer": Indexer,
    "indexer_metadata": IndexerMetadata,
    "indices": Indices,
    "norm_rope": NormRope,
    "projection": Projection,
    "shards": Shards,
    "sparse_attention": SparseAttention,
    "sparse_cache": SparseCache,
    "window_metadata": WindowMetadata,
}
