"""A repeated call with other arrays has the effect of a first call."""

import types

import numpy as np
import pytest

import cumla
from cumla.dispatch.launch_cache import UsedArrays, _key_of_torch, call_key, record
from cumla.kernels.cuda.launch import Launch
from support.attention import make_cache, make_indices, make_q
from support.lab import BF16, Lab

DEVICE = Lab("cuda", on_device=True)


on_device = pytest.mark.usefixtures("device")


def on_paper(array):
    """A CuPy array over host memory: operations on it are not allowed, but it has all attributes."""
    import cupy

    memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, 0)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), array.strides)


def launched(*numbers):
    """A launch whose arguments are all addresses."""
    kernel = types.SimpleNamespace(addresses=range(len(numbers)))
    return Launch(kernel, (1, 1, 1), (1, 1, 1), 0, False, list(numbers))


@pytest.mark.usefixtures("emulated")
def test_a_list_has_the_cache_key_of_its_arrays():
    a, b = (on_paper(np.zeros((4, 8), np.int32)) for _ in range(2))
    assert call_key([a, b], 1) == call_key((b, a), 1)
    assert call_key([a, b], 1) != call_key([a, b[:, :4]], 1)
    assert call_key([a, np.zeros(3)], 1) is None


def test_a_tensor_whose_memory_was_freed_has_another_cache_key():
    """Its address is null, which is as aligned as other memory."""

    def key(address):
        tensor = types.SimpleNamespace(
            get_device=lambda: 0, data_ptr=lambda: address, shape=(4,), stride=lambda: (1,), dtype="float32"
        )
        return _key_of_torch(tensor, [], [])

    assert key(1 << 20) == key(1 << 21) != key(0)


@pytest.mark.usefixtures("emulated")
def test_a_kernel_that_is_forced_is_not_that_of_a_note(rng, monkeypatch):
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    layout = cumla.V32_FP8
    arrays = make_q(rng, 2, 1, 16, layout), make_cache(rng, layout, 2, 64), make_indices(rng, 2, 1, 9, 128)
    taken, portable = [], sparse_kernels._portable
    monkeypatch.setattr(sparse_kernels, "_portable", lambda *x: taken.append(x) or portable(*x))
    put = DEVICE.put
    results = {"out": put(np.zeros((2, 1, 16, 512), BF16)), "lse": put(np.zeros((2, 16, 1), np.float32))}
    arguments, options = [put(array) for array in arrays], {**results, "plan": cumla.DecodePlan()}
    for _ in range(2):  # the first call allocates the plan's memory
        cumla.sparse_mla_decode(*arguments, **options)
    assert not taken
    with sparse_kernels.forced("portable"):
        cumla.sparse_mla_decode(*arguments, **options)
    assert taken


@pytest.mark.usefixtures("emulated")
class TestNote:
    a, b, new = (np.zeros((4, 8), np.int32) for _ in range(3))

    def test_addresses_are_those_of_arrays(self):
        a, b = on_paper(self.a), on_paper(self.b)
        known = record([launched(b.data.ptr, 0, a.data.ptr + 40)], [a, b], UsedArrays([], []), None)
        assert [places for _, places in known.launches] == [[(0, 1, 0), (2, 0, 40)]]
        assert (known.together, known.outputs, known.results, known.framework) == ([], [], None, "cupy")

    def test_outputs(self):
        a, new = on_paper(self.a), on_paper(self.new)
        known = record([launched(new.data.ptr)], [a], UsedArrays([new], [new]), (new, a))
        assert [places for _, places in known.launches] == [[(0, 1, 0)]]
        assert known.outputs == [((4, 8), np.dtype(np.int32))]
        assert known.results == [1, 0]

    def test_arrays_that_share_memory_must_share_it_again(self):
        whole = on_paper(self.a)
        right = whole[:, 4:]
        known = record([launched(right.data.ptr)], [whole, right], UsedArrays([], []), None)
        start = whole.data.ptr
        assert known.fits([start, start + 16])
        assert known.fits([0, 16])
        assert not known.fits([start, start + 32])

    def test_an_array_may_run_backwards(self):
        """The address of a reversed view is its last row's, inside the array that it views."""
        whole = on_paper(self.a)
        reversed_rows = whole[::-1]
        known = record([launched(reversed_rows.data.ptr)], [whole, reversed_rows], UsedArrays([], []), None)
        assert [places for _, places in known.launches] == [[(0, 0, 96)]]
        assert known.fits([0, 96])
        assert not known.fits([0, 200])

    def test_an_array_without_elements_has_its_address(self):
        whole = on_paper(self.a)
        nothing = on_paper(self.b)[:0]
        known = record([launched(nothing.data.ptr)], [whole, nothing], UsedArrays([], []), None)
        assert [places for _, places in known.launches] == [[(0, 1, 0)]]

    def test_what_is_written_must_stay_apart(self):
        a, b = on_paper(self.a), on_paper(self.b)
        known = record([launched(a.data.ptr, b.data.ptr)], [a, b], UsedArrays([], [b]), None)
        assert known.fits([0, 128])
        assert known.fits([128, 0])
        assert not known.fits([0, 127])
        assert not known.fits([127, 0])
        assert record([launched(a.data.ptr)], [a, b], UsedArrays([], []), None).fits([0, 0])  # both are only read

    def test_a_result_given_twice_is_given_twice_again(self):
        a = on_paper(self.a)
        known = record([launched(a.data.ptr)], [a, a], UsedArrays([], [a]), (a,))
        assert known.fits([64, 64])
        assert not known.fits([0, 256])

    @pytest.mark.parametrize("what", ["nothing", "an address of its own", "another result"])
    def test_what_cannot_be_made_again(self, what):
        a, own = on_paper(self.a), on_paper(self.new)
        launches = {"nothing": [], "an address of its own": [launched(own.data.ptr)]}
        result = own if what == "another result" else None
        assert record(launches.get(what, [launched(a.data.ptr)]), [a], UsedArrays([], []), result) is None


def insert(array_of, rng, k=None, tokens=40, slots=np.int64, **options):
    """One insert of fresh rows, and the resulting pages."""
    k = rng.standard_normal((tokens, 512)).astype(BF16) if k is None else k
    cache = np.full((8, 16, 584), 165, np.uint8)
    slot_mapping = rng.permutation(128)[:tokens].astype(slots)
    given = [array_of(x) for x in (k, cache, slot_mapping)]
    cumla.quantize_and_insert_k_cache(*given, 16, **options)
    expected = cache.copy()
    cumla.quantize_and_insert_k_cache(k, expected, slot_mapping, 16, backend="reference")
    return given[1], expected


@pytest.mark.gpu
def test_insert_again_by_numba(rng):
    insert_again(rng, "numba_cuda")


@on_device
def test_insert_again(rng):
    insert_again(rng, "cuda")


def insert_again(rng, backend):
    for tokens in (40, 40, 1, 40, 1):
        for slots in (np.int64, np.int32):
            got, expected = insert(DEVICE.put, rng, tokens=tokens, slots=slots, backend=backend)
            np.testing.assert_array_equal(DEVICE.get(got), expected)


@on_device
def test_rows_off_their_alignment(rng):
    import cupy

    for offset in (0, 8, 0, 1, 8):
        k = cupy.zeros((40, 528), BF16)[:, offset : offset + 512]
        k[:] = cupy.asarray(rng.standard_normal((40, 512)).astype(BF16))
        got, expected = insert(lambda x, k=k: k if x.ndim == 2 else DEVICE.put(x), rng, k=k.get())
        np.testing.assert_array_equal(DEVICE.get(got), expected)


@on_device
def test_a_wrong_call_after_a_right_one(rng):
    insert(DEVICE.put, rng)
    insert(DEVICE.put, rng)
    with pytest.raises(TypeError, match="slot_mapping: got dtype uint32"):
        insert(DEVICE.put, rng, slots=np.uint32)
    with pytest.raises(TypeError, match="block_size"):
        cumla.quantize_and_insert_k_cache(*(DEVICE.put(x) for x in _arrays(rng)), 16.0)
    with pytest.raises(TypeError, match="block_size"):
        cumla.quantize_and_insert_k_cache(*(DEVICE.put(x) for x in _arrays(rng)), True)


def _arrays(rng):
    return rng.standard_normal((40, 512)).astype(BF16), np.zeros((8, 16, 584), np.uint8), np.arange(40)


@on_device
def test_columns_of_one_array_and_arrays_of_their_own(rng):
    """kv_c and k_pe are often adjacent in one array, but need not be."""
    for side_by_side in (True, True, False, True, False, False):
        rows = rng.standard_normal((40, 576)).astype(BF16)
        given = DEVICE.put(rows)
        kv_c, k_pe = given[:, :512], given[:, 512:]
        if not side_by_side:
            other = DEVICE.put(rng.standard_normal((40, 576)).astype(BF16))
            rows[:, 512:], k_pe = DEVICE.get(other)[:, 512:], other[:, 512:]
        cache, slots = DEVICE.put(np.zeros((4, 16, 576), BF16)), rng.permutation(64)[:40]
        cumla.concat_and_cache_mla(kv_c, k_pe, cache, DEVICE.put(slots))
        np.testing.assert_array_equal(DEVICE.get(cache).reshape(64, 576)[slots].view(np.uint16), rows.view(np.uint16))


@on_device
def test_a_reversed_view_of_one_array_and_of_another(rng):
    """The array that the first call's suffix views is not used by a later call."""
    lse = [DEVICE.put(rng.standard_normal((2, 4)).astype(np.float32)) for _ in range(2)]
    a, b, c = (rng.standard_normal((4, 2, 64)).astype(np.float32) for _ in range(3))
    on_device = {id(x): DEVICE.put(x) for x in (a, b, c)}
    for prefix, suffix in ((a, a), (b, c), (b, c), (a, a)):
        out, want = DEVICE.put(np.zeros_like(a)), np.zeros_like(a)
        cumla.merge_attn_states(out, on_device[id(prefix)], lse[0], on_device[id(suffix)][::-1], lse[1])
        host_lse = [DEVICE.get(x) for x in lse]
        cumla.merge_attn_states(want, prefix, host_lse[0], suffix[::-1], host_lse[1], backend="reference")
        np.testing.assert_allclose(DEVICE.get(out), want, rtol=1e-5, atol=1e-6)


@on_device
def test_in_place_and_out_of_place(rng):
    """Both kinds of calls are cached, and a call of either kind replays its own."""
    table = rng.standard_normal((16, 64)).astype(np.float32)
    positions = rng.integers(0, 16, 5)
    on_device = DEVICE.put(positions), DEVICE.put(table)
    for in_place in (False, True, True, False, True):
        x = rng.standard_normal((5, 3, 512)).astype(BF16)
        given = DEVICE.put(x)
        out = given if in_place else DEVICE.put(np.zeros_like(x))
        got = cumla.apply_rope(given, *on_device, out=out)
        assert got is out
        want = cumla.apply_rope(x, positions, table, backend="reference")
        np.testing.assert_array_equal(DEVICE.get(got).view(np.uint16), want.view(np.uint16))
        if not in_place:
            np.testing.assert_array_equal(DEVICE.get(given).view(np.uint16), x.view(np.uint16))


def topk_case(rng):
    table = rng.integers(0, 50, (3, 6)).astype(np.int32)
    return (
        rng.integers(-1, 48, (7, 5)).astype(np.int32),
        rng.integers(0, 3, 7).astype(np.int32),
        table,
        8,
        np.ones(7, bool),
    )


@on_device
@pytest.mark.parametrize("framework", ["cupy", pytest.param("torch", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("given", [False, True])
def test_results(rng, framework, given):
    """New or given arrays, in the framework of the arguments, on its current stream."""
    put = DEVICE.put
    if framework == "torch":
        torch = pytest.importorskip("torch")

        def put(x):
            return torch.from_numpy(x).cuda()

    earlier = []
    for _ in range(4):
        case = topk_case(rng)
        want = cumla.compute_global_topk_indices_and_lens(*case, backend="reference")
        arrays = [put(x) if isinstance(x, np.ndarray) else x for x in case]
        out = [put(np.zeros_like(x)) for x in want] if given else None
        got = cumla.compute_global_topk_indices_and_lens(*arrays, out=tuple(out) if given else None)
        assert type(got[0]) is type(arrays[0])
        assert not given or got[0] is out[0]
        earlier.append((got, want))
    for got, want in earlier:  # none was written again
        for array, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(array.cpu() if framework == "torch" else array.get(), expected)


@on_device
def test_on_the_stream_of_its_caller(rng):
    import cupy

    case = [DEVICE.put(x) if isinstance(x, np.ndarray) else x for x in topk_case(rng)]
    out = tuple(cupy.empty_like(x) for x in cumla.compute_global_topk_indices_and_lens(*case))
    cumla.compute_global_topk_indices_and_lens(*case, out=out)
    want = [x.get() for x in out]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cumla.compute_global_topk_indices_and_lens(*case, out=out)
        with pytest.raises(ValueError, match="got None while a CUDA graph is being captured"):
            cumla.compute_global_topk_indices_and_lens(*case)
        graph = stream.end_capture()
    for array in out:
        array.fill(99)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for array, expected in zip(out, want, strict=True):
        np.testing.assert_array_equal(array.get(), expected)


def test_from_many_threads(device, rng):
    """Threads that never called the runtime, all launching at once."""
    from concurrent.futures import ThreadPoolExecutor

    insert(DEVICE.put, rng)
    seeds = range(20 if device.emulated else 200)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda seed: insert(DEVICE.put, np.random.default_rng(seed)), seeds))
    for got, expected in results:
        np.testing.assert_array_equal(DEVICE.get(got), expected)


@on_device
def test_copies_again(rng):
    """Other caches and other pairs, the caches in a list."""
    for _ in range(3):
        caches = [rng.integers(0, 256, (6, 5, 7), np.uint8) for _ in range(2)]
        pairs = np.stack([rng.permutation(3), 3 + rng.permutation(3)], axis=1)
        on_device = [DEVICE.put(cache) for cache in caches]
        cumla.copy_blocks(on_device, DEVICE.put(pairs))
        cumla.copy_blocks(caches, pairs, backend="reference")
        cumla.swap_blocks(on_device[0], on_device[1], DEVICE.put(pairs))
        cumla.swap_blocks(caches[0], caches[1], pairs, backend="reference")
        for got, expected in zip(on_device, caches, strict=True):
            np.testing.assert_array_equal(DEVICE.get(got), expected)
