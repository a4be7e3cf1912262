"""Other libraries' kernels that only cases of the records are compared with, as functions of `cumla.bench.peers`."""

from __future__ import annotations

import functools
import math
from typing import Any

from cumla.bench import peers
from cumla.bench.measure import Thunk

VLLM_TRITON = "triton_bf16_mla_sparse_interface, vLLM at 35772e3"
TORCH_COMPOSED = "gather, matmul and softmax of torch, in chunks of tokens"
DEEP_GEMM_LINEAR = f"per_token_group_fp8_quant of vLLM {peers.VLLM} and fp8_gemm_nt, DeepGEMM of vLLM {peers.VLLM}"
DEEP_GEMM_SCHEDULE = f"get_paged_mqa_logits_metadata, DeepGEMM of vLLM {peers.VLLM}"
VLLM_TRITON_SPARSE = "vllm.v1.attention.ops.xpu_mla_sparse"


def torch_sparse(q: Any, rows: Any, indices: Any, tokens_at_a_time: int = 64) -> Thunk | None:
    """Sparse attention of tokens [t, h, d] to rows [n, d], composed of torch's operations; indices may be -1."""
    if not peers.has_peer("torch"):
        return None
    import torch

    queries, kv, listed = peers.tensor(q), peers.tensor(rows), peers.tensor(indices)
    scale, out = queries.shape[-1] ** -0.5, torch.empty((*queries.shape[:2], 512), dtype=kv.dtype, device=kv.device)

    def call() -> Any:
        for start in range(0, len(queries), tokens_at_a_time):
            tokens = slice(start, start + tokens_at_a_time)
            keys, absent = kv[listed[tokens].clamp(min=0)], listed[tokens, None] < 0
            scores = (queries[tokens] @ keys.mT * scale).masked_fill(absent, -math.inf)
            torch.matmul(torch.softmax(scores, dim=-1), keys[..., :512], out=out[tokens])
        return out

    return call


def triton_sparse(q: Any, rows: Any, indices: Any) -> Thunk | None:
    """The same by vLLM's Triton kernel, which it runs where FlashMLA does not; it allocates its results."""
    peer = peers.module(VLLM_TRITON_SPARSE)
    if peer is None:
        return None
    queries, kv, listed = peers.tensor(q), peers.tensor(rows)[:, None], peers.tensor(indices)[:, None]
    width = queries.shape[-1]
    attend, scale = peer.triton_bf16_mla_sparse_interface, width**-0.5
    return lambda: attend(queries, kv, listed, scale, 512, width - 512)[0]


def vllm_map(name: str, *arguments: Any) -> Thunk | None:
    """A map of indices by its name, which allocates what it returns."""
    function = getattr(peers.module(peers.VLLM_CACHE), name, None)
    if function is None:
        return None
    return functools.partial(function, *(peers.tensor(x) if hasattr(x, "shape") else x for x in arguments))


def deep_gemm_schedule(lens: Any, block_size: int, multiprocessors: int) -> Thunk | None:
    peer = peers.deep_gemm()
    return None if peer is None else functools.partial(
        peer.get_paged_mqa_logits_metadata, peers.tensor(lens), block_size, multiprocessors
    )  # fmt: skip


def deep_gemm_linear(x: Any, weight: Any, scale: Any, out: Any) -> Thunk | None:
    """x W^T for e4m3 weights in blocks of 128 x 128: x is quantised by groups of 128 first, with scales by columns."""
    peer, operations = peers.deep_gemm(), peers.vllm_operations()
    if peer is None or operations is None or not hasattr(peer, "fp8_gemm_nt"):
        return None
    import torch

    tokens, columns = x.shape
    rows, codes, scales, result = map(peers.tensor, (x, weight, scale, out))
    codes = codes.view(torch.float8_e4m3fn)
    quantized = torch.empty((tokens, columns), dtype=torch.float8_e4m3fn, device=rows.device)
    padded = torch.empty((columns // 128, -(-tokens // 4) * 4), dtype=torch.float32, device=rows.device)
    factors = padded.t()[:tokens]

    def call() -> Any:
        operations._C.per_token_group_fp8_quant(rows, quantized, factors, 128, 1e-10, -448.0, 448.0, False, True, True)
        peer.fp8_gemm_nt((quantized, factors), (codes, scales), result)
        return result

    return call
