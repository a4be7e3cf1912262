"""Machine code of a compiled function, called without Numba: llvmlite links it and ctypes calls it.

Importing Numba takes longer than most of a process's other start-up work, and it imports SciPy if installed. A process
that finds machine code needs neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import struct
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

DIGEST_BYTES = 32
# By Numba's name of the result type.
RESULTS: dict[str, Any] = {
    "none": None, "bool": ctypes.c_bool, "int64": ctypes.c_int64, "uint64": ctypes.c_uint64, "uint32": ctypes.c_uint32,
    "uint16": ctypes.c_uint16, "float32": ctypes.c_float, "float64": ctypes.c_double,
}  # fmt: skip
# A result and the address of an exception; the entry's arguments are these two and the words. ctypes releases the GIL
# in calls of functions of this kind.
Memory = ctypes.c_int64 * 2
Entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
PLAIN, ARRAY = {bool, int, float}, np.ndarray
FLAGS = 0x1 | 0x2 | 0x100 | 0x400  # NumPy flags: C-contiguous, Fortran-contiguous, aligned, writeable


class MachineCode(NamedTuple):
    """
    entry    symbol to call (entry.py)
    result   Numba's name of the result's type
    words    format of the entry's words, for `struct`
    needs    undefined symbols
    objects  object files
    """

    entry: str
    result: str
    words: str
    needs: tuple[str, ...]
    objects: tuple[bytes, ...]

    def as_bytes(self) -> bytes:
        header = json.dumps([self.entry, self.result, self.words, self.needs, [len(x) for x in self.objects]])
        payload = b"\n".join([header.encode(), b"".join(self.objects)])
        return hashlib.sha256(payload).digest() + payload

    @classmethod
    def from_bytes(cls, data: bytes) -> MachineCode:
        """Raises ValueError for data that `as_bytes` did not make."""
        payload = data[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != data[:DIGEST_BYTES]:
            raise ValueError("damaged")
        header, _, rest = payload.partition(b"\n")
        entry, result, words, needs, sizes = json.loads(header)
        ends = np.cumsum(sizes).tolist()
        objects = tuple(rest[end - size : end] for end, size in zip(ends, sizes, strict=True))
        return cls(entry, result, words, tuple(needs), objects)


class NativeFunction:
    """Linked machine code. Raises LookupError if a symbol that it needs is undefined."""

    def __init__(self, code: MachineCode) -> None:
        process = ctypes.CDLL(None)
        missing = [name for name in code.needs if not (hasattr(process, name) or llvm.address_of_symbol(name))]
        if missing:  # LLVM would end the process
            raise LookupError(f"undefined symbols: {', '.join(missing)}")
        # An engine each: two functions may use equal symbols with different meanings.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
        for file in code.objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(file))
        self._engine.finalize_object()
        self._entry = Entry(self._engine.get_function_address(code.entry))
        self._pack = struct.Struct(code.words).pack
        self._result = RESULTS[code.result]

    def __call__(self, words: list[Any]) -> Any:
        """Call with the words of arguments (`taken_apart`), whose arrays must live until it returns."""
        memory = Memory()
        address = ctypes.addressof(memory)
        if self._entry(address, address + 8, self._pack(*words)):
            raise RuntimeError("a compiled function raised an exception")
        return None if self._result is None else self._result.from_buffer(memory).value


def taken_apart(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """The types of arguments that machine code depends on, and the arguments as words."""
    key: list[Any] = []
    words: list[Any] = []
    _take_apart(arguments, key, words)
    return tuple(key), words


def _take_apart(arguments: tuple[Any, ...], key: list[Any], words: list[Any]) -> None:
    for value in arguments:
        kind = value.__class__
        if kind is ARRAY:
            words.append(id(value))
            key += (value.dtype, value.ndim, value.flags.num & FLAGS)
        elif kind in PLAIN:
            words.append(value)
            key.append(kind)
        elif isinstance(value, tuple):
            key += (kind, len(value))
            _take_apart(value, key, words)
        else:
            words.append(value.item())
            key.append(kind)


def packing(words: list[Any]) -> str:
    return "=" + "".join("d" if isinstance(word, float) else "q" for word in words)


@functools.cache
def _initialize() -> None:
    with contextlib.suppress(RuntimeError):  # since llvmlite 0.45 it initialises itself and raises here
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def target_machine() -> Any:
    _initialize()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), opt=2, reloc="static" if "86" in llvm.get_process_triple() else "default",
        codemodel="jitdefault", jit=True,
    )  # fmt: skip


@functools.cache
def processor() -> tuple[str, str, str]:
    """Target of machine code: triple, name and features."""
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def object_of(assembly: str) -> bytes:
    """LLVM's assembly, compiled."""
    machine = target_machine()
    module = llvm.parse_assembly(assembly)
    module.triple = llvm.get_process_triple()
    module.data_layout = str(machine.target_data)
    module.verify()
    made: bytes = machine.emit_object(module)
    return made


def undefined_symbols(object_file: bytes) -> set[str]:
    """Undefined symbols of an ELF object (64-bit, little-endian). Raises ValueError for any other file."""
    if object_file[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF file of 64 bits, little endian")
    (first_section,) = struct.unpack_from("<Q", object_file, 0x28)
    section_bytes, sections = struct.unpack_from("<HH", object_file, 0x3A)
    starts = range(first_section, first_section + sections * section_bytes, section_bytes)
    headers = [struct.unpack_from("<IIQQQQIIQQ", object_file, start) for start in starts]
    found = set()
    for _, kind, _, _, start, size, names, *_ in headers:
        if kind != 2:  # a table of symbols
            continue
        for at in range(start, start + size, 24):
            name, _, _, section = struct.unpack_from("<IBBH", object_file, at)
            if name and section == 0:
                text = headers[names][4] + name
                found.add(object_file[text : object_file.index(b"\0", text)].decode())
    return found
