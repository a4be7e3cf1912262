"""Other libraries' kernels on the same arrays, where they can be imported: FlashMLA and vLLM's operations, DeepGEMM.

Each function returns a call without arguments, or None where the peer is not there or does not take such a call. cumla
never needs one of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import lzma
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
VLLM_CACHE = "vllm.models.deepseek_v4.common.ops.cache_utils"
DEEP_GEMM = "deep_gemm"
CUTEDSL_GATHER = "cutedsl_gather"

Call = Callable[[], Any]


def has_peer(name: str) -> bool:
    """Whether a module can be found; that it loads is another matter (`module`)."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def module(name: str) -> Any:
    """The module, or None. What is built for another CUDA or torch is as good as absent."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some print, where a program may read our results
            return importlib.import_module(name) if has_peer("torch") and has_peer(name) else None
    except (ImportError, OSError, RuntimeError):
        return None


@functools.cache
def vllm_operations() -> Any:
    """torch.ops with the operations of vLLM's library, sought on sys.path (it may be packed); None without it."""
    for folder in map(Path, sys.path):
        packed, unpacked = folder / "vllm_c_ops.so.xz", folder / "vllm_c_ops.so"
        if not (packed.exists() or unpacked.exists()) or not has_peer("torch"):
            continue
        import torch

        with tempfile.TemporaryDirectory() as scratch:
            if not unpacked.exists():
                unpacked = Path(scratch) / unpacked.name
                unpacked.write_bytes(lzma.decompress(packed.read_bytes()))
            try:
                torch.ops.load_library(str(unpacked))
            except OSError:  # as `module` has it
                return None
        return torch.ops
    return None


def cutedsl_gather() -> Any:
    """A stand-in for the CuTe DSL kernel by which vLLM gathers on CUDA, which needs a compiler that is not here."""
    found = module(CUTEDSL_GATHER)
    return None if found is None else found.gather


def tensor(array: Any) -> Any:
    """A CuPy array as torch's, over the same memory."""
    import torch

    return torch.from_dlpack(array)


def flash_mla_decode(q: Any, cache: Any, indices: Any, extra_k_cache: Any, extra_indices: Any) -> Call | None:
    """Sparse decode of 64 or 128 heads."""
    peer = module(FLASH_MLA)
    if peer is None or q.shape[2] not in (64, 128):
        return None
    plan, _ = peer.get_mla_metadata()
    query, pages, listed = tensor(q), tensor(cache)[:, :, None], tensor(indices)
    more = {}
    if extra_k_cache is not None:
        more = {
            "extra_k_cache": tensor(extra_k_cache)[:, :, None], "extra_indices_in_kvcache": tensor(extra_indices),
        }  # fmt: skip
    return lambda: peer.flash_mla_with_kvcache(
        query, pages, None, None, 512, plan, None, is_fp8_kvcache=True, indices=listed, **more
    )


def flash_mla_dense_decode(q: Any, cache: Any, block_table: Any, seq_lens: Any, scale: float) -> Call | None:
    peer = module(FLASH_MLA)
    if peer is None or q.shape[2] not in (16, 32, 64, 128):
        return None
    plan, _ = peer.get_mla_metadata()
    query, pages, table, lens = tensor(q), tensor(cache)[:, :, None], tensor(block_table), tensor(seq_lens)
    return lambda: peer.flash_mla_with_kvcache(query, pages, table, lens, 512, plan, softmax_scale=scale)


def flash_mla_prefill(q: Any, kv: Any, indices: Any) -> Call | None:
    peer = module(FLASH_MLA)
    if peer is None or q.shape[1] not in (64, 128) or indices.shape[1] % 64:
        return None
    query, rows, listed = tensor(q), tensor(kv)[:, None], tensor(indices)[:, None]
    return lambda: peer.flash_mla_sparse_fwd(query, rows, listed, q.shape[2] ** -0.5)


def vllm_insert(k: Any, cache: Any, slots: Any, block_size: int) -> Call | None:
    """V4's rows."""
    peer = module(VLLM_CACHE)
    if peer is None:
        return None
    arrays = tensor(k), tensor(cache), tensor(slots)
    return lambda: peer.quantize_and_insert_k_cache(*arrays, block_size)


def vllm_gather(out: Any, cache: Any, lens: Any, block_table: Any, block_size: int) -> Call | None:
    peer = module(VLLM_CACHE)
    if peer is None:
        return None
    arrays = tensor(out), tensor(cache), tensor(lens), None, tensor(block_table)
    return lambda: peer.dequantize_and_gather_k_cache(*arrays, block_size, 0)


def deep_gemm_paged_logits(q: Any, cache: Any, weights: Any, lens: Any, table: Any, columns: int) -> Call | None:
    peer = module(DEEP_GEMM)
    if peer is None:
        return None
    import torch

    query, rest = tensor(q).view(torch.float8_e4m3fn), [tensor(x) for x in (weights, lens[:, None], table)]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = peer.get_paged_mqa_logits_metadata(rest[1], cache.shape[1], multiprocessors)
    pages = tensor(cache)[:, :, None]
    return lambda: peer.fp8_paged_mqa_logits(query, pages, *rest, schedule, columns, clean_logits=False)
