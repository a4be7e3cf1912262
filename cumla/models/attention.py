"""One attention layer of any model, from hidden states to its output, as its LayerSpec describes it.

x       products with the hidden states: those of queries, rows and tokens' index keys in one, and in float32 those of
        compressors and of the weights of the indexer's heads (queries.py, rows.py, keys.py, pooled.py)
q, rows the normed latent of queries becomes heads, rotated; rows and index keys are rotated and inserted
select  the indexer scores queries of its own against the keys so far, and selects the top-k rows (selection.py)
o       = attention over the selected rows, and the window's (attended.py)
out     = output projection of o (output_projection.py)

The parts of a layer depend on its spec alone, and do not know each other. `Step` orders them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..arrays.array import Array
from ..arrays.memory import to_host
from ..arrays.streams import InOrder
from ..dispatch.backends import choose
from ..dispatch.values import check_flags, check_kind, check_optional_size
from ..layers.selected_attention import Chosen
from ..layers.sparse import Observer, not_observed
from ..layers.weights import BLOCK
from .attended import FLOAT32, OneList, WindowAndList
from .caches import CacheFormat, KeyFormat, LayerCaches, formats_of
from .config import AttentionConfig
from .context import LayerContext, StepContext
from .hidden_states import attend
from .keys import LatentKeys, PooledKeys, TokenKeys
from .layer_spec import LATENT
from .output_projection import GroupedOutput, HeadOutput
from .pooled import Compressors, Latents
from .products import compute_type, in_groups, multiply, width
from .queries import HiddenQueries, LatentQueries, WindowQueries
from .rows import LatentRows, NoRows, WindowRows
from .scratch import Scratch
from .selection import Indexer
from .shared_selection import SharedSelection
from .step import StepMetadata
from .validation import check_step, checked_activations
from .weight_shapes import named, shapes_of
from .weights import WeightFormat, WeightReader, keeps_fp8, place_of, weights_of_layer

QUERIES: dict[str, Any] = {"latent": LatentQueries, "hidden": HiddenQueries, "window": WindowQueries}
ROWS: dict[str, Any] = {"latent": LatentRows, "window": WindowRows}
ATTENDED: dict[str, Any] = {"latent": OneList, "window": WindowAndList}
POOLED: dict[str, Any] = {"compressor": Compressors, "latents": Latents}
KEYS: dict[str, Any] = {"tokens": TokenKeys, "pools": PooledKeys, "latents": LatentKeys}


class SparseAttention(LayerContext):
    """One attention layer. A model's class has the model's configuration.

    Args:
        config: of the model
        layer: the layer's number; for V4.1 from num_hidden_layers on a layer that predicts further tokens
        weights: transformers' or the published names within the attention module ("q_a_proj.weight") -> arrays, or a
            checkpoint's tensors under the names of the whole model: arrays of any framework and strides in float32 or
            bfloat16, or FP8 with a scale for each block: a BlockQuantizedWeight, or separate scales, "q_b_proj.scale"
            or "q_b_proj.weight_scale_inv". Only the layer's are read
        activations: bfloat16, or on the host also float32. "fp8", not for V4.1: bfloat16, and products of more than
            384 tokens with FP8 weights round them to e4m3, with a scale, a power of two, for 128 values of a token
        cache_format, key_format: of the caches passed to `step`, as in `LayerCaches.allocate`. For V4.1's key_format
            "fp8" queries are e4m3, for "mxfp4" rounded to MXFP4, as in DeepSeek's code
        weight_format: "fp8": FP8 matrices are stored in FP8; "bfloat16": the constructor dequantises them
        max_position: positions of RoPE's tables, at least the longest sequence; max_position_embeddings if None
        round_pooled, round_rows: of V4.1: round a pooled row to bfloat16 before its norm, and rotated rows before
            quantisation, as DeepSeek's code and SGLang do; False: as vLLM. None: only rotated rows
        scratch: temporary memory, shared by layers that run one after another
        batch_invariant: True: a token's bits depend on its request's tokens alone, not on the batch, on padding, on the
            chunks of a prompt or on whether a token is a prompt's or a decode's (docs/guide/batch-invariance.md). The
            builder's config then has it, too. Not with activations "fp8"
        xp: numpy or cupy, where the layer computes: on CuPy's current device; None: where its weights are

    Other weights are stored in the type that the device multiplies: the activations' type, on the host float32.
    """

    config_type: ClassVar[type[AttentionConfig]]

    def __init__(
        self,
        config: Any,
        layer: int,
        weights: Mapping[str, Any],
        *,
        activations: Any = "bfloat16",
        cache_format: CacheFormat | None = None,
        key_format: KeyFormat | None = None,
        weight_format: WeightFormat = "fp8",
        max_position: int | None = None,
        round_pooled: bool | None = None,
        round_rows: bool | None = None,
        scratch: Scratch | None = None,
        batch_invariant: bool = False,
        xp: Any = None,
        backend: str | None = None,
    ) -> None:
        check_kind(self.config_type, config=config)
        if scratch is not None:
            check_kind(Scratch, scratch=scratch)
        check_kind(Mapping, weights=weights)
        spec: Any = config.spec(layer)
        for name, value in (("round_pooled", round_pooled), ("round_rows", round_rows)):
            if value is not None:
                check_flags(**{name: value})
                if spec.cache_formats != "v41":
                    raise ValueError(f"{name}: got {value}, expected None for a model other than V4.1")
                spec = replace(spec, **{name: bool(value)})
        expected, block = named(config, layer, shapes_of(spec)), config.scale_block
        weights = weights_of_layer(
            weights, layer, config.names, block, getattr(config, "num_hidden_layers", None), config.model_names
        )
        self.xp = place_of(weights, next(iter(expected.values())).transformers) if xp is None else xp
        on_host = self.xp is np
        self.layouts = formats_of(spec, cache_format, key_format, on_host)
        check_optional_size(max_position=max_position)
        check_flags(batch_invariant=batch_invariant)
        choose(backend, on_device=not on_host)
        self.activations = checked_activations(activations, on_host, block == BLOCK, weight_format, batch_invariant)
        self.config, self.spec, self.layer, self.backend = config, spec, layer, backend
        self.dtype, self.scratch = compute_type(self.activations, self.xp), scratch or Scratch()
        self.rounds_activations, self.batch_invariant = activations == "fp8", bool(batch_invariant)
        self.blocks = self.scratch if batch_invariant else None
        read, alpha = WeightReader(weights, expected, self.xp, keeps_fp8(weight_format)), None
        if spec.learned_rope:
            alpha = to_host(read.vector("lerope.alpha"))
        self.cos_sin = self.xp.asarray(spec.cos_sin_table(max_position or config.max_position_embeddings, alpha))
        self._load(read)
        read.check_all_read()

    def _load(self, get: WeightReader) -> None:
        spec = self.spec
        kv_b = None
        if spec.rows == "latent":
            kv_b = in_groups(self.matrix(get, "wkv_b", rounds=False), spec.heads)
        queries = QUERIES[spec.rows if spec.q_rank else "hidden"]
        rows: Any = NoRows if spec.rows == "latent" and not spec.owns_rows else ROWS[spec.rows]
        self.queries, self.rows = queries(self, get, kv_b), rows(self, get)
        self.pooled = POOLED[spec.pooling](self, get) if spec.pooling in POOLED else None
        self.keys = KEYS[spec.keys](self, get) if spec.owns_keys and spec.keys in KEYS else None
        self.norms_with_keys = isinstance(self.keys, LatentKeys)
        self.attended = ATTENDED[spec.rows](self, get)
        self.output = (GroupedOutput if spec.o_groups else HeadOutput)(self, get, kv_b)
        low = (*self.queries.low, *(() if self.keys is None else self.keys.low), *self.rows.low, *self.output.low)
        self.low_rank = self.matrix(get, *low)
        shapes, end = shapes_of(spec), 0
        self.columns: dict[str, slice] = {}  # of the products with low_rank
        for name in low:
            first, end = end, end + shapes[f"{name}.weight"][0]
            self.columns[name] = slice(first, end)
        wide = () if self.pooled is None else self.pooled.wide
        if spec.selects:
            wide = (*wide, "indexer.weights_proj")
            self.indexer = Indexer(self, get)
        self.wide = self.matrix(get, *wide, rounds=False) if wide else None

    @property
    def ratio(self) -> int:
        """Positions of a selected row; 0: the layer has a window alone."""
        return self.spec.ratio

    @property
    def mode(self) -> str:
        return self.spec.mode

    @property
    def sinks(self) -> Any:
        """float32 [heads], or None."""
        return self.attended.sink

    def step(
        self,
        hidden_states: Array,
        layer_caches: LayerCaches,
        metadata: StepMetadata,
        selection: SharedSelection | None = None,
        *,
        topk_indices: Array | None = None,
        early_release: bool = True,
        out: Array | None = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert a step's rows, states and keys into the caches, and attend.

        Args:
            hidden_states: [T, hidden_size] of the layer's activations, after the layer's input norm; T are the
                metadata's tokens (padding included)
            layer_caches: written; only an owner writes rows that layers share
            metadata: of the step's batch (StepBuilder)
            selection: of the model, for layers that share selections or rows: layers that select write it, the others
                read it
            topk_indices: [T, topk] int32, rows that each token selects, counted within its request, -1 for none, in
                place of the selection of a layer that shares none, which is then not computed. Rows that are not
                complete at the token's position are left out. Also with pooled keys these are rows, and no others are
                attended (`selected_tokens`)
            early_release: False: no later kernel starts before the results are stored (docs/interop.md)
            out: [T, hidden_size] of hidden_states' dtype to write instead of allocating
            observe: called with a part's name around each part ("project", "insert", "compress", "select", "map",
                "decode", "gather", "prefill", "output")

        Returns out, to which the caller adds the residual. A step that is run again, as after an error in a later
        layer, gives the same bytes in out and in the caches. A step of decodes, once one of its size has run, allocates
        nothing if `out` is given, and can be captured in a CUDA graph.
        Raises TypeError or ValueError, before anything is written, for an argument that does not fit, and where the
        layer's owner or source has not run in this step, or wrote to other caches.
        """
        check_step(self, hidden_states, layer_caches, metadata, selection, topk_indices)
        run = Step(self, layer_caches, metadata, selection, observe).run
        shape = len(metadata.positions), self.spec.hidden_size
        return attend(run, hidden_states, shape, self.activations, topk_indices, out, stream, early_release)

    def insert(
        self, hidden_states: Array, layer_caches: LayerCaches, metadata: StepMetadata, *, stream: Any = None
    ) -> None:
        """Insert a step's rows into the window cache, without attending; of a layer of ratio 0.

        A draft layer keeps the rows of the main model's hidden states, not the rows of the tokens that it drafted.
        The arguments are the same as those of `step`.
        """
        if self.ratio:
            raise ValueError(f"layer: got {self.layer} of ratio {self.ratio}, expected one of ratio 0")
        check_step(self, hidden_states, layer_caches, metadata, None, None)
        run = Step(self, layer_caches, metadata, None, not_observed)
        shape = len(metadata.positions), self.spec.hidden_size
        into = self.scratch.shaped("inserted", shape, self.activations, self.cos_sin)  # attend's out, not written
        attend(run.only_insert, hidden_states, shape, self.activations, None, into, stream)


@dataclass(frozen=True)
class Step(StepContext):
    """The parts of one step in order. The caller's stream is current."""

    layer: SparseAttention

    def run(self, x: Any, topk_indices: Any, out: Any) -> None:
        """Decodes leave multiprocessors idle, so independent work is queued on two streams."""
        layer = self.layer
        selects, side, wide, latents = layer.spec.selects and topk_indices is None, self.side(), None, None
        if layer.pooled is not None or selects:
            with side.branch(), self.observe("select" if layer.pooled is None else "compress"):
                wide = self.array("wide", (len(x), width(layer.wide)), FLOAT32)
                multiply(x, layer.wide, wide, layer.backend, layer.blocks)
                if layer.pooled is not None:
                    latents = layer.pooled.run(self, wide)
        low = self.project(x)
        qr, kv = (low[part.low[0]] if part.low else None for part in (layer.queries, layer.rows))
        if layer.keys is not None:  # may norm qr
            layer.keys.insert(self, low, latents, qr)
        projected, index_q = layer.queries.project(self, x, qr, selects)
        if selects:
            side.join()
            with self.observe("select"):
                weights = None if wide is None else wide[:, -layer.spec.index_heads :]
                inputs = layer.indexer.queries(self, index_q, weights)
            with side.branch():  # after the scores, concurrently with the selection
                q = self.finish(projected, kv)
            with self.observe("select"):
                chosen = self.select(*inputs)
        else:
            q = self.finish(projected, kv)
            chosen = self.chosen(topk_indices)
        o = self.array("o", (*q.shape[:2], LATENT))
        self.attend(q, chosen, o, side.join)
        with self.observe("output"):
            layer.output.run(self, o, out, low.get("linear_gate"))

    def only_insert(self, x: Any, *_: Any) -> None:
        rows = self.layer.rows
        rows.insert(self, self.project(x)[rows.low[0]], normed=True)

    def side(self) -> InOrder:
        """The side stream. Work runs in order for prefills, which keep a device busy, and under an observer."""
        layer = self.layer
        independent = layer.pooled is not None and layer.pooled.is_independent
        if not independent or self.metadata.tokens.num_prefills or self.observe is not not_observed:
            return InOrder()
        if choose(layer.backend, on_device=layer.xp is not np) != "cuda":
            return InOrder()
        return layer.scratch.side(layer.cos_sin)

    def project(self, x: Any) -> dict[str, Any]:
        """Products with x by their weights' names; queries and rows are normed, unless other norms include them."""
        layer = self.layer
        with self.observe("project"):
            low = self.array("low_rank", (len(x), width(layer.low_rank)))
            multiply(x, layer.low_rank, low, layer.backend, layer.blocks)
            found = {name: low[:, columns] for name, columns in layer.columns.items()}
            if not layer.norms_with_keys:
                kv = found[layer.rows.low[0]][:, :LATENT] if layer.rows.low else None
                self.norm(found[layer.queries.low[0]], kv, layer.rows.norm)
        return found

    def finish(self, projected: Any, kv: Any) -> Any:
        """Queries of attention. Inserts the step's rows."""
        q = self.layer.queries.finish(self, projected)
        self.layer.rows.finish(self, q, kv)
        if self.selection is not None and self.layer.spec.owns_rows:
            self.selection.note_owned(self.layer.layer, self.metadata, self.caches)
        return q

    def select(self, q: Any, weights: Any) -> Chosen:
        """Select rows by the indexer's queries and weights."""
        layer, chosen = self.layer, self.memory()
        layer.indexer.select(self, q, weights, chosen)
        if self.selection is not None:
            self.selection.note(layer.spec, self.metadata)
        return chosen

    def chosen(self, topk_indices: Any) -> Chosen:
        """The rows that are given, or that another layer selected."""
        if topk_indices is not None:  # rows, also of a layer with pooled keys
            return self.arrays(*2 * topk_indices.shape[1:])._replace(topk_indices=topk_indices)
        return self.memory() if self.layer.spec.selection == "source" else Chosen(None, None, None, 0)

    def memory(self) -> Chosen:
        """Memory for the rows that tokens select, and for the slots of decodes."""
        shared, spec = self.selection, self.layer.spec
        found = self.arrays(spec.selected_keys, spec.listed_rows) if shared is None else shared.arrays
        indices, slots, lens = (array[: len(self.metadata.positions)] for array in found[:3])
        decodes = self.metadata.tokens.num_decode_tokens if self.maps_slots else 0
        return Chosen(indices, slots, lens, decodes, spec.pool)

    def arrays(self, keys: int, rows: int) -> Chosen:
        tokens, widths = len(self.metadata.positions), {"topk_indices": keys, "slots": rows}
        indices, slots = (self.array(name, (tokens, width), np.int32) for name, width in widths.items())
        return Chosen(indices, slots, self.array("lens", (tokens,), np.int32), 0)

    def attend(self, q: Any, chosen: Chosen, o: Any, join: Any) -> None:
        """Write o [tokens, heads, 512]. join: called before q is read."""
        self.layer.attended.run(self, q, chosen, o, join)
