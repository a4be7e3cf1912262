"""Every example call, with any values in its arrays: an operation writes only its outputs, inside their bounds.
Reads outside are detected as in test_safety_cache.py. Every operation has an example."""

import inspect
import pathlib
import runpy

import numpy as np
import pytest

import cumla
from cumla.specs import SPECS
from cumla.specs.inputs import TINY
from support import operations
from support.guarded import Guarded
from support.indexing import anything_like

pytestmark = pytest.mark.filterwarnings("error")
ROUNDS = 2
LONG_SIMULATED = ("sparse_attention", "dense_attention", "indexer", "indexer_topk")  # files of kernels


def has_no_such_kernels(x):
    return not operations.is_on(x.backend, x.get("name"))


def takes_the_simulator_long(x):
    return x.simulated and operations.EXAMPLES[x.get("name")].kernels in LONG_SIMULATED


@pytest.mark.nowhere(when=has_no_such_kernels)
@pytest.mark.nowhere(when=takes_the_simulator_long)
@pytest.mark.parametrize("name", operations.EXAMPLES)
def test_any_integers(lab, rng, name):
    example = operations.EXAMPLES[name]
    for seed in range(1 if lab.tiny else ROUNDS):
        guarded = []

        def put(value, guarded=guarded):
            if isinstance(value, list | tuple):
                return operations.rebuilt(value, [put(x) for x in value])
            if not isinstance(value, np.ndarray) or not value.ndim:
                return value
            guarded.append(Guarded(lab, np.ascontiguousarray(anything_like(rng, value))))
            return guarded[-1].array

        arguments = {key: put(value) for key, value in operations.arguments_of(example, seed).items()}
        example.spec.function(**arguments, backend=lab.backend)
        for array in guarded:
            array.assert_margins()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", operations.EXAMPLES)
def test_infinities_and_nan_are_no_warnings(rng, name, backend):
    """NumPy's warnings are errors here."""

    def changed(value):
        if isinstance(value, list | tuple):
            return operations.rebuilt(value, [changed(x) for x in value])
        if not isinstance(value, np.ndarray) or value.dtype.kind in "biu" or not value.ndim:
            return value
        value = value.copy()
        value[rng.random(value.shape) < 0.1] = np.nan
        value[rng.random(value.shape) < 0.1] = np.inf
        value[rng.random(value.shape) < 0.1] = -np.inf
        return value

    arguments = operations.arguments_of(operations.EXAMPLES[name], 0)
    arguments = {key: value if key == "attn_sink" else changed(value) for key, value in arguments.items()}
    operations.EXAMPLES[name].spec.function(**arguments, backend=backend)


OPERATIONS = {name for name in cumla.__all__ if inspect.isfunction(getattr(cumla, name))} - operations.NO_OPERATIONS


def test_every_operation_has_an_example():
    assert {example.op for example in operations.EXAMPLES.values()} >= OPERATIONS


@pytest.mark.usefixtures("emulated")
@pytest.mark.slow
def test_every_operation_is_fuzzed_on_devices(monkeypatch):
    """The cases that run under compute-sanitizer, as far as an emulated device goes: with the examples' shapes."""
    from support import fuzzed

    script = runpy.run_path(str(pathlib.Path(__file__).with_name("fuzz_device.py")))
    called, call = set(), fuzzed.call

    def noted(spec, *arguments):
        called.add(spec.name)
        call(spec, *arguments)

    monkeypatch.setattr(fuzzed, "call", noted)
    for files in script["OPS"].values():
        script["Fuzz"]("cuda", seed=0).examples(files, (TINY,))
    assert called == SPECS.keys()
