"""Exports calls for engines without Python: compiled kernels and the launches of every call, in one file.

`cumla export` writes it; the C runtime of cumla/runtime reads it (docs/guide/without-python.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..kernels.cuda.device import Device
from .compiled import cubins
from .file import Writer
from .header import OPERATIONS, abi
from .record import ExportedCall, Program, Record, record_of
from .self_test import cases_of

CompileAll = Callable[[list[Program], int], dict[Program, bytes]]
__all__ = ["cubins", "file_of", "record_of", "recorded"]


def recorded(calls: Iterable[ExportedCall], device: Device) -> list[Record]:
    """The records of calls on a device. Raises ExportError."""
    return [record_of(call, device) for call in calls]


def file_of(records: Iterable[Record], device: Device, compile_all: CompileAll = cubins) -> bytes:
    """The bytes of a file with these records.

    Args:
        compile_all: programs and a capability -> the code of each
    """
    writer, records = Writer(), list(records)
    for number, fields in enumerate(OPERATIONS):
        writer.operation(number, fields, [x for x in records if x.call.fields is fields])
    for case in cases_of(records):
        writer.case(OPERATIONS.index(case.call.fields), case)
    return writer.file(abi(), device, compile_all(writer.programs, device.limits.capability))
