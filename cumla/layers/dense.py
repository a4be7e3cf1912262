"""One step of a dense MLA layer: insert, then prefill with projected keys and decode in the latent space.

    prefill   k_nope, v = kv_c W_UK, kv_c W_UV for every head; causal attention over the new tokens; then for each
              chunk of the context: gather rows into the workspace, project them, attend to them and merge
    decode    q_latent = q_nope W_UK^T; attention over the paged rows, which are keys and values of all heads;
              out = latent out W_UV

Both give the same result. The prefill form computes less with many queries, the decode form reads less with few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack, streams
from ..arrays.array import Array
from ..dispatch.backends import BACKENDS
from ..dispatch.call import BFLOAT16
from ..dispatch.values import check_choice, check_flags, check_integers, check_optional_size, in_float32, shown
from ..kernels.types.plan import DenseDecodePlan, Workspace
from ..layout import MLA_BF16
from ..metadata.mla import MLACommonMetadata
from ..ops.dense_attention import dense_mla_decode, mha_varlen
from ..ops.dense_cache import concat_and_cache_mla, gather_cache
from ..ops.sparse_attention import MAX_HEADS
from ..ops.sparse_attention import V_DIM as KV_LORA_RANK
from .dense_validation import check_forward
from .products import batched_product, bits_of
from .sparse import Observer, not_observed
from .weights import BlockQuantizedWeight as BlockQuantizedWeight
from .weights import weight_of

ROPE_DIM = MLA_BF16.rope_dim
FLOAT32 = np.dtype(np.float32)
PREFILL_TOKENS = 128  # of prefills of a batch-invariant layer that attend in one call: partial results take memory
ACT_DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}


class MLACommonImpl:
    """The attention of a dense MLA layer between its projections of q and of the output.

    Args:
        num_heads: query heads on this device
        head_size: 576, values of a cached row
        scale: the model's softmax scale of a head (192**-0.5 with V3's YaRN factor)
        num_kv_heads: 1
        kv_cache_dtype: "auto" (rows of the activations' dtype), or "fp8" / "fp8_e4m3" with one scale for the cache
        q_lora_rank: not used: the model projects q
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: 512, P, 64 and V
        kv_b_proj: [num_heads * (P + V), 512], for each head W_UK^T over W_UV^T: bfloat16, float16 or float32, or a
            BlockQuantizedWeight; or a layer whose `weight` is one of these (layers/weights.py)
        batch_invariant: True: a token's bits depend on its request's tokens alone (docs/guide/batch-invariance.md): all
            tokens attend as decodes do. The builder's config then has it, too

    A layer reuses its memory for decodes in every step, so its steps must run one after another, on one stream. When
    larger memory is allocated, the smaller is not freed: graphs captured with it remain valid.

    vLLM's constructor has further arguments (alibi slopes, sparse blocks, soft caps, KV sharing), which vLLM refuses or
    ignores; cumla's has none of them.
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
        batch_invariant: bool = False,
        backend: str | None = None,
    ) -> None:
        check_choice((MLA_BF16.head_dim,), head_size=head_size)
        check_choice((1,), num_kv_heads=num_kv_heads)
        check_choice((KV_LORA_RANK,), kv_lora_rank=kv_lora_rank)
        check_choice((ROPE_DIM,), qk_rope_head_dim=qk_rope_head_dim)
        check_choice((*BACKENDS, None), backend=backend)
        check_flags(batch_invariant=batch_invariant)
        check_optional_size(q_lora_rank=q_lora_rank)
        check_integers(1, MAX_HEADS, num_heads=num_heads)
        check_integers(1, qk_nope_head_dim=qk_nope_head_dim, v_head_dim=v_head_dim)
        check_choice(("auto", "fp8", "fp8_e4m3"), kv_cache_dtype=kv_cache_dtype)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = in_float32("scale", scale, positive=True), kv_cache_dtype
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = qk_nope_head_dim + qk_rope_head_dim, v_head_dim
        self.kv_b_proj, self.backend = kv_b_proj, backend
        self.workspace = Workspace(owner="layer")
        self.batch_invariant = bool(batch_invariant)
        self.plan = DenseDecodePlan(self.workspace, batch_invariant=self.batch_invariant)

    def process_weights_after_loading(self, act_dtype: Any = BFLOAT16) -> None:
        """Split kv_b_proj into W_UK_T [num_heads, P, 512] and W_UV [num_heads, 512, V], views of one 16-bit matrix.

        Args:
            act_dtype: bfloat16 or float16, of the activations

        A quantised weight is dequantised here, once, on the host: cuBLAS multiplies 16-bit weights.
        """
        dtype = np.dtype(act_dtype)
        if dtype not in ACT_DTYPES.values():
            raise TypeError(f"act_dtype: got {dtype}, expected {' or '.join(ACT_DTYPES)}")
        weight = weight_of("kv_b_proj", self.kv_b_proj)
        heads, both = self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        if weight.shape != (heads * both, self.kv_lora_rank):
            raise ValueError(
                f"kv_b_proj: got shape {tuple(weight.shape)}, expected [{heads * both}, {self.kv_lora_rank}]: "
                f"{self.qk_nope_head_dim} + {self.v_head_dim} rows for each of {heads} heads"
            )
        weight = weight.astype(dtype, order="C").reshape(heads, both, self.kv_lora_rank)
        self.W_UK_T = weight[:, : self.qk_nope_head_dim]
        self.W_UV = weight[:, self.qk_nope_head_dim :].transpose(0, 2, 1)
        self._up_projection = weight.reshape(1, heads * both, self.kv_lora_rank).transpose(0, 2, 1)

    def forward(
        self,
        q: Array,
        k_c_normed: Array,
        k_pe: Array,
        kv_cache: Array,
        attn_metadata: MLACommonMetadata,
        output: Array | None = None,
        output_scale: None = None,
        *,
        k_scale: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert a step's rows and attend.

        Args:
            q: [T, num_heads * (P + 64)] or [T, num_heads, P + 64] bfloat16 or float16, RoPE applied to the last 64 of
                each head. T may exceed the metadata's tokens, as for the padded batch of a captured graph
            k_c_normed: [T, 512] of q's dtype
            k_pe: [T, 64] or [T, 1, 64] of q's dtype, RoPE applied
            kv_cache: [num_blocks, block_size, 576] of kv_cache_dtype, written. A cache without blocks is not written,
                as in a run that profiles memory; decodes and prefills with context need one with blocks elsewhere
            attn_metadata: of the step's batch, decodes first; with context_chunk_workspace if prefills have context
            output: [T, num_heads * V] of q's dtype to write instead of allocating
            output_scale: must be None: the output is not quantised
            k_scale: of an FP8 cache: float32 array of one value on the device, or a number (`layer._k_scale`)
            observe: called with an op's name around each op ("insert", "project", "prefill", "gather", "context",
                "absorb", "decode")

        Returns output; its rows of padding tokens, within the metadata's tokens and after them, are 0, where padding
        requests have a seq_len of 0. A step of decodes only does not synchronise with the host and, after the same
        shape has run once, allocates only its output, so a CUDA graph can capture it when `output` is given.
        Raises TypeError or ValueError for an argument that does not fit.
        """
        if output_scale is not None:
            raise ValueError(f"output_scale: got {shown(output_scale)}, expected None: the output is not quantised")
        check_forward(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, k_scale, stream)
        framework = dlpack.framework_of(q)
        q = dlpack.borrow(q, "q")
        tokens = len(q)
        q = q.reshape(tokens, self.num_heads, self.qk_head_dim)
        k_c_normed = dlpack.borrow(k_c_normed, "k_c_normed")
        k_pe = dlpack.borrow(k_pe, "k_pe").reshape(-1, ROPE_DIM)
        cache = dlpack.borrow(kv_cache, "kv_cache", writable=True)
        decodes, prefills = attn_metadata.decode_metadata, attn_metadata.prefill_metadata
        num_decode, num_prefill = attn_metadata.num_attending_decode_tokens, attn_metadata.num_prefill_tokens
        used = num_decode + num_prefill
        with streams.callers(q, framework, stream):
            if not isinstance(q, np.ndarray) and streams.is_capturing():
                refuse_in_capture(output, num_prefill)
            shape = (tokens, self.num_heads * self.v_head_dim)
            result = dlpack.empty(shape, q.dtype, q) if output is None else dlpack.borrow(output, "output", True)
            heads_out = result.reshape(tokens, self.num_heads, self.v_head_dim)
            run = _Run(self, cache, k_scale, observe)
            if attn_metadata.is_profile_run:
                run.allocate_worst_case(q, attn_metadata)
            if cache.size:
                slots = dlpack.borrow(attn_metadata.slot_mapping, "slot_mapping")[:tokens]
                with observe("insert"):
                    concat_and_cache_mla(
                        k_c_normed, k_pe, cache, slots, self.kv_cache_dtype, k_scale, backend=self.backend
                    )
            if decodes is not None and num_decode:
                run.decode(q[:num_decode], decodes, heads_out[:num_decode])
            if prefills is not None:
                new = slice(num_decode, used)
                workspace = attn_metadata.context_chunk_workspace
                if self.batch_invariant:
                    run.prefill_by_token(q[new], prefills, heads_out[new])
                else:
                    run.prefill(q[new], k_c_normed[new], k_pe[new], prefills, workspace, heads_out[new])
            if used < tokens:
                bits_of(result)[used:] = 0
        return dlpack.give(result, framework) if output is None else output


@dataclass(frozen=True)
class _Run:
    """The parts of one step and their common state. The caller's stream is already current."""

    layer: MLACommonImpl
    cache: Any
    k_scale: Any
    observe: Observer

    def product(self, a: Any, b: Any, out: Any) -> None:
        """out = a b, batches of matrices."""
        layer = self.layer
        batched_product(a, b, out, layer.backend, layer.workspace if layer.batch_invariant else None)

    def decode(self, q: Any, metadata: MLACommonMetadata, out: Any) -> None:
        """q [n, h, P + 64], out [n, h, V] written."""
        table, lens = (dlpack.borrow(getattr(metadata, x), x) for x in ("block_tables", "seq_lens_tensor"))
        query_len = metadata.max_decode_query_len or 1
        self.attend_in_latent_space(q, table, lens, query_len, metadata.max_decode_seq_len, self.plan(metadata), out)

    def prefill_by_token(self, q: Any, metadata: MLACommonMetadata, out: Any) -> None:
        """The same for prefills of a batch-invariant layer: each token is a decode of one token."""
        table, lens, starts = (
            dlpack.borrow(getattr(metadata, x), x) for x in ("block_tables", "seq_lens_tensor", "query_start_loc")
        )
        xp = dlpack.namespace_of(table)
        for first in range(0, len(q), PREFILL_TOKENS):
            part = slice(first, min(first + PREFILL_TOKENS, len(q)))
            tokens = xp.arange(part.start, part.stop, dtype=np.int32)
            requests = xp.searchsorted(starts, tokens, side="right") - 1
            seen = (lens[requests] - (starts[requests + 1] - 1 - tokens)).astype(np.int32)
            self.layer.plan.renew()
            self.attend_in_latent_space(
                q[part], table[requests], seen, 1, metadata.max_prefill_seq_len, self.layer.plan, out[part]
            )

    def attend_in_latent_space(
        self, q: Any, block_table: Any, seq_lens: Any, query_len: int, longest: int, plan: DenseDecodePlan, out: Any
    ) -> None:
        """Attend with q [n, h, P + 64], `query_len` tokens of each request, over the cache's rows."""
        layer, nope = self.layer, self.layer.qk_nope_head_dim
        heads, rank = layer.num_heads, layer.kv_lora_rank
        latent_q, latent_out, lse = self.latent(q, len(q) // query_len, query_len)
        by_token = latent_q.reshape(len(q), heads, layer.head_size)
        with self.observe("absorb"):
            self.product(q[..., :nope].transpose(1, 0, 2), layer.W_UK_T, by_token[..., :rank].transpose(1, 0, 2))
            bits_of(by_token)[..., rank:] = bits_of(q)[..., nope:]
        with self.observe("decode"):
            dense_mla_decode(
                latent_q, self.cache, block_table, seq_lens, scale=self.k_scale, softmax_scale=layer.scale,
                max_seqlen=longest, plan=plan, batch_invariant=layer.batch_invariant, out=latent_out, lse=lse,
                backend=layer.backend,
            )  # fmt: skip
        with self.observe("absorb"):
            self.product(latent_out.reshape(len(q), heads, rank).transpose(1, 0, 2), layer.W_UV, out.transpose(1, 0, 2))

    def plan(self, metadata: MLACommonMetadata) -> DenseDecodePlan:
        """The plan that the step's layers share, or else the layer's own plan, renewed for this step."""
        if metadata.decode_plan is not None:
            return metadata.decode_plan
        self.layer.plan.renew()
        return self.layer.plan

    def latent(self, like: Any, requests: int, query_len: int) -> tuple[Any, Any, Any]:
        """Memory for absorbed q and for the attention's out and lse, at the same address in every step."""
        layer, array = self.layer, self.layer.workspace.shaped
        sizes = requests, query_len, layer.num_heads
        return (
            array("latent_q", (*sizes, layer.head_size), like.dtype, like),
            array("latent_out", (*sizes, layer.kv_lora_rank), like.dtype, like),
            array("lse", (requests, layer.num_heads, query_len), FLOAT32, like),
        )

    def allocate_worst_case(self, q: Any, metadata: MLACommonMetadata) -> None:
        """Allocate the largest step's temporary memory, for runs that profile memory: the projections of a full context
        workspace, the float32 sums of all tokens, and the buffers for decodes of all the metadata's requests.
        """
        workspace = metadata.context_chunk_workspace
        self.latent(q, metadata.num_decodes + metadata.num_prefills, metadata.max_decode_query_len or 1)
        rows = max(len(q), 0 if workspace is None else len(workspace))
        _together = (self.projected(rows, q), *self.sums(q))

    def projected(self, rows: int, like: Any) -> Any:
        """Memory for K without its RoPE part, and V, of every head."""
        layer = self.layer
        return dlpack.empty((rows, layer.num_heads, layer.qk_nope_head_dim + layer.v_head_dim), like.dtype, like)

    def sums(self, q: Any) -> tuple[Any, Any]:
        """Memory to accumulate out and lse of chunks in float32: 16 bits would lose precision with every chunk."""
        heads = self.layer.num_heads
        return (
            dlpack.empty((len(q), heads, self.layer.v_head_dim), FLOAT32, q), dlpack.empty((heads, len(q)), FLOAT32, q)
        )  # fmt: skip

    def prefill(self, q: Any, kv_c: Any, k_pe: Any, metadata: MLACommonMetadata, workspace: Any, out: Any) -> None:
        """q [n, h, P + 64], kv_c [n, 512], k_pe [n, 64], out [n, h, V] written."""
        chunks = metadata.context_chunk_seq_tot or []
        if not chunks:
            self.attend("prefill", q, kv_c, k_pe, metadata.query_start_loc, metadata.query_start_loc, True, out)
            return
        workspace = dlpack.borrow(workspace, "context_chunk_workspace", writable=True)
        sums = self.sums(q)
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
        kv = self.projected(len(kv_c), q)
        with self.observe("project"):
            self.product(kv_c[None], layer._up_projection, kv.reshape(1, len(kv_c), -1))
        with self.observe(op):
            mha_varlen(
                q, kv[..., :nope], kv[..., nope:], dlpack.borrow(query_start_loc, "query_start_loc"), cu_seq_lens,
                k_pe=k_pe, softmax_scale=layer.scale, causal=causal, accumulate=accumulate, out=out, lse=lse,
                backend=layer.backend,
            )  # fmt: skip


def refuse_in_capture(output: Any, num_prefill: int) -> None:
    """Raise ValueError, naming the memory that would have to be allocated while a CUDA graph is being captured."""
    if output is None:
        raise ValueError("output: got None while a CUDA graph is being captured, expected memory allocated before it")
    if num_prefill:
        raise ValueError(
            f"attn_metadata: got {num_prefill} prefill tokens while a CUDA graph is being captured, expected decodes "
            "only: the projections of prefills would have to be allocated"
        )
