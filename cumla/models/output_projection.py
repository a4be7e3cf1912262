"""From attention's output to the layer's: inverse RoPE, a product for each group of heads, a product of all."""

from __future__ import annotations

from typing import Any, Protocol

from ..ops.norm_rope import apply_rope
from .products import flat, multiply, multiply_groups
from .scratch import Scratch


class OutputLayer(Protocol):
    """What the projection reads of an attention layer of V4 or V4.1.

    o_a  [groups, o_lora_rank, heads / groups * 512]
    o_b  [hidden_size, groups * o_lora_rank]
    """

    backend: str | None
    scratch: Scratch
    activations: Any
    cos_sin: Any
    o_a: Any
    o_b: Any


def project_output(layer: OutputLayer, o: Any, positions: Any, out: Any) -> None:
    """Write out [T, hidden_size]; o [T, heads, 512], attention's output, loses its RoPE."""
    groups, rank, width = layer.o_a.shape
    apply_rope(o, positions, layer.cos_sin, inverse=True, out=o, backend=layer.backend)
    grouped = layer.scratch.shaped("o_low_rank", (len(o), groups, rank), layer.activations, layer.cos_sin)
    by_group = flat(o).reshape(len(o), groups, width).transpose(1, 0, 2)
    multiply_groups(by_group, layer.o_a, grouped.transpose(1, 0, 2), layer.backend)
    multiply(flat(grouped), layer.o_b, out, layer.backend)
