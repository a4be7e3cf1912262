"""Fakes of peers' modules: their signatures, on torch's host tensors, computed by cumla's operations."""

import types
from typing import Any

import cumla


class FlashMLA:
    """Fake of vLLM's flash_mla_interface."""

    @staticmethod
    def get_mla_metadata():
        return types.SimpleNamespace(lengths=None), None

    @staticmethod
    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, plan, num_splits=None, softmax_scale=None, causal=False,
        is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
        topk_length=None, extra_topk_length=None, out=None,
    ):  # fmt: skip
        assert num_splits is None
        if indices is None:
            return cumla.dense_mla_decode(q, k_cache[:, :, 0], block_table, cache_seqlens, softmax_scale=softmax_scale)
        assert block_table is None
        assert cache_seqlens is None
        assert (head_dim_v, causal, is_fp8_kvcache) == (512, False, True)
        assert q.shape[2] in (64, 128)
        assert out.is_contiguous()
        assert q.shape[3] == 512 or (topk_length is None and extra_k_cache is None and attn_sink is None)
        assert indices.shape[-1] % 64 == 0
        lengths = [None if x is None else x.tolist() for x in (topk_length, extra_topk_length)]
        assert plan.lengths in (None, lengths), "a plan is of the lengths that it was made for"
        plan.lengths = lengths
        return cumla.sparse_mla_decode(
            q, k_cache, indices, topk_length=topk_length, extra_k_cache=extra_k_cache, attn_sink=attn_sink,
            extra_indices=extra_indices_in_kvcache, extra_topk_length=extra_topk_length, softmax_scale=softmax_scale,
            out=out,
        )  # fmt: skip

    @staticmethod
    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None):
        heads = q.shape[1]
        assert heads in (8, 16, 32, 64, 128)
        assert indices.shape[-1] % 128 == 0
        assert out is None or out.is_contiguous() or heads < 64
        result, logits, lse = cumla.sparse_mla_prefill(
            q, kv[:, 0], indices[:, 0], softmax_scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length
        )
        if out is not None:
            out.copy_(result)
        return result if out is None else out, logits, lse


class CacheUtils:
    """Fake of vLLM's cache_utils."""

    compute_global_topk_indices_and_lens = staticmethod(cumla.compute_global_topk_indices_and_lens)
    combine_topk_swa_indices = staticmethod(cumla.combine_topk_swa_indices)


def gather(out, cache, seq_lens, gather_lens, block_table, block_size, offset):
    """Fake of cutedsl_gather."""
    cumla.dequantize_and_gather_k_cache(out, cache, seq_lens, gather_lens, block_table, block_size, offset)


class DeepGemm:
    @staticmethod
    def get_paged_mqa_logits_metadata(lens, block_size, num_sms):
        assert lens.ndim == 2
        return cumla.get_paged_mqa_logits_metadata(lens, block_size, num_sms)

    @staticmethod
    def fp8_paged_mqa_logits(q, cache, weights, lens, table, schedule, width, clean_logits):
        assert q.shape[1] in (1, 2)
        assert cache.ndim == 4
        assert len(table) == len(q) == len(lens)
        return cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, schedule, width, clean_logits)

    fp8_mqa_logits = staticmethod(cumla.fp8_mqa_logits)

    @staticmethod
    def fp8_gemm_nt(a, b, out):
        import torch

        (codes, scales), (weight, weight_scales) = a, b
        assert scales.stride() == (1, -(-len(codes) // 4) * 4)
        x = codes.float().unflatten(1, (-1, 128)) * scales[:, :, None]
        out.copy_(cumla.fp8_block_linear(x.flatten(1), weight.view(torch.uint8), weight_scales))


class Operations:
    """Fake of torch.ops with vLLM's library: its _C and its _C_cache_ops."""

    def __init__(self) -> None:
        self._C = self._C_cache_ops = self
        self.called: list[str] = []

    def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        self, q, kv, cache, slots, positions, cos_sin, padded, eps, block_size
    ):
        import torch

        assert cache.ndim == 2
        assert slots.dtype == positions.dtype == torch.int64
        out = torch.zeros((len(q), padded, 512), dtype=q.dtype)
        out[:, : q.shape[1]] = cumla.qnorm_rope_and_insert(
            q, kv, cache, slots, positions, cos_sin, eps=eps, block_size=block_size, layout="DSV4_FP8"
        )
        return out

    @staticmethod
    def indexer_k_quant_and_cache(k, cache, slots, block_size, scale_format):
        assert (block_size, scale_format) == (128, "ue8m0")
        cumla.indexer_k_quant_and_cache(k, cache, slots)

    @staticmethod
    def per_token_group_fp8_quant(x, codes, scales, size, eps, least, most, ue8m0, transposed, aligned):
        groups = x.float().unflatten(1, (-1, size))
        scales.copy_(groups.abs().amax(2).clamp(min=eps) / most)
        codes.copy_((groups / scales[:, :, None]).flatten(1).to(codes.dtype))

    @staticmethod
    def concat_and_cache_mla(kv_c, k_pe, cache, slots, dtype, scale):
        assert dtype in ("auto", "fp8_ds_mla")
        cumla.concat_and_cache_mla(kv_c, k_pe, cache, slots, dtype)

    @staticmethod
    def cp_gather_and_upconvert_fp8_kv_cache(cache, rows, table, starts, requests, seq_starts):
        assert len(starts) == len(table) == requests
        assert seq_starts is None
        ends = [*starts[1:].tolist(), len(rows)]
        for i, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            lens = starts.new_full((1,), end - start)
            cumla.dequantize_and_gather_k_cache(
                rows[None, start:end], cache, lens, None, table[i : i + 1], layout="V32_FP8"
            )

    @staticmethod
    def cp_gather_indexer_k_quant_cache(cache, keys, scales, table, starts):
        import torch

        cumla.cp_gather_indexer_k_quant_cache(
            cache, keys.view(torch.uint8), scales.view(torch.float32).squeeze(-1), table, starts
        )

    def cooperative_topk(self, logits, lens, out, workspace, k, width):
        assert len(logits) <= 32
        self._choose("cooperative_topk", logits, lens, out, workspace, k, width)

    def persistent_topk(self, logits, lens, out, workspace, k, width):
        self._choose("persistent_topk", logits, lens, out, workspace, k, width)

    def _choose(self, name, logits, lens, out, workspace, k, width):
        assert logits.shape[1] >= width
        assert logits.stride(0) % 4 == 0
        assert len(workspace) >= 1 << 20
        self.called.append(name)
        out.copy_(cumla.top_k_per_row(logits, k, seq_lens=lens).flip(1))  # the order is unspecified

    @staticmethod
    def top_k_per_row_prefill(logits, starts, ends, out, rows, stride0, stride1, k):
        assert (rows, stride0, stride1) == (len(logits), *logits.stride())
        out.copy_(cumla.top_k_per_row(logits, k, starts, ends))


def install(monkeypatch: Any) -> Operations:
    """All peers can be imported, and torch reports a device's multiprocessors."""
    import torch

    from cumla.arrays import dlpack
    from cumla.bench import peers

    found = {peers.FLASH_MLA: FlashMLA, peers.VLLM_CACHE: CacheUtils, peers.DEEP_GEMM[0]: DeepGemm}
    operations = Operations()
    monkeypatch.setattr(peers, "module", found.get)
    monkeypatch.setattr(peers, "has_peer", lambda name: True)
    monkeypatch.setattr(peers, "vllm_operations", lambda: operations)
    monkeypatch.setattr(peers, "gather_of_vllm", lambda: peers.Gather(gather, peers.VLLM_GATHER_STAND_IN, True))
    monkeypatch.setattr(peers, "tensor", lambda array: dlpack.give(array, "torch"))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return operations
