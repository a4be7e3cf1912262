"""The compiled handler of XLA's custom calls, called as XLA calls it, on an emulated device."""

import contextlib
import ctypes
import functools
import re
import threading
import types

import numpy as np
import pytest

from cumla.interop import xla_frame, xla_handler
from cumla.interop.ops import OPS, Op
from support import operations

jax = pytest.importorskip("jax")
ops, xla = pytest.importorskip("cumla.interop.jax"), pytest.importorskip("cumla.interop.xla")

WORD, FUNCTION = ctypes.c_int64, ctypes.CFUNCTYPE
CONTEXTS = {0: 1001, 1: 1002}  # context of each emulated device


class Xla:
    """XLA's side: calls the handler with frames like XLA's."""

    def __init__(self):
        self.functions = {
            "stream_get": FUNCTION(WORD, WORD)(self._stream_get), "error_create": FUNCTION(WORD, WORD)(self._error),
            "launch": FUNCTION(WORD, WORD, WORD, WORD, WORD)(self._launch),
            "context": FUNCTION(WORD, WORD)(self._context),
        }  # fmt: skip
        stream_get, error_create, launch, context = map(xla_handler.address_of, self.functions.values())
        self.api = xla_frame.Api(stream_get=stream_get, error_create=error_create)
        self.table = xla.Table()
        words = self.table.words.ctypes.data
        self.handler = FUNCTION(WORD, WORD)(xla_handler.make_handler(words, launch, context, xla.in_python()))

    def start(self, driver):
        """Reset the handler's state."""
        self.driver, self.fail, self.context, self.messages = driver, 0, CONTEXTS[0], []
        self.table.words[:] = 0
        self.table.calls.clear()

    def _stream_get(self, question):
        ctypes.cast(question, ctypes.POINTER(xla_frame.StreamGet)).contents.stream = self.stream
        return 0

    def _error(self, question):
        self.messages.append(ctypes.cast(question, ctypes.POINTER(xla_frame.ErrorCreate)).contents.message.decode())
        return len(self.messages)

    def _launch(self, config, function, _, extra):
        return self.fail or self.driver.cuLaunchKernelEx(config, function, None, extra)

    def _context(self, into):
        WORD.from_address(into).value = self.context
        return 0

    def call(self, number, inputs, outputs, stream=0, stage=xla_frame.EXECUTE):
        """Raises RuntimeError for XLA's error."""
        self.stream, kept = stream, []

        def buffers(arrays):
            each = [xla_frame.Buffer(data=array.data.ptr) for array in arrays]
            pointers = (ctypes.POINTER(xla_frame.Buffer) * len(each))(*map(ctypes.pointer, each))
            kept.append((each, pointers))
            return xla_frame.Buffers(size=len(each), buffers=pointers)

        value = ctypes.c_uint64(number)
        scalar = xla_frame.Scalar(value=ctypes.pointer(value))
        values = (ctypes.POINTER(xla_frame.Scalar) * 1)(ctypes.pointer(scalar))
        frame = xla_frame.CallFrame(
            api=ctypes.pointer(self.api), stage=stage, arguments=buffers(inputs), results=buffers(outputs),
            attributes=xla_frame.Attributes(size=1, values=values),
        )  # fmt: skip
        error = self.handler(ctypes.addressof(frame))
        if error:
            raise RuntimeError(self.messages[error - 1])


@pytest.fixture(scope="module")
def made():
    return Xla()


@pytest.fixture
def compiler(here, made, monkeypatch):
    from emulation.cupy import DRIVER

    made.start(DRIVER)
    driver = types.SimpleNamespace(**vars(DRIVER))
    driver.cuCtxGetCurrent = lambda into: made._context(ctypes.addressof(into._obj))
    monkeypatch.setattr(xla, "ctypes", types.SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: driver}))
    monkeypatch.setattr(xla, "TABLE", made.table)
    monkeypatch.setattr(xla, "register", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    caches = ops._function_of, xla.capturing_stream
    for cache in caches:
        cache.cache_clear()
    yield made
    for cache in caches:
        cache.cache_clear()
    jax.clear_caches()


def compiled(function, *arrays):
    """The text that XLA gets for a GPU, and the identifiers of its custom calls."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return text, [int(number) for number in re.findall(r"call = (\d+) : ui64", text)]


class Program:
    """A custom call of one operation, with new arrays each time."""

    def __init__(self, device, case, rng):
        self.device, self.case, self.op = device, case, OPS[operations.operation(case)]
        arguments = operations.CASES[case](rng)
        self.names = [name for name in self.op.signature.parameters if isinstance(arguments.get(name), np.ndarray)]
        self.static = {name: x for name, x in arguments.items() if name not in self.names}
        function = functools.partial(getattr(ops, self.op.name), **self.static)
        arrays = [arguments[name] for name in self.names]
        _, (self.number,) = compiled(lambda *arrays: function(**dict(zip(self.names, arrays, strict=True))), *arrays)

    def _put(self, array):
        """An array in XLA's layout, row-major."""
        return self.device.put(np.ascontiguousarray(array))

    def call(self, compiler, rng, finished=True, **more):
        """Make the call with other arrays. Returns its results and the arrays that it wrote, and an eager call's."""
        arguments = operations.CASES[self.case](rng)
        want = [x.get() for x in operations.expected(self.case, arguments, self.op.writes, self._put)]
        inputs = [self._put(arguments[name]) for name in self.names]
        call = compiler.table.calls[self.number]
        written = [inputs[self.names.index(name)] for name in self.op.writes if name in self.names]
        new = [self._put(np.zeros(*shape)) for shape in call.shapes[len(inputs) + len(written) :]]
        compiler.call(self.number, inputs, [*written, *new], **more)
        if not finished:
            return None
        results = new[: len(want) - len(written)]  # without temporary memory
        return [x.get() for x in (*results, *written)], want


QUICK = "quantize_and_insert_k_cache-DSV4_FP8", "sparse_mla_decode-DSV4_FP8-two-caches", "merge_attn_states-float32"


@pytest.mark.parametrize(
    "case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in operations.CASES]
)
def test_the_second_call_is_made_without_python(case, here, compiler, calls, rng):
    program = Program(here, case, rng)
    for turn in range(3):
        before = len(calls)
        check(program, compiler, rng)
        assert bool(calls[before:]) == (turn == 0), (turn, calls)


CASE = "dense_mla_decode-bfloat16"


@pytest.fixture
def program(here, compiler, rng):
    return Program(here, CASE, rng)


def check(program, compiler, rng, **more):
    got, want = program.call(compiler, rng, **more)
    for one, other in zip(got, want, strict=True):
        assert operations.same_bits(one, other)


def test_a_call_ends_in_an_ordinary_launch_without_python(here, compiler, calls, monkeypatch, rng):
    """early_release=False, in calls by Python and by the handler."""
    from emulation.cupy import DRIVER, LAUNCHABLE

    make, names = operations.CASES[CASE], []
    monkeypatch.setitem(operations.CASES, CASE, lambda rng: {**make(rng), "early_release": False})

    def launch(config, function, *more):
        names.append(LAUNCHABLE[function - 1][0].name)
        return DRIVER.cuLaunchKernelEx(config, function, *more)

    compiler.driver = types.SimpleNamespace(cuLaunchKernelEx=launch)
    program = Program(here, CASE, rng)
    check(program, compiler, rng)
    assert calls
    assert not names
    calls.clear()
    check(program, compiler, rng)
    assert not calls
    assert names[-1] == "ordinary_launch"


def test_work_goes_to_the_stream_of_the_call(here, program, compiler, rng):
    import cupy

    for _ in range(3):
        stream = cupy.cuda.Stream(non_blocking=True)
        done = cupy.cuda.Event()
        stream.busy()
        program.call(compiler, rng, stream=stream.ptr, finished=False)
        done.record(stream)
        assert not done.done
        stream.synchronize()


def test_other_stages_do_nothing(program, compiler, calls, rng):
    for stage in range(xla_frame.EXECUTE):
        compiler.call(program.number, [], [], stage=stage)
    assert not calls


def test_another_device_has_notes_of_its_own(program, compiler, calls, rng):
    for context, asked in ((CONTEXTS[0], True), (CONTEXTS[0], False), (CONTEXTS[1], True), (CONTEXTS[0], False)):
        compiler.context, before = context, len(calls)
        check(program, compiler, rng)
        assert bool(calls[before:]) == asked


def test_buffers_that_lie_otherwise_have_notes_of_their_own(here, program, compiler, calls, rng):
    """A launcher chooses its kernel by alignment."""
    put = program._put
    for shift, asked in ((0, True), (2, True), (0, False), (2, False)):

        def shifted(array, shift=shift):
            import cupy

            memory = cupy.empty(array.nbytes + 16, np.uint8)
            place = cupy.ndarray(array.shape, array.dtype, memory.data + shift * (array.dtype.itemsize <= 2))
            place[...] = put(array)
            return place

        program._put, before = shifted, len(calls)
        check(program, compiler, rng)
        assert bool(calls[before:]) == asked, shift


def test_work_that_is_no_launch_is_done_each_time(here, program, compiler, calls, monkeypatch, rng):
    import cupy

    done, write = [], Op.write

    def more(self, *arguments):
        write(self, *arguments)
        cupy.cuda.get_current_stream().add(lambda: done.append(1))

    monkeypatch.setattr(Op, "write", more)
    for turn in range(3):
        check(program, compiler, rng)
        assert len(done) == turn + 1


def test_an_error_while_launches_are_recorded_is_not_remembered(here, program, compiler, calls, monkeypatch, rng):
    """Such as an error because another library holds the device's memory."""
    import cupy

    failed, write = [], Op.write

    def without_memory(self, *arguments):
        if not failed and cupy.cuda.get_current_stream().is_capturing():
            failed.append(True)
            raise MemoryError("out of memory")
        write(self, *arguments)

    monkeypatch.setattr(Op, "write", without_memory)
    check(program, compiler, rng)
    assert failed
    check(program, compiler, rng)  # is recorded
    made = len(calls)
    check(program, compiler, rng)
    assert len(calls) == made


def test_what_goes_wrong_in_python_is_an_error(program, compiler, monkeypatch, rng):
    def fail(self, *arguments):
        raise ValueError("q: got nonsense")

    with monkeypatch.context() as patched:
        patched.setattr(Op, "write", fail)
        with pytest.raises(RuntimeError, match=r"^ValueError: q: got nonsense$"):
            program.call(compiler, rng)
    check(program, compiler, rng)


def test_a_launch_that_fails_is_an_error(program, compiler, rng):
    check(program, compiler, rng)
    compiler.fail = 701
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: got CUDA error 701"):
        program.call(compiler, rng)
    compiler.fail = 0
    check(program, compiler, rng)


def test_a_program_of_another_process_is_an_error(compiler):
    with pytest.raises(RuntimeError, match="compiled in another process"):
        compiler.call(12345, [], [])


def test_threads_that_trace_first_programs_at_once_register_one_handler(monkeypatch):
    """XLA refuses a second one."""
    both, registered = threading.Barrier(2), []

    def make(*addresses):
        with contextlib.suppress(threading.BrokenBarrierError):  # broken if one thread waits for the other
            both.wait(0.5)
        return 0

    monkeypatch.setattr(xla, "make_handler", make)
    monkeypatch.setattr(xla, "address_of", lambda function: 0)
    driver = types.SimpleNamespace(cuLaunchKernelEx=None, cuCtxGetCurrent=None)
    monkeypatch.setattr(xla, "ctypes", types.SimpleNamespace(CDLL=lambda name: driver))
    monkeypatch.setattr(xla, "in_python", lambda: 0)
    monkeypatch.setattr(jax.ffi, "pycapsule", lambda handler: handler)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *rest, **more: registered.append(name))
    xla._register.cache_clear()
    threads = [threading.Thread(target=xla.register) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    xla._register.cache_clear()
    assert registered == [xla.TARGET]


def test_the_same_operation_has_the_same_number(compiler, rng):
    """It is part of the cache key of a compiled program."""
    arguments = operations.CASES[CASE](rng)
    names = [name for name, x in arguments.items() if isinstance(x, np.ndarray)]
    static = {name: x for name, x in arguments.items() if name not in names}

    def numbers(**more):
        def function(*arrays):
            return ops.dense_mla_decode(**dict(zip(names, arrays, strict=True)), **{**static, **more})

        return compiled(function, *(arguments[name] for name in names))[1]

    assert numbers() == numbers()
    assert numbers(softmax_scale=0.5) == numbers(softmax_scale=0.5) != numbers(softmax_scale=0.25)


def test_xlas_own_frames_are_read():
    """XLA's calls on the CPU, which have no stream but the same form."""
    seen = []

    def look(address, status):
        frame = xla_frame.CallFrame.from_address(address)
        if frame.extension:
            return xla._in_python(address, status)
        x, y = (
            (ctypes.c_float * 3).from_address(at) for at in (*frame.arguments.addresses(), *frame.results.addresses())
        )
        seen.append((frame.attributes.values[0].contents.value[0], list(x)))
        y[:] = [2 * value for value in x]
        return 0

    table = np.zeros(2 * xla_handler.SLOTS, np.int64)
    functions = FUNCTION(WORD, WORD, WORD)(look), FUNCTION(WORD, WORD)(lambda into: 0)
    python, context = map(xla_handler.address_of, functions)
    handler = xla_handler.make_handler(table.ctypes.data, 0, context, python)
    jax.ffi.register_ffi_target("cumla_frames", jax.ffi.pycapsule(handler), platform="cpu")
    call = jax.ffi.ffi_call("cumla_frames", jax.ShapeDtypeStruct((3,), "float32"))
    got = jax.jit(lambda x: call(x, call=np.uint64(1 << 40)))(np.array([1, 2, 3], np.float32))
    assert list(got) == [2, 4, 6]
    assert seen == [(1 << 40, [1, 2, 3])]


def test_jax_refuses_to_export_a_program(compiler, rng):
    """docs/jax.md says so: the handler's notes are this process's."""
    arguments = operations.CASES["quantize_and_insert_k_cache-DSV4_FP8"](rng)
    arrays = [arguments[name] for name in ("k", "k_cache", "slot_mapping")]
    insert = jax.jit(functools.partial(ops.quantize_and_insert_k_cache, block_size=operations.BLOCK))
    export = pytest.importorskip("jax.export")
    with pytest.raises(ValueError, match=f"(?s)custom calls whose targets.*{xla.TARGET}"):
        export.export(insert, platforms=["cuda"])(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
