"""Layers of GLM-5.3-Flash, Mistral Large 4 and Hy4 on every backend."""

import numpy as np
import pytest

from cumla.models import output_projection, products, queries
from support.backends import only
from support.family_stack import GOLDEN, FamilyStack

POOLS_OF_4, POOLS_OF_16, MISTRAL, HY = 2, 4, 6, 8  # golden cases
LONG = {POOLS_OF_4: 3, POOLS_OF_16: 0, MISTRAL: 0, HY: 0}  # their longest requests


@pytest.mark.parametrize("cache_format", ["float32", "fp8"])
@pytest.mark.parametrize("case", LONG)
def test_every_operation_is_on_the_layers_backend(case, cache_format):
    """Prompts and decodes, of layers that select and of one that takes their selection."""
    stack = FamilyStack(case, cache_format, "reference")
    with only("reference"):
        for first, count in ((0, 41), (41, 1), (42, 3)):
            stack.step([(LONG[case], first, count)])


@pytest.mark.parametrize(("case", "requests"), [(POOLS_OF_4, (1, 2)), (MISTRAL, (1,)), (HY, (1,))])
def test_outputs_and_selections_of_the_reference_are_transformers(case, requests):
    stack = FamilyStack(case, backend="reference")
    for request in requests:
        stack.check(request, stack.run(request, GOLDEN["stacks"][case]["requests"][request]))


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["bfloat16", "fp8"])
@pytest.mark.parametrize("case", [POOLS_OF_4, MISTRAL, HY])
def test_portable_kernels(lab, monkeypatch, case, cache_format):
    """One layer, on the device and on the host. Products are NumPy's: the simulated device has none.

    Tensor cores take weights times scales in bfloat16; the simulator does not round them. CUDA's own kernels, emulated,
    are off by 1.3% (FP8) and 0.6% (bfloat16) for this.
    """

    def product(x, weight, out, backend, blocks=None):
        x, weight = (np.asarray(lab.get(each)).astype(np.float32) for each in (x, weight))
        result = (x @ weight.transpose(0, 2, 1)).astype(lab.get(out).dtype)
        out[...] = result if isinstance(out, np.ndarray) else lab.put(result)

    if lab.backend != "numba_cuda":
        pytest.skip("other backends have products")
    if case != POOLS_OF_4 and not lab.on_device:
        pytest.skip("the simulator takes minutes")
    for module in (products, queries, output_projection):
        monkeypatch.setattr(module, "multiply_groups", product)
    outputs, picks = [], []
    for stack in (
        FamilyStack(case, cache_format, "numba_cuda", "bfloat16", lab=lab),
        FamilyStack(case, cache_format, "cpu", "bfloat16"),
    ):
        stack.layers, stack.numbers = stack.layers[:1], stack.numbers[:1]
        outputs.append(stack.run(LONG[case], [38, 1]).astype(np.float64))
        picks.append(stack.picks[stack.numbers[0]][LONG[case]])
    for t in range(39):
        np.testing.assert_array_equal(*(chosen[t] for chosen in picks))
    got, want = outputs
    bound = 0.03 if lab.on_device else 0.01
    assert np.sqrt(np.square(got - want).mean() / np.square(want).mean()) < bound
