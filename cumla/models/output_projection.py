"""Output projection: of all heads' values at once; or inverse RoPE, a product a group of heads, and one of all."""

from __future__ import annotations

from typing import Any

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
    """Inverse RoPE, then o_a [groups, o_rank, heads / groups * 512], and o_b [hidden_size, groups * o_rank]."""

    low = ()

    def __init__(self, layer: LayerContext, get: WeightReader, kv_b: None) -> None:
        self.o_a, self.o_b = in_groups(layer.matrix(get, "wo_a"), layer.spec.o_groups), layer.matrix(get, "wo_b")

    def run(self, step: StepContext, o: Any, out: Any, gate: None) -> None:
        """Write out [T, hidden_size]. Inverse RoPE is applied in place to o [T, heads, 512], attention's output.

        With activations in FP8 the first product writes FP8 if the second reads it, where possible.
        """
        layer, positions, (groups, rank, width) = step.layer, step.metadata.positions, self.o_a.shape
        backend, grouped = layer.backend, step.array("o_low_rank", (len(o), groups, rank))
        if not rounds(self.o_a, len(o)):
            apply_rope(o, positions, layer.cos_sin, inverse=True, out=o, backend=backend)
            by_groups = flat(o).reshape(len(o), groups, width).transpose(1, 0, 2)
            multiply_groups(by_groups, self.o_a, grouped.transpose(1, 0, 2), backend, layer.blocks)
            multiply(flat(grouped), self.o_b, out, backend, layer.blocks)
            return
        x = memory_of_rounded((groups, len(o), width), layer.scratch, o)
        inverse_rope_and_quantize(o, positions, layer.cos_sin, groups, is_ue8m0=True, out=x, backend=backend)
        if rounds(self.o_b, len(o)):
            low = memory_of_rounded((groups, len(o), rank), layer.scratch, o, "o_low_rank")
            if fp8_product(x, self.o_a, low.values, backend, low.scales):
                multiply_rounded(low.as_one_group(), self.o_b, by_group(out), o.dtype, backend)
                return
        multiply_rounded(x, self.o_a, grouped.transpose(1, 0, 2), o.dtype, backend)
        multiply(flat(grouped), self.o_b, out, backend)
