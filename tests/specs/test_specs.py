"""Specs say what the functions take, and their inputs of every size are those of calls that work."""

import contextlib
import inspect
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import cumla
from cumla.dispatch import debug
from cumla.dispatch.call import Call
from cumla.specs import SPECS
from cumla.specs.inputs import TINY, Inputs, Size
from cumla.specs.measured import Measured
from cumla.specs.served import Served
from cumla.specs.spec import flat

EVERY = [(spec, variant) for spec in SPECS.values() for variant in spec.variants]
VARIANTS = pytest.mark.parametrize(("spec", "variant"), EVERY, ids=lambda x: x.name)
FEW = replace(TINY, requests=2, context=70, block_size=16, pages=16, spare=0)
FEWEST = Size(requests=0, context=1), Size(requests=2, decodes=2, context=1)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_a_spec_names_the_array_arguments_in_order(spec):
    parameters = inspect.signature(spec.function).parameters
    arrays = [
        name for name, parameter in parameters.items()
        if "Array" in str(parameter.annotation) and name not in (*spec.outputs, "workspace")
    ]  # fmt: skip
    assert list(spec.arrays) == arrays
    assert {variant.name for variant in spec.variants}.isdisjoint(spec.outputs)
    assert len({variant.name for variant in spec.variants}) == len(spec.variants)


@VARIANTS
def test_arguments_are_those_of_the_spec(spec, variant):
    arguments = variant.arguments(Inputs("reference"))
    assert arguments.keys() <= spec.parameters.keys()
    for name, array in spec.arrays.items():
        assert name in arguments or spec.optional(name)
        for x in flat([arguments.get(name)]):
            if not hasattr(x, "dtype"):  # a number, such as a scale
                continue
            assert x.dtype in array.dtypes
            assert bool(array.holds) == (x.dtype in (np.int32, np.int64)) or array.way == "out", name


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_dtypes_are_those_that_the_function_checks(spec, monkeypatch):
    checked, array = {}, Call.array

    def noted(call, name, value, dtypes, *rest, **options):
        checked.setdefault(name, set()).update(dtypes)
        return array(call, name, value, dtypes, *rest, **options)

    monkeypatch.setattr(Call, "array", noted)
    for variant in spec.variants:
        spec.run(variant.arguments(Inputs("reference")), "reference")
    for name in checked.keys() & spec.arrays.keys():
        assert checked[name] <= set(spec.arrays[name].dtypes), name


@VARIANTS
def test_the_check_is_the_one_that_debug_makes(spec, variant, monkeypatch):
    made, check_of, arguments = set(), debug.check_of, variant.arguments(Inputs("reference"))

    def noted(file, kernel):
        made.add(check_of(file, kernel))
        return check_of(file, kernel)

    monkeypatch.setattr(debug, "check_of", noted)
    with cumla.debug(), contextlib.suppress(ValueError):  # inputs of a self-test have values that are wrong
        spec.run(arguments, "reference")
    known = set(flat([spec.check]))
    assert made - {None} == known or (len(known) > 1 and made & known == made - {None})


@VARIANTS
def test_what_is_not_written_stays(spec, variant):
    arguments = variant.arguments(Inputs("reference"))
    before = {name: [x.copy() for x in flat([arguments.get(name)]) if hasattr(x, "copy")] for name in spec.arrays}
    spec.run(arguments, "reference")
    for name, arrays in before.items():
        same = [x.tobytes() == y.tobytes() for x, y in zip(arrays, flat([arguments.get(name)]), strict=False)]
        assert all(same) == (spec.arrays[name].way == "in") or not arrays, name


@VARIANTS
@pytest.mark.parametrize(
    "wrong", [lambda x: x.astype(np.complex64), lambda x: x[None, None, None]], ids=["dtype", "shape"]
)
def test_wrong_dtypes_and_shapes_are_named(spec, variant, wrong):
    """Before anything is written."""
    arguments = variant.arguments(Inputs("reference"))
    before = [x.copy() for name in spec.writes for x in flat([arguments.get(name)])]
    for name in spec.arrays:
        x = arguments.get(name)
        if not isinstance(x, np.ndarray) or (wrong(x).dtype == x.dtype and x.ndim > 2):
            continue
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            spec.function(**{**arguments, name: wrong(x)}, backend="reference")
    after = [x for name in spec.writes for x in flat([arguments.get(name)])]
    assert all(x.tobytes() == y.tobytes() for x, y in zip(before, after, strict=True))


@VARIANTS
@pytest.mark.parametrize("sized", [Measured, Served])
def test_inputs_of_other_sizes_are_calls_that_work(spec, variant, sized):
    for got in spec.run(variant.arguments(sized("cpu", FEW)), "cpu"):
        assert isinstance(got, np.ndarray)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("size", FEWEST, ids=["no requests", "no prefills"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_fuzz_takes_the_smallest_sizes(spec, size):
    from support.fuzzed import Fuzzed

    for variant in spec.variants:
        assert variant.arguments(Fuzzed(0, size)).keys() <= spec.parameters.keys()


@VARIANTS
def test_rows_may_be_apart(spec, variant):
    """Fuzz gives every array of several axes gaps."""

    def apart(x):
        if not isinstance(x, np.ndarray) or x.ndim < 2:
            return [apart(y) for y in x] if isinstance(x, list) else x
        wide = np.zeros((len(x), x[0].size + 3), x.dtype)
        rows = np.ndarray(x.shape, x.dtype, wide, strides=(wide.strides[0], *x[:1].copy().strides[1:]))
        rows[...] = x
        return rows

    packed, arguments = (variant.arguments(Inputs("reference")) for _ in range(2))
    want = spec.run(packed, "reference")
    got = spec.run({name: apart(x) if name in spec.arrays else x for name, x in arguments.items()}, "reference")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_self_test_imports_no_models():
    """A first call imports it before it returns."""
    code = "import cumla.specs.self_test, sys; print([x for x in sys.modules if x.startswith('cumla.models')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@VARIANTS
def test_an_array_that_others_need_says_why(spec, variant):
    """An optional array may be required by another argument. "got NoneType" would hide which."""
    arguments, said = variant.arguments(Inputs("reference")), []
    for name in spec.arrays:
        if arguments.get(name) is None or not spec.optional(name):
            continue
        try:
            spec.function(**{**arguments, name: None}, backend="reference")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    assert not [message for message in said if "NoneType" in message]
