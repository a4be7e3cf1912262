"""Records of an operation's launches: each word a formula of the call's fields, found from calls of every claimed size.

Calls are dry runs with fake arrays: no GPU is needed, and launchers choose kernels for the described device.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.dry_run import dry_running
from ..kernels.cuda.dense_attention import LOG2_E
from ..kernels.cuda.device import Device
from ..kernels.cuda.launch import Launch
from ..kernels.cuda.tma import MapWord
from ..specs.inputs import Size
from .fields import PLANNED, OperationFields
from .words import Fields, Samples, Word, found

ARENA_BYTES = 1 << 44
ALIGNMENT = 16  # of addresses and strides
MOST_STEPS = 1 << 12  # a sample's stride exceeds the packed stride by fewer steps
LEAST_SAMPLES = 24  # of a sequence of kernels
TRIES = 2  # of strides: an odd multiple, and a random one
LEAST_NUMBER, MOST_NUMBER = 2.0**-100, 2.0**20  # scales and epsilons that a file serves
FLOAT, FLOAT_LOG2_E = 0x104, 0x204  # sizes of a part that is a float64 field as float32, or the field times log2(e)
FACTORS = {FLOAT: 1.0, FLOAT_LOG2_E: LOG2_E}
CHECKED = 64  # calls that a record is checked against in addition to those that it was found from


class ExportError(ValueError):
    """Launches that no record describes."""


class Limit(NamedTuple):
    """The product of two fields of a call, by name, is from `least` to `most`."""

    first: str
    second: str
    least: int
    most: int


@dataclass(frozen=True)
class ExportedCall:
    """Calls of one kind that a file serves.

    Attributes:
        fields: the operation's
        name: what the calls are, for people
        size: of the smallest call
        ranges: fields of Size that vary: the first and the last value
        by: the field of Size of which every value is recorded: it decides kernels and grids
        arguments: the call's arguments at a size, results included
        limits: of products of two fields: what others may have other kernels
    """

    fields: OperationFields
    name: str
    size: Size
    ranges: Mapping[str, tuple[int, int]]
    by: str
    arguments: Callable[[Size], dict[str, Any]]
    limits: tuple[Limit, ...] = ()


class Program(NamedTuple):
    """A program: a file of csrc/, the target and macros."""

    file: str
    arch: str | None
    macros: tuple[tuple[str, Any], ...]


class Function(NamedTuple):
    """A kernel of a program."""

    program: Program
    name: str


class Part(NamedTuple):
    """A part of the packed arguments: `size` bytes at `offset`; a tensor map has seven words."""

    offset: int
    size: int
    words: tuple[Word, ...]


class RecordedLaunch(NamedTuple):
    """A launch: its sizes are words; `template` has the constant bytes of the arguments.

    most_shared: bytes of shared memory that launches of the kernel may ask for; 0: what every kernel may
    """

    function: Function
    grid: tuple[Word, ...]
    block: tuple[int, ...]
    shared_bytes: Word
    overlap: bool
    template: bytes
    parts: tuple[Part, ...]
    most_shared: int


class Condition(NamedTuple):
    """What a field must be: equal to a word, at least the word, or, without one, from least to most; and a multiple. A
    number is a float64 from LEAST_NUMBER to MOST_NUMBER. With is_product, the word, a product of two fields, is from
    least to most."""

    field: int
    word: Word | None
    at_least: bool = False
    is_number: bool = False
    is_product: bool = False
    least: int = 0
    most: int = 0
    multiple: int = 1


class Record(NamedTuple):
    """The launches of calls of one kind.

    Attributes:
        conditions: of the call's fields
        by: the deciding value
        segments: (last deciding value, index of a sequence): in order
        sequences: launches
    """

    call: ExportedCall
    conditions: tuple[Condition, ...]
    by: Word
    segments: tuple[tuple[int, int], ...]
    sequences: tuple[tuple[RecordedLaunch, ...], ...]


class Arena:
    """Addresses for fake arrays: reserved and never touched."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._memory = mmap.mmap(-1, ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._rng, self._at = rng, 0

    def renewed(self) -> None:
        """Arrays of the next sample begin."""
        self._at = int(self._rng.integers(1, 1 << 24)) * ALIGNMENT

    def array(self, like: Any, steps: tuple[int, ...], odd: bool = False) -> np.ndarray:
        """A fake array of the shape and dtype of `like`.

        Args:
            steps: bytes for each axis: the axis has a random stride that is a multiple of them; 0: the packed stride
            odd: the stride is an odd multiple
        """
        shape, item = like.shape, like.dtype.itemsize
        strides, stride = [0] * len(shape), item
        for axis in reversed(range(len(shape))):
            if steps[axis]:
                multiple = -(-stride // steps[axis]) + int(self._rng.integers(0, MOST_STEPS))
                stride = (multiple | odd) * steps[axis]
            strides[axis] = stride
            stride *= max(shape[axis], 1)
        size = stride
        start = self._at
        self._at = -(-(start + size) // ALIGNMENT) * ALIGNMENT + int(self._rng.integers(1, 1 << 16)) * ALIGNMENT
        return np.ndarray(shape, like.dtype, self._bytes, start, tuple(strides))


def record_of(call: ExportedCall, device: Device, seed: int = 0) -> Record:
    """The launches of calls of one kind on a device.

    Raises ExportError if a word follows from no formula, or the sequence of kernels not from the deciding value.
    """
    sampler = Sampler(call, device, np.random.default_rng(seed))
    calls = list(sampler.calls())
    try:
        made = _record(call, sampler, list(calls), first_alone=False)
    except ExportError:  # NumPy's views of a single row have other strides
        made = _record(call, sampler, calls, first_alone=True)
    for _ in range(CHECKED):
        check(made, sampler.sample(sampler.sizes()))
    return made


def _record(call: ExportedCall, sampler: Sampler, calls: list[Sample], first_alone: bool) -> Record:
    """The record of these calls, and of more where a sequence has few of them.

    first_alone: the calls of the first deciding value are a sequence of their own
    """
    first = call.ranges[call.by][0]

    def key(x: Sample) -> Any:
        return first_alone and x.by == first, _sequence(x.launches)

    values: dict[Any, list[int]] = {}
    for x in calls:
        values.setdefault(key(x), []).append(x.by)
    for of_sequence in values.values():  # few samples would follow from formulas that are wrong
        for _ in range(LEAST_SAMPLES - len(of_sequence)):
            calls.append(sampler.sample(sampler.sizes(**{call.by: int(sampler.rng.choice(of_sequence))})))
    fields = _fields(call, calls)
    by = found(fields.by, fields, table=False)
    if by is None:
        raise ExportError(f"{call.name}: no field has the deciding value, {call.by}")
    numbers = {sequence: index for index, sequence in enumerate(values)}
    indices = np.array([numbers[key(x)] for x in calls])
    sequences = []
    for index in range(len(numbers)):
        rows = np.flatnonzero(indices == index)
        launches = [calls[row].launches for row in rows]
        sequences.append(tuple(_launch(call.name, each, fields.chosen(rows)) for each in zip(*launches, strict=True)))
    return Record(call, _conditions(call, fields), by, _segments(call, fields.by, indices), tuple(sequences))


def check(record: Record, sample: Sample) -> None:
    """Raise ExportError unless a record gives this call's launches, word for word."""
    fields, by = sample.values, record.by.evaluate(sample.values, 0)
    index = next(index for last, index in record.segments if by <= last)
    launches = [x for x in sample.launches if 0 not in x.grid]
    for recorded, launch in zip(record.sequences[index], launches, strict=True):
        sizes = tuple(word.evaluate(fields, by) for word in (*recorded.grid, recorded.shared_bytes))
        arguments = bytearray(recorded.template)
        for part in recorded.parts:
            words = [word.evaluate(fields, by) for word in part.words]
            found_bytes = described_bytes(words, part.size)
            arguments[part.offset : part.offset + len(found_bytes)] = found_bytes
        packed, what = launch.kernel.packed(launch.packed_arguments), f"{record.call.name}: {launch.kernel.raw.name}"
        if function_of(launch) != recorded.function:
            raise ExportError(f"{what} is another kernel than {recorded.function} at {record.call.by} {by}")
        if sizes != (*launch.grid, launch.shared_bytes):
            raise ExportError(f"{what}: sizes {launch.grid}, {launch.shared_bytes} bytes are not {sizes} of a formula")
        wrong = [at for at in range(len(packed)) if packed[at] != arguments[at]]
        if wrong:
            raise ExportError(f"{what}: arguments from byte {wrong[0]} on differ from the formulas")


def described_bytes(words: list[int], size: int) -> bytes:
    """The bytes of a word, or of a described tensor map that has these seven words."""
    if size in FACTORS:
        return struct.pack("<f", struct.unpack("<d", struct.pack("<q", words[0]))[0] * FACTORS[size])
    if len(words) == 1:
        return (words[0] & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    address, row, rows, pages, row_stride, page_bytes, box = words
    return struct.pack("<16q", address, 2, row, rows, pages, row_stride, page_bytes, 64, box, 1, *[0] * 6)


class Sample(NamedTuple):
    """A call and its launches."""

    by: int
    values: list[int]
    array_bytes: dict[str, int]
    launches: list[Launch]


class Sampler:
    """Makes calls of every size: each deciding value twice, the other sizes at random, their ends included."""

    def __init__(self, call: ExportedCall, device: Device, rng: np.random.Generator) -> None:
        self.call, self.device, self.rng, self.arena = call, device, rng, Arena(rng)
        self.steps = self._steps()

    def calls(self) -> Iterator[Sample]:
        first, last = self.call.ranges[self.call.by]
        for value in range(first, last + 1):
            for _ in range(2):
                yield self.sample(self.sizes(**{self.call.by: value}))
        for name, ends in self.call.ranges.items():
            for end in ends:
                yield self.sample(self.sizes(**{name: end}))
        for value in (first, last):  # with all other sizes at an end: what the sizes bound together has its own ends
            for end in range(2):
                ends_of = {name: ends[end] for name, ends in self.call.ranges.items()}
                yield self.sample(self.sizes(**ends_of | {self.call.by: value}))

    def sizes(self, **chosen: int) -> Size:
        for name, (first, last) in self.call.ranges.items():
            if name not in chosen:
                edges = first, last, int(self.rng.integers(first, last + 1)), _exponential(self.rng, first, last)
                chosen[name] = edges[int(self.rng.choice(4, p=(0.05, 0.05, 0.45, 0.45)))]
        return replace(self.call.size, **chosen)  # type: ignore[arg-type]

    def sample(self, size: Size) -> Sample:
        arguments = self.placed(self._with_numbers(self.call.arguments(size)), self.steps)
        return Sample(
            getattr(size, self.call.by), self.call.fields.values(arguments),
            {name: _extent(x) for name, x in arguments.items() if isinstance(x, np.ndarray)}, self.launches(arguments),
        )  # fmt: skip

    def _with_numbers(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with any scale and epsilon, where the operation has them."""
        numbers = {x.name: float(self.rng.uniform(LEAST_NUMBER, 1)) for x in self.call.fields.parameters if x.is_any}
        return {**arguments, **numbers}

    def placed(
        self, arguments: Mapping[str, Any], steps: Mapping[str, tuple[int, ...]], odd: bool = False
    ) -> dict[str, Any]:
        """The arguments with fake arrays. odd: strides are odd multiples of the steps."""
        self.arena.renewed()
        return {
            name: self.arena.array(x, steps.get(name, (0,) * x.ndim), odd) if isinstance(x, np.ndarray) else x
            for name, x in arguments.items()
        }  # fmt: skip

    def launches(self, arguments: Mapping[str, Any]) -> list[Launch]:
        fields, plan = self.call.fields, self.call.fields.plan_in(arguments)
        with dry_running(0, anywhere=True, described=self.device) as dry_run:
            if arguments.get(PLANNED):
                fields.call(arguments, plan)
            before = len(dry_run.launches)
            fields.call(arguments, plan)
        return dry_run.launches[before:]

    def _steps(self) -> dict[str, tuple[int, ...]]:
        """For each axis of an array of what its stride may be a multiple: of an element's bytes, of ALIGNMENT, or 0 for
        packed. For others the operation refuses it, or takes another kernel."""
        arguments = self.call.arguments(self.sizes(**{name: last for name, (_, last) in self.call.ranges.items()}))
        packed = _sequence(self.launches(self.placed(arguments, {})))
        found: dict[str, tuple[int, ...]] = {}
        for name, array in arguments.items():
            if isinstance(array, np.ndarray):
                found[name] = tuple(self._step(arguments, packed, name, axis) for axis in range(array.ndim))
        return found

    def _step(self, arguments: Mapping[str, Any], packed: Any, name: str, axis: int) -> int:
        array = arguments[name]
        if axis + 1 == array.ndim:
            return 0
        for step in (array.dtype.itemsize, ALIGNMENT):
            if self._takes(arguments, {name: tuple(step * (i == axis) for i in range(array.ndim))}, packed):
                return int(step)
        return 0

    def _takes(self, arguments: Mapping[str, Any], steps: Mapping[str, tuple[int, ...]], packed: Any) -> bool:
        """Whether strides of these multiples give the kernels of packed arrays: an odd one, and a random one."""
        try:
            return all(
                _sequence(self.launches(self.placed(arguments, steps, odd=number == 0))) == packed
                for number in range(TRIES)
            )
        except (ValueError, TypeError):
            return False


def _exponential(rng: np.random.Generator, first: int, last: int) -> int:
    """A number of any magnitude."""
    return min(last, int(first * math.exp(rng.random() * math.log(max(last / max(first, 1), 1))))) if first else first


def _extent(array: np.ndarray) -> int:
    """Bytes from an array's first to the end of its last element."""
    if not array.size:
        return 0
    return array.itemsize + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))


def _fields(call: ExportedCall, calls: list[Sample]) -> Fields:
    values = np.array([x.values for x in calls], np.int64)
    varies = (values != values[0]).any(axis=0)
    names, addresses = call.fields.names, []
    for parameter in call.fields.parameters:
        if parameter.is_array and values[0, parameter.first]:
            sizes = np.array([x.array_bytes[parameter.name] for x in calls], np.int64)
            addresses.append((parameter.first, sizes))
    known = {field for field, _ in addresses}
    numbers = tuple(parameter.first for parameter in call.fields.parameters if parameter.is_any)
    sizes_of = [i for i in range(len(names)) if varies[i] and i not in known and i not in numbers]
    sizes_of.sort(key=lambda i: ("strides" in names[i], i))
    kept: list[int] = []
    for i in sizes_of:  # equal fields once
        if not any((values[:, i] == values[:, j]).all() for j in kept):
            kept.append(i)
    return Fields(values, tuple(kept), tuple(addresses), np.array([x.by for x in calls], np.int64), numbers)


def function_of(launch: Launch) -> Function:
    """The kernel of a launch."""
    raw = launch.kernel.raw
    macros = tuple(sorted(raw.macros.items()))
    return Function(Program(raw.file, raw.arch, macros), raw.name)


def _sequence(launches: list[Launch]) -> tuple[Any, ...]:
    """What is the same in all launches of a sequence."""
    return tuple((function_of(x), x.block, x.overlap, _is_map(x), _absent(x)) for x in launches if 0 not in x.grid)


def _absent(launch: Launch) -> tuple[bool, ...]:
    """Which addresses of a launch are 0, such as a plan's where a call has none."""
    return tuple(not launch.packed_arguments[i] for i in launch.kernel.addresses)


def _is_map(launch: Launch) -> tuple[bool, ...]:
    return tuple(isinstance(x, MapWord) for x in launch.packed_arguments)


def _launch(name: str, launches: tuple[Launch, ...], fields: Fields) -> RecordedLaunch:
    """A launch of a sequence, from its samples."""
    first = launches[0]
    codes, template = first.kernel.layout_of_arguments(), bytearray(first.kernel.argument_bytes)
    what = f"{name}, {first.kernel.raw.name}"

    def formula(values: list[int], part: str) -> Word:
        word = found(np.array(values, np.int64), fields)
        if word is None:
            raise ExportError(f"{what}: {part} follows from no field of the call")
        return word

    grid = tuple(formula([x.grid[axis] for x in launches], f"grid[{axis}]") for axis in range(3))
    shared = formula([x.shared_bytes for x in launches], "shared memory")
    parts, index = [], 0
    while index < len(codes):
        offset, code = codes[index]
        values = [x.packed_arguments[index] for x in launches]
        if isinstance(first.packed_arguments[index], MapWord):
            words = [[x.packed_arguments[index + i] for x in launches] for i in (0, 2, 3, 4, 5, 6, 8)]
            parts.append(Part(offset, 128, tuple(formula(x, f"map at {offset}") for x in words)))
            index += 16
            continue
        if code in "fd":
            number = _number(values, fields)
            if number is not None:
                parts.append(Part(offset, number[0], (number[1],)))
            elif len(set(values)) > 1:
                raise ExportError(f"{what}: argument {index} is a fraction that differs")
            else:
                struct.pack_into("<" + code, template, offset, values[0])
        else:
            word, size = formula([int(x) for x in values], f"argument {index}"), struct.calcsize("<" + SIZES[code])
            if word.is_constant:
                template[offset : offset + size] = (word.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            else:
                parts.append(Part(offset, size, (word,)))
        index += 1
    return RecordedLaunch(
        function_of(first), grid, first.block, shared, first.overlap, bytes(template), tuple(parts),
        first.kernel._most_shared,
    )  # fmt: skip


def _number(values: list[float], fields: Fields) -> tuple[int, Word] | None:
    """The size of the part and the float64 field that these values are, as float32."""
    for field in fields.numbers:
        numbers = fields.values[:, field].copy().view(np.float64)
        for size, factor in FACTORS.items():
            if ((numbers * factor).astype(np.float32) == np.array(values, np.float32)).all():
                return size, Word(field, scale=1)
    return None


SIZES = {"P": "q", "i": "i", "q": "q", "I": "I", "?": "?"}


def _segments(call: ExportedCall, by: Samples, indices: Samples) -> tuple[tuple[int, int], ...]:
    """(last deciding value, sequence), in order. Raises ExportError if a value has several sequences."""
    of_value: dict[int, int] = {}
    for value, index in zip(by.tolist(), indices.tolist(), strict=True):
        if of_value.setdefault(value, index) != index:
            raise ExportError(f"{call.name}: {call.by} {value} has several sequences of kernels")
    segments: list[tuple[int, int]] = []
    for value in sorted(of_value):
        if segments and segments[-1][1] == of_value[value]:
            segments.pop()
        segments.append((value, of_value[value]))
    return tuple(segments)


def _conditions(call: ExportedCall, fields: Fields) -> tuple[Condition, ...]:
    """Every field's: equal to a formula of the fields before it, or in the range of the samples."""
    found_so_far: list[int] = []
    conditions = []
    addresses = {field for field, _ in fields.addresses}
    for i in range(fields.values.shape[1]):
        values, before = fields.values[:, i], fields._replace(sizes=tuple(found_so_far), addresses=())
        if i in addresses:
            conditions.append(Condition(i, None, least=1, most=MOST_ADDRESS, multiple=ALIGNMENT))
            continue
        if call.fields.names[i] == "workspace.shape[0]":
            bytes_needed = found(values, before)
            if bytes_needed is None:
                raise ExportError(f"{call.name}: the workspace's bytes follow from no field")
            conditions.append(Condition(i, bytes_needed, at_least=True))
            continue
        if i in fields.numbers:
            conditions.append(Condition(i, None, is_number=True))
            continue
        word = found(values, before, table=False)
        if word is not None:
            conditions.append(Condition(i, word))
            continue
        is_stride = call.fields.names[i].split(".")[-1].startswith("strides")
        found_so_far.append(i)
        if is_stride:
            multiple = math.gcd(ALIGNMENT, int(np.gcd.reduce(values)))
            conditions.append(Condition(i, None, most=MOST_FIELD_STRIDE, multiple=multiple))
        else:
            conditions.append(Condition(i, None, least=int(values.min()), most=int(values.max())))
    return (*conditions, *(_product(call, limit, fields.values) for limit in call.limits))


def _product(call: ExportedCall, limit: Limit, values: Samples) -> Condition:
    first, second = (call.fields.names.index(name) for name in limit[:2])
    products = values[:, first] * values[:, second]
    if products.min() < limit.least or products.max() > limit.most:
        raise ExportError(f"{call.name}: {limit.first} * {limit.second} is {products.min()} to {products.max()}")
    word = Word(first, second, scale=1)
    return Condition(first, word, is_product=True, least=limit.least, most=limit.most)


MOST_ADDRESS, MOST_FIELD_STRIDE = (1 << 62), (1 << 40) - 1
