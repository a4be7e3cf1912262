"""One dense MLA layer, one step: insert, then prefill with projected keys and decode in the latent space.

    prefill   k_nope, v = kv_c W_UK, kv_c W_UV for every head; causal attention over the new tokens; then chunk by
              chunk over the context: gather rows into the workspace, project them, attend to them too
    decode    q_latent = q_nope W_UK^T; attention over the paged rows, which are keys and values of all heads;
              out = latent out W_UV

Both give the same result. The first computes less for many queries, the second reads less for few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import dlpack, streams
from ..dispatch.call import BFLOAT16, Call
from ..kernels.types.plan import DecodePlan
from ..layout import MLA_BF16
from ..metadata.mla import MLACommonMetadata
from ..ops.dense_attention import dense_mla_decode, mha_varlen
from ..ops.dense_cache import concat_and_cache_mla, gather_cache
from ..ops.sparse_attention import V_DIM as KV_LORA_RANK
from .sparse import Observer, not_observed

ROPE_DIM = MLA_BF16.rope_dim
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32 = np.dtype(np.float32)
ACT_DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}


@dataclass(frozen=True)
class BlockQuantizedWeight:
    """A matrix in FP8 with a scale for each block, as DeepSeek V3 checkpoints hold them.

    weight  uint8 (or float8) [out, in], e4m3
    scale   float32 [ceil(out / block[0]), ceil(in / block[1])]; value = e4m3 * scale
    block   rows and columns that share a scale
    """

    weight: Any
    scale: Any
    block: tuple[int, int] = (128, 128)


class MLACommonImpl:
    """The attention of a dense MLA layer between its projections of q and of the output.

    num_heads         query heads on this device
    head_size         576, values of a cached row
    scale             softmax scale of a head, which the model knows (192**-0.5 with V3's YaRN factor)
    num_kv_heads      1
    kv_cache_dtype    "auto" (rows of the activations' dtype), or "fp8" / "fp8_e4m3" with one scale for the cache
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim    512, P, 64 and V
    kv_b_proj         [num_heads * (P + V), 512], for each head W_UK^T over W_UV^T: bfloat16, float16 or float32,
                      or a BlockQuantizedWeight

    A layer keeps scratch memory from step to step, so its steps must run one after another, on one stream.

    What the seed's constructor takes beside these (alibi slopes, sparse blocks, soft caps, KV sharing) it refuses
    or ignores, so there are no arguments for it here.
    Source: vLLM MLACommonImpl.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int = 1,
        kv_cache_dtype: str = "auto",
        *,
        kv_b_proj: Any,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = KV_LORA_RANK,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = ROPE_DIM,
        v_head_dim: int = 128,
        backend: str | None = None,
    ) -> None:
        for name, got, expected in (
            ("head_size", head_size, MLA_BF16.head_dim),
            ("num_kv_heads", num_kv_heads, 1),
            ("kv_lora_rank", kv_lora_rank, KV_LORA_RANK),
            ("qk_rope_head_dim", qk_rope_head_dim, ROPE_DIM),
        ):
            if got != expected:
                raise ValueError(f"{name}: got {got}, expected {expected}")
        if kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
            raise ValueError(f"kv_cache_dtype: got {kv_cache_dtype!r}, expected 'auto', 'fp8' or 'fp8_e4m3'")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = qk_nope_head_dim + qk_rope_head_dim, v_head_dim
        self.kv_b_proj, self.backend = kv_b_proj, backend
        self.plan = DecodePlan()  # keeps the memory of the decodes' partial results
        self._scratch: dict[str, Any] = {}

    def process_weights_after_loading(self, act_dtype: Any = BFLOAT16) -> None:
        """Make W_UK_T [num_heads, P, 512] and W_UV [num_heads, 512, V] of kv_b_proj: views of one 16-bit matrix.

        act_dtype  bfloat16 or float16, of the activations

        A quantised weight is dequantised here, once, on the host: weights of 16 bits are what cuBLAS multiplies.
        """
        dtype = np.dtype(act_dtype)
        if dtype not in ACT_DTYPES.values():
            raise TypeError(f"act_dtype: got {dtype}, expected {' or '.join(ACT_DTYPES)}")
        if isinstance(self.kv_b_proj, BlockQuantizedWeight):
            weight = dequantized(self.kv_b_proj)
        else:
            weight = dlpack.borrow(self.kv_b_proj, "kv_b_proj")
        heads, both = self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        if weight.shape != (heads * both, self.kv_lora_rank):
            raise ValueError(
                f"kv_b_proj: got shape {tuple(weight.shape)}, expected [{heads * both}, {self.kv_lora_rank}]: "
                f"{self.qk_nope_head_dim} + {self.v_head_dim} rows for each of {heads} heads"
            )
        weight = weight.astype(dtype).reshape(heads, both, self.kv_lora_rank)
        self.W_UK_T = weight[:, : self.qk_nope_head_dim]
        self.W_UV = weight[:, self.qk_nope_head_dim :].transpose(0, 2, 1)
        self._up_projection = weight.reshape(1, heads * both, self.kv_lora_rank).transpose(0, 2, 1)

    def forward(
        self,
        q: Any,
        k_c_normed: Any,
        k_pe: Any,
        kv_cache: Any,
        attn_metadata: MLACommonMetadata,
        output: Any = None,
        *,
        k_scale: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert a step's rows and attend.

        q           [T, num_heads * (P + 64)] or [T, num_heads, P + 64] bfloat16 or float16, RoPE applied to the
                    last 64 of each head. T may exceed the metadata's tokens, as it does where a captured graph's
                    batch is padded: those rows of the result are 0
        k_c_normed  [T, 512] of q's dtype
        k_pe        [T, 64] or [T, 1, 64] of q's dtype, RoPE applied
        kv_cache    [num_blocks, block_size, 576] as kv_cache_dtype says, written. Without blocks nothing is
                    written, as in a run that profiles memory
        attn_metadata  of the step's batch, decodes first; with context_chunk_workspace where prefills have context
        output      [T, num_heads * V] of q's dtype to write instead of allocating
        k_scale     of an FP8 cache: float32 array of one value on the device, or a number (`layer._k_scale`)
        observe     called with an op's name around each op ("insert", "project", "prefill", "gather", "context",
                    "absorb", "decode")

        Returns output. A step of decodes alone reads nothing back and, after the same shape has run once, allocates
        nothing but its output, so a CUDA graph can capture it when `output` is given.
        Raises TypeError or ValueError for an argument that does not fit.
        """
        if not hasattr(self, "W_UV"):
            raise ValueError("kv_b_proj: not processed, expected process_weights_after_loading to be called first")
        framework = dlpack.framework_of(q)
        q = dlpack.borrow(q, "q")
        tokens, width = len(q), self.num_heads * self.qk_head_dim
        if q.size != tokens * width or q.ndim not in (2, 3):
            raise ValueError(f"q: got shape {tuple(q.shape)}, expected [T, {self.num_heads}, {self.qk_head_dim}]")
        if q.dtype != self.W_UV.dtype:
            raise TypeError(f"q: got dtype {q.dtype}, expected {self.W_UV.dtype} as act_dtype said")
        q = q.reshape(tokens, self.num_heads, self.qk_head_dim)
        k_c_normed = dlpack.borrow(k_c_normed, "k_c_normed")
        k_pe = dlpack.borrow(k_pe, "k_pe").reshape(-1, ROPE_DIM)
        cache = dlpack.borrow(kv_cache, "kv_cache", writable=True)
        decodes, prefills = attn_metadata.decode_metadata, attn_metadata.prefill_metadata
        num_decode, num_prefill = attn_metadata.num_decode_tokens, attn_metadata.num_prefill_tokens
        used = num_decode + num_prefill
        for name, rows in (("q", tokens), ("k_c_normed", len(k_c_normed)), ("k_pe", len(k_pe))):
            if rows < used:
                raise ValueError(f"{name}: got {rows} tokens, expected at least the metadata's {used}")
        with streams.callers(q, framework, stream):
            shape = (tokens, self.num_heads * self.v_head_dim)
            if output is None:
                result = dlpack.empty(shape, q.dtype, q)
            else:
                result = dlpack.borrow(output, "output", writable=True)
                if result.shape != shape or result.dtype != q.dtype:
                    raise ValueError(
                        f"output: got {result.dtype} {list(result.shape)}, expected {q.dtype} {list(shape)}"
                    )
            heads_out = result.reshape(tokens, self.num_heads, self.v_head_dim)
            run = _Run(self, cache, k_scale, observe)
            if cache.size:
                slots = dlpack.borrow(attn_metadata.slot_mapping, "slot_mapping")[:tokens]
                with observe("insert"):
                    concat_and_cache_mla(
                        k_c_normed, k_pe, cache, slots, self.kv_cache_dtype, k_scale, backend=self.backend
                    )
            if decodes is not None:
                run.decode(q[:num_decode], decodes, heads_out[:num_decode])
            if prefills is not None:
                new = slice(num_decode, used)
                workspace = attn_metadata.context_chunk_workspace
                run.prefill(q[new], k_c_normed[new], k_pe[new], prefills, workspace, heads_out[new])
            if used < tokens:
                bits_of(result)[used:] = 0
        return dlpack.give(result, framework) if output is None else output

    def scratch(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
        """An array beside `like` that stays where it is from step to step, larger ones replacing smaller ones."""
        size = math.prod(shape)
        held = self._scratch.get(name)
        if held is None or held.size < size or held.dtype != dtype:
            held = self._scratch[name] = dlpack.empty((size,), dtype, like)
        return held[:size].reshape(shape)


@dataclass(frozen=True)
class _Run:
    """The parts of one step, with what they share. The caller's stream is current already."""

    layer: MLACommonImpl
    cache: Any
    k_scale: Any
    observe: Observer

    def product(self, a: Any, b: Any, out: Any) -> None:
        """out = a b, batches of matrices."""
        call = Call(self.layer.backend)
        call.borrow("a", a)
        with call.kernels("projection") as kernels:
            kernels.batched_product(a, b, out)

    def decode(self, q: Any, metadata: MLACommonMetadata, out: Any) -> None:
        """q [n, h, P + 64], out [n, h, V] written."""
        layer, nope = self.layer, self.layer.qk_nope_head_dim
        query_len = metadata.max_decode_query_len or 1
        requests = len(q) // query_len
        if requests * query_len != len(q):
            raise ValueError(f"attn_metadata: got {len(q)} decode tokens, expected a multiple of {query_len} each")
        heads, rank = layer.num_heads, layer.kv_lora_rank
        latent_q = layer.scratch("latent_q", (requests, query_len, heads, layer.head_size), q.dtype, q)
        latent_out = layer.scratch("latent_out", (requests, query_len, heads, rank), q.dtype, q)
        lse = layer.scratch("lse", (requests, heads, query_len), FLOAT32, q)
        by_token = latent_q.reshape(len(q), heads, layer.head_size)
        with self.observe("absorb"):
            self.product(q[..., :nope].transpose(1, 0, 2), layer.W_UK_T, by_token[..., :rank].transpose(1, 0, 2))
            bits_of(by_token)[..., rank:] = bits_of(q)[..., nope:]
        with self.observe("decode"):
            dense_mla_decode(
                latent_q, self.cache, dlpack.borrow(metadata.block_tables, "block_tables"),
                dlpack.borrow(metadata.seq_lens_tensor, "seq_lens_tensor"), scale=self.k_scale,
                softmax_scale=layer.scale, max_seqlen=metadata.max_decode_seq_len, plan=layer.plan, out=latent_out,
                lse=lse, backend=layer.backend,
            )  # fmt: skip
        with self.observe("absorb"):
            self.product(latent_out.reshape(len(q), heads, rank).transpose(1, 0, 2), layer.W_UV, out.transpose(1, 0, 2))

    def prefill(self, q: Any, kv_c: Any, k_pe: Any, metadata: MLACommonMetadata, workspace: Any, out: Any) -> None:
        """q [n, h, P + 64], kv_c [n, 512], k_pe [n, 64], out [n, h, V] written."""
        chunks = metadata.context_chunk_seq_tot or []
        if not chunks:
            self.attend("prefill", q, kv_c, k_pe, metadata.query_start_loc, metadata.query_start_loc, True, out)
            return
        if workspace is None:
            raise ValueError(
                "attn_metadata: got no context_chunk_workspace for prefills with context, "
                "expected MLACommonState.begin_forward to have put one there"
            )
        workspace = dlpack.borrow(workspace, "context_chunk_workspace", writable=True)
        if len(workspace) < max(chunks) or workspace.dtype != q.dtype:
            raise ValueError(
                f"context_chunk_workspace: got {workspace.dtype} {list(workspace.shape)}, "
                f"expected {q.dtype} of at least {max(chunks)} rows"
            )
        # In float32: 16 bits would lose some with each of many chunks.
        sums = dlpack.empty(out.shape, FLOAT32, q), dlpack.empty((self.layer.num_heads, len(q)), FLOAT32, q)
        self.attend("prefill", q, kv_c, k_pe, metadata.query_start_loc, metadata.query_start_loc, True, *sums)
        starts = dlpack.borrow(metadata.context_chunk_starts, "context_chunk_starts")
        cu_seq_lens = dlpack.borrow(metadata.context_chunk_cu_seq_lens, "context_chunk_cu_seq_lens")
        for i, tokens in enumerate(chunks):
            rows = workspace[:tokens]
            with self.observe("gather"):
                gather_cache(
                    self.cache, rows, metadata.block_tables, cu_seq_lens[i], metadata.num_prefills, starts[i],
                    scale=self.k_scale, backend=self.layer.backend,
                )  # fmt: skip
            self.attend(
                "context", q, rows[:, :KV_LORA_RANK], rows[:, KV_LORA_RANK:], metadata.query_start_loc, cu_seq_lens[i],
                False, *sums, accumulate=True,
            )  # fmt: skip
        out[...] = sums[0]

    def attend(
        self,
        op: str,
        q: Any,
        kv_c: Any,
        k_pe: Any,
        query_start_loc: Any,
        cu_seq_lens: Any,
        causal: bool,
        out: Any,
        lse: Any = None,
        accumulate: bool = False,
    ) -> None:
        """Project rows up for every head and attend to them."""
        layer, nope = self.layer, self.layer.qk_nope_head_dim
        kv = layer.scratch("kv", (len(kv_c), layer.num_heads, nope + layer.v_head_dim), q.dtype, q)
        with self.observe("project"):
            self.product(kv_c[None], layer._up_projection, kv.reshape(1, len(kv_c), -1))
        with self.observe(op):
            mha_varlen(
                q, kv[..., :nope], kv[..., nope:], dlpack.borrow(query_start_loc, "query_start_loc"), cu_seq_lens,
                k_pe=k_pe, softmax_scale=layer.scale, causal=causal, accumulate=accumulate, out=out, lse=lse,
                backend=layer.backend,
            )  # fmt: skip


def dequantized(weight: BlockQuantizedWeight) -> Any:
    """float32 [out, in], where the weight is. Raises TypeError or ValueError if it and its scales do not fit."""
    native, scale = dlpack.borrow(weight.weight, "kv_b_proj.weight"), dlpack.borrow(weight.scale, "kv_b_proj.scale")
    if native.dtype != np.uint8 or scale.dtype != np.float32:
        raise TypeError(f"kv_b_proj: got {native.dtype} with scales of {scale.dtype}, expected uint8 and float32")
    (rows, columns), (block_rows, block_columns) = native.shape, weight.block
    expected = (-(-rows // block_rows), -(-columns // block_columns))
    if scale.shape != expected:
        raise ValueError(f"kv_b_proj.scale: got shape {tuple(scale.shape)}, expected {list(expected)}")
    on_host = isinstance(native, np.ndarray)
    host, host_scale = (array if on_host else array.get() for array in (native, scale))
    scales = host_scale.repeat(block_rows, axis=0)[:rows].repeat(block_columns, axis=1)[:, :columns]
    values = np.ascontiguousarray(host).view(E4M3).astype(np.float32) * scales
    return values if on_host else dlpack.namespace_of(native).asarray(values)


def bits_of(array: Any) -> Any:
    """A 16-bit array as integers: to be copied and zeroed by CuPy whatever it knows of the type."""
    return array.view(np.uint16)
