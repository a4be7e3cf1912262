"""tests/fuzz_device.py as a script: which calls its options make. test_safety_examples.py makes the calls."""

import collections
import pathlib
import runpy

import pytest

from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.sparse import kernels as sparse_kernels
from cumla.specs import SPECS
from support import operations

SCRIPT = pathlib.Path(__file__).with_name("fuzz_device.py")
pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture
def script(monkeypatch):
    """The script with calls that are only noted: (operation, variant, backend, seed, size, forced kernel)."""
    from support import fuzzed

    calls = []

    def call(spec, variant, backend, seed, size=None):
        calls.append((spec.name, variant.name, backend, seed, size, sparse_kernels._forced.get()))

    monkeypatch.setattr(fuzzed, "call", call)
    monkeypatch.setattr(compiler, "OPTIONS", compiler.OPTIONS)  # restored afterwards
    found, allocators = runpy.run_path(str(SCRIPT)), []
    monkeypatch.setattr(found["cupy"].cuda, "set_allocator", allocators.append, raising=False)

    def run(*options):
        calls.clear()
        monkeypatch.setattr("sys.argv", [str(SCRIPT), *options])
        found["main"]()
        assert allocators.pop() is None  # no pool, in which accesses outside an array would go unnoticed
        return calls

    run.families = found["OPS"]
    return run


def test_a_round_calls_every_variant_of_a_family_at_two_sizes_with_seeds_of_its_own(script, capsys):
    calls = script("--ops", "layers", "--rounds", "2")
    files = script.families["layers"]
    wanted = [(x.op, x.of_variant.name) for x in operations.EXAMPLES.values() if x.kernels in files]
    assert len(wanted) > 5
    assert collections.Counter((op, variant) for op, variant, *_ in calls) == dict.fromkeys(wanted, 4)
    assert {backend for _, _, backend, *_ in calls} == {"cuda"}
    assert len({seed for *_, seed, _, _ in calls}) == 2 * len(wanted)
    assert [size is None for *_, size, _ in calls] == [False, True] * (2 * len(wanted))
    assert capsys.readouterr().out == "2 rounds of layers on cuda\n"


def test_rounds_of_attention_force_each_kernel(script):
    calls = script("--ops", "attention", "--rounds", "1", "--backend", "numba_cuda")
    forced = [(op, kernel, size.heads) for op, *_, size, kernel in calls if kernel is not None]
    assert {kernel for op, kernel, _ in forced if op == "sparse_mla_decode"} == set(sparse_kernels.KERNELS)
    heads = [heads for op, kernel, heads in forced if (op, kernel) == ("sparse_mla_prefill", "hopper")]
    assert [(heads > 16) + (heads > 32) for heads in heads] == [0, 1, 2]
    assert {op for op, *_ in calls} >= {op for op, spec in SPECS.items() if spec.kernels == "dense_attention"}
    assert {backend for _, _, backend, *_ in calls} == {"numba_cuda"}


def test_macros_reach_the_compiler(script):
    script("--rounds", "0", "--define", "EVERY_LANE_ARRIVES", "--define", "X=2")
    assert compiler.OPTIONS[-2:] == ("-DEVERY_LANE_ARRIVES", "-DX=2")


def test_each_operation_is_in_one_family(script):
    """New operations, too: they are layers' if no family names their kernels."""
    files = [file for files in script.families.values() for file in files]
    assert sorted(files) == sorted({spec.kernels for spec in SPECS.values()})
    assert {"compressor", "norm_rope", "projection"} <= set(script.families["layers"])
