"""V3.2's layers in a trace's steps: tokens select 2,048 rows of one cache. cumla's calls and vLLM's chain.

FlashMLA's decode of these rows takes no lengths: absent entries are -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from trace_layers import BF16, StepInputs
from trace_peers import PREFILL_REQUESTS, PeerStep

from cumla.arrays import dlpack, streams
from cumla.bench import peers
from cumla.layers.selected_attention import Chosen, SelectedAttention
from cumla.layout import V32_FP8
from cumla.ops.dense_cache import concat_and_cache_mla
from cumla.ops.sparse_cache import dequantize_and_gather_k_cache, indexer_k_quant_and_cache

LATENT = 512
UPCONVERTED_HEADS = 32  # from this number on, vLLM gathers prompts' rows as bfloat16; with fewer it reads pages
SCALE = V32_FP8.head_dim**-0.5
V32_FUNCTIONS = {
    "insert": f"vLLM {peers.VLLM}: concat_and_cache_mla, indexer_k_quant_and_cache",
    "attention": f"{peers.FLASH_MLA_OF}: flash_mla_with_kvcache, flash_mla_sparse_fwd; vLLM {peers.VLLM}: "
    "cp_gather_and_upconvert_fp8_kv_cache, compute_global_topk_indices_and_lens in place of V3.2's own index map",
}


class V32Inputs(StepInputs):
    """cumla's calls: all tokens attend over pages, as in V3.2 layers; decodes use the slots that selection writes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.decodes:  # views of the arrays that the other tokens' index map writes
            slots, lens = (
                dlpack.borrow(getattr(self.workspace, name), name)[: self.decodes]
                for name in ("topk_indices", "topk_lens")
            )
            self.decode_slots, self.decode_lens = self.place.give(slots), self.place.give(lens)

    def insert(self) -> None:
        rows, slots, backend = self.kv, self.batch.slot_mapping, self.place.backend
        for cache, index in zip(self.caches.window, self.caches.index, strict=True):
            concat_and_cache_mla(rows[:, :LATENT], rows[:, LATENT:], cache, slots, "fp8_ds_mla", backend=backend)
            indexer_k_quant_and_cache(self.keys, index, slots, backend=backend)

    def inserted(self) -> Iterator[tuple[Any, Callable[[Any], Any] | None]]:
        """Compared by value: cumla's and the newest vLLM's scales are powers of two, vLLM 0.26's are not."""
        cache = dlpack.borrow(self.caches.window[0], "cache")

        def values(pages: Any) -> Any:
            rows = cache.shape[1]
            found = self.place.xp.empty((len(pages), rows, V32_FP8.head_dim), BF16)
            lens = self.place.xp.full(len(pages), rows, np.int32)
            dequantize_and_gather_k_cache(
                found, cache, lens, None, pages.astype(np.int32)[:, None], rows, layout=V32_FP8,
                backend=self.place.backend,
            )  # fmt: skip
            return found

        yield cache, values
        yield dlpack.borrow(self.caches.index[0], "index"), None

    def attend(self, new_plan: bool = True, path: str | None = None) -> None:
        if new_plan or self.metadata.tile_sched_swaonly is None:
            self.metadata.tile_sched_swaonly = self.builder.build_tile_scheduler(len(self.q))["swaonly"]
        work, tokens, framework = self.workspace, len(self.q), self.place.framework
        arrays = (self.normed, self.selected, work.topk_indices[:tokens], work.topk_lens[:tokens], self.out)
        q, selected, slots, lens, out = (dlpack.borrow(x, "step") for x in arrays)
        lse = dlpack.borrow(work.lse, "lse")[:tokens]
        with streams.callers(q, framework):
            for cache in self.caches.window:
                rows = dlpack.borrow(cache, "cache")
                attention = SelectedAttention(rows, V32_FP8, SCALE, path, self.place.backend)
                attention.attend(q, self.metadata, Chosen(selected, slots, lens, self.decodes), out, lse)


class V32Peers(PeerStep):
    """vLLM's calls."""

    def insert(self) -> None:
        ours, operations = self.ours, peers.vllm_operations()._C_cache_ops
        slots, scale = ours.batch.slot_mapping, self.torch.ones(1, device=ours.q.device)
        for cache, index in zip(ours.caches.window, ours.caches.index, strict=True):
            operations.concat_and_cache_mla(ours.kv[:, :LATENT], ours.kv[:, LATENT:], cache, slots, "fp8_ds_mla", scale)
            operations.indexer_k_quant_and_cache(ours.keys, index, slots, 128, "ue8m0")

    def attend(self, new_plan: bool = True) -> None:
        ours = self.ours
        gathers = self.heads >= UPCONVERTED_HEADS
        if new_plan or self._plan is None:
            self._plan, _ = peers.module(peers.FLASH_MLA).get_mla_metadata()
        for cache in ours.caches.window:
            over_pages = ours.decodes if gathers else len(ours.q)
            if over_pages:
                self._over_pages(cache, over_pages)
            for start, stop, rows in self._chunks if gathers else ():
                self._over_rows(cache, start, stop, rows)

    def _over_pages(self, cache: Any, tokens: int) -> None:
        ours, metadata = self.ours, self.ours.metadata
        indices, _ = peers.module(peers.VLLM_CACHE).compute_global_topk_indices_and_lens(
            ours.selected[:tokens], metadata.token_to_req_indices[:tokens], metadata.block_table, metadata.block_size,
            metadata.is_valid_token[:tokens],
        )  # fmt: skip
        peers.module(peers.FLASH_MLA).flash_mla_with_kvcache(
            self.normed[:tokens, None], cache[:, :, None], None, None, LATENT, self._plan, None, softmax_scale=SCALE,
            is_fp8_kvcache=True, indices=indices[:, None], out=self.out[:tokens, None],
        )  # fmt: skip

    def _rows_of_prefills(self) -> Any:
        """Plan request chunks, (first, one past the last, each request's first row and the end), and their memory."""
        ours, first = self.ours, self.ours.metadata.num_decodes
        self._chunks: list[Any] = []
        ends = ours.batch.seq_lens_cpu
        for start in range(first, ours.batch.num_reqs, PREFILL_REQUESTS):
            stop = min(start + PREFILL_REQUESTS, ours.batch.num_reqs)
            starts = np.concatenate([[0], np.cumsum(ends[start:stop])]).astype(np.int32)
            self._chunks.append((start, stop, ours.place.give(starts)))
        most = max((int(ends[start:stop].sum()) for start, stop, _ in self._chunks), default=0)
        return self.torch.empty((most, V32_FP8.head_dim), dtype=ours.q.dtype, device=ours.q.device)

    def _over_rows(self, cache: Any, start: int, stop: int, starts: Any) -> None:
        ours, torch, metadata = self.ours, self.torch, self.ours.metadata
        tokens = slice(int(ours.starts[start]), int(ours.starts[stop]))
        rows = self._rows[: int(ours.batch.seq_lens_cpu[start:stop].sum())]
        peers.vllm_operations()._C_cache_ops.cp_gather_and_upconvert_fp8_kv_cache(
            cache, rows, metadata.block_table[start:stop], starts[:-1], stop - start, None
        )
        local = ours.selected[tokens]
        of_request = starts[(metadata.token_to_req_indices[tokens] - start).long()]
        listed = torch.where(local < 0, local, local + of_request[:, None])
        heads = self.heads if self.heads in (8, 16, 32) else self.padded
        peers.module(peers.FLASH_MLA).flash_mla_sparse_fwd(
            self.normed[tokens, :heads], rows[:, None], listed[:, None], SCALE, out=self.out[tokens, :heads]
        )
