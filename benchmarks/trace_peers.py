"""The peers' chains for a step of a trace: vLLM's operations on the tensors that cumla gets."""

from __future__ import annotations

from typing import Any

from trace_layers import INDEX_HEADS, V32, WINDOW, StepInputs
from trace_steps import Steps

from cumla.bench import peers

PREFILL_REQUESTS = 4  # requests of a chunk: vLLM's PREFILL_CHUNK_SIZE
WORKSPACE_BYTES = 1 << 20  # workspace of the top-k operations


def functions() -> dict[str, str]:
    """The peers' functions and versions, by part, as they are recorded in rows."""
    found = peers.gather_of_vllm()
    gather = "none" if found is None else found.name
    return {
        "insert": f"vLLM {peers.VLLM}: fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
        "select": f"DeepGEMM of vLLM {peers.VLLM}: fp8_paged_mqa_logits, fp8_mqa_logits; vLLM {peers.VLLM}: "
        "cp_gather_indexer_k_quant_cache, cooperative_topk, persistent_topk, top_k_per_row_prefill",
        "attention": f"{peers.FLASH_MLA_OF}: flash_mla_with_kvcache, flash_mla_sparse_fwd; vLLM {peers.VLLM}: "
        f"compute_global_topk_indices_and_lens, combine_topk_swa_indices; gather: {gather}",
        "plan": f"{peers.FLASH_MLA_OF}: get_mla_metadata",
        "index schedule": f"DeepGEMM of vLLM {peers.VLLM}: get_paged_mqa_logits_metadata",
    }


class PeerStep:
    """The peers' calls for the parts of a StepInputs. A part whose peer is absent raises ImportError.

    FlashMLA's decode takes 64 or 128 heads, so queries and outputs with fewer heads are padded, as vLLM's insert writes
    them; its prefill takes 8, 16 and 32 heads without padding.
    """

    def __init__(self, ours: StepInputs) -> None:
        import torch

        self.ours, self.torch = ours, torch
        tokens, heads, width = ours.q.shape
        self.heads, self.padded = heads, 64 if heads <= 64 else 128
        self.normed, self.out, self.sink = ours.normed, torch.empty_like(ours.out), ours.sink
        if self.padded > heads:
            like = {"dtype": ours.q.dtype, "device": ours.q.device}
            self.normed = torch.zeros((tokens, self.padded, width), **like)
            self.normed[:, :heads] = ours.normed
            self.out = torch.empty((tokens, self.padded, 512), **like)
            self.sink = torch.full((self.padded,), -torch.inf, device=ours.q.device)
            self.sink[:heads] = ours.sink
        self.inserted: Any = None
        self._plan: Any = None
        found = peers.gather_of_vllm()
        self._gather: Any = None if found is None else found.call
        self._rows = self._rows_of_prefills()
        if ours.shape.selects:
            self.selected = torch.full_like(ours.selected, -1)
            self._prepare_selection()

    # ---- insert

    def insert(self) -> None:
        op, ours = peers.vllm_operations()._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, self.ours
        for cache in ours.caches.window:
            self.inserted = op(
                ours.q, ours.kv, cache.view(len(cache), -1), ours.batch.slot_mapping, ours.token_positions,
                ours.cos_sin, self.padded, 1e-6, cache.shape[1],
            )  # fmt: skip

    # ---- selection

    def _prepare_selection(self) -> None:
        torch, metadata, device = self.torch, self.ours.index_metadata, self.ours.q.device
        self.index_q = self.ours.index_q.view(torch.float8_e4m3fn)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        rows = max((chunk.total_seq_lens for chunk in metadata.prefill.chunks), default=0) if metadata.prefill else 0
        self._keys = torch.empty((rows, 128), dtype=torch.float8_e4m3fn, device=device)
        self._scales = torch.empty((rows, 4), dtype=torch.uint8, device=device)
        if metadata.decode is not None:
            lens = metadata.decode.seq_lens
            self.lens = lens if lens.ndim == 2 else lens[:, None]
            self.width = -(-int(lens.max()) // 256) * 256 or 256
        self.schedule: Any = None

    def make_schedule(self) -> None:
        """Compute the paged logits' schedule, once a step."""
        multiprocessors = self.torch.cuda.get_device_properties(0).multi_processor_count
        page = self.ours.caches.index[0].shape[1]
        self.schedule = peers.deep_gemm().get_paged_mqa_logits_metadata(self.lens, page, multiprocessors)

    def select(self) -> None:
        ours = self.ours
        if ours.index_metadata.decode is not None and self.schedule is None:
            self.make_schedule()
        for cache in ours.caches.index:
            self.selected.fill_(-1)
            if ours.index_metadata.prefill is not None:
                for chunk in ours.index_metadata.prefill.chunks:
                    self._select_prefill(cache, chunk)
            if ours.index_metadata.decode is not None:
                self._select_decode(cache, ours.index_metadata.decode)

    def _select_decode(self, cache: Any, decode: Any) -> None:
        (entries, each), k = self.lens.shape, self.selected.shape[1]
        tokens = entries * each
        logits = peers.deep_gemm().fp8_paged_mqa_logits(
            self.index_q[:tokens].view(entries, each, INDEX_HEADS, 128), cache[:, :, None],
            self.ours.index_weights[:tokens], self.lens, decode.block_table, self.schedule, self.width,
            clean_logits=False,
        )  # fmt: skip
        choose = getattr(peers.vllm_operations()._C, peers.top_k_function(tokens))
        choose(logits, self.lens, self.selected[:tokens], self._workspace, k, self.width)

    def _select_prefill(self, cache: Any, chunk: Any) -> None:
        operations, tokens = peers.vllm_operations(), slice(chunk.token_start, chunk.token_end)
        keys, scales = self._keys[: chunk.total_seq_lens], self._scales[: chunk.total_seq_lens]
        if not chunk.skip_kv_gather:
            operations._C_cache_ops.cp_gather_indexer_k_quant_cache(
                cache, keys, scales, chunk.block_table, chunk.cu_seq_lens
            )
        logits = peers.deep_gemm().fp8_mqa_logits(
            self.index_q[tokens], (keys, scales.view(self.torch.float32).squeeze(-1)), self.ours.index_weights[tokens],
            chunk.cu_seqlen_ks, chunk.cu_seqlen_ke, clean_logits=False,
        )  # fmt: skip
        operations._C.top_k_per_row_prefill(
            logits, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke, self.selected[tokens], len(logits), logits.stride(0),
            logits.stride(1), self.selected.shape[1],
        )  # fmt: skip

    # ---- attention

    def attend(self, new_plan: bool = True) -> None:
        ours = self.ours
        if new_plan or self._plan is None:
            self._plan, _ = peers.module(peers.FLASH_MLA).get_mla_metadata()
        for i, window in enumerate(ours.caches.window):
            compressed = ours.caches.compressed[i] if ours.caches.compressed else None
            if ours.decodes:
                self._decode(window, compressed)
            for chunk in self._chunks:
                self._prefill(window, compressed, *chunk)

    def _decode(self, window: Any, compressed: Any) -> None:
        ours, n, metadata = self.ours, self.ours.decodes, self.ours.metadata
        more: dict[str, Any] = {}
        if ours.shape.ratio == 4:
            indices, lens = peers.module(peers.VLLM_CACHE).compute_global_topk_indices_and_lens(
                ours.selected[:n], metadata.token_to_req_indices[:n], ours.table, compressed.shape[1],
                metadata.is_valid_token[:n],
            )  # fmt: skip
            more = {"extra_indices_in_kvcache": indices[:, None], "extra_topk_length": lens}
        elif ours.shape.ratio == 128:
            more = {
                "extra_indices_in_kvcache": metadata.c128a_global_decode_topk_indices,
                "extra_topk_length": metadata.c128a_decode_topk_lens,
            }
        if more:
            more["extra_k_cache"] = compressed[:, :, None]
        peers.module(peers.FLASH_MLA).flash_mla_with_kvcache(
            self.normed[:n, None], window[:, :, None], None, None, 512, self._plan, None, softmax_scale=512**-0.5,
            is_fp8_kvcache=True, indices=metadata.decode_swa_indices, topk_length=metadata.decode_swa_lens,
            attn_sink=self.sink, out=self.out[:n, None], **more,
        )  # fmt: skip

    def _rows_of_prefills(self) -> Any:
        """Plan the prefills' chunks, and allocate memory for the rows of the largest chunk.

        Chunks are (first request, one past the last, N, M): a request has M rows; its window rows begin at N.
        """
        ours = self.ours
        first, requests, ratio = ours.metadata.num_decodes, ours.batch.num_reqs, ours.shape.ratio
        ends, new = ours.batch.seq_lens_cpu, ours.starts[1:] - ours.starts[:-1]
        self._chunks = []
        for start in range(first, requests, PREFILL_REQUESTS):
            some = slice(start, min(start + PREFILL_REQUESTS, requests))
            n = int(ends[some].max()) // ratio if ratio > 1 else 0
            window = int((new[some] + (ends[some] - new[some]).clip(max=WINDOW - 1)).max())
            self._chunks.append((some.start, some.stop, n, n + window))
        most = max(((stop - start) * m for start, stop, _, m in self._chunks), default=0)
        return self.torch.empty((most, 512), dtype=ours.q.dtype, device=ours.q.device)

    def _prefill(self, window: Any, compressed: Any, start: int, stop: int, n: int, m: int) -> None:
        ours, metadata, ratio = self.ours, self.ours.metadata, self.ours.shape.ratio
        first, tokens = metadata.num_decodes, slice(int(ours.starts[start]), int(ours.starts[stop]))
        rows, lens = self._rows[: (stop - start) * m].view(stop - start, m, 512), metadata.seq_lens[start:stop]
        gather_lens = metadata.prefill_gather_lens[start - first : stop - first]
        gather = self._gather
        if compressed is not None:
            gather(rows, compressed, lens // ratio, None, ours.table[start:stop], compressed.shape[1], 0)
        gather(rows, window, lens, gather_lens, metadata.block_table[start:stop], window.shape[1], n)
        local = slice(tokens.start - ours.decodes, tokens.stop - ours.decodes)
        if ratio == 4:
            listed = ours.selected[tokens]
        else:
            listed = metadata.c128a_prefill_topk_indices[local] if ratio == 128 else metadata.prefill_swa_indices[local]
        indices, counts = peers.module(peers.VLLM_CACHE).combine_topk_swa_indices(
            listed, metadata.query_start_loc[start : stop + 1], lens, gather_lens, WINDOW, ratio,
            0 if ratio == 1 else listed.shape[1], m, n,
        )  # fmt: skip
        heads = self.heads if self.heads in (8, 16, 32) else self.padded
        peers.module(peers.FLASH_MLA).flash_mla_sparse_fwd(
            self.normed[tokens, :heads], rows.view(-1, 1, 512), indices[:, None], 512**-0.5,
            attn_sink=self.sink[:heads], topk_length=counts, out=self.out[tokens, :heads],
        )  # fmt: skip


def missing(part: str, kind: str, steps: Steps) -> str | None:
    """The peer that a part lacks, or None."""
    if part == "select" and peers.deep_gemm() is None:
        return "DeepGEMM (pip install vllm)"
    for name in (peers.FLASH_MLA, peers.VLLM_CACHE) if part == "attention" else ():
        if peers.module(name) is None:
            return f"{name} (pip install vllm)"
    if part != "attention" or (kind == V32 and steps.mixed):
        return None if peers.vllm_operations() is not None else f"{peers.VLLM_OPERATIONS[0]} (pip install vllm)"
    return "nvidia-cutlass-dsl, which vLLM's gather needs" if steps.mixed and peers.gather_of_vllm() is None else None
