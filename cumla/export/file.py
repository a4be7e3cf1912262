"""The file that `cumla export` writes and the C runtime reads: tables of fixed-size structs, little-endian.

cumla/runtime/cumla.c has the same structs in the same order.
A header has the file's size and a checksum of what follows, then the offset and the count of each table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels.cuda.device import Device
from .fields import OperationFields
from .record import LEAST_NUMBER, MOST_NUMBER, Function, Program, Record, RecordedLaunch
from .self_test import Case
from .words import Word

MAGIC, VERSION = b"CUMLA\0\r\n", 2
HEADER = struct.Struct("<8sIIQQIIII")  # magic, version, ABI, bytes, checksum, capability, SMs, 0, tables
TABLE = struct.Struct("<QQ")  # offset, count
NONE = 0xFFFFFFFF
# The structs of each table, as in `struct`; "bytes" has no structs.
TABLES = {
    "clusters": "<IIIII",  # function, CTAs of a cluster, threads, shared bytes, clusters that run at a time
    "operations": "<IIIIIIII",  # name, words, first field's name, records, the workspace's size, arrays
    "arrays": "<I",  # the first field of an array
    "field_names": "<I",
    "records": "<IIIIIIII",  # operation, name, first condition, conditions, by, first segment, segments, 0
    "conditions": "<IIIIqq",  # field, kind, word, multiple, least, most
    "segments": "<qII",  # last deciding value, sequence, 0
    "sequences": "<II",  # first launch, launches
    "launches": "<IIIIIIIIIIIIII",  # function, grid, block, shared, overlap, template, bytes, first part, parts, 0
    "parts": "<IIII",  # offset, bytes, first of its words, how many: 1, or 7 of a tensor map
    "part_words": "<I",
    "words": "<HHHHIIqqqqq",  # first, second, third, base, first run, runs, scale, third_scale, add, divisor, most
    "runs": "<qqq",  # start, value, slope
    "functions": "<IIII",  # program, name, shared bytes, 0
    "programs": "<QQ",  # place among the bytes, size
    "cases": "<IIIIIIIIQ",  # operation, name, first word, first fill, fills, first check, checks, 0, bytes of memory
    "case_words": "<q",
    "fills": "<IIIIQ",  # field of the address, place and bytes of what is repeated, 0, bytes
    "checks": "<IIIIQQddd",  # fill, place, elements, most beyond; first, stride; absolute, relative, cosine
    "bytes": "",
}
EQUAL, RANGE, AT_LEAST, NUMBER, PRODUCT = range(5)  # kinds of conditions; a number's ends are float64


class Writer:
    """Collects the tables of a file."""

    def __init__(self) -> None:
        self.tables: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self.bytes = bytearray()
        self._places: dict[bytes, int] = {}
        self._words: dict[Word, int] = {}
        self._programs: dict[Program, int] = {}
        self._functions: dict[Function, int] = {}

    def place(self, data: bytes) -> int:
        """Where these bytes are in the file's bytes, at a multiple of 16."""
        if data not in self._places:
            self.bytes += bytes(-len(self.bytes) % 16)
            self._places[data] = len(self.bytes)
            self.bytes += data
        return self._places[data]

    def text(self, text: str) -> int:
        return self.place(text.encode() + b"\0")

    def add(self, table: str, rows: Iterable[tuple[Any, ...]]) -> tuple[int, int]:
        """Append structs; returns the first one's index, and their number."""
        entries, rows = self.tables[table], list(rows)
        entries += rows
        return len(entries) - len(rows), len(rows)

    def word(self, word: Word) -> int:
        if word not in self._words:
            runs = self.add("runs", word.runs) if word.runs else (0, 0)
            fields = word.first, word.second, word.third, word.base
            numbers = word.scale, word.third_scale, word.add, word.divisor, word.most
            self._words[word], _ = self.add("words", [(*fields, *runs, *numbers)])
        return self._words[word]

    def operation(self, number: int, fields: OperationFields, records: Sequence[Record]) -> None:
        names = self.add("field_names", [(self.text(name),) for name in fields.names])[0]
        workspace = fields.names.index(WORKSPACE) if WORKSPACE in fields.names else NONE
        made = [self.record(number, x) for x in records]
        first, count = self.add("records", made)
        arrays = self.add("arrays", [(x.first,) for x in fields.parameters if x.is_array])
        self.add("operations", [(self.text(fields.spec.name), fields.words, names, first, count, workspace, *arrays)])

    def record(self, operation: int, record: Record) -> tuple[int, ...]:
        conditions = []
        for x in record.conditions:
            kind = RANGE if x.word is None else PRODUCT if x.is_product else AT_LEAST if x.at_least else EQUAL
            word = NONE if x.word is None else self.word(x.word)
            least, most = x.least, x.most
            if x.is_number:
                kind, (least, most) = NUMBER, (bits_of(number) for number in (LEAST_NUMBER, MOST_NUMBER))
            conditions.append((x.field, kind, word, x.multiple, least, most))
        sequences, _ = self.add("sequences", [self.sequence(x) for x in record.sequences])
        segments = self.add("segments", [(last, sequences + index, 0) for last, index in record.segments])
        return (operation, self.text(record.call.name), *self.add("conditions", conditions), self.word(record.by),
                *segments, 0)  # fmt: skip

    def sequence(self, launches: Sequence[RecordedLaunch]) -> tuple[int, int]:
        return self.add("launches", [self.launch(x) for x in launches])

    def launch(self, x: RecordedLaunch) -> tuple[int, ...]:
        parts = []
        for part in x.parts:
            words = self.add("part_words", [(self.word(word),) for word in part.words])
            parts.append((part.offset, part.size, *words))
        return (
            self.function(x.function, x.most_shared), *map(self.word, x.grid), *x.block, self.word(x.shared_bytes),
            int(x.overlap), self.place(x.template), len(x.template), *self.add("parts", parts), 0,
        )  # fmt: skip

    def case(self, operation: int, case: Case) -> None:
        words, _ = self.add("case_words", [(x,) for x in case.words])
        fills = self.add("fills", [(x.field, self.place(x.block), len(x.block), 0, x.bytes) for x in case.fills])
        checks = []
        for x in case.checks:
            place = self.place(x.want.tobytes())
            bound = float(x.bound.absolute), x.bound.relative, float(x.bound.cosine)
            checks.append((x.fill, place, len(x.want), x.most, x.first, x.stride, *bound))
        row = operation, self.text(case.name), words, *fills, *self.add("checks", checks), 0, case.bytes
        self.add("cases", [row])

    def function(self, function: Function, most_shared: int) -> int:
        if function not in self._functions:
            program = self._programs.setdefault(function.program, len(self._programs))
            self._functions[function], _ = self.add("functions", [(program, self.text(function.name), 0, 0)])
        index = self._functions[function]
        program, name, before, _ = self.tables["functions"][index]
        self.tables["functions"][index] = program, name, max(before, most_shared), 0
        return index

    @property
    def programs(self) -> list[Program]:
        """All programs, in order."""
        return list(self._programs)

    def clusters(self, most: Mapping[int, int]) -> list[tuple[int, ...]]:
        """Rows of the table of clusters. most: clusters that run at a time, by the number of CTAs in a cluster."""
        launches = {(row[0], row[4], row[7]) for row in self.tables["launches"]}
        found: list[tuple[int, ...]] = []
        for function, index in self._functions.items():
            size = dict(function.program.macros).get("PARTS", 1) if function.name == "sparse_mla_decode" else 1
            for of_launch, threads, shared in sorted(launches):
                if of_launch == index and isinstance(size, int) and size > 1:
                    shared_bytes = self.tables["words"][shared][WORD_ADD]
                    found.append((index, size, threads, shared_bytes, most[size]))
        return found

    def file(self, abi: int, device: Device, cubins: Mapping[Program, bytes]) -> bytes:
        """The file's bytes."""
        self.add("programs", [(self.place(cubins[x]), len(cubins[x])) for x in self.programs])
        self.add("clusters", self.clusters(dict(device.clusters or ())))
        bodies = []
        for name, layout in TABLES.items():
            body = b"".join(struct.pack(layout, *row) for row in self.tables[name]) if layout else bytes(self.bytes)
            bodies.append((body, len(self.tables[name]) if layout else len(body)))
        at = HEADER.size + TABLE.size * len(TABLES)
        table, data = b"", b""
        for body, count in bodies:
            data += bytes(-(at + len(data)) % 16)
            table += TABLE.pack(at + len(data), count)
            data += body
        rest = table + data
        sizes = HEADER.size + len(rest), checksum(rest)
        numbers = device.limits.capability, device.sms, 0, len(TABLES)
        return HEADER.pack(MAGIC, VERSION, abi, *sizes, *numbers) + rest


WORKSPACE = "workspace.shape[0]"
WORD_ADD = 8  # of a row of words


def checksum(data: bytes) -> int:
    """Fletcher's sum of 32-bit words, modulo 2^32; what is beyond the last word counts as zeros."""
    import numpy as np

    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint64)
    first = int(words.sum()) & MASK
    weights = np.arange(len(words), 0, -1, dtype=np.uint64)
    return first | (int((words * weights).sum()) & MASK) << 32


MASK = 0xFFFFFFFF


def bits_of(number: float) -> int:
    """The bits of a float64, as an integer; in the order of the numbers if they are positive."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def read(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The tables of a file; the bytes under "bytes", the header under "header". Raises ValueError for another file."""
    data = path.read_bytes()
    if len(data) < HEADER.size or data[:8] != MAGIC:
        raise ValueError(f"{path}: is no file of cumla export")
    header = HEADER.unpack_from(data)
    if header[1] != VERSION or header[3] != len(data) or header[4] != checksum(data[HEADER.size :]):
        raise ValueError(f"{path}: is of another version, or is damaged")
    found: dict[str, list[tuple[Any, ...]]] = {"header": [header]}
    for i, (name, layout) in enumerate(TABLES.items()):
        offset, count = TABLE.unpack_from(data, HEADER.size + TABLE.size * i)
        if layout:
            size = struct.calcsize(layout)
            found[name] = [struct.unpack_from(layout, data, offset + size * j) for j in range(count)]
        else:
            found[name] = [(data[offset : offset + count],)]
    return found
