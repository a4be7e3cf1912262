"""The structures that XLA's FFI passes to a custom call, as far as cumla needs them (jaxlib's xla/ffi/api/c_api.h).

XLA only appends members to these structures, and keeps old ones for at least a year.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

METADATA = 1  # XLA_FFI_Extension_Metadata
EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
COMMAND_BUFFER_COMPATIBLE = 1  # of XLA_FFI_Handler_TraitsBits
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL


class Extension(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p))


class Version(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class Metadata(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32))


class MetadataExtension(ctypes.Structure):
    _fields_ = (("base", Extension), ("metadata", POINTER(Metadata)))


class Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("version", Version), ("internal", c_void_p),
        ("error_create", c_void_p), ("error_get_message", c_void_p), ("error_destroy", c_void_p),
        ("handler_register", c_void_p), ("stream_get", c_void_p),
    )  # fmt: skip


class Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p), ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )  # fmt: skip


class Buffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", c_void_p),
        ("buffers", POINTER(POINTER(Buffer))),
    )  # fmt: skip

    def addresses(self) -> list[int]:
        return [self.buffers[i].contents.data or 0 for i in range(self.size)]


class Scalar(ctypes.Structure):
    _fields_ = (("dtype", c_int), ("value", POINTER(ctypes.c_uint64)))


class Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", c_void_p),
        ("names", c_void_p), ("values", POINTER(POINTER(Scalar))),
    )  # fmt: skip


class CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", POINTER(Extension)), ("api", POINTER(Api)), ("context", c_void_p),
        ("stage", c_int), ("arguments", Buffers), ("results", Buffers), ("attributes", Attributes),
    )  # fmt: skip


class StreamGet(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class ErrorCreate(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class ErrorDestroy(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("error", c_void_p))


TAKES_ONE = ctypes.CFUNCTYPE(c_void_p, c_void_p)  # every function of the API


def asked(function: int, question: Any) -> int:
    """Call an API function with its argument structure. Returns the error, or 0."""
    question.struct_size = ctypes.sizeof(question)
    return TAKES_ONE(function)(ctypes.addressof(question)) or 0


def stream_of(frame: CallFrame) -> int:
    """The CUDA stream of a call. Raises RuntimeError if it has none, as on the CPU."""
    question = StreamGet(context=frame.context)
    error = asked(frame.api.contents.stream_get, question)
    if error:
        asked(frame.api.contents.error_destroy, ErrorDestroy(error=error))
        raise RuntimeError("XLA has no stream for this call")
    return question.stream or 0


def error_of(frame: CallFrame, message: str) -> int:
    """An error object for XLA, which becomes its owner."""
    return asked(frame.api.contents.error_create, ErrorCreate(message=message.encode(), code=INTERNAL))


def say_what_we_are(metadata: Metadata) -> None:
    metadata.version.major, metadata.version.minor = version()
    metadata.traits = COMMAND_BUFFER_COMPATIBLE


@functools.cache
def version() -> tuple[int, int]:
    """The version of jaxlib's FFI."""
    import jax

    text = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return int(found["MAJOR"]), int(found["MINOR"])
