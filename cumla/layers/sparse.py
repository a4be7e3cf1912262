"""One step of a sparse attention layer: insert, map, attend, for a mixed decode/prefill batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import dlpack, streams
from ..arrays.array import Array
from ..dispatch.backends import choose
from ..dispatch.call import end_release
from ..dispatch.values import check_choice, check_flags, check_integers, check_kind, shown
from ..kernels.types.metadata import C128A_RATIO
from ..layout import DSV4_BF16, DSV4_F32, DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT, CacheLayout
from ..metadata.builder import COMPRESS_RATIOS
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata
from ..ops.indices import compute_global_topk_indices_and_lens
from ..ops.prefill_rows import gather_prefill_rows
from ..ops.sparse_attention import V_DIM, check_pair, scale_or_default, sparse_mla_decode, sparse_mla_prefill
from ..ops.sparse_cache import indexer_k_quant_and_cache, quantize_and_insert_k_cache
from .prefill_path import PATHS, Chunk, chunk_paths, first_tokens
from .selection import select_rows
from .sparse_validation import check_step, refuse_in_capture, tokens_used
from .step_arguments import CompressedCache, LayerWorkspace

LAYOUTS = (DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT, DSV4_BF16, DSV4_F32)
Observer = Callable[[str], AbstractContextManager[Any]]


def not_observed(op: str) -> AbstractContextManager[Any]:
    """The observer that does nothing."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class SparseMLALayer:
    """An attention layer of a DeepSeek V4 class model, between its projections.

    Attributes:
        compress_ratio: 0: window only, 2 (V4.1) and 4 (V4): window and selected compressed rows, 128: window and all
            compressed rows; 1: as 0, or as 2 where the metadata's config has C1A layers
        index_topk: the model's number of entries selected; topk_indices may have more columns or fewer
        attn_sink: [h] float32, or None
        softmax_scale: 1 / sqrt(512) if None
        layout: of the window's cache: DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT or DSV4_BF16; on the host also DSV4_F32
        extra_layout: of the compressed cache: the same as layout; with DSV41_FP8 also DSV41_FP4, with DSV41_FP8_SPLIT
            also DSV41_FP4_SPLIT; None: the same as layout. Layers without compressed rows do not use it
        batch_invariant: True: a token's bits depend on its request's tokens alone (docs/guide/batch-invariance.md); the
            builder's config then has it, too. All tokens attend over pages
    """

    compress_ratio: int = 1
    index_topk: int = 512
    attn_sink: Any = None
    softmax_scale: float | None = None
    layout: CacheLayout = DSV4_FP8
    extra_layout: CacheLayout | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_choice((0, *COMPRESS_RATIOS), compress_ratio=self.compress_ratio)
        check_integers(1, index_topk=self.index_topk)
        scale_or_default(self.softmax_scale, V_DIM)
        check_flags(batch_invariant=self.batch_invariant)
        check_kind(CacheLayout, layout=self.layout)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: got {self.layout.name}, expected one of {[layout.name for layout in LAYOUTS]}")
        if self.extra_layout is not None:
            check_kind(CacheLayout, extra_layout=self.extra_layout)
            check_pair(self.layout, self.extra_layout)

    @property
    def compressed_layout(self) -> CacheLayout:
        """The format of the compressed cache."""
        return self.layout if self.extra_layout is None else self.extra_layout

    def step(
        self,
        q: Array,
        k: Array | None,
        swa_cache: Array,
        metadata: DeepseekSparseSWAMetadata,
        compressed: CompressedCache | None = None,
        *,
        out: Array | None = None,
        workspace: LayerWorkspace | None = None,
        prefill_path: str | None = None,
        join: Callable[[], None] | None = None,
        early_release: bool = True,
        backend: str | None = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert this step's rows and attend.

        Args:
            q: [num_tokens, h, 512] bfloat16, RoPE applied; on the host also float32, without k
            k: [num_tokens, 512] bfloat16, RoPE applied; None: the cache contains the rows already
            swa_cache: uint8 [num_blocks, block_size, 584 or 528] (or rows that are not quantised), of the layer's
                layout, written
            metadata: of the step's batch
            compressed: the compressed cache, for layers that have compressed rows
            out: [num_tokens, h, 512] of q's dtype to write instead of allocating
            workspace: temporary memory of decodes; with out and workspace given, and after a first step with metadata
                of the same builder, a step of decodes allocates nothing
            prefill_path: how prefills attend: "pages", straight over the caches; "rows", over rows gathered from them;
                None: the faster path for each chunk (cumla/layers/prefill_path.py)
            join: called before the first operation that reads q or the window's rows: a caller that computes them on
                another stream makes this stream wait for it there
            early_release: False: no later kernel starts before the results are stored (docs/interop.md)
            observe: called with an op's name around each op ("insert", "select", "map", "decode", "gather", "prefill")

        Returns out; its last 64 values still carry RoPE. Rows of padding tokens are 0 or not written.
        Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
        """
        if compressed is not None:
            check_kind(CompressedCache, compressed=compressed)
        if workspace is not None:
            check_kind(LayerWorkspace, workspace=workspace)
        check_choice((*PATHS, None), prefill_path=prefill_path)
        check_flags(early_release=early_release)
        if self.batch_invariant and prefill_path == "rows":
            raise ValueError("prefill_path: got 'rows', expected None or 'pages' for a batch-invariant layer")
        for name, function in (("join", not_observed if join is None else join), ("observe", observe)):
            if not callable(function):
                raise TypeError(f"{name}: got {shown(function)}, expected a function")
        check_step(self, q, k, swa_cache, metadata, compressed, out, workspace, backend, stream)
        framework = dlpack.framework_of(q)
        q = dlpack.borrow(q, "q")
        result = dlpack.borrow(out, "out", writable=True) if out is not None else None
        with streams.callers(q, framework, stream):
            refuse_in_capture(q, metadata, compressed, out, workspace)
            if result is None:
                result = dlpack.empty((*q.shape[:2], V_DIM), q.dtype, q)
            run = _Run(self, metadata, workspace, backend, observe, q, swa_cache, compressed, result)
            if k is not None:
                run.insert(k, swa_cache, self.layout, metadata.slot_mapping, metadata.block_size)
            if compressed is not None and compressed.k is not None:
                cache, layout = compressed.cache, self.compressed_layout
                run.insert(compressed.k, cache, layout, compressed.slot_mapping, cache.shape[1])
            chunks = run.chunks("pages" if self.batch_invariant else prefill_path)
            with_decodes = run.tokens_with_decodes(chunks)
            if compressed is not None and compressed.indexer is not None:
                run = replace(run, compressed=run.select(compressed, with_decodes))
            mapped = run.map_slots(with_decodes) if with_decodes else {}
            if join is not None:
                join()
            if with_decodes:
                run.decode(mapped, with_decodes)
            for chunk in chunks:
                tokens = run.tokens_of(chunk.prefills)
                left = slice(max(tokens.start, with_decodes), tokens.stop)
                if left.start < left.stop and chunk.path == "pages":
                    run.prefill_over_pages(left)
                elif left.start < left.stop:
                    run.prefill_over_rows(chunk, tokens, left)
            if not early_release:
                end_release(q)
        return dlpack.give(result, framework) if out is None else out


@dataclass(frozen=True)
class _Run:
    """The parts of one step and their common state. The caller's stream is already current."""

    layer: SparseMLALayer
    metadata: DeepseekSparseSWAMetadata
    workspace: LayerWorkspace | None
    backend: str | None
    observe: Observer
    q: Any
    swa_cache: Any
    compressed: CompressedCache | None
    out: Any

    def read(self, name: str) -> Any:
        """An array of the metadata."""
        return dlpack.borrow(getattr(self.metadata, name), name)

    def insert(self, k: Any, cache: Any, layout: CacheLayout, slot_mapping: Any, block_size: int) -> None:
        with self.observe("insert"):
            k = dlpack.borrow(k, "k")
            slots = dlpack.borrow(slot_mapping, "slot_mapping")[: len(k)]
            quantize_and_insert_k_cache(k, cache, slots, block_size, layout=layout, backend=self.backend)

    def chunks(self, path: str | None) -> list[Chunk]:
        """The chunks of the step's prefills, on their paths."""
        layer, compressed, topk = self.layer, self.compressed, None
        if compressed is not None and compressed.indexer is not None:
            topk = layer.index_topk
        elif compressed is not None and compressed.topk_indices is not None:
            topk = compressed.topk_indices.shape[1]
        name = choose(self.backend, on_device=not isinstance(self.q, np.ndarray))
        return list(chunk_paths(self.metadata, layer.compress_ratio, self.q.shape[1], topk, name, layer.layout, path))

    def tokens_with_decodes(self, chunks: list[Chunk]) -> int:
        """The step's first tokens that attend in one call over pages; only decodes if prefills have no slot memory."""
        decodes, compressed = self.metadata.num_decode_tokens, self.compressed
        end = first_tokens(decodes, self.layer.compress_ratio, chunks)
        slot_arrays = () if compressed is None else (compressed.decode_slots, compressed.decode_lens)
        has_memory = all(array is None or len(array) >= end for array in slot_arrays)
        return end if has_memory and self.metadata.swa_indices is not None else decodes

    def select(self, compressed: CompressedCache, with_decodes: int) -> CompressedCache:
        """Insert the indexer's keys, then return the compressed cache with the rows that tokens select."""
        inputs, metadata, topk = compressed.indexer, self.metadata, self.layer.index_topk
        tokens = tokens_used(metadata)
        assert inputs is not None
        if inputs.k is not None:
            with self.observe("insert"):
                k = dlpack.borrow(inputs.k, "indexer.k")
                slots = dlpack.borrow(compressed.slot_mapping, "slot_mapping")
                indexer_k_quant_and_cache(k, inputs.cache, slots, backend=self.backend)
        arrays = {"scores": self._cut("scores", None), "selected": self._cut("selected", tokens)}

        def memory(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            array = arrays.get(name)
            return dlpack.empty(shape, np.dtype(dtype), self.q) if array is None else array

        selected = memory("selected", (tokens, topk), np.int32)
        of_decodes, decodes = None, metadata.num_decode_tokens
        if 0 < decodes == inputs.metadata.num_decode_tokens:  # the same tokens are decodes in the indexer's metadata
            arrays |= {name: self._cut(name, with_decodes) for name in ("topk_indices", "topk_lens")}
            slots = memory("topk_indices", (with_decodes, topk), np.int32)[:, :topk]
            lens = memory("topk_lens", (with_decodes,), np.int32)
            compressed = replace(compressed, decode_slots=slots, decode_lens=lens)
            of_decodes = slots[:decodes], lens[:decodes]
        with self.observe("select"):
            select_rows(
                inputs, self.read("positions"), self.read("token_to_req_indices"),
                dlpack.borrow(compressed.block_table, "block_table"), selected, memory, self.backend, of_decodes,
                self.read("is_valid_token"),
            )  # fmt: skip
        return replace(compressed, topk_indices=selected, indexer=None)

    def map_slots(self, tokens: int) -> dict[str, Any]:
        """Attention's arguments for the compressed rows of the first `tokens` tokens over pages."""
        compressed, metadata = self.compressed, self.metadata
        if compressed is None:
            return {}
        if compressed.topk_indices is None:
            return self._extra(compressed, metadata.c128a_global_decode_topk_indices, metadata.c128a_decode_topk_lens)
        if compressed.decode_slots is None:
            slots, lens = self._cut("topk_indices", tokens), self._cut("topk_lens", tokens)
            out = None
            if slots is not None and lens is not None:
                out = slots[:, : compressed.topk_indices.shape[1]], lens
            slots, lens = self._slots_of(compressed, slice(tokens), out)
        else:
            slots, lens = (
                dlpack.borrow(getattr(compressed, name), name)[:tokens] for name in ("decode_slots", "decode_lens")
            )
            first = metadata.num_decode_tokens
            if first < tokens:
                self._slots_of(compressed, slice(first, tokens), (slots[first:], lens[first:]))
        return self._extra(compressed, slots[:, None], lens)

    def _slots_of(self, compressed: CompressedCache, tokens: slice, out: tuple[Any, Any] | None) -> tuple[Any, Any]:
        """Slots of the compressed rows that tokens select, and their counts, written to `out` if it is given."""
        with self.observe("map"):
            topk_indices = self._selected(tokens)
            names = ("token_to_req_indices", "is_valid_token", "positions")
            requests, is_valid, positions = (self.read(name)[tokens] for name in names)
            found: tuple[Any, Any] = compute_global_topk_indices_and_lens(
                topk_indices, requests, compressed.block_table, compressed.cache.shape[1], is_valid, compact=True,
                positions=positions, compress_ratio=self.layer.compress_ratio, out=out, backend=self.backend,
            )  # fmt: skip
        return found

    def _extra(self, compressed: CompressedCache, indices: Any, lens: Any) -> dict[str, Any]:
        """The arguments of attention for the compressed rows at slots [tokens, 1, topk]."""
        return {
            "extra_k_cache": compressed.cache, "extra_indices": indices, "extra_topk_length": lens,
            "extra_layout": self.layer.compressed_layout,
        }  # fmt: skip

    def decode(self, extra: dict[str, Any], tokens: int) -> None:
        """Attend with the first `tokens` tokens over pages."""
        metadata, lse = self.metadata, self._cut("lse", tokens)
        window, lens = metadata.decode_swa_indices, metadata.decode_swa_lens
        if tokens > metadata.num_decode_tokens:
            window, lens = (self.read(name)[:tokens] for name in ("swa_indices", "swa_lens"))
        self._over_pages(
            "decode", slice(tokens), window, lens, extra, metadata.decode_plan(self.layer.compress_ratio), lse
        )

    def _over_pages(
        self, op: str, tokens: slice, window: Any, lens: Any, extra: dict[str, Any], plan: Any, lse: Any = None
    ) -> None:  # fmt: skip
        layer = self.layer
        with self.observe(op):
            sparse_mla_decode(
                self.q[tokens, None], self.swa_cache, window, layout=layer.layout, block_size=self.metadata.block_size,
                topk_length=lens, **extra, attn_sink=layer.attn_sink, softmax_scale=layer.softmax_scale,
                out=self.out[tokens, None], lse=lse, plan=plan, batch_invariant=layer.batch_invariant,
                backend=self.backend,
            )  # fmt: skip

    def _cut(self, name: str, tokens: int | None) -> Any:
        """The part of a workspace's array that a step of `tokens` tokens uses; None without an array that large."""
        array = None if self.workspace is None else getattr(self.workspace, name)
        if array is None or (tokens is not None and len(array) < tokens):
            return None
        return dlpack.borrow(array, f"workspace.{name}", writable=True)[:tokens]

    def tokens_of(self, prefills: slice) -> slice:
        """The step's tokens that belong to consecutive prefills."""
        starts, first = self.read("query_start_loc_cpu"), self.metadata.num_decodes
        return slice(int(starts[first + prefills.start]), int(starts[first + prefills.stop]))

    def prefill_over_pages(self, tokens: slice) -> None:
        """Attend with prefill tokens on the decode path."""
        first, extra = self.metadata.num_decode_tokens, dict[str, Any]()
        local = slice(tokens.start - first, tokens.stop - first)
        if self.compressed is not None:
            indices, lens = self._slots_of(self.compressed, tokens, None)
            extra = self._extra(self.compressed, indices[:, None], lens)
        window, lens = self.read("prefill_swa_indices")[local, None], self.read("prefill_swa_lens")[local]
        plan = self.metadata.pages_plan(self.layer.compress_ratio, tokens.start)
        self._over_pages("prefill", tokens, window, lens, extra, plan)

    def prefill_over_rows(self, chunk: Chunk, tokens: slice, left: slice) -> None:
        """Gather the rows of the chunk's requests into a workspace [requests, m, 512], and attend to them there.

        Args:
            tokens: the chunk's tokens
            left: the chunk's remaining tokens, which have not attended yet
        """
        metadata, ratio, (prefills, n, m, *_), q = self.metadata, self.layer.compress_ratio, chunk, self.q
        requests = slice(metadata.num_decodes + prefills.start, metadata.num_decodes + prefills.stop)
        seq_lens, gather_lens = self.read("seq_lens")[requests], self.read("prefill_gather_lens")[prefills]
        workspace = dlpack.empty((prefills.stop - prefills.start, m, V_DIM), q.dtype, q)
        with self.observe("gather"):
            if metadata.replay_start is not None:  # windows have no rows before replay_start, even within the step
                valid = (seq_lens - self.read("replay_start")[requests].clip(0)).clip(0)
                gather_lens = dlpack.namespace_of(valid).where(valid < gather_lens, valid, gather_lens)
            topk_indices, gathered = self._selected(tokens), dict[str, Any]()
            if self.compressed is not None:
                gathered = {
                    "compressed_cache": self.compressed.cache, "compressed_layout": self.layer.compressed_layout,
                    "compressed_block_table": dlpack.borrow(self.compressed.block_table, "block_table")[requests],
                }  # fmt: skip
            indices, lens = gather_prefill_rows(
                workspace, self.swa_cache, self.read("block_table")[requests], metadata.block_size, seq_lens,
                gather_lens, self.read("query_start_loc")[requests.start : requests.stop + 1], topk_indices,
                topk_indices.shape[1] if gathered else 0, metadata.config.window_size, ratio, n,
                compact=ratio != C128A_RATIO, layout=self.layer.layout, **gathered, backend=self.backend,
            )  # fmt: skip
        with self.observe("prefill"):
            skipped = left.start - tokens.start
            logits = dlpack.empty((2, left.stop - left.start, q.shape[1]), np.dtype(np.float32), q)
            sparse_mla_prefill(
                q[left], workspace.reshape(-1, V_DIM), indices[skipped:], softmax_scale=self.layer.softmax_scale,
                attn_sink=self.layer.attn_sink, topk_length=lens[skipped:], out=(self.out[left], logits[0], logits[1]),
                backend=self.backend,
            )  # fmt: skip

    def _selected(self, tokens: slice) -> Any:
        """Local compressed rows [tokens, >= topk] that tokens attend to. Without topk_indices: of prefills."""
        first = self.metadata.num_decode_tokens
        if self.compressed is None:
            return self.read("prefill_swa_indices")[: tokens.stop - tokens.start]
        if self.compressed.topk_indices is not None:
            return dlpack.borrow(self.compressed.topk_indices, "topk_indices")[tokens]
        return self.read("c128a_prefill_topk_indices")[tokens.start - first : tokens.stop - first]
