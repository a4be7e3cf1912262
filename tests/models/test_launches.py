"""How many launches a captured step of decodes takes, of every kind of layer."""

import numpy as np
import pytest
from graphs.test_models import Decodes

from support.family_stack import FamilyStack
from support.graphs import graph_of
from support.v41_stack import Stack

# Kernels, products and fills: by golden layer, whether it selects for itself or the rows are given, the most.
MOST = {
    "v4 window": (2, True, 9), "v4 c128a": (3, True, 11), "v4 c4a": (8, True, 15), "v4 c4a, given": (8, False, 12),
    "v32": (13, True, 16), "v32, given": (13, False, 13),
}  # fmt: skip
MOST_V41 = {"window": 10, "c2a full": 21, "c2a reindex": 15, "c1a full": 23, "c1a reindex": 17, "c1a reuse": 10}

MOST_FLASH = {"full": 14, "reuse": 9}  # of GLM-5.3-Flash


def launches(call):
    """Work that a graph of a call has, but for what only joins streams."""
    return sum("Capture" not in work.do.__qualname__ for work in graph_of(call).works)


@pytest.mark.parametrize("name", MOST)
def test_of_v4_and_v32(here, name):
    case, selects, most = MOST[name]
    decodes, topk = Decodes(here, case), None if selects else here.put(np.tile([[0, -1]], (2, 1)).astype(np.int32))
    for index in range(2):
        decodes.prepare(index)
        decodes.run(topk_indices=topk)
    decodes.prepare(2)
    assert 1 < launches(lambda: decodes.run(topk_indices=topk)) <= most


def test_of_v41(here):
    stack, found = Stack(0, "fp4", "cuda", "bfloat16", here), {}
    stack.step([(1, 0, 3), (0, 0, 7)])
    step = [(0, 7, 1), (1, 3, 1)]
    batch, tables = stack.paged.batch(step)
    metadata = stack.builder.build(batch, tables, here.put(np.array([0, 1], np.int32)))
    for number, (layer, caches) in enumerate(zip(stack.layers, stack.caches, strict=True)):
        x = np.concatenate([stack.hidden[r][number, first : first + count] for r, first, count in step])
        x, out = here.put(x.astype(layer.activations)), here.put(np.zeros_like(x, layer.activations))

        def run(layer=layer, caches=caches, x=x, out=out):
            layer.step(x, caches, metadata, stack.selection, out=out)

        run()
        name = layer.mode if not layer.ratio else f"c{layer.ratio}a {layer.mode}"
        found[name] = launches(run)
    assert found.keys() == MOST_V41.keys()
    assert {name for name, count in found.items() if not 1 < count <= MOST_V41[name]} == set()


def test_of_glm_5_3_flash(here):
    """Also of layers that take another's selection."""
    stack, found = FamilyStack(4, "fp8", "cuda", "bfloat16", lab=here), {}
    stack.step([(0, 0, 40)])
    metadata = stack.builder.build(stack.paged.batch([(0, 40, 1)])[0], rings=here.put(np.zeros(1, np.int32)))
    for index, (layer, number) in enumerate(zip(stack.layers, stack.numbers, strict=True)):
        x = here.put(stack.hidden[0][index, 40:41].astype(layer.activations))
        out = here.put(np.zeros((1, 128), layer.activations))

        def run(layer=layer, caches=stack.caches[number], x=x, out=out):
            layer.step(x, caches, metadata, stack.selection, out=out)

        run()
        found[layer.mode] = launches(run)
    assert found.keys() == MOST_FLASH.keys()
    assert {name: count for name, count in found.items() if not 1 < count <= MOST_FLASH[name]} == {}
