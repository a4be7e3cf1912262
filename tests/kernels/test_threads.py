"""Work is distributed over the cores, and no event during it causes a hang or leaks a thread."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cumla.kernels.cpu import threads

CHECKOUT = Path(__file__).parent.parent.parent


WITHOUT_A_GIL = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("threads", sys.argv[1])
threads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(threads)
assert not sys._is_gil_enabled()
threads.num_cores = lambda: 8
for _ in range(100):
    done = []
    threads.for_each(20_000, lambda items: done.append(list(items)))
    assert sorted(sum(done, [])) == list(range(20_000))
"""


def without_a_gil():
    """The command of a Python without a GIL that has what threads.py imports, if there is one."""
    for name in ("python3.14t", "python3.13t"):
        found = shutil.which(name)
        probe = [found, "-c", "import sys, numpy, threadpoolctl; sys.exit(sys._is_gil_enabled())"]
        if found and subprocess.run(probe, capture_output=True).returncode == 0:
            return [found, "-"]
    return []


FREE_THREADED = without_a_gil()


@pytest.fixture(autouse=True)
def three_cores(monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    monkeypatch.setattr(threads, "_cores", threads._Cores())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("nanoseconds", [0, 1, 1000, threads.LONGEST_PIECE, 10 * threads.LONGEST_PIECE])
def test_each_row_is_done_once(count, nanoseconds):
    done = np.zeros(count, np.int64)
    ranges = []

    def loop(first, end, array, number):
        assert array is done
        ranges.append((first, end))
        array[first:end] += number

    threads.parallel_for(count, nanoseconds, loop, done, 5)
    assert (done == 5).all()
    if count * nanoseconds < threads.WORTH_A_THREAD:
        assert len(ranges) == 1  # too little work to wake a thread
    elif nanoseconds >= threads.LONGEST_PIECE:
        assert max(end - first for first, end in ranges) == 1


def test_all_cores_take_part():
    at_once = threading.Barrier(3, timeout=100)
    threads.for_each(3, lambda items: [at_once.wait() for _ in items] and None)


@pytest.mark.parametrize("who", ["the caller", "a helper"])
def test_a_failure_comes_when_all_have_stopped(who):
    caller, begun, failed, left = threading.get_ident(), threading.Barrier(3, timeout=100), [], []

    def work(items):
        for item in items:
            if item < 3:
                begun.wait()
            if (threading.get_ident() == caller) == (who == "the caller") and not failed:
                failed.append(True)
                raise MemoryError(f"of {who}")
            time.sleep(0.02)
            left.append("worked")

    with pytest.raises(MemoryError, match=f"of {who}"):
        threads.for_each(1000, work)
    before = len(left)
    assert before < 500  # items that others were processing, or took before this thread failed
    time.sleep(0.1)
    assert len(left) == before
    threads.for_each(3, lambda items: left.extend(items))  # works as before


def test_no_thread_shares_an_iterator_of_pythons():
    """Without a GIL such an iterator repeats and skips items (this Python may have a GIL)."""
    kinds = set()
    threads.for_each(3, lambda items: kinds.add(type(items)))
    threads.parallel_for(3, threads.LONGEST_PIECE, lambda *_: None)
    assert kinds == {threads._Items}


@pytest.mark.skipif(not FREE_THREADED, reason="needs a Python without a GIL, with NumPy and threadpoolctl")
def test_each_item_is_done_once_without_a_gil():
    done = subprocess.run([*FREE_THREADED, threads.__file__], input=WITHOUT_A_GIL, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_within_a_call_of_the_same_thread():
    with pytest.raises(RuntimeError, match="during another call of the same thread"):
        threads.for_each(1, lambda items: threads.for_each(1, lambda items: None))
    threads.for_each(1, lambda items: None)


def test_without_more_threads(monkeypatch):
    """If no thread can be started, the calling thread does all work."""

    class NoThreads:
        def submit(self, *work):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads._cores, "_pool", NoThreads())
    done = []
    threads.for_each(5, done.extend)
    assert done == [0, 1, 2, 3, 4]


def test_no_kernel_has_other_threads():
    """Nor Numba's cache, which misses changes: kernels use `compiled` and `parallel_for`."""
    for path in (CHECKOUT / "kernels").rglob("*.py"):
        text = path.read_text()
        assert "prange" not in text, path
        assert "njit" not in text or path.name == "compiled.py", path


PRELUDE = """
import faulthandler, multiprocessing, os, signal, threading, time
import numpy as np, ml_dtypes, cumla
from cumla.timing import limit_blas_threads
faulthandler.dump_traceback_later(180, exit=True)
rng = np.random.default_rng(0)
kv = rng.standard_normal((500, 576)).astype(ml_dtypes.bfloat16)
q = rng.standard_normal((300, 64, 576)).astype(ml_dtypes.bfloat16)
indices = rng.integers(0, 500, (300, 256), np.int32)
rows, slots = kv[:, :512].repeat(2, axis=0), rng.permutation(1000)

def attend(n=3, **out):
    return cumla.sparse_mla_prefill(q[:n], kv, indices[:n], **out)[1].tobytes()

def insert(_=None):
    cache = cumla.DSV4_FP8.allocate(16, 64)
    cumla.quantize_and_insert_k_cache(rows, cache, slots)
    return cache.tobytes()

expected = attend(), insert()

def in_child():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if (attend(), insert()) == expected else 3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
SCENES = {
    "forks": """
import warnings; warnings.simplefilter("ignore", DeprecationWarning)  # what Python thinks of forks with threads
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(insert, range(4)) == [expected[1]] * 4
stop = []
def loop():
    while not stop:
        attend(300)
thread = threading.Thread(target=loop)
thread.start()
for _ in range(3):
    time.sleep(0.05)
    assert in_child() == 0
stop.append(True)
thread.join()
""",
    "threads": """
limit_blas_threads()
results = []
def work():
    for _ in range(10):
        results.append((attend(), insert()) == expected)
all_threads = [threading.Thread(target=work) for _ in range(4)]
for thread in all_threads: thread.start()
for thread in all_threads: thread.join()
assert results == [True] * 40
""",
    "a signal's handler": """
def handler(*_):
    attend()
signal.signal(signal.SIGUSR1, handler)
for _ in range(20):  # one may come between two calls
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        for _ in range(5): attend(300)
    except RuntimeError as error:
        assert "during another call of the same thread" in str(error), error
        break
else:
    raise SystemExit("the handler's calls went through")
assert attend() == expected[0]
""",
    "Ctrl-C": """
out = np.zeros((300, 64, 512), ml_dtypes.bfloat16), np.zeros((300, 64), np.float32), np.zeros((300, 64), np.float32)
for seconds in ((0.01,), (0.05, 0.051)):  # once, and twice in haste
    try:
        try:
            for delay in seconds:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
            for _ in range(1000): attend(300, out=out)
        finally:
            for array in out: array[...] = 0  # the caller takes them back
            time.sleep(0.2)
            assert not any(array.any() for array in out)
            time.sleep(1)
    except KeyboardInterrupt:
        pass
assert attend() == expected[0]
""",
}


@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene):
    """In a separate process, which may hang or crash."""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "3", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + SCENES[scene]],
        env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
