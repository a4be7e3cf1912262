"""Compiled kernels are tested once, the result is kept, and a wrong one is an error that says what to do."""

import logging
import signal
import threading

import numpy as np
import pytest

import cumla
import emulation
from cumla.dispatch import kernel_check
from cumla.kernels import check_results
from cumla.kernels.check_results import Fresh, MiscompiledError, note
from cumla.kernels.cpu import sparse_cache, threads
from cumla.specs.self_test import CASES, check_case
from support.lab import BF16

OP = "quantize_and_insert_k_cache"


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Tests are on, and nothing that other tests compiled waits for one."""
    monkeypatch.setenv(check_results.VARIABLE, "1")
    monkeypatch.setattr(kernel_check, "PENDING", {})
    yield
    check_results.FAILED.clear()
    check_results.UNSAVED.clear()


@pytest.fixture
def fresh(tmp_path):
    return Fresh("_insert", "cpu", "Numba 0.0", "Install another.", tmp_path / "insert.verdict")


@pytest.fixture
def checked(monkeypatch):
    """The operations of the cases that were checked so far."""
    ops = []
    monkeypatch.setattr(
        "cumla.specs.self_test.check_case", lambda case, *rest: ops.append(case.op) or check_case(case, *rest)
    )
    return ops


@pytest.fixture
def compiling(monkeypatch):
    """Let the next insertion on the CPU compile kernels: `compiling(*fresh)`."""
    right, left = sparse_cache.quantize_and_insert_k_cache, []

    def compiles(*arguments):
        while left:
            note(left.pop())
        right(*arguments)

    monkeypatch.setattr(sparse_cache, OP, compiles)
    return lambda *fresh: left.extend(fresh)


def insert(backend="cpu"):
    cache = cumla.DSV4_FP8.allocate(2, 5)
    cumla.quantize_and_insert_k_cache(np.ones((3, 512), BF16), cache, np.arange(3), backend=backend)
    return cache


def test_a_right_kernel_is_tested_once(fresh, compiling, checked):
    compiling(fresh)
    insert()
    assert checked == [OP] * len(checked)
    assert checked
    assert fresh.result_file.read_text() == "right"
    del checked[:]
    compiling(fresh)  # as the next process does
    insert()
    assert not checked


def test_a_wrong_kernel_is_an_error_now_and_later(fresh, monkeypatch, compiling):
    compiles = sparse_cache.quantize_and_insert_k_cache

    def wrong(k, pages, slots, power_of_two):
        compiles(k, pages, slots, power_of_two)
        pages.bytes[0, 7] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(sparse_cache, OP, wrong)
        compiling(fresh)
        text = (
            r"quantize_and_insert_k_cache \(DSV4_FP8\): .* is off by 1 .* compiled by Numba 0.0: _insert. "
            "Install another."
        )
        for _ in range(2):  # the code is still there
            with pytest.raises(MiscompiledError, match=text):
                insert()
        insert("reference")  # as the message says
    with pytest.raises(MiscompiledError, match=text):
        note(fresh)


def test_a_wrong_kernel_writes_nothing_later(fresh, monkeypatch):
    monkeypatch.setitem(check_results.FAILED, (OP, "cpu"), "wrong")
    cache = cumla.DSV4_FP8.allocate(2, 5)
    before = cache.copy()
    with pytest.raises(MiscompiledError, match="wrong"):
        cumla.quantize_and_insert_k_cache(np.ones((3, 512), BF16), cache, np.arange(3))
    assert (cache == before).all()


class TimeLimitError(Exception):
    """As a task queue's signal handler raises it."""


@pytest.mark.parametrize("error", [TimeLimitError("time is up"), MemoryError("no memory"), KeyboardInterrupt()])
def test_an_error_from_outside_says_nothing_about_a_kernel(error, fresh, compiling, monkeypatch):
    """It is the caller's, and a later call tests again."""

    def check(*arguments):
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("the handler has raised")

    def handler(*_):
        raise error

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("cumla.specs.self_test.check_case", check)
            compiling(fresh)
            with pytest.raises(type(error)) as raised:
                insert()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised.value is error
    if isinstance(error, Exception):
        assert error.__notes__ == [f"raised by the self-test of {OP} (_insert), which its next call repeats"]
    assert not check_results.FAILED
    assert not fresh.result_file.exists()
    insert()
    assert fresh.result_file.read_text() == "right"


def test_what_a_failed_call_compiled_is_tested_by_the_next_call(fresh, compiling, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sparse_cache, "parallel_for", lambda *_: 1 / 0)
        compiling(fresh)
        with pytest.raises(ZeroDivisionError):
            insert()
    assert not fresh.result_file.exists()
    cumla.apply_rope(np.ones((1, 1, 64), np.float32), np.zeros(1, np.int32), np.ones((4, 64), np.float32))
    assert not fresh.result_file.exists()
    insert()
    assert fresh.result_file.read_text() == "right"


def test_no_result_for_what_another_thread_compiled(fresh, compiling, monkeypatch):
    """A call of another operation, or of the same, ends while the thread that compiled a kernel still calls it."""
    compiled, go_on = threading.Event(), threading.Event()
    compiles = sparse_cache.quantize_and_insert_k_cache

    def waits(*arguments):
        compiles(*arguments)
        if threading.current_thread() is thread:
            compiled.set()
            assert go_on.wait(100)

    monkeypatch.setattr(sparse_cache, OP, waits)
    compiling(fresh)
    thread = threading.Thread(target=insert)
    thread.start()
    assert compiled.wait(100)
    insert()
    cumla.apply_rope(np.ones((1, 1, 64), np.float32), np.zeros(1, np.int32), np.ones((4, 64), np.float32))
    assert not fresh.result_file.exists()
    go_on.set()
    thread.join()
    assert fresh.result_file.read_text() == "right"


def test_what_a_worker_thread_compiles_belongs_to_its_call(fresh, compiling, monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    monkeypatch.setattr(threads, "_cores", threads._Cores())
    compiles, caller = sparse_cache.quantize_and_insert_k_cache, threading.get_ident()
    both = threading.Barrier(2, timeout=100)

    def in_a_worker(*arguments):
        def work(items):
            for _ in items:
                both.wait()
                if threading.get_ident() != caller:
                    compiles(*arguments)

        threads.for_each(2, work)

    monkeypatch.setattr(sparse_cache, OP, in_a_worker)
    compiling(fresh)
    insert()
    assert fresh.result_file.read_text() == "right"


DAMAGED = {
    "empty": b"",
    "zeros": bytes(16),
    "random": b"\x87\xferight",
    "cut": b"wron",
    "cut message": b"wrong: off by",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_result_is_no_result(damage, fresh, compiling):
    fresh.result_file.write_bytes(DAMAGED[damage])
    compiling(fresh)
    with pytest.warns(RuntimeWarning, match=r"insert.verdict is damaged: the kernel is tested again"):
        insert()
    assert fresh.result_file.read_text() == "right"


def test_a_first_call_that_compiles_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(check_results, "_announced", {})
    monkeypatch.setattr(sparse_cache, OP, lambda *_: check_results.announce_compilation("sparse_cache"))
    with caplog.at_level(logging.INFO, "cumla"):
        for _ in range(2):
            insert()
            check_results.announce_compilation("window_metadata", cached=False)  # of a builder
    assert [record.getMessage() for record in caplog.records] == [
        f"{OP}: a first call compiles its kernels (`cumla warmup` does so ahead of time)",
        "window_metadata: a first call compiles its kernels (every process does so)",
    ]


def test_a_call_is_tested_by_the_case_of_a_keyword_that_it_gives():
    cases = kernel_check._cases(
        "indexer_topk", {"INDEXER_FP8"}, kernel_check._keyword_names({"slots": (1, 2), "out": None})
    )
    assert [case.variant for case in cases] == ["slots"]
    cases = kernel_check._cases("indexer_topk", {"INDEXER_FP8"}, kernel_check._keyword_names({"slots": None, "out": 1}))
    assert [case.variant for case in cases] == [""]
    cases = kernel_check._cases(
        "compute_global_topk_indices_and_lens", set(), kernel_check._keyword_names({"compact": False})
    )
    assert [case.variant for case in cases] == [""]


@pytest.mark.filterwarnings("error")
def test_infinite_results_are_compared_without_a_warning():
    cases = [case for case in CASES if case.op == "apply_candidate_mask"]
    assert cases
    for case in cases:
        assert check_case(case, "cpu", seed=0).passed


def test_nothing_is_tested_where_self_tests_are_off(fresh, monkeypatch, compiling, checked):
    monkeypatch.setenv(check_results.VARIABLE, "0")
    compiling(fresh)
    insert()
    assert not checked


def test_where_nothing_can_be_kept(fresh, tmp_path, compiling, checked):
    (tmp_path / "file").touch()
    compiling(fresh._replace(result_file=tmp_path / "file" / "x"))
    insert()
    assert checked
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(bool(emulation.unavailable()), reason=str(emulation.unavailable()))
class TestOnDevices:
    @pytest.fixture(autouse=True)
    def devices(self):
        with emulation.devices():
            yield

    @pytest.fixture
    def compiling(self, monkeypatch):
        """Let the next insertion compile kernels: `compiling(*fresh)`; its own kernel is in `made`."""
        from cumla.kernels.cuda import compile as compiler
        from cumla.kernels.cuda import sparse_cache as launcher

        left, self.made = [], []

        def kernel(*arguments, **defines):
            while left:
                note(left.pop())
            self.made.append(compiler.kernel(*arguments, **defines))
            return self.made[-1]

        monkeypatch.setattr(launcher, "kernel", kernel)
        return lambda *fresh: left.extend(fresh)

    def insert(self, tokens):
        """A call that is in no launch cache yet, by its number of tokens."""
        import cupy

        cache = cumla.DSV4_FP8.allocate(tokens, 7, cupy)
        cumla.quantize_and_insert_k_cache(
            cupy.array(np.ones((tokens, 512), BF16)), cache, cupy.array(np.arange(tokens))
        )

    def test_only_what_a_case_launches_is_judged(self, tmp_path, compiling):
        self.insert(3)
        used = Fresh("insert", "cuda", "NVRTC 13.1", "", tmp_path / "used.verdict", "DSV4_FP8", self.made[0])
        other = used._replace(kernel=object(), result_file=tmp_path / "other.verdict")
        compiling(used, other)
        self.insert(4)
        assert used.result_file.read_text() == "right"
        assert other.result_file.read_text() == "not reached"

    def test_not_while_a_graph_is_captured(self, tmp_path, compiling):
        import cupy

        k, slots = cupy.array(np.ones((5, 512), BF16)), cupy.array(np.arange(5))
        cache = cumla.DSV4_FP8.allocate(4, 8, cupy)
        cumla.quantize_and_insert_k_cache(k, cache, slots)
        cache = cumla.DSV4_FP8.allocate(5, 8, cupy)
        fresh = Fresh("insert", "cuda", "NVRTC 13.1", "", tmp_path / "x.verdict", "DSV4_FP8", object())
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            compiling(fresh)
            cumla.quantize_and_insert_k_cache(k, cache, slots)
            stream.end_capture()
        assert not fresh.result_file.exists()
        self.insert(6)
        assert fresh.result_file.read_text() == "not reached"

    def test_no_memory_for_a_test(self, tmp_path, compiling, monkeypatch):
        """As where another library holds the device's memory."""
        self.insert(7)
        fresh = Fresh("insert", "cuda", "NVRTC 13.1", "", tmp_path / "x.verdict", "DSV4_FP8", self.made[0])

        def no_memory(*_):
            raise MemoryError("Out of memory allocating 512 bytes")

        with monkeypatch.context() as patch:
            patch.setattr("cumla.specs.self_test.check_case", no_memory)
            compiling(fresh)
            with pytest.raises(MemoryError, match="Out of memory"):
                self.insert(8)
        self.insert(9)
        assert fresh.result_file.read_text() == "right"
