"""Compiled kernels are tested once, the result is kept, and a wrong one is an error that says what to do."""

import numpy as np
import pytest

import cumla
import emulation
from cumla.dispatch import self_test
from cumla.kernels import self_tests
from cumla.kernels.cpu import sparse_cache
from cumla.kernels.self_tests import UNTESTED, Fresh, MiscompiledError, note
from cumla.self_test import CASES, check_case
from support.lab import BF16


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Tests are on, and nothing that other tests compiled waits for one."""
    monkeypatch.setenv(self_tests.VARIABLE, "1")
    monkeypatch.setattr(self_test, "_thread", self_test._Thread())
    UNTESTED.clear()
    yield
    UNTESTED.clear()
    self_tests.FAILED.clear()


@pytest.fixture
def fresh(tmp_path):
    return Fresh("_insert", "cpu", "Numba 0.0", "Install another.", tmp_path / "insert.verdict")


def insert():
    cache = cumla.DSV4_FP8.allocate(2, 5)
    cumla.quantize_and_insert_k_cache(np.ones((3, 512), BF16), cache, np.arange(3), backend="cpu")
    return cache


def test_a_right_kernel_is_tested_once(fresh, monkeypatch):
    tested = []
    run_self_test = self_test.run_self_test
    monkeypatch.setattr(self_test, "run_self_test", lambda op, *rest: tested.append(op) or run_self_test(op, *rest))
    note(fresh)
    insert()
    assert tested == ["quantize_and_insert_k_cache"] * len(tested)
    assert tested
    assert fresh.result_file.read_text() == "right"
    del tested[:]
    note(fresh)  # as the next process does
    assert not UNTESTED
    insert()
    assert not tested


def test_a_wrong_kernel_is_an_error_now_and_later(fresh, monkeypatch):
    right = sparse_cache.quantize_and_insert_k_cache

    def wrong(k, pages, slots, power_of_two):
        right(k, pages, slots, power_of_two)
        pages.bytes[0, 7] ^= 1

    monkeypatch.setattr(sparse_cache, "quantize_and_insert_k_cache", wrong)
    note(fresh)
    text = (
        r"quantize_and_insert_k_cache \(DSV4_FP8\): .* is off by 1 .* compiled by Numba 0.0: _insert. Install another."
    )
    for _ in range(2):  # the code is still there
        with pytest.raises(MiscompiledError, match=text):
            insert()
    monkeypatch.undo()
    monkeypatch.setenv(self_tests.VARIABLE, "1")
    with pytest.raises(MiscompiledError, match=text):
        note(fresh)


def test_a_call_is_tested_by_the_case_of_a_keyword_that_it_gives():
    cases = self_test._cases("indexer_topk", {"INDEXER_FP8"}, self_test._given({"slots": (1, 2), "out": None}))
    assert [case.variant for case in cases] == ["slots"]
    cases = self_test._cases("indexer_topk", {"INDEXER_FP8"}, self_test._given({"slots": None, "out": 1}))
    assert [case.variant for case in cases] == [""]
    cases = self_test._cases("compute_global_topk_indices_and_lens", set(), self_test._given({"compact": False}))
    assert [case.variant for case in cases] == [""]


@pytest.mark.filterwarnings("error")
def test_infinite_results_are_compared_without_a_warning():
    cases = [case for case in CASES if case.op == "apply_candidate_mask"]
    assert cases
    for case in cases:
        assert check_case(case, "cpu", seed=0).passed


def test_nothing_is_tested_where_self_tests_are_off(fresh, monkeypatch):
    monkeypatch.setenv(self_tests.VARIABLE, "0")
    note(fresh)
    assert not UNTESTED


def test_where_nothing_can_be_kept(fresh, tmp_path):
    (tmp_path / "file").touch()
    note(fresh._replace(result_file=tmp_path / "file" / "x"))
    insert()
    assert not UNTESTED
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(bool(emulation.unavailable()), reason=str(emulation.unavailable()))
class TestOnDevices:
    @pytest.fixture(autouse=True)
    def devices(self):
        with emulation.devices():
            yield

    def insert(self):
        import cupy

        cache = cumla.DSV4_FP8.allocate(2, 5, cupy)
        cumla.quantize_and_insert_k_cache(cupy.array(np.ones((3, 512), BF16)), cache, cupy.array(np.arange(3)))

    def test_only_what_a_case_launches_is_judged(self, tmp_path, monkeypatch):
        from cumla.kernels.cuda import compile as compiler
        from cumla.kernels.cuda import sparse_cache as launcher

        made = []
        monkeypatch.setattr(launcher, "kernel", lambda *a, **k: made.append(compiler.kernel(*a, **k)) or made[-1])
        self.insert()
        used = Fresh("insert", "cuda", "NVRTC 13.1", "", tmp_path / "used.verdict", "DSV4_FP8", made[0])
        other = used._replace(kernel=object(), result_file=tmp_path / "other.verdict")
        note(used)
        note(other)
        self.insert_again()
        assert used.result_file.read_text() == "right"
        assert other.result_file.read_text() == "not reached"

    def insert_again(self):
        import cupy

        cache = cumla.DSV4_FP8.allocate(3, 6, cupy)  # a call that is not known yet
        cumla.quantize_and_insert_k_cache(cupy.array(np.ones((4, 512), BF16)), cache, cupy.array(np.arange(4)))

    def test_not_while_a_graph_is_captured(self, tmp_path, monkeypatch):
        import cupy

        k, slots = cupy.array(np.ones((5, 512), BF16)), cupy.array(np.arange(5))
        cache = cumla.DSV4_FP8.allocate(4, 7, cupy)
        cumla.quantize_and_insert_k_cache(k, cache, slots)
        cache = cumla.DSV4_FP8.allocate(5, 7, cupy)
        fresh = Fresh("insert", "cuda", "NVRTC 13.1", "", tmp_path / "x.verdict", "DSV4_FP8", object())
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            note(fresh)
            cumla.quantize_and_insert_k_cache(k, cache, slots)
            stream.end_capture()
        assert not UNTESTED
        assert not fresh.result_file.exists()
