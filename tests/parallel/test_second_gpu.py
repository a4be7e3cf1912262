"""A process with two GPUs: every example call has equal results on both, whichever GPU is current."""

import numpy as np
import pytest

from cumla.arrays import dlpack
from support import operations

pytestmark = pytest.mark.gpu


class CuPy:
    @staticmethod
    def current(device):
        import cupy

        return cupy.cuda.Device(device)

    def put(self, array, device):
        import cupy

        with self.current(device):
            return cupy.array(array)

    def get(self, array):
        with array.device:
            return array.device.id, array.get()


class Torch:
    @staticmethod
    def current(device):
        import torch

        return torch.cuda.device(device)

    def put(self, array, device):
        return dlpack.give(np.array(array), "torch").to(f"cuda:{device}")

    def get(self, tensor):
        return tensor.device.index, dlpack.borrow(tensor.cpu())


def each(value, function):
    """The value with its arrays, of any library, replaced."""
    if hasattr(value, "_fields"):  # a named tuple, such as a Shard
        return type(value)(*(each(x, function) for x in value))
    if isinstance(value, list | tuple):
        return type(value)(each(x, function) for x in value)
    return function(value) if hasattr(value, "dtype") and getattr(value, "shape", ()) else value


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", operations.EXAMPLES)
@pytest.mark.parametrize(("backend", "make"), [("cuda", CuPy), ("numba_cuda", CuPy), ("cuda", Torch)])
def test_examples(backend, make, name):
    if make is Torch:
        pytest.importorskip("torch")
    framework, example, found = make(), operations.EXAMPLES[name], []
    for device, current in ((0, 0), (1, 1), (1, 0), (0, 1)):
        arguments = each(
            list(operations.arguments_of(example, 0).items()),
            lambda array, device=device: framework.put(array, device),
        )
        with framework.current(current):
            for _ in range(2):  # in full, and from the launch cache
                results = example.spec.function(**dict(arguments), backend=backend)
        mine = []
        each([results, *(value for _, value in arguments)], lambda array, mine=mine: mine.append(framework.get(array)))
        assert {place for place, _ in mine} == {device}
        found.append([array.tobytes() for _, array in mine])
    assert all(other == found[0] for other in found[1:])
