"""NCCL: one rank on any GPU, two ranks on two GPUs; graphs; and errors of ranks."""

import multiprocessing
import threading

import pytest

pytestmark = pytest.mark.gpu

TWO = 2


def run_processes(work, folder, size=TWO, time_limit=30, windows=False):
    """(rank, result, error) of each rank."""
    import nccl_ranks

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=nccl_ranks.process, args=(work, str(folder), rank, size, time_limit, windows, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    got = sorted((results.get(timeout=100) for _ in processes), key=lambda word: word[0])
    for process in processes:
        process.join(20)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive, got
    return got


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    import pathlib

    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")


def check(results):
    import nccl_ranks

    from support import ranks

    for case, want in enumerate(nccl_ranks.wanted()):
        ranks.check([of_rank[case] for of_rank in results], want, case >= 2, len(results))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_share_a_gpu(size):
    import nccl_ranks

    from cumla.parallel import run_threads

    check(run_threads(size, nccl_ranks.decodes))


def test_one_rank():
    import nccl_ranks

    from cumla.interop.nccl import NcclCommunicator

    (comm,) = NcclCommunicator.in_process([0], windows=True)
    with comm:
        check([nccl_ranks.whole_run(comm)])


def test_a_missing_rank_is_named(tmp_path):
    from cumla.interop.nccl import NcclCommunicator
    from cumla.parallel import FileStore, RankError

    with pytest.raises(RankError, match=r"ranks 0, 2 did not reach the start within 0\.5 s") as caught:
        NcclCommunicator(FileStore(tmp_path), 1, 3, time_limit=0.5)
    assert caught.value.ranks == (0, 2)


def test_arrays_elsewhere():
    import cupy
    import numpy as np

    from cumla.interop.nccl import NcclCommunicator

    (comm,) = NcclCommunicator.in_process([0])
    with comm:
        with pytest.raises(ValueError, match="x: got an array elsewhere, expected it on CUDA device 0"):
            comm.all_gather(np.zeros(3))
        with pytest.raises(TypeError, match="x: got dtype int16, expected one of"):
            comm.reduce_scatter(cupy.zeros((1, 3), np.int16))
        with pytest.raises(ValueError, match="x: got strides"):
            comm.all_gather(cupy.zeros((4, 4))[:, :2])


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.usefixtures("two_gpus")
def test_two_processes(tmp_path, windows):
    got = run_processes("whole_run", tmp_path, windows=windows)
    assert [error for _, _, error in got] == [None, None]
    check([result for _, result, _ in got])


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.usefixtures("two_gpus")
def test_two_threads_of_one_process(windows):
    import cupy
    import nccl_ranks

    from cumla.interop.nccl import NcclCommunicator

    comms = NcclCommunicator.in_process([0, 1], windows=windows)
    results, errors = [None] * TWO, []

    def run(rank):
        try:
            cupy.cuda.Device(rank).use()
            with comms[rank]:
                results[rank] = nccl_ranks.whole_run(comms[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(TWO)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not errors, errors
    check(results)


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ("other_shape", "rank 1 got all_gather of float32 [4], expected all_gather of float32 [3] as rank 0"),
        ("failure", "rank 1 failed: ValueError: out of luck"),
        ("failure_in_a_window", "rank 1 failed: ValueError: out of luck"),
        ("never_comes", "all_gather did not end within 1 s"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_is_wrong_is_named(tmp_path, work, says):
    got = run_processes(work, tmp_path, windows=work == "failure_in_a_window")
    _, seconds, error = got[0]
    assert error is not None
    assert says in error, got
    assert "rank 1" in error, got
    assert seconds < 60
