"""Memory registered with NCCL on all ranks, with a fake library; test_under_load.py uses NCCL."""

import dataclasses
import threading

import numpy as np
import pytest

import cumla
import emulation
from cumla.parallel import RankError, context
from support import fake_nccl, ranks
from support.fake_nccl import joined, on_ranks

pytestmark = pytest.mark.skipif(bool(emulation.unavailable()), reason=emulation.unavailable() or "")


@pytest.fixture
def library(nccl, monkeypatch):
    from cumla.interop import nccl_library

    made = fake_nccl.LibraryWithWindows()
    monkeypatch.setattr(nccl_library, "library", lambda: made)
    return made


def test_results_are_exchanged_in_windows(nccl, library):
    """All ranks do so, until the communicator is closed."""
    import cupy

    from cumla.parallel import ContextAttention

    def run(comm):
        attention = ContextAttention(comm, backend="cuda")
        q = cupy.zeros((2, 4, 512), np.float32)

        def attend(q, part, part_lse):
            part[...], part_lse[...] = comm.rank, 0

        return attention._decode(attend, q, None, None, None, None)[0].get()

    for out in on_ranks(nccl.NcclCommunicator.in_process([0, 0], windows=True), run):
        np.testing.assert_array_equal(out, np.full((2, 4, 512), 0.5))
    assert sorted(window[0] for window in library.windows) == [0, 1]
    assert {window[2:] for window in library.windows} == {(2 << 20, 1)}
    assert not library.held
    assert not library.registered


def test_a_close_that_waits_for_memory_ends(nccl, library, monkeypatch):
    """CUDA may wait for another rank before it gives memory back."""
    monkeypatch.setattr(nccl.nccl_endings, "GRACE_SECONDS", 0.1)
    given_back = threading.Event()
    monkeypatch.setattr(library, "ncclMemFree", lambda address: given_back.wait(30) and 0)
    (comm,) = nccl.NcclCommunicator.in_process([0], windows=True)
    comm.memory(100, None)
    try:
        with pytest.warns(RuntimeWarning, match="rank 0: NCCL waits for other ranks"):
            comm.close()
    finally:
        given_back.set()


def test_other_memory_is_named_before_it_is_asked_for(nccl, library):
    comms = nccl.NcclCommunicator.in_process([0, 0], time_limit=10, windows=True)
    for error in on_ranks(comms, lambda comm: comm.memory(100 + comm.rank, None)):
        assert "rank 1 got memory of 101 bytes, expected memory of 100 bytes as rank 0" in str(error)
    assert not library.windows


def test_memory_of_windows_is_not_sent_from(nccl, library):
    """NCCL 2.28 crashes when such a communicator is aborted."""
    import cupy

    (comm,) = nccl.NcclCommunicator.in_process([0], windows=True)
    with comm:
        window, other = comm.memory(6, None).reshape(1, 6), cupy.zeros((1, 6), np.uint8)
        for x, out in ((window, other), (other, window), (window[:, 3:], other[:, 3:])):
            with pytest.raises(ValueError, match=r"x, out: got memory of memory\(\), expected other memory"):
                comm.all_to_all(x, out)
        assert comm.all_gather(other[0], window) is window


@pytest.mark.parametrize("options", [{"windows": True}, {"windows": False}, {}])
def test_windows_if_wanted(nccl, library, options):
    (comm,) = nccl.NcclCommunicator.in_process([0], **options)
    with comm:
        comm.memory(6, None)
        assert bool(library.windows) == options.get("windows", False)


@pytest.mark.parametrize(
    ("windows", "says"),
    [
        ((True, False), "windows: got True on rank 0 and False on rank 1, expected the same on all ranks"),
        ((False, True, True), "windows: got True on ranks 1, 2 and False on rank 0, expected the same on all ranks"),
    ],
)
def test_ranks_with_and_without_windows(nccl, library, windows, says):
    """A rank with windows would register memory, and wait for the others."""
    errors = joined(nccl, [len(windows)] * len(windows), windows=windows)
    assert [str(error) for error in errors] == [says] * len(windows)
    assert {type(error) for error in errors} == {RankError}


def test_windows_are_true_or_false(nccl):
    with pytest.raises(TypeError, match="windows: got 1 of type int, expected True or False"):
        nccl.NcclCommunicator.in_process([0], windows=1)


class Decode:
    """A rank's decode over the ranks' context, with new queries in each call."""

    CALLS = 2

    def __init__(self, comm, split_heads):
        import cupy

        from cumla.parallel import ContextAttention, Shard, local_seq_lens

        shard = Shard(comm.rank, comm.size, 3)
        contexts = [self.context(call) for call in range(self.CALLS)]
        table, pages = contexts[0].pages(shard)
        cache = np.zeros((pages, ranks.BLOCK, 576), ranks.BF16)
        rows = contexts[0].rows
        cumla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, contexts[0].slots(table, shard))
        heads = contexts[0].own_heads(comm) if split_heads else slice(None)
        self.queries = [cupy.array(np.ascontiguousarray(context.q[:, heads])) for context in contexts]
        self.q, self.out = (cupy.empty((*self.queries[0].shape[:2], dim), ranks.BF16) for dim in (576, 512))
        self.lse = cupy.empty(self.q.shape[:2], np.float32)
        self.attention = ContextAttention(comm, split_heads=split_heads, backend="cuda")
        rest = cache, np.ascontiguousarray(table[contexts[0].token_to_req]), local_seq_lens(contexts[0].seen, shard)
        self.rest = [cupy.array(x) for x in rest]

    @staticmethod
    def context(call):
        """The same rows for every call."""
        context = ranks.Context.make(np.random.default_rng(3), [9, 5], 4, 576)
        q = np.random.default_rng(call).standard_normal(context.q.shape).astype(ranks.BF16)
        return dataclasses.replace(context, q=q)

    def __call__(self):
        self.attention.dense_decode(self.q, *self.rest, out=self.out, lse=self.lse, max_seqlen=9)

    def result(self, call, run):
        """The result of `run` with a call's queries."""
        self.q.view(np.uint16)[...] = self.queries[call].view(np.uint16)
        run()
        return self.out.get(), self.lse.get()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("version", "way"),
    [
        *((version, "everything to all") for version in (22707, 22803, 22809, 23004, 23007)),
        (22809, "some heads each"), (22809, "split heads"),
    ],
)  # fmt: skip
def test_windows_are_sent_once_they_are_written(nccl, monkeypatch, version, way, captured):
    """Kernels release the next kernel before they store; NCCL's kernels for windows may then start without waiting."""
    import cupy

    from cumla.interop import nccl_library

    made = fake_nccl.LibraryWithWindows(version)
    monkeypatch.setattr(nccl_library, "library", lambda: made)

    split_heads = way == "split heads"
    if way == "some heads each":
        monkeypatch.setattr(context, "WORTH_A_CALL", -1)  # otherwise two ranks would not take this way

    def run(comm):
        decode = Decode(comm, split_heads)
        results = [decode.result(0, decode)]  # the result that an early call would send again
        if not captured:
            return [*results, decode.result(1, decode)]
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            decode()
            graph = stream.end_capture()
        return [*results, decode.result(1, lambda: [graph.launch(stream), stream.synchronize()])]

    results = on_ranks(nccl.NcclCommunicator.in_process([0, 0], windows=True), run)
    assert not [result for result in results if isinstance(result, BaseException)], results
    for call in range(Decode.CALLS):
        want = ranks.dense_on_one(Decode.context(call))
        ranks.check([of_rank[call] for of_rank in results], want, split_heads, len(results))


@pytest.mark.parametrize(
    ("version", "windows", "launches"),
    [
        (22606, False, 0), (22707, True, 0), (22803, True, 1), (22803, False, 0), (22902, True, 1), (22902, False, 1),
        (23004, True, 1), (23004, False, 1), (23007, True, 0), (23007, False, 0),
    ],
)  # fmt: skip
def test_exchanges_have_an_ordinary_launch_ahead_where_nccl_does_not_wait(
    nccl, monkeypatch, version, windows, launches
):
    """From 2.29 on NCCL's kernels for windows may serve other memory, too."""
    import cupy

    from cumla.interop import nccl_library
    from cumla.kernels.cuda.launch import recorded_launches

    made = fake_nccl.LibraryWithWindows(version)
    monkeypatch.setattr(nccl_library, "library", lambda: made)
    (comm,) = nccl.NcclCommunicator.in_process([0], windows=windows)
    with comm, recorded_launches() as found:
        x, parts = comm.memory(12, None).view(np.float32), cupy.zeros((1, 3), np.float32)
        comm.all_gather(x)
        comm.all_to_all(parts)
        comm.reduce_scatter(parts)
        comm.all_gather((x, parts))  # one exchange
    assert [(launch.kernel.raw.name, launch.overlap) for launch in found] == [("ordinary_launch", False)] * 4 * launches
