"""A repeated step, as after an error in a later layer: the same bytes of outputs and of all caches."""

import copy

import numpy as np
import pytest

from support.models import GoldenLayer, V4Layer, V32Layer, relative_rms
from support.v41_stack import Stack, check_outputs

CASES = {"v4 c128a": 3, "v4 c4a": 8, "v32": 13}
# Steps of (request, first position, tokens), and the step that is repeated after them.
STEPS = {
    "a chunk at an even position": ([(0, 0, 12)], [(0, 12, 19)]),
    "a chunk at an odd position": ([(0, 0, 13)], [(0, 13, 19)]),
    "a chunk as long as a ring": ([(0, 0, 13)], [(0, 13, 8)]),
    "a short chunk": ([(0, 0, 13)], [(0, 13, 7)]),
    "a decode": ([(0, 0, 13)], [(0, 13, 1)]),
    "a decode with drafts": ([(0, 0, 13)], [(0, 13, 6)]),
    "a decode and chunks": ([(0, 0, 13), (1, 0, 15)], [(0, 13, 1), (1, 15, 17)]),
    "the first chunk": ([], [(0, 0, 20)]),
}


def arrays_of(caches):
    return [array.tobytes() for array in vars(caches).values() if array is not None]


@pytest.mark.parametrize("steps", ["a chunk at an odd position", "a decode and chunks", "the first chunk"])
@pytest.mark.parametrize("case", CASES)
def test_layers_of_v4_and_v32(case, steps):
    golden = GoldenLayer(CASES[case])
    layer = (V32Layer if case == "v32" else V4Layer)(golden, 2, speculative=5)
    before, step = STEPS[steps]
    for scheduled in before:
        layer.step([scheduled], given=False)
    once = layer.step(step, given=False)
    want = [np.concatenate(once).tobytes(), *arrays_of(layer.caches)]
    for _ in range(2):
        found = layer.step(step, given=False)
        assert [np.concatenate(found).tobytes(), *arrays_of(layer.caches)] == want
    for (_, first, count), out in zip(step, once, strict=True):
        assert relative_rms(out, golden.out[first : first + count]) < 1e-5


def ran(stack, steps, times):
    before, step = STEPS[steps]
    for scheduled in before:
        stack.step([scheduled])
    for _ in range(times):
        out = stack.step(step)
    return [np.concatenate([part.ravel() for part in out]).tobytes(), *(b for c in stack.caches for b in arrays_of(c))]


@pytest.mark.parametrize(
    ("steps", "cache_format"), [*((steps, "float32") for steps in STEPS), ("a decode and chunks", "fp4")]
)
def test_layers_of_v41(steps, cache_format):
    activations = "float32" if cache_format == "float32" else "bfloat16"
    stacks = [
        Stack(0 if steps == "a decode and chunks" else 2, cache_format, activations=activations) for _ in range(2)
    ]
    once, twice = (ran(stack, steps, times) for stack, times in zip(stacks, (1, 3), strict=True))
    assert once == twice


@pytest.mark.parametrize("case", [0, 2])
def test_every_step_of_v41_is_run_again(case):
    """Chunks and decodes at even and at odd positions, each twice: the published outputs."""
    stack, outputs, first = Stack(case), [], 0
    for count in [13, 1, 9, 8, 20, 1, 2, 3, sum(stack.record["requests"][0]) - 57]:
        for _ in range(2):
            out = stack.step([(0, first, count)])
        outputs += out
        first += count
    check_outputs(stack, case, 0, np.concatenate(outputs, axis=1), 1e-4)


def test_a_failed_layer_and_a_shorter_step():
    """Layers up to an error in the third of them; then the same step with fewer tokens, by new metadata."""
    want, stack = Stack(0), Stack(0)
    for each in (want, stack):
        each.step([(0, 0, 13)])
    broken = copy.copy(stack)
    broken.layers = [*stack.layers[:3], None]
    with pytest.raises((AttributeError, ValueError)):
        broken.step([(0, 13, 30)])
    for first, count in ((13, 9), (22, 1), (23, 12)):
        got, expected = (each.step([(0, first, count)])[0] for each in (stack, want))
        np.testing.assert_array_equal(got, expected)
