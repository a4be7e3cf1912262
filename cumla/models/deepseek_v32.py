"""An attention layer of a DeepSeek V3.2 model, from hidden states to its output.

qr          = norm(W_qa x);   q_nope, q_pe = W_qb qr of each head, q_pe rotated
kv_c, k_pe  = W_kva x;        norm(kv_c) and rotated k_pe are the row that is inserted into the cache
indexer       scores queries W_iqb qr against the rotated keys LayerNorm(W_k x) of all tokens so far, selects the top-k
o           = attention of W_UK q_nope, q_pe over the selected rows, in the latent space
out         = W_o (W_UV o of each head)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_kind
from ..layers.selected_attention import SelectedAttention
from ..layers.sparse import Observer, not_observed
from ..ops.dense_cache import concat_and_cache_mla
from ..ops.norm_rope import apply_rope, fused_q_kv_rmsnorm, indexer_knorm_rope_and_insert
from . import caches
from .block_scaled import enable_fp8_activations
from .caches import DeepseekV32Caches
from .hidden_states import attend
from .layer_spec import INDEX_DIM, LATENT
from .layer_spec import ROPE_DIM as ROPE
from .products import compute_type, first_rows, flat, in_groups, multiply, multiply_groups, rows_of, stacked, transposed
from .scratch import Scratch
from .selection import Indexer
from .step import DeepseekV32StepBuilder as DeepseekV32StepBuilder
from .step import DeepseekV32StepMetadata
from .v32_config import DeepseekV32Config as DeepseekV32Config
from .validation import check_indexer_metadata, check_options, check_types, check_v32_step
from .weight_shapes import expected_weights
from .weights import V32_ATTENTION, WeightFormat, WeightReader, keeps_fp8, place_of, weights_of_layer

FLOAT32 = np.dtype(np.float32)
ROUNDED = ("low_rank", "queries", "o")  # products that may round activations to FP8
LAYER_NORM_EPS = 1e-6  # of the indexer's keys
LATENT_NORM_EPS = 1e-6  # of the latent norms, independent of rms_norm_eps, as in the authors' code and transformers


class DeepseekV32Attention:
    """One attention layer.

    The arguments are the same as DeepseekV4Attention's (cumla.models.deepseek_v4). `weights` has transformers' names
    within the module ("kv_b_proj.weight"), or a checkpoint's tensors under the names of the whole model.
    """

    def __init__(
        self,
        config: DeepseekV32Config,
        layer: int,
        weights: Mapping[str, Any],
        *,
        activations: Any = "bfloat16",
        cache_format: caches.CacheFormat = "fp8",
        weight_format: WeightFormat = "fp8",
        max_position: int | None = None,
        scratch: Scratch | None = None,
        xp: Any = None,
        backend: str | None = None,
    ) -> None:
        check_kind(DeepseekV32Config, config=config)
        if scratch is not None:
            check_kind(Scratch, scratch=scratch)
        check_kind(Mapping, weights=weights)
        weights = weights_of_layer(weights, layer, V32_ATTENTION)
        self.xp = place_of(weights) if xp is None else xp
        self.activations = check_options(
            layer, None, activations, cache_format, max_position, self.xp is np, backend, weight_format
        )  # fmt: skip
        self.config, self.layer, self.backend = config, layer, backend
        self.layouts, self.scratch = caches.formats(cache_format), scratch or Scratch()
        self.cache_dtype = "fp8_ds_mla" if cache_format == "fp8" else "auto"
        read = WeightReader(weights, expected_weights(config, layer), self.xp, keeps_fp8(weight_format))
        self._load(read)
        if activations == "fp8":
            enable_fp8_activations(self, *ROUNDED)
        read.check_all_read()
        self.cos_sin = self.xp.asarray(config.cos_sin_table(max_position or config.max_position_embeddings))
        self.indexer = Indexer(
            config.index_n_heads, config.index_topk, self.layouts.indexer, True, self.scratch, backend
        )

    def _load(self, get: WeightReader) -> None:
        config, dtype = self.config, compute_type(self.activations, self.xp)

        def matrix(*names: str) -> Any:
            return stacked([get.matrix(f"{name}.weight") for name in names], dtype, self.xp, self.scratch)

        self.low_rank = matrix("q_a_proj", "indexer.wk", "kv_a_proj_with_mqa")  # whole blocks of 128 rows first
        self.q_a_norm, self.kv_a_norm = get.vector("q_a_layernorm.weight"), get.vector("kv_a_layernorm.weight")
        self.queries = matrix("q_b_proj", "indexer.wq_b")
        kv_b, nope = in_groups(matrix("kv_b_proj"), config.num_attention_heads), config.qk_nope_head_dim
        self.latent = transposed(rows_of(kv_b, 0, nope), dtype)  # W_UK: [h, 512, P]
        self.value = rows_of(kv_b, nope, nope + config.v_head_dim)  # W_UV: [h, V, 512]
        self.o, self.index_weights = matrix("o_proj"), matrix("indexer.weights_proj")
        self.k_norm, self.k_bias = get.vector("indexer.k_norm.weight"), get.vector("indexer.k_norm.bias")

    def step(
        self,
        hidden_states: Any,
        layer_caches: DeepseekV32Caches,
        metadata: DeepseekV32StepMetadata,
        *,
        topk_indices: Any = None,
        early_release: bool = True,
        out: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert a step's rows and keys into the caches, and attend.

        Args:
            hidden_states: [T, hidden_size] of the layer's activations, after the layer's input norm; T are the
                metadata's tokens (padding included)
            layer_caches: written
            metadata: of the step's batch (DeepseekV32StepBuilder)
            topk_indices: [T, topk] int32, positions that each token selects, -1 for none, in place of the indexer's
                selection, which is then not computed. A position after the token's own is left out
            early_release: False: no later kernel starts before the results are stored (docs/interop.md)
            out: [T, hidden_size] of hidden_states' dtype to write instead of allocating
            observe: called with a part's name around each part ("project", "insert", "select", "map", "gather",
                "decode", "prefill", "output")

        Returns out, to which the caller adds the residual.
        Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
        """
        self.check_step(hidden_states, layer_caches, metadata, topk_indices)
        run = V32Step(self, layer_caches, metadata, observe).run
        shape = len(metadata.positions), self.config.hidden_size
        return attend(run, hidden_states, shape, self.activations, topk_indices, out, stream, early_release)

    def check_step(
        self, hidden_states: Any, layer_caches: Any, metadata: Any, topk_indices: Any, all_rows: bool = True
    ) -> None:
        """Raise the errors of `step`; whole: whether the cache has all latent rows, not only one rank's."""
        check_types(layer_caches=(layer_caches, DeepseekV32Caches), metadata=(metadata, DeepseekV32StepMetadata))
        check_v32_step(self, hidden_states, layer_caches, metadata, topk_indices, all_rows)
        check_indexer_metadata(metadata.indexer, metadata.tokens, topk_indices)


@dataclass(frozen=True)
class V32Step:
    """The parts of one step. The caller's stream is current."""

    layer: DeepseekV32Attention
    caches: DeepseekV32Caches
    metadata: DeepseekV32StepMetadata
    observe: Observer

    def run(self, x: Any, topk_indices: Any, out: Any) -> None:
        layer, config, tokens, backend = self.layer, self.layer.config, len(x), self.layer.backend
        heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.q_lora_rank
        step = self.metadata.tokens
        with self.observe("project"):
            low = self.array("low_rank", (tokens, rank + INDEX_DIM + LATENT + ROPE))
            multiply(x, layer.low_rank, low, backend)
            qr, keys, kv = low[:, :rank], low[:, rank : rank + INDEX_DIM], low[:, rank + INDEX_DIM :]
            kv_c = kv[:, :LATENT]
            fused_q_kv_rmsnorm(
                qr, kv_c, layer.q_a_norm, layer.kv_a_norm, LATENT_NORM_EPS, out=(qr, kv_c), backend=backend
            )
            width, index_width = heads * (nope + ROPE), config.index_n_heads * INDEX_DIM
            both = self.array("projected_q", (tokens, width + index_width))
            if topk_indices is None:
                multiply(qr, layer.queries, both, backend)
            else:
                multiply(qr, first_rows(layer.queries, width), both[:, :width], backend)
            projected = both[:, :width].reshape(tokens, heads, nope + ROPE)
            q = self.array("q", (tokens, heads, LATENT + ROPE))
            multiply_groups(
                projected[..., :nope].transpose(1, 0, 2), layer.latent, q[..., :LATENT].transpose(1, 0, 2), backend
            )
            rotated = q[..., LATENT:]
            apply_rope(projected[..., nope:], step.positions, layer.cos_sin, out=rotated, backend=backend)
        with self.observe("insert"):
            rows = kv[:, None]
            apply_rope(rows, step.positions, layer.cos_sin, out=rows, backend=backend)
            self.insert_rows(kv_c, kv[:, LATENT:])
            self.insert_keys(keys)
        slots = None
        if topk_indices is None:
            slots = self.decode_slots()
            with self.observe("select"):
                index_q = both[:, width:].reshape(tokens, config.index_n_heads, INDEX_DIM)
                topk_indices = self.select(x, index_q, slots)
        o = self.array("o", (tokens, heads, LATENT))
        self.attend(q, topk_indices, slots, o)
        with self.observe("output"):
            values = self.array("values", (tokens, heads, config.v_head_dim))
            multiply_groups(o.transpose(1, 0, 2), layer.value, values.transpose(1, 0, 2), backend)
            multiply(flat(values), layer.o, out, backend)

    def insert_rows(self, kv_c: Any, k_pe: Any) -> None:
        layer, slots = self.layer, self.metadata.tokens.slot_mapping
        concat_and_cache_mla(kv_c, k_pe, self.caches.rows, slots, layer.cache_dtype, backend=layer.backend)

    def attend(self, q: Any, topk_indices: Any, slots: tuple[Any, Any] | None, o: Any) -> None:
        """Write o [tokens, heads, LATENT], the attention over the selected rows.

        Args:
            slots: slots of the rows that decodes select, and their counts, if the indexer wrote them
        """
        layer, (tokens, heads, _) = self.layer, q.shape
        mapped = 0 if slots is None else self.metadata.tokens.num_decode_tokens
        indices, lens = self.slots(tokens, topk_indices.shape[1])
        attention = SelectedAttention(
            self.caches.rows, layer.layouts.v32, layer.config.softmax_scale, backend=layer.backend, observe=self.observe
        )
        lse = self.array("lse", (tokens, heads, 1), FLOAT32)
        attention.attend(q, self.metadata.tokens, topk_indices, indices, lens, mapped, o, lse)

    def slots(self, tokens: int, topk: int) -> tuple[Any, Any]:
        """Arrays for the slots of the rows that `tokens` tokens select, and for their counts."""
        return self.array("slots", (tokens, topk), np.int32), self.array("lens", (tokens,), np.int32)

    def decode_slots(self) -> tuple[Any, Any] | None:
        """The arrays of `slots` for decodes."""
        decodes = self.metadata.tokens.num_decode_tokens
        if not decodes:
            return None
        slots, lens = self.slots(len(self.metadata.positions), self.layer.indexer.topk)
        return slots[:decodes], lens[:decodes]

    def insert_keys(self, keys: Any) -> None:
        layer, slots = self.layer, dlpack.borrow(self.metadata.tokens.slot_mapping, "slot_mapping")
        indexer_knorm_rope_and_insert(
            keys, layer.k_norm, layer.k_bias, self.caches.indexer, slots, self.metadata.positions, layer.cos_sin,
            eps=LAYER_NORM_EPS, layout=layer.layouts.indexer, backend=layer.backend,
        )  # fmt: skip

    def select(self, x: Any, q: Any, slots: tuple[Any, Any] | None) -> Any:
        """[tokens, index_topk] int32, the positions that each token selects by its projected queries q."""
        layer, metadata = self.layer, self.metadata
        weights = self.array("index_weights", (len(x), layer.config.index_n_heads), FLOAT32)
        multiply(x, layer.index_weights, weights, layer.backend)
        queries = layer.indexer.queries(q, weights, metadata.positions, layer.cos_sin)
        return layer.indexer.select(
            *queries, self.caches.indexer, metadata.indexer, metadata.positions, metadata.tokens.token_to_req_indices,
            metadata.tokens.block_table, slots, metadata.tokens.is_valid_token,
        )  # fmt: skip

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return self.layer.scratch.shaped(name, shape, dtype or self.layer.activations, self.layer.cos_sin)
