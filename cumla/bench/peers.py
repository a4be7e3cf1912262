"""Other libraries' kernels on the same arrays: FlashMLA and operations of an installed vLLM, DeepGEMM.

`pip install vllm` brings all of them. Each function returns a call without arguments, or None where the peer is not
installed or does not take such a call. cumla never needs one of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ..dispatch import backends
from .measure import Thunk

FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
VLLM_OPERATIONS = "vllm._C", "vllm._C_stable_libtorch"  # importing one registers operations of torch
VLLM_CACHE = "vllm.models.deepseek_v4.common.ops.cache_utils"
DEEP_GEMM = "deep_gemm", "vllm.third_party.deep_gemm"
CUTEDSL_GATHER = "cutedsl_gather"


def _version(recorded: str) -> str:
    """The version of the installed vLLM; of files without a package, the one that the records were measured with."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return recorded


VLLM, FLASH_MLA_OF = _version("0.26"), f"FlashMLA of vLLM {_version('0.33')}"

# Functions and versions, as rows name them.
FLASH_MLA_DECODE = f"flash_mla_with_kvcache, {FLASH_MLA_OF}"
FLASH_MLA_PREFILL = f"flash_mla_sparse_fwd, {FLASH_MLA_OF}"
VLLM_INSERT = f"fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, vLLM {VLLM}"
VLLM_GATHER_STAND_IN = "a stand-in for vLLM's dequantize_and_gather_k_cache_cutedsl: its algorithm in CUDA C++"
VLLM_KEYS = f"indexer_k_quant_and_cache, vLLM {VLLM}"
VLLM_CONCAT = f"concat_and_cache_mla, vLLM {VLLM}"
VLLM_PREFILL_CHOICE = f"top_k_per_row_prefill, vLLM {VLLM}"
DEEP_GEMM_LOGITS = f"fp8_mqa_logits, DeepGEMM of vLLM {VLLM}"
DEEP_GEMM_PAGED_LOGITS = f"fp8_paged_mqa_logits, DeepGEMM of vLLM {VLLM}"

COOPERATIVE_ROWS = 32 if VLLM.startswith("0.26") else 64  # up to which vLLM chooses by cooperative_topk (0.33: 64)


def has_peer(name: str) -> bool:
    """Whether a module can be found; that it loads is another matter (`module`)."""
    return backends.is_installed(name)


@functools.cache
def module(name: str) -> Any:
    """The module, or None. A module built for another CUDA or torch counts as missing."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some print, where a program may read our results
            return importlib.import_module(name) if has_peer("torch") and has_peer(name) else None
    except (ImportError, OSError, RuntimeError):
        return None


def deep_gemm() -> Any:
    """DeepGEMM: a package, or the copy within vLLM; None without it."""
    return next(filter(None, map(module, DEEP_GEMM)), None)


@functools.cache
def vllm_operations() -> Any:
    """torch.ops with the compiled operations of an installed vLLM; None without them."""
    if all(module(name) is None for name in VLLM_OPERATIONS):
        return None
    import torch

    return torch.ops


class Gather(NamedTuple):
    """A gather of FP8 rows, called as vLLM's dequantize_and_gather_k_cache.

    Attributes:
        name: as rows name it
        is_stand_in: a kernel of the same algorithm in place of vLLM's
    """

    call: Callable[..., Any]
    name: str
    is_stand_in: bool


def gather_of_vllm() -> Gather | None:
    """What vLLM's users run on CUDA: its CuTe DSL kernel, which needs nvidia-cutlass-dsl; else a stand-in, or None.

    vLLM's Triton kernel is its fallback, and no peer.
    """
    cache, imports = module(VLLM_CACHE), module("vllm.utils.import_utils")
    if cache is not None and imports is not None and imports.has_cutedsl():
        return Gather(cache.dequantize_and_gather_k_cache, f"dequantize_and_gather_k_cache, vLLM {VLLM}", False)
    stand_in = module(CUTEDSL_GATHER)
    return None if stand_in is None else Gather(stand_in.gather, VLLM_GATHER_STAND_IN, True)


def tensor(array: Any) -> Any:
    """A CuPy array as torch's, over the same memory."""
    import torch

    return torch.from_dlpack(array)


def flash_mla_decode(
    q: Any, cache: Any, indices: Any, out: Any, *, sink: Any = None, lens: Any = None, extra_k_cache: Any = None,
    extra_indices: Any = None, extra_lens: Any = None,
) -> Thunk | None:  # fmt: skip
    """Sparse decode; it takes 64 or 128 heads, to which fewer are padded. The plan is made once."""
    peer = module(FLASH_MLA)
    if peer is None:
        return None
    heads = q.shape[2]
    query, result = _padded(tensor(q), 64 if heads <= 64 else 128), _padded(tensor(out), 64 if heads <= 64 else 128)
    plan, _ = peer.get_mla_metadata()
    pages, listed = tensor(cache)[:, :, None], tensor(indices)
    named = {name: tensor(x) for name, x in (("topk_length", lens), ("extra_topk_length", extra_lens)) if x is not None}
    if sink is not None:
        named["attn_sink"] = _padded(tensor(sink)[:, None], query.shape[2], -math.inf)[:, 0].contiguous()
    if extra_k_cache is not None:
        named["extra_k_cache"] = tensor(extra_k_cache)[:, :, None]
        named["extra_indices_in_kvcache"] = tensor(extra_indices)

    def call() -> Any:
        peer.flash_mla_with_kvcache(
            query, pages, None, None, 512, plan, None, is_fp8_kvcache=True, indices=listed, out=result, **named
        )
        return result[:, :, :heads]

    return call


def _padded(x: Any, heads: int, value: float = 0.0) -> Any:
    """With so many heads, the last dimension but one."""
    import torch

    return x if x.shape[-2] == heads else torch.nn.functional.pad(x, (0, 0, 0, heads - x.shape[-2]), value=value)


def flash_mla_dense_decode(q: Any, cache: Any, block_table: Any, seq_lens: Any, scale: float) -> Thunk | None:
    peer = module(FLASH_MLA)
    if peer is None or q.shape[2] not in (16, 32, 64, 128):
        return None
    plan, _ = peer.get_mla_metadata()
    query, pages, table, lens = tensor(q), tensor(cache)[:, :, None], tensor(block_table), tensor(seq_lens)
    return lambda: peer.flash_mla_with_kvcache(query, pages, table, lens, 512, plan, softmax_scale=scale)


def flash_mla_prefill(q: Any, kv: Any, indices: Any, lens: Any = None, sink: Any = None) -> Thunk | None:
    """Sparse prefill. 8, 16 and 32 heads have a kernel of their own; others are padded to 64 or 128."""
    peer = module(FLASH_MLA)
    if peer is None or indices.shape[1] % 128:
        return None
    heads = q.shape[1]
    query = tensor(q) if heads in (8, 16, 32) else _padded(tensor(q), 64 if heads <= 64 else 128)
    rows, listed = tensor(kv)[:, None], tensor(indices)[:, None]
    named = {} if lens is None else {"topk_length": tensor(lens)}
    if sink is not None:
        named["attn_sink"] = _padded(tensor(sink)[:, None], query.shape[1], -math.inf)[:, 0].contiguous()

    def call() -> Any:
        out, *_ = peer.flash_mla_sparse_fwd(query, rows, listed, q.shape[2] ** -0.5, **named)
        return out[:, :heads]

    return call


def vllm_qnorm_rope_insert(
    q: Any, kv: Any, cache: Any, slots: Any, positions: Any, cos_sin: Any, block_size: int
) -> Thunk | None:
    """V4's insert as vLLM makes it: queries normed and rotated, rows rotated, quantised and written. Gives queries."""
    operations = vllm_operations()
    if operations is None:
        return None
    arrays = [tensor(x) for x in (q, kv, cache, slots, positions, cos_sin)]
    arrays[2] = arrays[2].view(len(cache), -1)
    heads = q.shape[1]
    op, padded = operations._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, 64 if heads <= 64 else 128
    return lambda: op(*arrays, padded, 1e-6, block_size)[:, :heads]


def vllm_gather_name() -> str:
    found = gather_of_vllm()
    return "" if found is None else found.name


def vllm_gather(
    out: Any, cache: Any, lens: Any, gather_lens: Any, block_table: Any, block_size: int, offset: int = 0
) -> Thunk | None:
    found = gather_of_vllm()
    if found is None:
        return None
    arrays = [None if x is None else tensor(x) for x in (out, cache, lens, gather_lens, block_table)]
    return lambda: found.call(*arrays, block_size, offset)


def vllm_insert_keys(k: Any, cache: Any, slots: Any) -> Thunk | None:
    """An indexer's calls."""
    operations = vllm_operations()
    if operations is None:
        return None
    arrays = [tensor(x) for x in (k, cache, slots)]
    return lambda: operations._C_cache_ops.indexer_k_quant_and_cache(*arrays, 128, "ue8m0")


def vllm_concat(kv_c: Any, k_pe: Any, cache: Any, slots: Any) -> Thunk | None:
    operations = vllm_operations()
    if operations is None:
        return None
    import torch

    arrays = [tensor(x) for x in (kv_c, k_pe, cache, slots)]
    scale = torch.ones(1, device=arrays[0].device)
    return lambda: operations._C_cache_ops.concat_and_cache_mla(*arrays, "auto", scale)


def vllm_top_k(logits: Any, k: int, lens: Any = None, starts: Any = None, ends: Any = None) -> Thunk | None:
    """The choice as vLLM makes it: decode rows have lens, prefill rows starts and ends."""
    operations = vllm_operations()
    if operations is None or k not in (512, 1024, 2048):
        return None
    import torch

    scores, rows = tensor(logits), len(logits)
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    if lens is None:
        first, last = tensor(starts), tensor(ends)

        def prefill() -> Any:
            operations._C.top_k_per_row_prefill(scores, first, last, out, rows, scores.stride(0), 1, k)
            return out

        return prefill
    choose = getattr(operations._C, top_k_function(rows))
    ends, workspace = tensor(lens), torch.zeros(1 << 20, dtype=torch.uint8, device=scores.device)

    def decode() -> Any:
        choose(scores, ends, out, workspace, k, scores.shape[1])
        return out

    return decode


def top_k_function(rows: int) -> str:
    """vLLM's top-k operation for decodes."""
    return "cooperative_topk" if rows <= COOPERATIVE_ROWS else "persistent_topk"


def deep_gemm_logits(q: Any, k: Any, scales: Any, weights: Any, starts: Any, ends: Any) -> Thunk | None:
    peer = deep_gemm()
    if peer is None:
        return None
    import torch

    query, keys = (tensor(x).view(torch.float8_e4m3fn) for x in (q, k))
    scale, *rest = [tensor(x) for x in (scales, weights, starts, ends)]
    return lambda: peer.fp8_mqa_logits(query, (keys, scale), *rest, clean_logits=False)


def deep_gemm_paged_logits(q: Any, cache: Any, weights: Any, lens: Any, table: Any, columns: int) -> Thunk | None:
    """lens [B] or [B, next_n]; no more than two tokens of a request."""
    peer = deep_gemm()
    if peer is None or q.shape[1] > 2:
        return None
    import torch

    query, rest = tensor(q).view(torch.float8_e4m3fn), [tensor(x) for x in (weights, lens, table)]
    rest[1] = rest[1] if rest[1].ndim == 2 else rest[1][:, None]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = peer.get_paged_mqa_logits_metadata(rest[1], cache.shape[1], multiprocessors)
    pages = tensor(cache)[:, :, None]
    return lambda: peer.fp8_paged_mqa_logits(query, pages, *rest, schedule, columns, clean_logits=False)
