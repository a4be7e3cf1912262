"""A captured step of layers of GLM-5.3-Flash, Mistral Large 4 and Hy4 is right at other lengths.

Pools are completed, rings go round, drafts; norms and gates run in the layers' own memory.
"""

import dataclasses

import numpy as np
import pytest

from support.family_stack import FamilyStack
from support.graphs import graph_of

ARRAYS = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
FIRST = {  # by golden case, first position of each request's captured steps
    "glm5_next": (2, {3: 38, 2: 3}), "mistral_large4": (6, {1: 38, 0: 3}), "hy_v4": (8, {1: 17, 0: 3}),
}  # fmt: skip


class Decodes:
    """Steps of so many tokens of two requests, in arrays at fixed addresses."""

    def __init__(self, lab, counts, model):
        case, self.first = FIRST[model]
        self.stack, self.lab, self.counts = FamilyStack(case, "fp8", "cuda", "bfloat16", lab=lab), lab, counts
        self.arrays, self.inputs = {}, []
        for request, first in self.first.items():
            self.stack.step([(request, 0, first)])
        self.prepare(0)
        self.outs = [lab.put(np.zeros(x.shape, self.stack.layers[0].activations)) for x in self.inputs]

    def keep(self, name, array):
        placed = self.lab.put(np.ascontiguousarray(array))
        self.arrays.setdefault(name, placed)[...] = placed
        return self.arrays[name]

    def prepare(self, index):
        scheduled = [
            (request, first + sum(self.counts[:index]), self.counts[index]) for request, first in self.first.items()
        ]
        batch = self.stack.paged.batch(scheduled)[0]
        kept = {name: self.keep(name, self.lab.get(getattr(batch, name))) for name in ARRAYS}
        batch = dataclasses.replace(batch, **kept, max_seq_len=64)
        rings = self.keep("rings", np.array(list(self.first), np.int32)) if self.stack.has_rings else None
        self.metadata = self.stack.builder.build(batch, rings=rings)
        self.inputs = [
            self.keep(f"x{layer}", np.concatenate([
                self.stack.hidden[r][layer, first : first + count] for r, first, count in scheduled
            ]).astype(self.stack.layers[0].activations))
            for layer in range(len(self.stack.layers))
        ]  # fmt: skip

    def run(self):
        stack = self.stack
        for layer, caches, x, out in zip(stack.layers, stack.caches.values(), self.inputs, self.outs, strict=True):
            layer.step(x, caches, self.metadata, stack.selection, out=out)

    def results(self):
        import cupy

        cupy.cuda.Device().synchronize()
        outs = [self.lab.get(out).view(np.uint16) for out in self.outs]
        rings = [caches.ring for caches in self.stack.caches.values() if caches.ring is not None]
        return (outs, [self.lab.get(ring).view(np.uint16) for ring in rings]) if rings else (outs,)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (2, 2)], ids=["single tokens", "drafts"])
@pytest.mark.parametrize("model", FIRST)
def test_a_captured_step_is_right_at_other_lengths(device, model, counts):
    eager, captured = Decodes(device, counts, model), Decodes(device, counts, model)
    eager.run()
    captured.run()
    graph = None
    for index in range(1, len(counts)):
        eager.prepare(index)
        captured.prepare(index)
        eager.run()
        graph = graph or graph_of(captured.run)
        graph.launch()
        for got, want in zip(captured.results(), eager.results(), strict=True):
            np.testing.assert_array_equal(np.stack(got), np.stack(want))
            assert np.stack(got).any()
