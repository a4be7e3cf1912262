"""An attention layer of a DeepSeek V4 model, from hidden states to its output.

qr, kv      = norm(W_qa x), norm(W_kv x)                  kv is rotated and inserted into the window cache
q           = norm of each head of W_qb qr, rotated
compressor  (ratios 4, 128) pools kv and score of ratio positions into a row of the compressed cache
indexer     (ratio 4) scores rows of its own compressor against queries W_iqb qr, selects the top-k
o           = attention over the window and the compressed rows, with sinks, then inverse RoPE
out         = W_ob (W_oa of each group of heads)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.streams import InOrder
from ..dispatch.backends import choose
from ..dispatch.values import check_kind
from ..layers.sparse import CompressedCache, LayerWorkspace, Observer, SparseMLALayer, not_observed
from ..layout import CacheLayout
from ..ops.compressor import compress_and_insert
from ..ops.norm_rope import fused_q_kv_rmsnorm, qnorm_rope_and_insert
from . import caches
from .block_scaled import enable_fp8_activations
from .caches import DeepseekV4Caches
from .hidden_states import attend
from .output_projection import project_output
from .products import compute_type, flat, in_groups, multiply, stacked, width
from .scratch import Scratch
from .selection import Indexer
from .step import DeepseekV4StepMetadata
from .v4_config import HEAD_DIM, DeepseekV4Config
from .validation import check_indexer_metadata, check_options, check_types, check_v4_step
from .weight_shapes import expected_weights
from .weights import V4_ATTENTION, WeightFormat, WeightReader, keeps_fp8, place_of, weights_of_layer

__all__ = ["DeepseekV4Attention", "DeepseekV4Caches", "DeepseekV4Config"]

FLOAT32 = np.dtype(np.float32)
ROUNDED = ("low_rank", "q_b", "index_q_b", "o_a", "o_b")  # products that may round activations to FP8


class DeepseekV4Attention:
    """One attention layer.

    Args:
        config: of the model
        layer: the layer's number
        weights: transformers' names within the attention module ("q_a_proj.weight") -> arrays, or a checkpoint's
            tensors under transformers' or the published names of the whole model: arrays of any framework and strides
            in float32 or bfloat16, or FP8 with a scale for each block: a BlockQuantizedWeight, or separate scales,
            "q_b_proj.scale" or "q_b_proj.weight_scale_inv". Only the layer's are read
        activations: bfloat16, or on the host also float32. "fp8": bfloat16, and products of more than 384 tokens with
            FP8 weights round them to e4m3, with a scale, a power of two, for 128 values of a token
        cache_format: "fp8", "bfloat16", or on the host "float32": the format of the caches passed to `step`
        weight_format: "fp8": FP8 matrices are stored in FP8; "bfloat16": the constructor dequantises them
        max_position: positions of RoPE's tables, at least the longest sequence; max_position_embeddings if None
        scratch: temporary memory, shared by layers that run one after another
        xp: numpy or cupy, where the layer computes: on CuPy's current device; None: where its weights are

    Other weights are stored in the type that the device multiplies: the activations' type, on the host float32. The
    weights that multiply the hidden states are stacked in one matrix.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
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
        check_kind(DeepseekV4Config, config=config)
        if scratch is not None:
            check_kind(Scratch, scratch=scratch)
        check_kind(Mapping, weights=weights)
        weights = weights_of_layer(weights, layer, V4_ATTENTION)
        self.xp = place_of(weights) if xp is None else xp
        self.activations = check_options(
            layer,
            len(config.compress_ratios),
            activations,
            cache_format,
            max_position,
            self.xp is np,
            backend,
            weight_format,
        )
        self.config, self.layer, self.backend = config, layer, backend
        self.ratio, self.layouts = config.compress_ratios[layer], caches.formats(cache_format)
        self.scratch = scratch or Scratch()
        read = WeightReader(weights, expected_weights(config, layer), self.xp, keeps_fp8(weight_format))
        self._load(read)
        if activations == "fp8":
            enable_fp8_activations(self, *ROUNDED)
        read.check_all_read()
        table = config.cos_sin_table(self.ratio, max_position or config.max_position_embeddings)
        self.cos_sin = self.xp.asarray(table)
        self.attention = SparseMLALayer(self.ratio, config.index_topk, self.sinks, layout=self.layouts.v4)
        self.indexer = Indexer(
            config.index_n_heads, config.index_topk, self.layouts.indexer, False, self.scratch, backend
        )

    def _load(self, get: WeightReader) -> None:
        config, dtype = self.config, compute_type(self.activations, self.xp)

        def matrix(*names: str) -> Any:
            return stacked([get.matrix(f"{name}.weight") for name in names], dtype, self.xp, self.scratch)

        self.low_rank = matrix("q_a_proj", "kv_proj")
        self.q_a_norm, self.kv_norm = get.vector("q_a_norm.weight"), get.vector("kv_norm.weight")
        self.q_b = matrix("q_b_proj")
        self.o_a, self.o_b = in_groups(matrix("o_a_proj"), config.o_groups), matrix("o_b_proj")
        self.sinks = get.vector("sinks")
        self.compressors: list[Compressor] = []
        if self.ratio == 1:
            return
        prefixes = ("compressor.", "compressor.indexer.")[: 2 if self.ratio == 4 else 1]
        pooled = [f"{prefix}{name}" for prefix in prefixes for name in ("kv_proj", "gate_proj")]
        for prefix in prefixes:
            bias, norm = get.vector(f"{prefix}position_bias"), get.vector(f"{prefix}kv_norm.weight")
            self.compressors.append(Compressor(bias, norm, 2 * bias.shape[1]))
        if self.ratio == 4:
            pooled.append("compressor.indexer.scorer.weights_proj")
            self.index_q_b = matrix("compressor.indexer.q_b_proj")
        self.pooled = matrix(*pooled)

    def step(
        self,
        hidden_states: Any,
        layer_caches: DeepseekV4Caches,
        metadata: DeepseekV4StepMetadata,
        *,
        topk_indices: Any = None,
        early_release: bool = True,
        out: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert a step's rows, states and keys into the caches, and attend.

        Args:
            hidden_states: [T, hidden_size] of the layer's activations, after the layer's input norm; T are the
                metadata's tokens (padding included)
            layer_caches: written
            metadata: of the step's batch (DeepseekV4StepBuilder)
            topk_indices: [T, topk] int32, compressed rows that each token selects, counted within its request, -1 for
                none; for ratio 4, in place of the indexer's selection, which is then not computed
            early_release: False: no later kernel starts before the results are stored (docs/interop.md)
            out: [T, hidden_size] of hidden_states' dtype to write instead of allocating
            observe: called with a part's name around each part ("project", "insert", "compress", "select", "map",
                "decode", "gather", "prefill", "output")

        Returns out, to which the caller adds the residual. A step of decodes, once one of its size has run, allocates
        nothing if `out` is given, and can be captured in a CUDA graph.
        Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
        """
        self.check_step(hidden_states, layer_caches, metadata, topk_indices)
        run = V4Step(self, layer_caches, metadata, observe).run
        shape = len(metadata.positions), self.config.hidden_size
        return attend(run, hidden_states, shape, self.activations, topk_indices, out, stream, early_release)

    def check_step(
        self, hidden_states: Any, layer_caches: Any, metadata: Any, topk_indices: Any, all_rows: bool = True
    ) -> None:
        """Raise the errors of `step`; whole: whether the cache has all compressed rows, not only one rank's."""
        if topk_indices is not None and self.ratio != 4:
            raise ValueError(f"topk_indices: got an array for a layer of ratio {self.ratio}, expected None")
        check_types(layer_caches=(layer_caches, DeepseekV4Caches), metadata=(metadata, DeepseekV4StepMetadata))
        check_v4_step(self, hidden_states, layer_caches, metadata, topk_indices, all_rows)
        if self.ratio == 4:
            check_indexer_metadata(metadata.indexer, metadata.window, topk_indices)


@dataclass(frozen=True)
class Compressor:
    """The weights of a compressor without its projections, and the columns of its projections."""

    position_bias: Any
    norm_weight: Any
    columns: int


@dataclass(frozen=True)
class V4Step:
    """The parts of one step. The caller's stream is current."""

    layer: DeepseekV4Attention
    caches: DeepseekV4Caches
    metadata: DeepseekV4StepMetadata
    observe: Observer

    def run(self, x: Any, topk_indices: Any, out: Any) -> None:
        """Decodes leave multiprocessors idle, so independent work is queued on two streams."""
        layer, metadata = self.layer, self.metadata
        config, tokens = layer.config, len(x)
        side, q = self.side(), self.array("q", (tokens, config.num_attention_heads, HEAD_DIM))
        slots = None
        if layer.ratio == 1:
            self.queries(*self.project(x), q)
        else:
            with side.branch():
                pooled = self.compress(x)
            qr, kv = self.project(x)
            if layer.ratio == 4 and topk_indices is None:
                index_q = self.index_queries(qr)
                side.join()
                with self.observe("select"):
                    inputs = layer.indexer.queries(
                        index_q, pooled[:, -config.index_n_heads :], metadata.positions, layer.cos_sin
                    )
                with side.branch():  # after the scores, concurrently with the selection
                    self.queries(qr, kv, q)
                with self.observe("select"):
                    slots, decodes = self.decode_slots(), metadata.window.num_decode_tokens
                    topk_indices = self.select(*inputs, slots and (slots[0][:decodes], slots[1][:decodes]))
            else:
                self.queries(qr, kv, q)
        o = self.array("o", q.shape)
        self.attend(q, topk_indices, slots, o, side.join)
        with self.observe("output"):
            project_output(layer, o, metadata.positions, out)

    def side(self) -> InOrder:
        """The side stream. Work runs in order for prefills, which keep a device busy, and under an observer."""
        layer = self.layer
        alone = layer.ratio == 1 or self.metadata.window.num_prefills or self.observe is not not_observed
        if alone or choose(layer.backend, on_device=layer.xp is not np) != "cuda":
            return InOrder()
        return layer.scratch.side(layer.cos_sin)

    def project(self, x: Any) -> tuple[Any, Any]:
        """Normed projections: [tokens, q_lora_rank] for the queries and [tokens, 512] for the window's rows."""
        layer, config = self.layer, self.layer.config
        with self.observe("project"):
            low = self.array("low_rank", (len(x), config.q_lora_rank + HEAD_DIM))
            multiply(x, layer.low_rank, low, layer.backend)
            qr, kv = low[:, : config.q_lora_rank], low[:, config.q_lora_rank :]
            fused_q_kv_rmsnorm(
                qr, kv, layer.q_a_norm, layer.kv_norm, config.rms_norm_eps, out=(qr, kv), backend=layer.backend
            )
        return qr, kv

    def queries(self, qr: Any, kv: Any, q: Any) -> None:
        """Write the heads of queries, and the window's rows."""
        layer, config = self.layer, self.layer.config
        with self.observe("project"):
            multiply(qr, layer.q_b, flat(q), layer.backend)
        with self.observe("insert"):
            qnorm_rope_and_insert(
                q, kv, self.caches.window, self.metadata.window.slot_mapping, self.metadata.positions, layer.cos_sin,
                eps=config.rms_norm_eps, layout=layer.layouts.v4, out=q, backend=layer.backend,
            )  # fmt: skip

    def attend(
        self, q: Any, topk_indices: Any, slots: tuple[Any, Any] | None, o: Any, join: Callable[[], None]
    ) -> None:
        """Write o [tokens, heads, 512], the attention over the window's rows and the selected compressed rows.

        Args:
            slots: slots of the rows that decodes select, and their counts, if the indexer wrote them
            join: called before q is read
        """
        layer, compressed = self.layer, None
        if layer.ratio > 1:
            table = self.metadata.compressors[layer.ratio].block_table
            compressed = CompressedCache(self.caches.compressed, table, topk_indices=topk_indices)
            if slots is not None:
                compressed = replace(compressed, decode_slots=slots[0], decode_lens=slots[1])
        layer.attention.step(
            q, None, self.caches.window, self.metadata.window, compressed, out=o,
            workspace=self.workspace(q, topk_indices if slots is None else None), join=join, backend=layer.backend,
            observe=self.observe,
        )  # fmt: skip

    def compress(self, x: Any) -> Any:
        """Pool this step's tokens into compressed rows and index keys. Returns the projections."""
        layer = self.layer
        with self.observe("compress"):
            pooled = self.array("pooled", (len(x), width(layer.pooled)), FLOAT32)
            multiply(x, layer.pooled, pooled, layer.backend)
            self.pool(pooled)
        return pooled

    def pool(self, pooled: Any) -> None:
        layer = self.layer
        own, *rest = layer.compressors
        indexer: dict[str, Any] = {}
        if rest:
            (keys,) = rest
            indexer = {
                "index_kv_score": pooled[:, own.columns : own.columns + keys.columns],
                "index_position_bias": keys.position_bias, "index_norm_weight": keys.norm_weight,
                "index_state_cache": self.caches.indexer_state, "index_k_cache": self.caches.indexer,
            }  # fmt: skip
        slots = self.metadata.compressors[layer.ratio].slot_mapping
        self.insert_pooled(
            pooled[:, : own.columns], own, self.caches.state, self.caches.compressed, slots, layer.layouts.v4, **indexer
        )

    def insert_pooled(
        self, kv_score: Any, compressor: Compressor, states: Any, cache: Any, slots: Any, layout: CacheLayout,
        **indexer: Any,
    ) -> None:  # fmt: skip
        """Pool with the layer's compressor, and with the indexer's if the layer has an indexer."""
        layer, metadata = self.layer, self.metadata
        step = metadata.compressors[layer.ratio]
        compress_and_insert(
            kv_score, compressor.position_bias, compressor.norm_weight, states, step.state_slot_mapping,
            step.state_block_table, cache, slots, metadata.positions, metadata.window.token_to_req_indices,
            metadata.window.query_start_loc, layer.cos_sin, compress_ratio=layer.ratio, eps=layer.config.rms_norm_eps,
            layout=layout, **indexer, backend=layer.backend,
        )  # fmt: skip

    def index_queries(self, qr: Any) -> Any:
        """The indexer's projected queries, [tokens, heads, 128]."""
        layer, config = self.layer, self.layer.config
        with self.observe("select"):
            q = self.array("index_q", (len(qr), config.index_n_heads, config.index_head_dim))
            multiply(qr, layer.index_q_b, flat(q), layer.backend)
        return q

    def decode_slots(self) -> tuple[Any, Any] | None:
        """Arrays for the slots of the compressed rows that decodes select, and for their counts.

        The arrays have more rows in steps with prefills, whose first tokens may attend together with the decodes.
        """
        window = self.metadata.window
        if not window.num_decode_tokens:
            return None
        tokens = len(self.metadata.positions) if window.num_prefills else window.num_decode_tokens
        slots = self.array("topk_slots", (tokens, self.layer.indexer.topk), np.int32)
        return slots, self.array("topk_lens", (tokens,), np.int32)

    def select(self, q: Any, weights: Any, slots: tuple[Any, Any] | None) -> Any:
        """[tokens, index_topk] int32, the compressed rows selected by the indexer's queries and weights."""
        layer, metadata = self.layer, self.metadata
        assert metadata.indexer is not None
        return layer.indexer.select(
            q, weights, self.caches.indexer, metadata.indexer, metadata.positions,
            metadata.window.token_to_req_indices, metadata.compressors[layer.ratio].block_table, slots,
            metadata.window.is_valid_token,
        )  # fmt: skip

    def workspace(self, q: Any, topk_indices: Any) -> LayerWorkspace:
        tokens, heads, _ = q.shape
        lse = self.array("lse", (tokens, heads, 1), FLOAT32)
        if topk_indices is None:
            return LayerWorkspace(lse)
        slots = self.array("topk_slots", topk_indices.shape, np.int32)
        return LayerWorkspace(lse, slots, self.array("topk_lens", (tokens,), np.int32))

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return self.layer.scratch.shaped(name, shape, dtype or self.layer.activations, self.layer.cos_sin)
