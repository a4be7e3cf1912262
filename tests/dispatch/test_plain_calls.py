"""Calls without a plan, outputs or a workspace: repeated from the launch cache, in memory kept for their stream."""

import threading

import numpy as np
import pytest

import cumla
from cumla.dispatch import launch_cache
from cumla.kernels.types import stream_workspace
from support.attention import make_cache, make_indices, make_q
from support.lab import BF16

LAYOUT = cumla.DSV4_FP8
LENGTHS = [3, 200, 256, 77]


@pytest.fixture(autouse=True)
def released():
    cumla.release_memory()
    yield
    cumla.release_memory()


@pytest.fixture
def full_calls(monkeypatch):
    """The operations whose calls were made in full."""
    names, tested = [], launch_cache.tested
    monkeypatch.setattr(
        launch_cache, "tested", lambda function, op, *rest: names.append(op) or tested(function, op, *rest)
    )
    return names


def decode_arguments(rng, put, batch=4, topk=256):
    arrays = make_q(rng, batch, 1, 16, LAYOUT), make_cache(rng, LAYOUT, 4, 64), make_indices(rng, batch, 1, topk, 256)
    return [put(x) for x in arrays]


def sparse_decode(rng, device):
    arguments = decode_arguments(rng, device.put)
    return lambda lengths, **options: cumla.sparse_mla_decode(*arguments, topk_length=lengths, **options)


def dense_decode(rng, device):
    q = device.put(rng.standard_normal((4, 1, 16, 576)).astype(BF16))
    cache = device.put(rng.standard_normal((24, 64, 576)).astype(BF16))
    table = device.put(rng.permutation(24).astype(np.int32).reshape(4, 6))
    return lambda lengths, **options: cumla.dense_mla_decode(q, cache, table, lengths, softmax_scale=0.05, **options)


def topk(rng, device):
    q = device.put(rng.integers(0, 120, (4, 1, 8, 128)).astype(np.uint8))
    weights = device.put(rng.standard_normal((4, 8)).astype(np.float32))
    cache, table = cumla.INDEXER_FP8.allocate(8, 64), np.arange(8, dtype=np.int32).reshape(4, 2)
    keys = rng.standard_normal((512, 128)).astype(BF16)
    cumla.indexer_k_quant_and_cache(keys, cache, np.arange(512), backend="reference")
    cache, table = device.put(cache), device.put(table)
    return lambda lengths: cumla.indexer_topk(q, cache, weights, 16, context_lens=lengths, block_table=table)


CALLS = {
    "sparse_mla_decode": (sparse_decode, cumla.DecodePlan),
    "dense_mla_decode": (dense_decode, cumla.DenseDecodePlan),
}


@pytest.mark.parametrize("op", CALLS)
def test_repeated_calls_give_the_bits_of_a_plan_s(op, device, rng, full_calls):
    """Lengths differ from call to call: every call divides its own keys."""
    make, plan_of = CALLS[op]
    call, lengths = make(rng, device), [device.put(rng.permutation(LENGTHS).astype(np.int32)) for _ in range(4)]
    plain = [[device.get(x) for x in call(x)] for x in lengths]
    assert full_calls.count(op) == 2  # the first allocates memory, the second is recorded
    for got, x in zip(plain, lengths, strict=True):
        for a, b in zip(got, call(x, plan=plan_of()), strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), device.get(b).view(np.uint8))


def test_an_indexer_s_scores_are_in_kept_memory(device, rng, full_calls):
    call, lengths = topk(rng, device), device.put(np.array([3, 100, 128, 77], np.int32))
    got = [device.get(call(lengths)) for _ in range(4)]
    assert full_calls.count("indexer_topk") == 2
    for other in got[1:]:
        np.testing.assert_array_equal(got[0], other)


def keys_of_workspaces():
    return list(stream_workspace._workspaces)


def test_a_stream_has_memory_of_its_own(device, rng, full_calls):
    import cupy

    call, lengths = sparse_decode(rng, device), device.put(np.array(LENGTHS, np.int32))
    want = [device.get(x) for x in call(lengths)]
    streams, results = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)], []
    cupy.cuda.Device().synchronize()
    full_calls.clear()
    for _ in range(3):
        for stream in streams:
            with stream:
                results.append(call(lengths))
    assert len(full_calls) <= len(streams) + 1  # the first on each stream, and the one that is recorded
    for stream in streams:
        stream.synchronize()
    for result in results:
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_array_equal(device.get(got).view(np.uint8), expected.view(np.uint8))
    used = [stream_workspace._workspaces[key].named_arrays() for key in keys_of_workspaces()]
    assert len(used) == 4
    addresses = [array.data.ptr for arrays in used for array in arrays.values()]
    assert len(set(addresses)) == len(addresses)


def test_a_thread_has_memory_of_its_own(device, rng):
    """Threads that launch on one stream may take turns within a call."""
    calls = [sparse_decode(rng, device) for _ in range(2)]
    lengths, results = device.put(np.array(LENGTHS, np.int32)), {}
    want = [[device.get(x) for x in call(lengths, plan=cumla.DecodePlan())] for call in calls]
    barrier = threading.Barrier(2)

    def work(i):
        barrier.wait()
        results[i] = [calls[i](lengths) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys_of_workspaces()) == 2
    for i in range(2):
        for result in results[i]:
            for got, expected in zip(result, want[i], strict=True):
                np.testing.assert_array_equal(device.get(got).view(np.uint8), expected.view(np.uint8))


@pytest.mark.usefixtures("emulated")
def test_a_new_stream_with_a_freed_handle_has_new_memory(rng):
    """Work of the destroyed stream may still use the old memory."""
    import cupy

    handle = cupy.cuda.Stream().ptr
    workspaces = []
    for _ in range(2):
        stream = cupy.cuda.Stream(handle=handle)
        with stream:
            workspaces.append(stream_workspace.workspace_of_stream(cupy.zeros(1, np.int32)))
        assert stream_workspace.known_workspace(0, handle) is workspaces[-1]
        stream.destroy()
    assert workspaces[0] is not workspaces[1]


def test_the_memory_of_16_streams_is_kept(device):
    import cupy

    like = device.put(np.zeros(1, np.int32))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(20)]
    for stream in streams:
        with stream:
            stream_workspace.workspace_of_stream(like)
    known = [stream_workspace.known_workspace(0, stream.ptr) is not None for stream in streams]
    assert known == [False] * 4 + [True] * 16
    cumla.release_memory()
    assert not keys_of_workspaces()


def test_released_memory_is_allocated_again(device, rng):
    call, lengths = sparse_decode(rng, device), device.put(np.array(LENGTHS, np.int32))
    want = [device.get(x) for x in call(lengths)]
    for _ in range(3):
        cumla.release_memory()
        for got, expected in zip(call(lengths), want, strict=True):
            np.testing.assert_array_equal(device.get(got).view(np.uint8), expected.view(np.uint8))


def test_a_captured_call_without_a_plan_is_an_error(device, rng):
    """Kept memory would be that of eager calls, too."""
    import cupy

    call, lengths = sparse_decode(rng, device), device.put(np.array(LENGTHS, np.int32))
    out, lse = (x.copy() for x in call(lengths))
    for _ in range(2):
        call(lengths, out=out, lse=lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match="got None while a CUDA graph is being captured"):
            call(lengths)
        with pytest.raises(RuntimeError, match="memory would have to be allocated while a CUDA graph is captured"):
            call(lengths, out=out, lse=lse)
        stream.end_capture()


@pytest.mark.parametrize("op", CALLS)
def test_memory_of_a_call_that_launched_nothing_is_clear(op, device, rng):
    """Warm-up asks for the programs of a call, without its launches."""
    from cumla.kernels.cuda.compile import programs_asked_for

    make, plan_of = CALLS[op]
    call, lengths = make(rng, device), device.put(np.array(LENGTHS, np.int32))
    wanted = call(lengths, plan=plan_of())
    with programs_asked_for():
        call(lengths)
    for got, want in zip(call(lengths), wanted, strict=True):
        np.testing.assert_array_equal(device.get(got).view(np.uint8), device.get(want).view(np.uint8))


@pytest.mark.parametrize("repeated", [False, True])
def test_memory_of_a_call_that_ended_between_its_launches_is_dropped(here, rng, monkeypatch, repeated):
    """Its counters are zero only after the last one."""
    from cumla.kernels.cuda import launch

    call, lengths = sparse_decode(rng, here), here.put(np.array(LENGTHS, np.int32))
    want = [here.get(x) for x in call(lengths)]
    if repeated:
        call(lengths)
    else:
        cumla.release_memory()
    launch_kernel, *memory = launch._thread.memory
    launches = []

    def interrupted(*arguments):
        launches.append(arguments)
        if len(launches) == 3:
            raise KeyboardInterrupt
        return launch_kernel(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(launch._thread, "memory", (interrupted, *memory))
        with pytest.raises(KeyboardInterrupt):
            [call(lengths) for _ in range(2)]
    assert not keys_of_workspaces()
    for got, expected in zip(call(lengths), want, strict=True):
        np.testing.assert_array_equal(here.get(got).view(np.uint8), expected.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("op", CALLS)
def test_torch_allocates_what_its_calls_return(op, rng, full_calls):
    torch = pytest.importorskip("torch")

    class Torch:
        @staticmethod
        def put(x):
            bits = x.view(np.int16) if x.dtype == BF16 else x
            tensor = torch.from_numpy(bits).cuda()
            return tensor.view(torch.bfloat16) if x.dtype == BF16 else tensor

    make, plan_of = CALLS[op]
    call, lengths = make(rng, Torch), Torch.put(np.array(LENGTHS, np.int32))
    want = call(lengths, plan=plan_of())
    for _ in range(3):  # the first call that is repeated keeps an element of each dtype, whose shape results take
        call(lengths)
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        got = call(lengths)
        assert torch.cuda.memory_allocated() > before
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        del got
        assert torch.cuda.memory_allocated() == before
