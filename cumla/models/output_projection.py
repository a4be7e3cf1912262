"""Output projection: of all heads' values at once; or inverse RoPE, a product a group of heads, and one of all."""

from __future__ import annotations

from typing import Any, Protocol

from ..ops.linear import by_group
from ..ops.norm_rope import apply_rope, inverse_rope_and_quantize
from .context import LayerContext, StepContext
from .norms import apply_gate
from .products import (
    flat,
    fp8_product,
    in_groups,
    memory_of_rounded,
    multiply,
    multiply_groups,
    multiply_rounded,
    rounds,
    rows_of,
)
from .scratch import Scratch
from .weights import WeightReader


class HeadOutput:
    """W_UV projects the attention of each head from the latent to its values; W_o, all heads' values to the output.

    A gate multiplies the values by the sigmoid of a projection of the hidden states, in float32.
    """

    def __init__(self, layer: LayerContext, get: WeightReader, kv_b: Any) -> None:
        self.low = ("linear_gate",) if layer.spec.gate else ()
        nope = layer.spec.nope_dim
        self.value = rows_of(kv_b, nope, nope + layer.spec.v_dim)  # W_UV: [h, V, 512]
        self.o = layer.matrix(get, "wo")

    def run(self, step: StepContext, o: Any, out: Any, gate: Any) -> None:
        values = step.array("values", (len(o), step.layer.spec.heads, step.layer.spec.v_dim))
        backend, blocks = step.layer.backend, step.layer.blocks
        multiply_groups(o.transpose(1, 0, 2), self.value, values.transpose(1, 0, 2), backend, blocks)
        if gate is not None:
            apply_gate(values, gate, step.array)
        multiply(flat(values), self.o, out, backend, blocks)


class GroupedOutput:
    """`project_output` with a layer's weights."""

    low = ()

    def __init__(self, layer: LayerContext, get: WeightReader, kv_b: None) -> None:
        self.o_a, self.o_b = in_groups(layer.matrix(get, "wo_a"), layer.spec.o_groups), layer.matrix(get, "wo_b")
        self.backend, self.scratch, self.activations = layer.backend, layer.scratch, layer.activations
        self.cos_sin, self.blocks = layer.cos_sin, layer.blocks

    def run(self, step: StepContext, o: Any, out: Any, gate: None) -> None:
        project_output(self, o, step.metadata.positions, out)


class OutputLayer(Protocol):
    """The attributes of a V4 or V4.1 attention layer that the projection reads.

    Attributes:
        o_a: [groups, o_lora_rank, heads / groups * 512]
        o_b: [hidden_size, groups * o_lora_rank]
    """

    backend: str | None
    blocks: Scratch | None
    scratch: Scratch
    activations: Any
    cos_sin: Any
    o_a: Any
    o_b: Any


def project_output(layer: OutputLayer, o: Any, positions: Any, out: Any) -> None:
    """Write out [T, hidden_size]. Inverse RoPE is applied in place to o [T, heads, 512], attention's output."""
    groups, rank, width = layer.o_a.shape
    if rounds(layer.o_a, len(o)):
        project_rounded_output(layer, o, positions, out)
        return
    apply_rope(o, positions, layer.cos_sin, inverse=True, out=o, backend=layer.backend)
    grouped = layer.scratch.shaped("o_low_rank", (len(o), groups, rank), layer.activations, layer.cos_sin)
    by_group = flat(o).reshape(len(o), groups, width).transpose(1, 0, 2)
    multiply_groups(by_group, layer.o_a, grouped.transpose(1, 0, 2), layer.backend, layer.blocks)
    multiply(flat(grouped), layer.o_b, out, layer.backend, layer.blocks)


def project_rounded_output(layer: OutputLayer, o: Any, positions: Any, out: Any) -> None:
    """`project_output` with activations in FP8; the first product writes FP8 if the second reads it, where possible."""
    groups, rank, width = layer.o_a.shape
    tokens, scratch, backend = len(o), layer.scratch, layer.backend
    x = memory_of_rounded((groups, tokens, width), scratch, o)
    inverse_rope_and_quantize(o, positions, layer.cos_sin, groups, is_ue8m0=True, out=x, backend=backend)
    if rounds(layer.o_b, tokens):
        low = memory_of_rounded((groups, tokens, rank), scratch, o, "o_low_rank")
        if fp8_product(x, layer.o_a, low.values, backend, low.scales):
            multiply_rounded(low.as_one_group(), layer.o_b, by_group(out), o.dtype, backend)
            return
    grouped = scratch.shaped("o_low_rank", (tokens, groups, rank), layer.activations, layer.cos_sin)
    multiply_rounded(x, layer.o_a, grouped.transpose(1, 0, 2), o.dtype, backend)
    multiply(flat(grouped), layer.o_b, out, backend)
