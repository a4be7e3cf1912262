"""The self-test of a decode runs the programs that were compiled for the call, whatever their sizes."""

import contextlib

import numpy as np
import pytest

import cumla
from cumla.dispatch import kernel_check
from cumla.kernels import check_results
from cumla.kernels.check_results import Fresh
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.device import assumed
from cumla.kernels.cuda.sparse import kernels as sparse_kernels
from cumla.kernels.cuda.sparse import under_test
from cumla.kernels.cuda.sparse import work as sparse_work
from cumla.specs.self_test import CASES, Outcome, check_case
from support.lab import BF16

SMS, CLUSTERS_AT_A_TIME = 132, {2: 66, 3: 39, 4: 30, 5: 22, 6: 17}  # of an H200
ATTENTION = ("sm90/decode/", "sm80/sparse/", "common/sparse/")
OP = "sparse_mla_decode"


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setenv(check_results.VARIABLE, "1")
    monkeypatch.setattr(kernel_check, "PENDING", {})
    yield
    check_results.FAILED.clear()


@pytest.fixture
def h200(emulated, monkeypatch):
    for module in (sparse_kernels, sparse_work):
        monkeypatch.setattr(module, "device_sms", lambda device: SMS)
    monkeypatch.setattr(sparse_kernels, "most_clusters", lambda probe, size, *rest: CLUSTERS_AT_A_TIME[size])
    compiler.look_first_in()
    yield
    compiler.look_first_in()


def programs_of(call):
    """The programs of attention that a call asks for."""
    with compiler.programs_asked_for() as programs:
        call()
    return {program for program in programs if program[0].startswith(ATTENTION)}


def decode(batch, heads, layout, *widths, lengths):
    import cupy

    def keys(width):
        return layout.allocate(64, 64, cupy), cupy.zeros((batch, 1, width), np.int32)

    (cache, indices), *more = map(keys, widths)
    extra = {} if not more else {"extra_k_cache": more[0][0], "extra_indices": more[0][1]}
    if lengths:
        extra["topk_length"] = cupy.zeros(batch, np.int32)
    q = cupy.zeros((batch, 1, heads, layout.head_dim), BF16)
    cumla.sparse_mla_decode(q, cache, indices, layout=layout, block_size=64, backend="cuda", **extra)


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("batch", [1, 32, 64, 200])
@pytest.mark.parametrize(
    ("heads", "layout", "widths"),
    [(64, cumla.DSV4_FP8, (128, 512)), (128, cumla.V32_FP8, (2048,)), (16, cumla.DSV41_FP8, (128,))],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_the_self_test_of_a_decode_compiles_nothing_more(
    h200, monkeypatch, capability, batch, heads, layout, widths, lengths
):
    with assumed(capability):
        of_call = programs_of(lambda: decode(batch, heads, layout, *widths, lengths=lengths))
        assert len(of_call) >= 2
        fresh = [
            Fresh(name, "cuda", "", "", None, layout.name, None, file, dict(macros))
            for file, name, _, *macros in of_call
        ]

        class Run:
            @staticmethod
            def check_case(case, backend, seed, heads):
                arguments = case.arguments(kernel_check_inputs(backend, seed, heads))
                case.spec.run(arguments, backend)
                return Outcome(True, 0.0)

        monkeypatch.setattr(kernel_check, "_self_tests", [lambda: Run])
        cases = [x for x in CASES if x.op == OP and x.variant.split(", ")[0] == layout.name and "_FP4" not in x.variant]
        assert cases
        test = kernel_check.Test(OP, fresh, cases, heads)
        assert programs_of(lambda: kernel_check._run_test(test)) == of_call


def kernel_check_inputs(backend, seed, heads):
    from cumla.specs.inputs import Inputs, tiny

    return Inputs(backend, tiny(heads), seed)


@contextlib.contextmanager
def within_a_test_of(**macros_of_files):
    tested = [Fresh("", "cuda", "", "", None, file=file, macros=macros) for file, macros in macros_of_files.items()]
    token = check_results.UNDER_TEST.set(tested)
    try:
        yield
    finally:
        check_results.UNDER_TEST.reset(token)


@pytest.mark.parametrize(
    "macros",
    [
        {under_test.DECODE: {"TILE_HEADS": 16, "PARTS": 3}},
        {under_test.EXACT: {"TILE_HEADS": 16, "COMBINES": 1}},
        {under_test.PLAN: {}, under_test.EXACT: {"TILE_HEADS": 16, "COMBINES": 1}},
    ],
    ids=["a cluster of three", "two splits", "a plan"],
)
def test_a_small_case_is_right_with_programs_of_other_sizes(here, monkeypatch, macros):
    monkeypatch.setattr(sparse_kernels, "_clusters", lambda device: ())
    (case,) = (x for x in CASES if x.op == OP and x.variant == "DSV4_FP8, two caches")
    with assumed(90), within_a_test_of(**macros):
        outcome = check_case(case, "cuda", 0, 20)
    assert outcome.passed, outcome
