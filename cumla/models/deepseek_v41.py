"""An attention layer of a DeepSeek V4.1 model, from hidden states to its output.

qr, kv      = norm(W_qa x), norm(W_kv x)                  kv is rotated and inserted into the layer's window cache
q           = W_qb qr, rotated; its heads have no norm
compressor  (owners of rows) pools one or two positions into a latent row: rotated and inserted into the compressed
            cache; W_ik of the latent, normed and rotated, is the row's index key
indexer     (layers that select) scores the owner's keys against queries W_iqb qr, selects the top-k. One layer also
            chooses candidate blocks; later layers score only the rows of these blocks
o           = attention over the window and the selected rows, with sinks, then inverse RoPE
out         = W_ob (W_oa of each group of heads)

Few layers own compressed rows or select: the others read an owner's caches, and the latest selection. `mode_of` gives
the role of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dispatch.values import check_flags, check_integers, check_kind
from ..layers.selection import Candidates
from ..layers.sparse import CompressedCache, LayerWorkspace, Observer, SparseMLALayer, not_observed
from ..ops.indexer_topk import WORKSPACE_BYTES
from ..ops.latents import compress_latents
from ..ops.norm_rope import apply_rope, fused_q_kv_rmsnorm, norm_rope_and_insert
from ..ops.sparse_cache import indexer_k_quant_and_cache
from .caches import DeepseekV41Caches, KeyFormat, V41CacheFormat, v41_formats
from .hidden_states import attend
from .output_projection import project_output
from .products import compute_type, flat, in_groups, multiply, stacked, width
from .scratch import Scratch
from .selection import Indexer
from .v4_config import HEAD_DIM
from .v41_config import DeepseekV41Config, mode_of
from .v41_step import DeepseekV41Selection, DeepseekV41StepBuilder, DeepseekV41StepMetadata, serving_of
from .validation import check_options, check_v41_step
from .weight_shapes import expected_weights
from .weights import V41_ATTENTION, WeightFormat, WeightReader, keeps_fp8, place_of, weights_of_layer

__all__ = [
    "DeepseekV41Attention", "DeepseekV41Caches", "DeepseekV41Config", "DeepseekV41Selection", "DeepseekV41StepBuilder",
    "DeepseekV41StepMetadata", "serving_of",
]  # fmt: skip

FLOAT32 = np.dtype(np.float32)
SCALE_BLOCK = (32, 32)  # of FP8 weights


class DeepseekV41Attention:
    """One attention layer.

    Args:
        config: of the model
        layer: the layer's number; from num_hidden_layers on a layer that predicts further tokens
        weights: published names within the attention module ("wq_a.weight") -> arrays, or a checkpoint's tensors under
            the names of the whole model ("layers.2.attn.wq_a.weight", "mtp.0.attn.wq_a.weight"): arrays of any
            framework and strides in float32 or bfloat16, or FP8 with a scale for each block of 32 by 32: a
            BlockQuantizedWeight, or separate scales, "wq_a.scale". Only the layer's are read
        activations: bfloat16, or on the host also float32
        cache_format: "fp4", "fp8", "fp4_split", "fp8_split", "bfloat16", or on the host "float32": the format of the
            caches passed to `step`
        key_format: format of the index keys: "fp8", with queries in e4m3, or "mxfp4", with queries rounded to MXFP4, as
            in DeepSeek's code; None: "fp8", or the type of rows that are not quantised
        weight_format: "fp8": FP8 matrices are stored in FP8; "bfloat16": the constructor dequantises them
        max_position: positions of RoPE's tables, at least the longest sequence; max_position_embeddings if None
        round_pooled: round a pooled row to bfloat16 before its norm, as DeepSeek's code and SGLang do; False: as vLLM
        round_rows: round rotated rows to bfloat16 before quantisation, as DeepSeek's code and SGLang do; False: as vLLM
        scratch: temporary memory, shared by layers that run one after another
        xp: numpy or cupy, where the layer computes: on CuPy's current device; None: where its weights are

    Other weights are stored in the type that the device multiplies: the activations' type, on the host float32.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        layer: int,
        weights: Mapping[str, Any],
        *,
        activations: Any = "bfloat16",
        cache_format: V41CacheFormat = "fp4",
        key_format: KeyFormat | None = None,
        weight_format: WeightFormat = "fp8",
        max_position: int | None = None,
        round_pooled: bool = False,
        round_rows: bool = True,
        scratch: Scratch | None = None,
        xp: Any = None,
        backend: str | None = None,
    ) -> None:
        check_kind(DeepseekV41Config, config=config)
        if scratch is not None:
            check_kind(Scratch, scratch=scratch)
        check_kind(Mapping, weights=weights)
        check_integers(0, layer=layer)
        check_flags(round_pooled=round_pooled, round_rows=round_rows)
        self.layouts = v41_formats(cache_format, key_format)
        weights = weights_of_layer(weights, layer, V41_ATTENTION, SCALE_BLOCK, config.num_hidden_layers)
        self.xp = place_of(weights, "wq_a.weight") if xp is None else xp
        on_host = self.xp is np
        plain = cache_format if cache_format in ("bfloat16", "float32") else "fp8"
        self.activations = check_options(layer, None, activations, plain, max_position, on_host, backend)
        self.config, self.layer, self.backend = config, layer, backend
        self.ratio, self.mode = config.ratio(layer), mode_of(config, layer)
        self.round_pooled, self.round_rows = bool(round_pooled), bool(round_rows)
        self.scratch = scratch or Scratch()
        read = WeightReader(weights, expected_weights(config, layer), self.xp, keeps_fp8(weight_format))
        self._load(read)
        read.check_all_read()
        table = config.cos_sin_table(self.ratio, max_position or config.max_position_embeddings)
        self.cos_sin = self.xp.asarray(table)
        self.attention = SparseMLALayer(
            self.ratio, config.index_topk, self.sinks, layout=self.layouts.window,
            extra_layout=self.layouts.compressed if self.ratio else None,
        )  # fmt: skip
        self.indexer = Indexer(
            config.index_n_heads, config.index_topk, self.layouts.indexer, False, self.scratch, backend,
            WORKSPACE_BYTES,  # contexts of a million positions
        )  # fmt: skip

    def _load(self, get: WeightReader) -> None:
        config, dtype = self.config, compute_type(self.activations, self.xp)

        def matrix(*names: str) -> Any:
            return stacked([get.matrix(f"{name}.weight") for name in names], dtype, self.xp, self.scratch)

        self.low_rank = matrix("wq_a", "wkv")
        self.q_norm, self.kv_norm = get.vector("q_norm.weight"), get.vector("kv_norm.weight")
        self.q_b = matrix("wq_b")
        self.o_a, self.o_b = in_groups(matrix("wo_a"), config.o_groups), matrix("wo_b")
        self.sinks = get.vector("attn_sink")
        if self.mode not in ("full", "reindex"):
            return
        self.index_q_b = matrix("indexer.wq_b")
        wide = ["indexer.weights_proj"]  # float32 products of the hidden states; the compressor's come first
        if self.mode == "full":
            wide = [*("compressor.wkv", "compressor.wgate")[: self.ratio], *wide]
            self.latent_norm, self.index_k = get.vector("compressor.norm.weight"), matrix("indexer.wk")
            self.index_k_norm = get.vector("indexer.k_norm.weight")
        self.wide = matrix(*wide)

    def step(
        self,
        hidden_states: Any,
        layer_caches: DeepseekV41Caches,
        metadata: DeepseekV41StepMetadata,
        selection: DeepseekV41Selection | None = None,
        *,
        early_release: bool = True,
        out: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert a step's rows and keys into the caches, and attend.

        Args:
            hidden_states: [T, hidden_size] of the layer's activations, after the layer's input norm; T are the
                metadata's tokens (padding included)
            layer_caches: written; only an owner writes compressed rows and keys
            metadata: of the step's batch (DeepseekV41StepBuilder)
            selection: of the model: layers that select write it, the others read it. Layers of ratio 0 need none
            early_release: False: no later kernel starts before the results are stored (docs/interop.md)
            out: [T, hidden_size] of hidden_states' dtype to write instead of allocating
            observe: called with a part's name around each part ("project", "insert", "compress", "select", "decode",
                "gather", "map", "prefill", "output")

        Returns out, to which the caller adds the residual. A step that is run again, as after an error in a later
        layer, gives the same bytes in out and in the caches. A step of decodes, once one of its size has run, allocates
        nothing if `out` is given, and can be captured in a CUDA graph.
        Raises TypeError or ValueError, before anything is written, for an argument that does not fit, and where the
        layer's owner or source has not run in this step, or wrote to other caches.
        """
        check_v41_step(self, hidden_states, layer_caches, metadata, selection)
        run = V41Step(self, layer_caches, metadata, selection, observe)
        shape = len(metadata.positions), self.config.hidden_size
        return attend(run.run, hidden_states, shape, self.activations, None, out, stream, early_release)

    def insert(
        self,
        hidden_states: Any,
        layer_caches: DeepseekV41Caches,
        metadata: DeepseekV41StepMetadata,
        *,
        stream: Any = None,
    ) -> None:
        """Insert a step's rows into the window cache, without attending.

        A draft layer keeps the rows of the main model's hidden states, not the rows of the tokens that it drafted.
        The arguments are the same as those of `step`, for a layer of ratio 0.
        """
        if self.ratio:
            raise ValueError(f"layer: got {self.layer} of ratio {self.ratio}, expected one of ratio 0")
        check_v41_step(self, hidden_states, layer_caches, metadata, None)
        run = V41Step(self, layer_caches, metadata, None, not_observed)
        shape = len(metadata.positions), self.config.hidden_size
        into = self.scratch.shaped("inserted", shape, self.activations, self.cos_sin)  # attend's out, not written
        attend(run.only_insert, hidden_states, shape, self.activations, None, into, stream)


@dataclass(frozen=True)
class V41Step:
    """The parts of one step. The caller's stream is current."""

    layer: DeepseekV41Attention
    caches: DeepseekV41Caches
    metadata: DeepseekV41StepMetadata
    selection: DeepseekV41Selection | None
    observe: Observer

    def run(self, x: Any, _: Any, out: Any) -> None:
        layer, metadata = self.layer, self.metadata
        selects = layer.mode in ("full", "reindex")
        with self.observe("project"):
            qr, kv = self.project(x)
            wide: Any = None
            if selects:
                wide = self.array("wide", (len(x), width(layer.wide)), FLOAT32)
                multiply(x, layer.wide, wide, layer.backend)
        if layer.mode == "full":  # kv's norm is part of its insert; qr's norm shares a launch with the keys'
            with self.observe("compress"):
                self.insert_keys(self.compress(wide), qr)
        else:
            with self.observe("project"):
                self.norm(qr, kv, layer.kv_norm)
        if selects:
            with self.observe("select"):
                self.select(qr, wide[:, -layer.config.index_n_heads :])
        q = self.array("q", (len(x), layer.config.num_attention_heads, HEAD_DIM))
        with self.observe("project"):
            multiply(qr, layer.q_b, flat(q), layer.backend)
            apply_rope(q, metadata.positions, layer.cos_sin, out=q, backend=layer.backend)
        with self.observe("insert"):
            self.insert(kv)
        o = self.array("o", q.shape)
        self.attend(q, o)
        with self.observe("output"):
            project_output(layer, o, metadata.positions, out)

    def only_insert(self, x: Any, *_: Any) -> None:
        qr, kv = self.project(x)
        self.norm(qr, kv, self.layer.kv_norm)
        self.insert(kv)

    def project(self, x: Any) -> tuple[Any, Any]:
        """Projections: [tokens, q_lora_rank] for the queries and [tokens, 512] for the window's rows."""
        layer, config = self.layer, self.layer.config
        low = self.array("low_rank", (len(x), config.q_lora_rank + HEAD_DIM))
        multiply(x, layer.low_rank, low, layer.backend)
        return low[:, : config.q_lora_rank], low[:, config.q_lora_rank :]

    def norm(self, qr: Any, other: Any, weight: Any) -> None:
        """RMSNorm of qr and of other rows, in place."""
        layer = self.layer
        fused_q_kv_rmsnorm(
            qr, other, layer.q_norm, weight, layer.config.rms_norm_eps, out=(qr, other), backend=layer.backend
        )

    def insert(self, kv: Any) -> None:
        layer, metadata = self.layer, self.metadata
        norm_rope_and_insert(
            kv, self.caches.window, metadata.window.slot_mapping, metadata.positions, layer.cos_sin,
            weight=layer.kv_norm if layer.mode == "full" else None, eps=layer.config.rms_norm_eps,
            round_rows=layer.round_rows, layout=layer.layouts.window, backend=layer.backend,
        )  # fmt: skip

    def compress(self, wide: Any) -> Any:
        """Pool this step's tokens into compressed rows. Returns the latents, 0 where no row was completed."""
        layer, metadata, tokens = self.layer, self.metadata, len(wide)
        rows, eps = metadata.rows[layer.ratio], layer.config.rms_norm_eps
        latents = self.array("latents", (tokens, HEAD_DIM))
        latents.fill(0)
        ring: dict[str, Any] = {}
        if layer.ratio > 1:
            window = metadata.window
            ring = {
                "positions": metadata.positions, "query_start_loc": window.query_start_loc,
                "state_cache": self.caches.ring, "restart_rows": self.caches.restart_rows,
                "restart_positions": self.caches.restart_positions,
            }  # fmt: skip
        compress_latents(
            wide[:, : layer.ratio * HEAD_DIM], layer.latent_norm,
            rows.slot_mapping if layer.ratio == 1 else metadata.ring_slot_mapping, latents,
            compress_ratio=layer.ratio, **ring, eps=eps, round_pooled=layer.round_pooled, backend=layer.backend,
        )  # fmt: skip
        norm_rope_and_insert(
            latents, self.caches.compressed, rows.slot_mapping, rows.row_positions, layer.cos_sin,
            round_rows=layer.round_rows, layout=layer.layouts.compressed, backend=layer.backend,
        )  # fmt: skip
        return latents

    def insert_keys(self, latents: Any, qr: Any) -> None:
        """Insert the index keys of the rows. One launch norms qr and the keys."""
        layer, rows = self.layer, self.metadata.rows[self.layer.ratio]
        keys = self.array("index_k", (len(latents), layer.config.index_head_dim))
        multiply(latents, layer.index_k, keys, layer.backend)
        self.norm(qr, keys, layer.index_k_norm)
        heads = keys[:, None]
        apply_rope(heads, rows.row_positions, layer.cos_sin, out=heads, backend=layer.backend)
        tile = layer.layouts.indexer.scale_tile or 128
        indexer_k_quant_and_cache(keys, self.caches.indexer, rows.slot_mapping, tile, backend=layer.backend)
        assert self.selection is not None
        self.selection.note_owned(layer.layer, self.metadata, self.caches)

    def select(self, qr: Any, weights: Any) -> None:
        """Write the selection, and candidate blocks if the layer chooses them."""
        layer, config, metadata, selection = self.layer, self.layer.config, self.metadata, self.selection
        assert selection is not None
        tokens, decodes = len(qr), metadata.window.num_decode_tokens
        q = self.array("index_q", (tokens, config.index_n_heads, config.index_head_dim))
        multiply(qr, layer.index_q_b, flat(q), layer.backend)
        q, weights = layer.indexer.queries(q, weights, metadata.positions, layer.cos_sin)
        rows = metadata.rows[layer.ratio]
        layer.indexer.select(
            q, weights, self.caches.indexer, rows.indexer, metadata.positions, metadata.window.token_to_req_indices,
            rows.block_table, (selection.slots[:decodes], selection.lens[:decodes]) if decodes else None,
            metadata.window.is_valid_token, selection.topk_indices[:tokens], self.candidates(),
        )  # fmt: skip
        selection.note("rows", layer.layer, metadata)
        if layer.layer == config.candidate_source_layer_id:
            selection.note("candidates", layer.layer, metadata)

    def candidates(self) -> Candidates | None:
        layer, config = self.layer, self.layer.config
        assert self.selection is not None
        if layer.layer == config.candidate_source_layer_id:
            return self.selection.candidates(written=True)
        return self.selection.candidates(written=False) if config.reads_candidates(layer.layer) else None

    def attend(self, q: Any, o: Any) -> None:
        """Write o [tokens, heads, 512], the attention over the window's rows and the selected rows."""
        layer, metadata, tokens, compressed = self.layer, self.metadata, len(q), None
        if layer.ratio:
            selection, decodes = self.selection, metadata.window.num_decode_tokens
            assert selection is not None
            compressed = CompressedCache(
                self.caches.compressed, metadata.rows[layer.ratio].block_table,
                topk_indices=selection.topk_indices[:tokens], decode_slots=selection.slots[:decodes],
                decode_lens=selection.lens[:decodes],
            )  # fmt: skip
        lse = self.array("lse", (tokens, q.shape[1], 1), FLOAT32)
        layer.attention.step(
            q, None, self.caches.window, metadata.window, compressed, out=o, workspace=LayerWorkspace(lse),
            backend=layer.backend, observe=self.observe,
        )  # fmt: skip

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return self.layer.scratch.shaped(name, shape, dtype or self.layer.activations, self.layer.cos_sin)
