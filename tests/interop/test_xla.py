"""The compiled handler of XLA's custom calls, called as XLA calls it, on an emulated device."""

import ctypes
import functools
import re
import types

import numpy as np
import pytest

from cumla.interop.ops import OPS, Op
from support import operations
from support.lab import lab_of

jax = pytest.importorskip("jax")
ops = pytest.importorskip("cumla.interop.jax")
from cumla.interop import xla, xla_frame, xla_handler  # noqa: E402  (they import jax)

WORD, FUNCTION = ctypes.c_int64, ctypes.CFUNCTYPE
CONTEXTS = {0: 1001, 1: 1002}  # of the emulated devices


class Xla:
    """XLA's side: calls of the handler with frames like its own."""

    def __init__(self, driver, device):
        self.driver, self.device, self.launches, self.fail = driver, device, 0, 0
        self.context, self.messages = CONTEXTS[0], []
        functions = {
            "stream_get": FUNCTION(WORD, WORD)(self._stream_get), "error_create": FUNCTION(WORD, WORD)(self._error),
        }  # fmt: skip
        self._functions = [*functions.values(), FUNCTION(WORD, WORD, WORD, WORD, WORD)(self._launch),
                           FUNCTION(WORD, WORD)(self._context)]  # fmt: skip
        self.api = xla_frame.Api(**{name: xla_handler.address_of(f) for name, f in functions.items()})
        self.table = xla.Table()
        self.address = xla_handler.make_handler(
            self.table.words.ctypes.data, *map(xla_handler.address_of, self._functions[2:]), xla.in_python()
        )
        self.handler = FUNCTION(WORD, WORD)(self.address)

    def _stream_get(self, question):
        ctypes.cast(question, ctypes.POINTER(xla_frame.StreamGet)).contents.stream = self.stream
        return 0

    def _error(self, question):
        self.messages.append(ctypes.cast(question, ctypes.POINTER(xla_frame.ErrorCreate)).contents.message.decode())
        return len(self.messages)

    def _launch(self, config, function, _, extra):
        self.launches += 1
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


@pytest.fixture(params=[pytest.param("cuda", id="emulated")])
def device(request):
    yield from lab_of(request)


@pytest.fixture
def calls(monkeypatch):
    """The names of the operations that Python is asked for."""
    calls = []
    run = Op.run

    def counted(self, *args, **kwargs):
        calls.append(self.name)
        run(self, *args, **kwargs)

    monkeypatch.setattr(Op, "run", counted)
    return calls


@pytest.fixture
def compiler(device, monkeypatch):
    from emulation.cupy import DRIVER

    made = Xla(DRIVER, device)
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
    """What XLA would be given for a GPU: the text, and the numbers of its custom calls."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return text, [int(number) for number in re.findall(r"call = (\d+) : ui64", text)]


class Program:
    """A custom call of one operation, with arrays of its own each time."""

    def __init__(self, device, case, rng):
        self.device, self.case, self.op = device, case, OPS[operations.operation(case)]
        arguments = operations.CASES[case](rng)
        self.names = [name for name in self.op.signature.parameters if isinstance(arguments.get(name), np.ndarray)]
        self.static = {name: x for name, x in arguments.items() if name not in self.names}
        function = functools.partial(getattr(ops, self.op.name), **self.static)
        arrays = [arguments[name] for name in self.names]
        _, (self.number,) = compiled(lambda *arrays: function(**dict(zip(self.names, arrays, strict=True))), *arrays)

    def _put(self, array):
        """As XLA has its arrays."""
        return self.device.put(np.ascontiguousarray(array))

    def call(self, compiler, rng, **more):
        """Make the call with other arrays. Returns what it wrote and what an eager call writes."""
        arguments = operations.CASES[self.case](rng)
        want = [x.get() for x in operations.expected(self.case, arguments, self.op.writes, self._put)]
        inputs = [self._put(arguments[name]) for name in self.names]
        call = compiler.table.calls[self.number]
        written = [inputs[self.names.index(name)] for name in self.op.writes if name in self.names]
        new = [self._put(np.zeros(*shape)) for shape in call.shapes[len(inputs) + len(written) :]]
        compiler.call(self.number, inputs, [*written, *new], **more)
        return [x.get() for x in (*written, *new)][: len(want)], want


@pytest.mark.parametrize("case", operations.CASES)
def test_the_second_call_is_made_without_python(case, device, compiler, calls, rng):
    program = Program(device, case, rng)
    for turn in range(3):
        before = len(calls)
        got, want = program.call(compiler, rng)
        for one, other in zip(got, want, strict=True):
            assert operations.same_bits(one, other)
        assert bool(calls[before:]) == (turn == 0), (turn, calls)
