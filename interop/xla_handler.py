"""The compiled handler of XLA's custom calls: it repeats a recorded call's launches with the new call's addresses.

Numba compiles it, so no C compiler is needed. It reads notes that Python has written, in words of 64 bits:

    next note of the call, CUDA context, buffers n, n alignments of their addresses,
    pairs p of buffers that share memory, p times (buffer, other, distance),
    launches, and of each: function, CUlaunchConfig, bytes of arguments, words w of them, w words,
        addresses a among them, a times (byte offset among the arguments, buffer, offset in it)

A call without a fitting note runs in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .xla_frame import EXECUTE, METADATA, Api, Attributes, Buffer, Buffers, CallFrame, Extension, Scalar, StreamGet

SLOTS = 1 << 14  # entries of the table of calls
MAX_BUFFERS = 64
MAX_ARGUMENT_BYTES = 4096
ARGUMENT_WORDS = MAX_ARGUMENT_BYTES // 8
MAX_VERSIONS = 32  # notes of a call, for different placements of its buffers
CONFIG_WORDS, STREAM_WORD = 7, 4  # of CUlaunchConfig
BUFFER_POINTER, BUFFER_SIZE = 1, 2  # tags of the entries of a launch's `extra`
ALIGNMENT_MASK = 15

WORD = ir.IntType(64)


@intrinsic
def load(typing: Any, address: Any) -> Any:
    """The word at an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], WORD.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def store(typing: Any, address: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], WORD.as_pointer()))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def on_stack(typing: Any, count: Any) -> Any:
    """The address of `count` words, a literal, on the stack of the calling function."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(WORD, count.literal_value))
        return builder.ptrtoint(memory, WORD)

    return types.int64(count), generate


def _caller(arguments: int) -> Any:
    """A function (address, words...) that calls the function at an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(WORD, [WORD] * arguments)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    signature = types.int64(*[types.int64] * (arguments + 1))
    if arguments == 1:
        return intrinsic(lambda typing, function, a: (signature, generate))
    if arguments == 2:
        return intrinsic(lambda typing, function, a, b: (signature, generate))
    return intrinsic(lambda typing, function, a, b, c, d: (signature, generate))


call_1, call_2, call_4 = _caller(1), _caller(2), _caller(4)

# Offsets in XLA's structures
EXTENSION, EXTENSION_TYPE = CallFrame.extension.offset, Extension.type.offset
STAGE, API, CONTEXT = CallFrame.stage.offset, CallFrame.api.offset, CallFrame.context.offset
STREAM_GET, QUESTION_BYTES = Api.stream_get.offset, ctypes.sizeof(StreamGet)
QUESTION_WORDS = QUESTION_BYTES // 8
QUESTION_CONTEXT, QUESTION_STREAM = StreamGet.context.offset, StreamGet.stream.offset
ARGUMENTS, RESULTS = (
    (getattr(CallFrame, name).offset + Buffers.size.offset, getattr(CallFrame, name).offset + Buffers.buffers.offset)
    for name in ("arguments", "results")
)
DATA = Buffer.data.offset
NUMBER, VALUE = CallFrame.attributes.offset + Attributes.values.offset, Scalar.value.offset
LOW = 0xFFFFFFFF  # mask of a C int


def make_handler(table: int, launch_kernel: int, current_context: int, in_python: int) -> int:
    """The address of a handler of XLA's FFI.

    Args:
        table: address of SLOTS pairs of words: the number of a call, the address of its first note
        launch_kernel: address of cuLaunchKernelEx
        current_context: address of cuCtxGetCurrent
        in_python: address of a function (frame, status) for all other cases; returns an error or 0
    """
    local: Callable[..., Any] = numba.njit(nogil=True)

    @local
    def first_note(number):
        slot = number % SLOTS
        for _ in range(SLOTS // 2):
            found = load(table + 16 * slot)
            if found == number:
                return load(table + 16 * slot + 8)
            if found == 0:
                return 0
            slot = (slot + 1) % SLOTS
        return 0

    @local
    def addresses_of(frame, memory):
        """Write the addresses of all buffers. Returns their number."""
        count = 0
        for which in range(2):
            size, buffers = ARGUMENTS if which == 0 else RESULTS
            for i in range(load(frame + size)):
                if count < MAX_BUFFERS:
                    store(memory + 8 * count, load(load(load(frame + buffers) + 8 * i) + DATA))
                count += 1
        return count

    @local
    def fitting(note, context, addresses, count):
        """The address of the launches of the first fitting note, or 0."""
        while note:
            at = note + 24
            fits = load(note + 8) == context and load(note + 16) == count
            if fits:
                for i in range(count):
                    fits = fits and load(addresses + 8 * i) & ALIGNMENT_MASK == load(at + 8 * i)
                at += 8 * count
                pairs = load(at)
                at += 8
                for _ in range(pairs):
                    first, other = load(addresses + 8 * load(at)), load(addresses + 8 * load(at + 8))
                    fits = fits and other - first == load(at + 16)
                    at += 24
                if fits:
                    return at
            note = load(note)
        return 0

    @local
    def launch(at, stream, addresses):
        """Launch the kernels of a note. Returns the driver's status."""
        config, extra = on_stack(CONFIG_WORDS), on_stack(6)
        arguments = on_stack(ARGUMENT_WORDS)
        launches = load(at)
        at += 8
        for _ in range(launches):
            function = load(at)
            at += 8
            for i in range(CONFIG_WORDS):
                store(config + 8 * i, load(at + 8 * i))
            store(config + 8 * STREAM_WORD, stream)
            at += 8 * CONFIG_WORDS
            store(extra + 40, load(at))
            words = load(at + 8)
            at += 16
            for i in range(words):
                store(arguments + 8 * i, load(at + 8 * i))
            at += 8 * words
            places = load(at)
            at += 8
            for _ in range(places):
                store(arguments + load(at), load(addresses + 8 * load(at + 8)) + load(at + 16))
                at += 24
            store(extra, BUFFER_POINTER)
            store(extra + 8, arguments)
            store(extra + 16, BUFFER_SIZE)
            store(extra + 24, extra + 40)
            store(extra + 32, 0)
            status = call_4(launch_kernel, config, function, 0, extra) & LOW
            if status:
                return status
        return 0

    def handler(frame):
        extension = load(frame + EXTENSION)
        if extension and load(extension + EXTENSION_TYPE) & LOW == METADATA:
            return call_2(in_python, frame, 0)
        if load(frame + STAGE) & LOW != EXECUTE:
            return 0
        context, addresses = on_stack(1), on_stack(MAX_BUFFERS)
        store(context, 0)
        call_1(current_context, context)
        count, at = addresses_of(frame, addresses), 0
        if count <= MAX_BUFFERS:
            at = fitting(first_note(load(load(load(load(frame + NUMBER)) + VALUE))), load(context), addresses, count)
        if not at:
            return call_2(in_python, frame, 0)
        question = on_stack(QUESTION_WORDS)
        store(question, QUESTION_BYTES)
        store(question + 8, 0)
        store(question + QUESTION_CONTEXT, load(frame + CONTEXT))
        error = call_1(load(load(frame + API) + STREAM_GET), question)
        if error:
            return error
        status = launch(at, load(question + QUESTION_STREAM), addresses)
        if status:
            return call_2(in_python, frame, status)
        return 0

    compiled = numba.cfunc(types.int64(types.int64))(handler)
    KEPT.append(compiled)
    return int(compiled.address)


KEPT: list[Any] = []  # keeps compiled code alive


def address_of(function: Any) -> int:
    """The address of a function of a library, or of ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
