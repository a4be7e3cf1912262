"""A call runs on the caller's current stream: after what produced its arguments, before what reads its results.

Each test starts with work that keeps a side stream busy for long; a reader that does not wait sees old values. On
emulated devices that work takes until something waits for it.
"""

import contextlib
import ctypes
import gc

import numpy as np
import pytest

import cumla
from cumla.arrays import foreign_memory, streams
from support import pairs
from support.capsules import Foreign

CYCLES = 100_000_000  # some 50 ms
T, K = 64, 32


class TestHandles:
    def test_integers(self):
        assert streams.handle_of(0) == 0
        assert streams.handle_of(12345) == 12345

    def test_the_stream_protocol_comes_first(self):
        class Stream:
            ptr = 1

            def __cuda_stream__(self):
                return 0, 77

        assert streams.handle_of(Stream()) == 77

    @pytest.mark.parametrize("attribute", ["ptr", "cuda_stream"])
    def test_attributes(self, attribute):
        assert streams.handle_of(type("Stream", (), {attribute: 9})()) == 9

    @pytest.mark.parametrize("stream", ["legacy", True, object(), 1.5])
    def test_anything_else_is_an_error(self, stream):
        with pytest.raises(TypeError, match=r"stream: got .*, expected a CUDA stream or its handle"):
            cumla.sparse_mla_decode(None, None, None, stream=stream)


def arguments(rng):
    """Calls compute_global_topk_indices_and_lens, whose result is its first argument while the table is 0, 1, 2, ..."""
    topk = rng.integers(0, K, (T, K)).astype(np.int32)
    return topk, np.zeros(T, np.int32), np.arange(K, dtype=np.int32)[None], 1, np.ones(T, np.bool_)


class CuPy:
    def __init__(self):
        import cupy

        self.module = cupy
        self.spin_kernel = cupy.RawKernel(
            'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }',
            "spin",
        )
        self.spin_kernel((1,), (1,), (1,))  # compile it

    def put(self, array):
        return self.module.asarray(array)

    def get(self, array):
        return array.get(stream=self.module.cuda.get_current_stream())

    def stream(self):
        return self.module.cuda.Stream(non_blocking=True)

    def on(self, stream):
        return stream

    def spin(self):
        self.spin_kernel((1,), (1,), (CYCLES,))

    def copy(self, target, source):
        target[...] = source


class Emulated(CuPy):
    def __init__(self):
        import cupy

        self.module = cupy

    def spin(self):
        self.module.cuda.get_current_stream().busy()


class Torch:
    def __init__(self):
        self.module = pytest.importorskip("torch")

    def put(self, array):
        return self.module.from_numpy(array).cuda()

    def get(self, array):
        return array.cpu().numpy()

    def stream(self):
        return self.module.cuda.Stream()

    def on(self, stream):
        return self.module.cuda.stream(stream)

    def spin(self):
        self.module.cuda._sleep(CYCLES)

    def copy(self, target, source):
        target.copy_(source)


@pytest.fixture
def emulated(emulated):
    yield Emulated()
    foreign_memory.UntilDone._waiting.clear()  # exported memory is released while these devices exist


@pytest.fixture(
    params=[pytest.param(CuPy, marks=pytest.mark.gpu), pytest.param(Torch, marks=pytest.mark.gpu), Emulated]
)
def framework(request):
    return request.getfixturevalue("emulated") if request.param is Emulated else request.param()


def synchronize():
    import cupy

    cupy.cuda.Device().synchronize()


def produced_late(framework, side, rng):
    """Arguments whose first array gets its values late, on `side`, and those values."""
    topk, *rest = arguments(rng)
    array, fresh = framework.put(np.zeros_like(topk)), framework.put(topk)
    rest = [framework.put(x) if isinstance(x, np.ndarray) else x for x in rest]
    cumla.compute_global_topk_indices_and_lens(array, *rest)  # compiles the kernel
    synchronize()
    with framework.on(side):
        framework.spin()
        framework.copy(array, fresh)
    return (array, *rest), topk


class TestOrder:
    def test_the_current_stream_is_used(self, framework, rng):
        side = framework.stream()
        late, values = produced_late(framework, side, rng)
        with framework.on(side):
            out, _ = cumla.compute_global_topk_indices_and_lens(*late)
            np.testing.assert_array_equal(framework.get(out), values)

    def test_another_stream_would_have_been_too_early(self, framework, rng):
        """Checks that the producer is slow enough for these tests to fail."""
        side, other = framework.stream(), framework.stream()
        late, values = produced_late(framework, side, rng)
        with framework.on(other):
            out, _ = cumla.compute_global_topk_indices_and_lens(*late)
            assert not np.array_equal(framework.get(out), values)
        synchronize()

    def test_the_stream_asked_for_is_used(self, framework, rng):
        side = framework.stream()
        late, values = produced_late(framework, side, rng)
        out, _ = cumla.compute_global_topk_indices_and_lens(*late, stream=side)
        with framework.on(side):
            np.testing.assert_array_equal(framework.get(out), values)

    def test_those_who_read_results_on_the_current_stream_wait(self, framework, rng):
        """The op runs late on its stream; a reader of another library on that stream still sees its result."""
        import cupy

        side = framework.stream()
        topk, *rest = arguments(rng)
        given = [framework.put(x) if isinstance(x, np.ndarray) else x for x in (topk, *rest)]
        out = (framework.put(np.zeros_like(topk)), framework.put(np.zeros(T, np.int32)))
        synchronize()
        with framework.on(side):
            framework.spin()
            cumla.compute_global_topk_indices_and_lens(*given, out=out)
        with cupy.cuda.Stream.from_external(side):
            np.testing.assert_array_equal(cupy.from_dlpack(out[0]).get(), topk)

    def test_memory_of_results_is_not_given_to_others_too_early(self, framework, rng):
        """A result that is dropped while the op has not run yet is not overwritten by one on another stream."""
        side, other = framework.stream(), framework.stream()
        late, values = produced_late(framework, side, rng)
        with framework.on(side):
            out, _ = cumla.compute_global_topk_indices_and_lens(*late)
            kept = framework.put(np.zeros_like(values))
            framework.copy(kept, out)
            del out
        with framework.on(other):
            for _ in range(8):
                zeros = framework.put(np.zeros((T, K), np.int32))
                cumla.compute_global_topk_indices_and_lens(zeros, *late[1:])
        with framework.on(side):
            np.testing.assert_array_equal(framework.get(kept), values)


class TestOfOtherLibraries:
    """Arrays by protocol only, on emulated devices."""

    def test_dlpack_gets_the_stream_that_will_read(self, emulated, rng):
        side, (topk, *rest) = emulated.stream(), arguments(rng)
        rest = [emulated.put(x) if isinstance(x, np.ndarray) else x for x in rest]
        for stream, expected in (
            (None, foreign_memory.LEGACY_STREAM),
            (0, foreign_memory.LEGACY_STREAM),
            (side, side.ptr),
        ):
            array = Foreign(emulated.put(topk))
            cumla.compute_global_topk_indices_and_lens(array, *rest, stream=stream)
            assert array.stream == expected

    def test_memory_is_kept_until_it_was_read(self, emulated, rng):
        """The producer reuses the memory as soon as no array holds it."""
        side, (topk, *rest) = emulated.stream(), arguments(rng)
        rest = [emulated.put(x) if isinstance(x, np.ndarray) else x for x in rest]
        array = Foreign(emulated.put(topk))
        with side:
            side.busy()
            out, _ = cumla.compute_global_topk_indices_and_lens(array, *rest)
            gc.collect()
            assert not array.released
            np.testing.assert_array_equal(emulated.get(out), topk)
        cumla.compute_global_topk_indices_and_lens(Foreign(emulated.put(topk)), *rest)
        assert array.released == 1  # and no longer than until the next one is

    def test_the_cuda_array_interface_is_waited_for(self, emulated, rng):
        """The consumer is then responsible for waiting for the stream that writes."""
        side, other = emulated.stream(), emulated.stream()
        late, values = produced_late(emulated, side, rng)
        array = InterfaceOnly(late[0], side.ptr)
        with other:
            out, _ = cumla.compute_global_topk_indices_and_lens(array, *late[1:])
            np.testing.assert_array_equal(emulated.get(out), values)


class InterfaceOnly:
    """An array with `__cuda_array_interface__` alone; `stream` is where its values are made."""

    def __init__(self, array, stream):
        self.array = array
        self.__cuda_array_interface__ = {
            "version": 3, "shape": array.shape, "typestr": array.dtype.str, "data": (array.data.ptr, False),
            "stream": stream,
        }  # fmt: skip


def test_a_call_on_another_device_than_the_current_one(emulated, rng):
    """Kernels run on the arrays' device, on any stream, and the caller's device is current again afterwards."""
    import cupy

    case = arguments(rng)
    for stream in (None, "other"):
        with cupy.cuda.Device(1):
            given = [emulated.put(x) if isinstance(x, np.ndarray) else x for x in case]
            handle = emulated.stream().ptr if stream else None
        with streams.Current(1, handle):
            assert cupy.cuda.runtime.getDevice() == 1
        out, _ = cumla.compute_global_topk_indices_and_lens(*given, stream=handle)
        assert out.device.id == 1
        assert cupy.cuda.runtime.getDevice() == 0
        cupy.cuda.Device().synchronize()
        np.testing.assert_array_equal(out.get(), case[0])


def test_a_context_that_is_not_entered_changes_nothing(emulated):
    import cupy

    streams.Current(0, emulated.stream().ptr)
    assert cupy.cuda.get_current_stream().ptr == 0


def test_arrays_on_the_host_and_on_two_devices_do_not_mix(emulated, rng):
    import cupy

    topk, requests, table, block_size, valid = arguments(rng)
    rest = [emulated.put(x) for x in (requests, table)]
    with cupy.cuda.Device(1):
        elsewhere = emulated.put(table)
    for wrong, where in ((table, "in host memory"), (elsewhere, "on CUDA device 1")):
        with pytest.raises(ValueError, match=f"block_table: got an array {where}, expected it on CUDA device 0"):
            cumla.compute_global_topk_indices_and_lens(emulated.put(topk), rest[0], wrong, block_size, valid)
    with pytest.raises(ValueError, match="block_table: got an array on CUDA device 0, expected it in host memory"):
        cumla.compute_global_topk_indices_and_lens(topk, requests, rest[1], block_size, valid)


def test_a_relaxed_capture_is_over_when_its_context_is(emulated):
    """What a thread may do while it captures is restored, after an error too."""
    from emulation import queues

    for before in (0, 1, queues.RELAXED):
        queues.exchange_capture_mode(ctypes.byref(ctypes.c_int(before)))
        with contextlib.suppress(KeyError), streams.relaxed_capture():
            assert queues.capture_mode() == queues.RELAXED
            raise KeyError
        assert queues.capture_mode() == before
    queues.exchange_capture_mode(ctypes.byref(ctypes.c_int(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [pairs.VersionedProducer, pairs.UnversionedProducer, pairs.CudaInterface])
def test_arrays_by_protocol_are_waited_for(wrap, rng):
    """A torch tensor of a side stream, exported by its protocol only, to CuPy's current stream."""
    import cupy

    framework, cupy_stream = Torch(), cupy.cuda.Stream(non_blocking=True)
    rest = [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in arguments(rng)[1:]]
    side = framework.stream()
    late, values = produced_late(framework, side, rng)
    with framework.on(side):  # the stream on which torch's protocols export the tensor
        array = wrap(late[0])
        if wrap is pairs.CudaInterface:
            array.__cuda_array_interface__ = {
                **array.__cuda_array_interface__,
                "version": 3,
                "stream": side.cuda_stream,
            }
        with cupy_stream:
            out, _ = cumla.compute_global_topk_indices_and_lens(array, *rest)
            np.testing.assert_array_equal(out.get(stream=cupy_stream), values)


@pytest.mark.gpu
def test_numba_arrays_are_waited_for(rng):
    import cupy
    from numba import cuda

    @cuda.jit("void(int32[:, :], int32[:, :], int64)")
    def spin(target, source, milliseconds):
        for _ in range(milliseconds):
            cuda.nanosleep(1_000_000)
        for i in range(target.shape[0]):
            for j in range(target.shape[1]):
                target[i, j] = source[i, j]

    topk, *rest = arguments(rng)
    side = cuda.stream()
    array, fresh = cuda.to_device(np.zeros_like(topk), stream=side), cuda.to_device(topk, stream=side)
    rest = [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in rest]
    cumla.compute_global_topk_indices_and_lens(cupy.asarray(topk), *rest)  # compiles the kernel
    synchronize()
    spin[1, 1, side](array, fresh, 60)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, _ = cumla.compute_global_topk_indices_and_lens(array, *rest)
        np.testing.assert_array_equal(out.get(stream=stream), topk)


@pytest.mark.gpu
class TestJax:
    @staticmethod
    def slowly(values):
        """A JAX array that the device is still busy making."""
        import jax

        jnp = jax.numpy

        @jax.jit
        def late(x, busy):
            busy = jax.lax.fori_loop(0, 200, lambda i, a: a @ a * 1e-3, busy)
            return x + (busy.sum() * 0).astype(jnp.int32)

        busy = jnp.zeros((4096, 4096), jnp.bfloat16)
        late(jnp.zeros_like(values), busy).block_until_ready()
        return late(jnp.asarray(values), busy)

    def test_a_slow_producer(self, rng):
        jax = pytest.importorskip("jax")
        topk, *rest = arguments(rng)
        rest = [jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for x in rest]
        cumla.compute_global_topk_indices_and_lens(jax.numpy.asarray(topk), *rest)
        out, _ = cumla.compute_global_topk_indices_and_lens(self.slowly(topk), *rest)
        np.testing.assert_array_equal(np.asarray(out), topk)

    def test_a_reader_of_late_results(self, rng):
        """The op runs late on CuPy's stream; JAX waits for it."""
        jax = pytest.importorskip("jax")
        framework = CuPy()
        topk, *rest = arguments(rng)
        given = [jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for x in (topk, *rest)]
        add = jax.jit(lambda x: x + 1)
        add(cumla.compute_global_topk_indices_and_lens(*given)[0]).block_until_ready()
        with framework.stream():
            framework.spin()
            out, _ = cumla.compute_global_topk_indices_and_lens(*given)
            later = add(out)
        np.testing.assert_array_equal(np.asarray(later), topk + 1)

    def test_arguments_that_are_dropped_are_kept_until_they_were_read(self, rng):
        """JAX may reuse the memory of a dropped array for its next one before CuPy's stream has read it."""
        jax = pytest.importorskip("jax")
        framework = CuPy()
        topk, *rest = arguments(rng)
        rest = [jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for x in rest]
        out = [framework.put(np.zeros_like(topk)), framework.put(np.zeros(T, np.int32))]
        array = jax.numpy.asarray(topk).block_until_ready()
        side = framework.stream()
        with side:
            framework.spin()
            cumla.compute_global_topk_indices_and_lens(array, *rest, out=out)
            del array
            for _ in range(50):
                jax.numpy.zeros((T, K), np.int32).block_until_ready()
            np.testing.assert_array_equal(framework.get(out[0]), topk)

    def test_a_step_inside_jit_waits_and_is_waited_for(self, rng):
        jax = pytest.importorskip("jax")
        import cumla.interop.jax as ops

        topk, *rest = arguments(rng)
        rest = [jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for x in rest]

        @jax.jit
        def mapped(topk, requests, table, valid):
            return ops.compute_global_topk_indices_and_lens(topk + 1, requests, table, 1, valid)[0] * 2

        late = self.slowly(topk - 1)
        out = mapped(late, rest[0], rest[1], rest[3])
        np.testing.assert_array_equal(np.asarray(out), topk * 2)


@pytest.mark.parametrize("how", ["current", "stream="])
def test_a_stream_that_is_being_captured(framework, how, rng):
    """`stream=` is the way into a capture that was begun by hand."""
    import cupy

    topk, *rest = arguments(rng)
    given = [framework.put(x) if isinstance(x, np.ndarray) else x for x in (topk, *rest)]
    out = (framework.put(np.zeros_like(topk)), framework.put(np.zeros(T, np.int32)))
    cumla.compute_global_topk_indices_and_lens(*given, out=out)
    synchronize()
    side = framework.stream()
    stream = cupy.cuda.Stream.from_external(side)
    stream.begin_capture()
    with framework.on(side) if how == "current" else contextlib.nullcontext():
        cumla.compute_global_topk_indices_and_lens(*given, out=out, stream=side if how == "stream=" else None)
    graph = stream.end_capture()
    for _ in range(3):
        fresh = rng.integers(0, K, (T, K)).astype(np.int32)
        framework.copy(given[0], framework.put(fresh))
        synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(framework.get(out[0]), fresh)


def test_allocation_in_a_capture_names_what_is_missing(framework, rng):
    import cupy

    topk, *rest = arguments(rng)
    given = [framework.put(x) if isinstance(x, np.ndarray) else x for x in (topk, *rest)]
    cumla.compute_global_topk_indices_and_lens(*given)
    side = framework.stream()
    stream = cupy.cuda.Stream.from_external(side)
    stream.begin_capture()
    try:
        text = r"out\[0\] \(global_topk_indices\): got None while a CUDA graph is being captured, expected int32"
        with framework.on(side), pytest.raises(ValueError, match=text):
            cumla.compute_global_topk_indices_and_lens(*given)
    finally:
        stream.end_capture()


class QueriedMeanwhile:
    """An event that is done, and is asked for while another thread releases memory, too."""

    def __init__(self, release):
        self._release = release

    @property
    def done(self):
        if self._release is not None:
            release, self._release = self._release, None
            release()
        return True


class NotDone:
    done = False


@pytest.mark.usefixtures("emulated")
def test_memory_in_use_is_kept_where_two_threads_release_some():
    waiting, used = foreign_memory.UntilDone._waiting, (NotDone(), "memory in use")

    def release():
        foreign_memory.UntilDone("other memory", 0, 0)  # is over at once

    waiting.extend([(QueriedMeanwhile(release), "memory"), used])
    release()
    assert used in waiting
