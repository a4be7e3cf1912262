"""Collectives of communicators; an error of a rank names the rank."""

import _thread
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from cumla.parallel import (
    Agreement,
    FileStore,
    MemoryStore,
    RankError,
    TcpStore,
    ThreadCommunicator,
    run_threads,
    threads,
)
from support.lab import BF16

SECONDS = 0.3


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("dtype", [np.uint8, BF16, np.float32])
def test_threads_move_arrays(size, dtype):
    def on(comm):
        x = (np.arange(6) + comm.rank).astype(dtype).reshape(2, 3)
        parts = np.stack([x + np.array(10 * to, dtype) for to in range(size)])
        y = np.full(3, comm.rank, np.int32)
        both = comm.all_gather((x, y))
        return comm.all_gather(x), comm.reduce_scatter(parts), comm.all_to_all(parts), both

    got = run_threads(size, on)
    x = [(np.arange(6) + rank).astype(dtype).reshape(2, 3) for rank in range(size)]
    for rank, (gathered, total, taken, both) in enumerate(got):
        np.testing.assert_array_equal(gathered, np.stack(x))
        np.testing.assert_array_equal(both[0], gathered)
        np.testing.assert_array_equal(both[1], np.arange(size)[:, None] * np.ones(3))
        mine = [a + np.array(10 * rank, dtype) for a in x]
        np.testing.assert_array_equal(taken, np.stack(mine))
        np.testing.assert_array_equal(total, np.sum(np.stack(mine).astype(np.float64), axis=0).astype(dtype))


def test_results_come_where_they_are_wanted():
    def on(comm):
        out = np.empty((2, 3), np.float32)
        return comm.all_gather(np.full(3, comm.rank, np.float32), out) is out and out[:, 0].tolist()

    assert run_threads(2, on) == [[0, 1], [0, 1]]


WRONG = {
    "shape": (
        lambda comm: comm.all_gather(np.zeros(4 if comm.rank == 2 else 3)),
        r"rank 2 got .*\[4\], expected .*\[3\]",
    ),
    "dtype": (
        lambda comm: comm.all_gather(np.zeros(3, np.int32 if comm.rank == 2 else np.float32)),
        "rank 2 got all_gather of int32",
    ),
    "call": (
        lambda comm: (comm.all_to_all if comm.rank == 2 else comm.all_gather)(np.zeros((3, 2))),
        "rank 2 got all_to_all of",
    ),
    "end": (lambda comm: comm.rank == 2 or comm.all_gather(np.zeros(3)), "rank 2 ended and did not reach call 1"),
    "error": (
        lambda comm: [][comm.rank] if comm.rank == 2 else comm.all_gather(np.zeros(3)),
        "rank 2 failed: IndexError",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_rank_that_is_wrong_is_named(case):
    """The error comes at once, not at the time limit."""
    function, says = WRONG[case]
    start = time.monotonic()
    with pytest.raises(RankError, match=says) as caught:
        run_threads(3, function, 100)
    assert caught.value.ranks == (2,)
    assert time.monotonic() - start < 90


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_is_late_is_named(ends):
    """The error comes at the time limit, whether the rank arrives later or never."""
    together, over = threading.Barrier(2), threading.Event()

    def on(comm):
        if comm.rank == 2:
            over.wait(100)
        else:
            together.wait(100)
        try:
            comm.all_gather(np.zeros(3))
        finally:
            if ends:
                over.set()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 did not reach call 1 within 1 s") as caught:
        run_threads(3, on, 1)
    assert caught.value.ranks == (2,)
    assert time.monotonic() - start < 90
    over.set()


def test_an_interrupt_ends_the_ranks():
    """They end before it is raised: the caller reuses the arrays."""
    calls = []

    def on(comm):
        while len(calls) < 100_000:
            comm.all_gather(np.zeros(3))
            calls.append(comm.rank)
            if len(calls) == 9:
                _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        run_threads(3, on)
    before = len(calls)
    time.sleep(0.1)
    assert len(calls) == before < 100_000


@pytest.mark.parametrize(
    ("op", "arrays"),
    [
        ("all_to_all", lambda x, rank: (x[1:], x[1:])),
        ("all_to_all", lambda x, rank: ((x[0], x[1]), (x[2], x[2]))),
        ("all_gather", lambda x, rank: (x[0, 1 - rank], x[0])),
        ("all_gather", lambda x, rank: ((x[2, 0], x[0, rank]), (x[0], x[1]))),  # allowed for the rank's own part
        ("reduce_scatter", lambda x, rank: (x[0], x[0, 1 - rank])),
    ],
)
def test_what_is_sent_is_not_written_over(op, arrays):
    """Otherwise other ranks would get data that has arrived already, or not, depending on timing."""

    def on(comm):
        sent, out = arrays(np.zeros((3, 2, 4)), comm.rank)
        with pytest.raises(ValueError, match=f"out: got memory of another array of the call, .* to {op}"):
            getattr(comm, op)(sent, out)

    run_threads(2, on)


def test_a_ranks_own_part_may_be_in_place():
    def on(comm):
        x = np.arange(8.0).reshape(2, 4) + 10 * comm.rank
        gathered, scattered = np.zeros((2, 4)), x.copy()
        gathered[comm.rank] = x[0]
        comm.all_gather(gathered[comm.rank], gathered)
        comm.reduce_scatter(scattered, scattered[comm.rank])
        return gathered[:, 0].tolist(), scattered[comm.rank].tolist()

    assert run_threads(2, on) == [([0, 10], [10, 12, 14, 16]), ([0, 10], [18, 20, 22, 24])]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_what_was_sent_may_be_changed_after_the_call(op, monkeypatch):
    """A rank's call returns when the others have read what it sent, however slow they are."""
    changed = threading.Event()

    def slowly(function):
        def run(*arguments):
            if threading.current_thread().name == "rank 1":
                changed.wait(0.2)
            return function(*arguments)

        return run

    monkeypatch.setattr(threads, "gather", slowly(threads.gather))
    for name in ("_reduce", "_take"):
        monkeypatch.setattr(ThreadCommunicator, name, slowly(getattr(ThreadCommunicator, name)))

    def on(comm):
        x = np.full((2, 3), 1.0 + comm.rank)
        got = getattr(comm, op)(x)
        x[...] = 99
        changed.set()
        return got.max()

    assert run_threads(2, on) == [3.0 if op == "reduce_scatter" else 2.0] * 2


def test_numbers_without_an_axis_move():
    got = run_threads(2, lambda comm: (comm.all_gather(np.array(comm.rank)), comm.all_to_all(np.arange(2) + comm.rank)))
    assert [[x.tolist() for x in pair] for pair in got] == [[[0, 1], [0, 1]], [[0, 1], [1, 2]]]


def test_another_number_of_ranks():
    store, errors = MemoryStore(), []

    def on(comm):
        try:
            with Agreement(store, comm.rank, 2 + comm.rank, SECONDS if comm.rank else 100) as agreement:
                ThreadCommunicator(agreement)
        except RankError as error:
            errors.append((comm.rank, str(error)))

    run_threads(2, on)
    assert len(errors) == 2
    assert "rank 1 got 3 ranks, expected 2 ranks as rank 0" in dict(errors)[0]
    assert "rank 0" in dict(errors)[1] or "rank 2" in dict(errors)[1]


class LateStore(MemoryStore):
    """Every start-up step of rank 1 happens just after rank 0 has checked for it."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def get(self, key):
        found = super().get(key)
        if key == "the start/1" and found is None:
            other = Agreement(self, 1, 2, SECONDS)
            if self.error is not KeyError:
                self.set("the start/1", ("other words" if self.error else "words",))
            other.end(self.error and self.error("1 of 2"))
        return found


def test_a_rank_that_comes_and_ends_between_two_looks_has_come():
    assert Agreement(LateStore(None), 0, 2, SECONDS).exchange("the start", "words") == ["words", "words"]
    with pytest.raises(RankError, match="rank 1 got other words, expected words as rank 0"):
        Agreement(LateStore(ValueError), 0, 2, SECONDS).agree("the start", "words")
    with pytest.raises(RankError, match="rank 1 failed: KeyError: '1 of 2' and did not reach the start"):
        Agreement(LateStore(KeyError), 0, 2, SECONDS).agree("the start", "words")


def test_who_is_to_blame_is_heard_through_others():
    store = MemoryStore()
    Agreement(store, 2, 3).end(ValueError("2"))
    with pytest.raises(RankError) as first, Agreement(store, 0, 3, SECONDS) as agreement:
        agreement.exchange("go", 0)
    with pytest.raises(RankError, match=r"rank 2 failed: ValueError: 2.*as rank 0 says") as second:
        Agreement(store, 1, 3, SECONDS).check_others()
    assert first.value.ranks == second.value.ranks == (2,)


def store_of(kind, place):
    return FileStore(place) if kind == "file" else TcpStore(*place)


def test_ranks_may_end_at_any_time(monkeypatch):
    """Also directly after a check that they run."""
    is_alive = threading.Thread.is_alive

    def was_alive(thread):
        was = is_alive(thread)
        if was and thread.name.startswith("rank"):
            thread.join(10)
        return was

    monkeypatch.setattr(threading.Thread, "is_alive", was_alive)
    for size in (1, 3):
        assert run_threads(size, lambda comm: (time.sleep(0.01), comm.rank)[1]) == list(range(size))


def test_a_folder_stays_the_same_when_the_current_directory_changes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = FileStore("messages")
    store.set("key", 1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.get("key") == 1
    store.set("other", 2)
    assert FileStore(tmp_path / "messages").get("other") == 2


def be_a_rank(kind, place, rank, results):
    """In a separate process: agree twice; rank 2 disagrees the second time."""
    try:
        with Agreement(store_of(kind, place), rank, 3, 100) as agreement:
            values = agreement.exchange("who is there", {"rank": rank})
            assert [value["rank"] for value in values] == [0, 1, 2]
            agreement.agree("what to do", "gather" if rank < 2 else "scatter")
    except RankError as error:
        results.put((rank, error.ranks, str(error)))


@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.slow), "tcp"])
def test_processes_agree(kind, tmp_path):
    context = multiprocessing.get_context("spawn")
    place = str(tmp_path) if kind == "file" else (TcpStore.serve(b"secret"), b"secret")
    results = context.Queue()
    processes = [context.Process(target=be_a_rank, args=(kind, place, rank, results)) for rank in range(3)]
    for process in processes:
        process.start()
    got = sorted(results.get(timeout=150) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert [rank for rank, _, _ in got] == [0, 1, 2]
    assert all(ranks == (2,) and "rank 2 got scatter, expected gather" in text for _, ranks, text in got)


SERVE = """
import sys
from cumla.parallel import TcpStore
print(*TcpStore.serve(b"secret"), flush=True)
sys.stdin.read()
"""
SAY_AND_GO = """
import os, signal, sys
from cumla.parallel import Agreement, TcpStore
store = TcpStore((sys.argv[1], int(sys.argv[2])), b"secret")
os.kill(int(sys.argv[3]), signal.SIGSTOP)
Agreement(store, 1, 2).end()
"""


@pytest.fixture
def server():
    """A process that serves the store, and its address."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            host, port = process.stdout.readline().split()
            yield process, (host, int(port))
        finally:
            process.kill()


def test_who_keeps_the_words_may_be_gone(server):
    """This is an error, unless only a last message remains to be sent."""
    process, address = server
    store = TcpStore(address, b"secret", 20)
    store.set("key", 1)
    assert store.get("key") == 1
    process.kill()
    process.wait()
    with pytest.raises(ConnectionError, match=r"address: the process that serves \('127.0.0.1', \d+\) is gone"):
        store.get("key")
    with pytest.raises(ConnectionError, match="is gone"), Agreement(store, 0, 2, 20) as agreement:
        agreement.exchange("go on", 1)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP")
def test_who_keeps_the_words_may_say_nothing(server):
    """Like a rank that has finished while its process waits for others: no rank waits forever, and none to end."""
    process, address = server
    store = TcpStore(address, b"secret", 20)
    say_and_go = [sys.executable, "-c", SAY_AND_GO, address[0], str(address[1]), str(process.pid)]
    subprocess.run(say_and_go, check=True, timeout=100)
    store._time_limit = 0.2
    with pytest.raises(ConnectionError, match=r"or did not answer for 0\.2 s"):
        store.get("key")
    with pytest.raises(ConnectionError, match=r"did not answer for 0\.3 s"):
        TcpStore(address, b"secret", 0.3)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(ConnectionError):  # an answer to another question is not accepted
        store.get("other")
    assert TcpStore(address, b"secret", 20).get("ended/1") == ("ended", ())


def test_another_key_and_other_services(server):
    """A client without the key is rejected, and disturbs no other."""
    _, address = server
    with pytest.raises(ValueError, match=r"key: got another key than the process that serves"):
        TcpStore(address, b"other")
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        store = TcpStore(address, b"secret", 20)
        store.set("key", [1])
        assert store.get("key") == [1]
        store.delete("key")
        assert store.get("key") is None


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x05hello"])
def test_another_service(words):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.sendall(words)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises((ConnectionError, ValueError), match=r"address: the process at|key: got another key"):
            TcpStore(other.getsockname(), b"secret", 20)


def test_keys_are_bytes():
    for call in (lambda: TcpStore.serve("secret"), lambda: TcpStore(("127.0.0.1", 1), "secret", 0)):
        with pytest.raises(TypeError, match="key: got str, expected bytes"):
            call()


def test_nothing_is_a_value():
    store = MemoryStore()
    assert run_threads(3, lambda comm: Agreement(store, comm.rank, 3, 20).exchange("nothing", None)) == [[None] * 3] * 3


def test_no_server():
    with pytest.raises(TimeoutError, match=r"address: no process serves \('127.0.0.1', 1\)"):
        TcpStore(("127.0.0.1", 1), b"key", time_limit=0.1)


def test_what_was_read_is_deleted(tmp_path):
    """A long run leaves only its last entries in the store."""
    store = MemoryStore()

    def on(comm):
        agreement = Agreement(store, comm.rank, 2, 10)
        for i in range(20):
            agreement.exchange(f"step {i}", i)

    run_threads(2, on)
    assert len(store._values) <= 4


def test_what_is_set_between_a_look_and_a_wait_ends_the_wait():
    store = MemoryStore()
    store.wait(0)
    assert store.get("key") is None
    store.set("key", 1)
    start = time.monotonic()
    store.wait(20)
    assert time.monotonic() - start < 10
    start = time.monotonic()
    store.wait(0.05)  # and nothing was set since
    assert time.monotonic() - start >= 0.04
