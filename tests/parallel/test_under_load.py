"""NCCL between two GPUs that other processes keep busy. The load must not change any value."""

import multiprocessing
import pathlib
import threading

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TWO, A_GPU = 2, 3  # ranks; processes that use each GPU


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")


@pytest.fixture
def load(two_gpus, importable):
    """Processes that multiply matrices on each GPU until the test has ended."""
    import nccl_load

    context = multiprocessing.get_context("spawn")
    stop, began = context.Event(), [context.Event() for _ in range(TWO * A_GPU)]
    processes = [
        context.Process(target=nccl_load.keep_busy, args=(i % TWO, begun, stop), daemon=True)
        for i, begun in enumerate(began)
    ]
    for process in processes:
        process.start()
    try:
        assert all(begun.wait(120) for begun in began), "the load did not start"
        yield
        assert all(process.is_alive() for process in processes), "the load ended early"
    finally:
        stop.set()
        for process in processes:
            process.join(20)
            process.kill()


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.usefixtures("load")
def test_processes(tmp_path, windows):
    import nccl_load

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=nccl_load.process, args=(str(tmp_path), rank, TWO, windows, results), daemon=True)
        for rank in range(TWO)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=500) for _ in processes)
    for process in processes:
        process.join(20)
        process.kill()
    assert found == {0: {}, 1: {}}


@pytest.mark.usefixtures("load")
def test_threads_of_one_process():
    import cupy
    import nccl_load

    from cumla.interop.nccl import NcclCommunicator

    comms, found = NcclCommunicator.in_process([0, 1], windows=True, time_limit=120), {}
    barrier = threading.Barrier(TWO, timeout=120)

    def run(rank):
        try:
            cupy.cuda.Device(rank).use()
            with comms[rank]:
                found[rank] = nccl_load.wrong_calls(comms[rank], barrier.wait)
        except BaseException as error:
            barrier.abort()
            found[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(TWO)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(500)
    assert found == {0: {}, 1: {}}
