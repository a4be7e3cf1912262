"""Queries of attention and of the indexer, projected from their normed latent."""

from __future__ import annotations

from typing import Any

from ..ops.norm_rope import apply_rope
from .context import LayerContext, StepContext
from .layer_spec import INDEX_DIM, LATENT
from .norms import LayerNorm
from .products import first_rows, flat, multiply, multiply_groups, rows_of, transposed
from .weights import WeightReader


class LatentQueries:
    """Queries over latent rows: W_UK projects the part of each head that is not rotated to the latent.

    One product has the queries of attention and of the indexer.
    """

    low = ("wq_a",)

    def __init__(self, layer: LayerContext, get: WeightReader, kv_b: Any) -> None:
        self._load(layer, get)
        self.latent = transposed(rows_of(kv_b, 0, layer.spec.nope_dim), layer.dtype)  # W_UK: [h, 512, P]
        self.factors = head_factors(get) if layer.spec.position_scale else {}

    def _load(self, layer: LayerContext, get: WeightReader) -> None:
        self.norm: Any = get.vector("q_norm.weight")
        self.q_b = layer.matrix(get, "wq_b", *(("indexer.wq_b",) if layer.spec.selects else ()))

    def project(self, step: StepContext, x: Any, qr: Any, selects: bool) -> tuple[Any, Any]:
        """Projected heads, and the indexer's [T, heads, 128] if the step selects."""
        spec, tokens, backend, blocks = step.layer.spec, len(qr), step.layer.backend, step.layer.blocks
        width, index_width = spec.heads * spec.head_dim, spec.index_heads * INDEX_DIM if spec.selects else 0
        with step.observe("project"):
            both = step.array("projected_q", (tokens, width + index_width))
            if not selects:
                multiply(qr, first_rows(self.q_b, width), both[:, :width], backend, blocks)
                return both[:, :width], None
            multiply(qr, self.q_b, both, backend, blocks)
        return both[:, :width], both[:, width:].reshape(tokens, spec.index_heads, INDEX_DIM)

    def finish(self, step: StepContext, projected: Any) -> Any:
        """Queries [T, h, 512 + rope_dim], rotated."""
        layer, spec = step.layer, step.layer.spec
        heads = projected.reshape(len(projected), spec.heads, spec.head_dim)
        with step.observe("project"):
            q = step.array("q", (len(heads), spec.heads, spec.row_dim))
            nope, positions = heads[..., : spec.nope_dim], step.metadata.positions
            if self.factors:
                apply_rope(nope, positions, None, **self.factors, out=nope, backend=layer.backend)
            latent = q[..., :LATENT].transpose(1, 0, 2)
            multiply_groups(nope.transpose(1, 0, 2), self.latent, latent, layer.backend, layer.blocks)
            if spec.rope_dim:
                apply_rope(
                    heads[..., spec.nope_dim :], positions, layer.cos_sin, is_neox=spec.rope_pairs == "halves",
                    **self.factors, out=q[..., LATENT:], backend=layer.backend,
                )  # fmt: skip
        return q


class HiddenQueries(LatentQueries):
    """Queries over latent rows, projected from hidden states: the indexer's after a LayerNorm."""

    low = ("wq",)

    def _load(self, layer: LayerContext, get: WeightReader) -> None:
        self.norm = None
        if layer.spec.selects:
            self.index_q = layer.matrix(get, "indexer.wq_b")
            self.index_norm = LayerNorm(*(get.vector(f"indexer.q_input_norm.{name}") for name in ("weight", "bias")))

    def project(self, step: StepContext, x: Any, qr: Any, selects: bool) -> tuple[Any, Any]:
        """The heads, which are projected already, and the indexer's [T, heads, 128] if the step selects."""
        if not selects:
            return qr, None
        with step.observe("project"):
            normed = step.array("index_x", x.shape)
            eps, backend, blocks = step.layer.spec.key_eps, step.layer.backend, step.layer.blocks
            self.index_norm.run(x, eps, normed, step.array, backend, blocks)
            q = step.array("index_q", (len(x), step.layer.spec.index_heads, INDEX_DIM))
            multiply(normed, self.index_q, flat(q), backend, blocks)
        return qr, q


def head_factors(get: WeightReader, prefix: str = "") -> dict[str, Any]:
    """SSMax's arguments of an operation."""
    return {
        "ssmax_scale": get.vector(f"{prefix}ssmax_scaling.s"), "ssmax_bias": get.vector(f"{prefix}ssmax_scaling.b")
    }  # fmt: skip


class WindowQueries:
    """Queries over rows of 512 values. The insert of the window's rows rotates them (rows.py)."""

    low = ("wq_a",)

    def __init__(self, layer: LayerContext, get: WeightReader, kv_b: None) -> None:
        self.norm = get.vector("q_norm.weight")
        self.q_b = layer.matrix(get, "wq_b")
        self.index_q_b = layer.matrix(get, "indexer.wq_b") if layer.spec.selects else None

    def project(self, step: StepContext, x: Any, qr: Any, selects: bool) -> tuple[Any, Any]:
        """The latent, and the indexer's queries [T, heads, 128] if the step selects."""
        if not selects:
            return qr, None
        with step.observe("select"):
            q = step.array("index_q", (len(qr), step.layer.spec.index_heads, INDEX_DIM))
            multiply(qr, self.index_q_b, flat(q), step.layer.backend, step.layer.blocks)
        return qr, q

    def finish(self, step: StepContext, qr: Any) -> Any:
        """Queries [T, h, 512], not yet rotated: projected here, concurrently with the selection."""
        with step.observe("project"):
            q = step.array("q", (len(qr), step.layer.spec.heads, LATENT))
            multiply(qr, self.q_b, flat(q), step.layer.backend, step.layer.blocks)
        return q
