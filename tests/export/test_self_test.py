"""A file's self-test: a case for every kernel, whose results the C runtime compares; `cumla export --test`."""

import ctypes
import functools
import re

import numpy as np
import pytest

from cumla.__main__ import main
from cumla.bounds import EQUAL, ROUNDED, compare
from cumla.export import library
from cumla.export.fields import DTYPES
from cumla.export.file import read
from cumla.export.self_test import PERIOD, arguments_of, block_of, cases_of, check_of, contents_of
from support import runtime
from support.command_line import error_line
from support.lab import Lab
from support.runtime import Runtime

OK, DRIVER_ERROR, WRONG_STRUCT, NOT_SERVED, WRONG_RESULT = 0, 2, 5, 6, 7
KINDS = [x if x == "v4" else pytest.param(x, marks=pytest.mark.slow) for x in runtime.MODELS]
MOST_STORED = 2_000_000
READ = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_size_t)


class SelfTested(Runtime):
    """A file, opened on the stand-in, with memory for its self-test."""

    def __init__(self, data, path):
        path.write_bytes(data)
        self.tables = read(path)
        super().__init__(data)
        assert self.status == OK, self.message
        self.hook = ctypes.c_void_p.in_dll(self.driver, "stand_in_before_read")
        needed = ctypes.c_uint64()
        assert self.library.cumla_self_test_bytes(self.handle, ctypes.byref(needed)) == OK
        self.bytes = needed.value
        memory = np.full(self.bytes + 256, 0x5A, np.uint8)
        self.memory = memory[-memory.ctypes.data % 256 :][: self.bytes]

    def checks(self):
        """Of each result in order: the case's index, the field, dtype, elements, and the row of the table."""
        data = self.tables["bytes"][0][0]
        for number, (_, _, word, fill, _, check, checks, *_) in enumerate(self.tables["cases"]):
            for row in self.tables["checks"][check : check + checks]:
                field = self.tables["fills"][fill + row[0]][0]
                name = DTYPES[self.tables["case_words"][word + field + 1][0] - 1]
                dtype = np.dtype(np.uint16 if name == "bfloat16" else name)
                yield number, field, name, np.frombuffer(data, dtype, row[2], row[1]).copy(), row

    def run(self, change=lambda number, elements: None, size=None, stream=runtime.STREAM, memory=None):
        """The self-test of a device whose results are the file's, but for what `change` does to the n-th."""
        results = iter(enumerate(self.checks()))

        def before_read(place, of_read):
            number, (*_, elements, row) = next(results)
            change(number, elements)
            target = np.frombuffer((ctypes.c_ubyte * of_read).from_address(place), elements.dtype)
            assert len(target[:: row[5]]) == len(elements)
            target[:: row[5]] = elements

        callback, calls = READ(before_read), ctypes.c_uint32(7)
        self.hook.value = ctypes.cast(callback, ctypes.c_void_p).value
        try:
            status = self.library.cumla_self_test(
                self.handle, ctypes.c_uint64(self.memory.ctypes.data if memory is None else memory),
                ctypes.c_size_t(self.bytes if size is None else size), ctypes.c_void_p(stream), ctypes.byref(calls),
            )  # fmt: skip
        finally:
            self.hook.value = None
        self.driver.stand_in_launches((runtime.Launched * 64)())
        return status, calls.value

    def name_of(self, number):
        data, place = self.tables["bytes"][0][0], self.tables["cases"][number][1]
        return data[place : data.index(b"\0", place)].decode()


@pytest.fixture
def tested(tmp_path):
    found = SelfTested(runtime.file("v4"), tmp_path / "file")
    yield found
    found.close()


@functools.cache
def cases(kind):
    return tuple(cases_of(runtime.records(kind)))


def functions_of(case, records):
    """The kernels of a case's call."""
    record, by = next(x for x in records if x.call is case.call), int(case.name.split()[-1])
    index = next(index for last, index in record.segments if by <= last)
    return {launch.function for launch in record.sequences[index]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_has_a_case_that_is_served(kind, tmp_path):
    records, made_of, stored = runtime.records(kind), cases(kind), set()
    of_file = {launch.function for x in records for sequence in x.sequences for launch in sequence}
    assert set().union(*(functions_of(case, records) for case in made_of)) == of_file
    for case in made_of:
        # Not what a kernel leaves that computes nothing, or only zeros.
        assert any(len(np.unique(x.want.astype(np.float64))) > 1 or x.want[0] for x in case.checks), case.name
        stored |= {x.block for x in case.fills} | {x.want.tobytes() for x in case.checks}
    assert sum(map(len, stored)) < MOST_STORED
    found = SelfTested(runtime.file(kind), tmp_path / "file")
    assert found.run() == (OK, len(made_of)), found.message
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_kernels_are_within_the_bounds(emulated, number):
    """V4's cases on an emulated device, whose SMs have other kernels of some calls."""
    lab = Lab("cuda", on_device=True, emulated=True)
    case = cases("v4")[number]
    arguments = arguments_of(case.call, int(case.name.split()[-1]))
    arguments.pop("workspace", None)
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    on_device = {name: lab.put(x) for name, x in arrays.items()}
    case.call.fields.call({**arguments, **on_device, "backend": "cuda"})
    for check in case.checks:
        field = case.fills[check.fill].field
        name = next(x.name for x in case.call.fields.parameters if x.first == field)
        arrays[name][...] = lab.get(on_device[name])
        flat = np.frombuffer(contents_of(arrays[name]), check.want.dtype)
        got = flat[check.first :: check.stride][: len(check.want)]
        if check.most:
            assert (got != check.want).sum() <= check.most, name
        else:
            assert compare(got, check.want, check.bound)[0], name


def test_a_result_that_differs_is_named(tested):
    """Of each type, and in the first, any and the last array; the calls before it are counted."""
    checks = list(tested.checks())
    chosen = {(dtype, row[6] > 0): number for number, (_, _, dtype, _, row) in enumerate(checks)}
    assert len(chosen) > 4
    for wrong in (0, *chosen.values()):
        case, field, _, elements, row = checks[wrong]
        at = len(elements) - 1
        allowed = row[3]

        def change(number, elements, wrong=wrong, at=at, allowed=allowed):
            if number == wrong:
                elements.view(f"u{elements.dtype.itemsize}")[at - allowed :] ^= 1 << (8 * elements.dtype.itemsize - 2)

        assert tested.run(change) == (WRONG_RESULT, case), tested.message
        operation = tested.tables["cases"][case][0]
        names = tested.tables["operations"][operation][2]
        data, place = tested.tables["bytes"][0][0], tested.tables["field_names"][names + field][0]
        array = data[place : data.index(b".", place)].decode()
        assert tested.message.startswith(f"{tested.name_of(case)}: {array}[{row[4] + at * row[5]}]: got ")
        assert tested.run() == (OK, len(tested.tables["cases"]))


def test_a_code_between_two_values_may_be_rounded_either_way(tested):
    """As many bytes of a cache as the file says, and no more."""
    wrong, (*_, row) = next(x for x in enumerate(tested.checks()) if x[1][4][3])
    for count, status in ((row[3], OK), (row[3] + 1, WRONG_RESULT)):

        def change(number, elements, count=count):
            if number == wrong:
                elements[:count] += 1

        assert tested.run(change)[0] == status


def moved_by(factor, wrong, row):
    """A change that moves the numbers of a result by this many times their bounds."""

    def change(number, elements):
        if number == wrong:
            finite = np.isfinite(elements)
            elements[finite] += factor * (row[6] + row[7] * abs(elements[finite]))

    return change


@pytest.mark.parametrize("with_cosine", [False, True])
def test_values_within_their_bounds_are_right(tested, with_cosine):
    """Unless all are moved one way, by the cosine distance where it has a bound."""
    wrong, (*_, row) = next(
        x for x in enumerate(tested.checks())
        if x[1][2] == "float32" and x[1][4][6] > 0 and np.isfinite(x[1][4][8]) == with_cosine
    )  # fmt: skip
    assert tested.run(moved_by(0.1, wrong, row))[0] == OK
    assert tested.run(moved_by(0.9, wrong, row))[0] == (WRONG_RESULT if with_cosine else OK)
    assert "got a cosine distance of" in tested.message or not with_cosine
    assert tested.run(moved_by(2, wrong, row))[0] == WRONG_RESULT


def test_a_result_that_is_no_number(tested):
    wrong = next(number for number, x in enumerate(tested.checks()) if x[2] == "float32" and x[4][6] > 0)

    def change(number, elements):
        if number == wrong:
            elements[0] = np.nan

    assert tested.run(change)[0] == WRONG_RESULT
    assert "nan, expected" in tested.message


def test_memory_that_is_too_small_or_not_aligned(tested):
    for arguments in ({"size": tested.bytes - 1}, {"memory": 0}, {"memory": tested.memory.ctypes.data + 16}):
        assert tested.run(**arguments) == (WRONG_STRUCT, 0)
        assert re.match(f"memory: got .*, expected {tested.bytes} at a multiple of 256", tested.message)


def test_a_stream_that_is_captured(tested):
    tested.driver.cuStreamBeginCapture_v2(None, 0)
    try:
        assert tested.run() == (NOT_SERVED, 0)
    finally:
        tested.driver.cuStreamEndCapture(None, ctypes.byref(ctypes.c_void_p()))
    assert "stream: got one that is captured" in tested.message


def test_an_error_of_a_call(tested):
    error = ctypes.c_int.in_dll(tested.driver, "stand_in_error")
    error.value = 700
    try:
        assert tested.run() == (DRIVER_ERROR, 0)
    finally:
        error.value = 0


def test_blocks_are_the_shortest_that_an_array_repeats():
    rng = np.random.default_rng(0)
    for array, length in (
        (np.full((3, 100), 165, np.uint8), 1),
        (np.resize(rng.standard_normal(PERIOD), (30, 1000)), 8 * PERIOD),
        (np.tile(rng.standard_normal(7), (5, 1)), 56),
        (rng.standard_normal((5, 7)), 280),
    ):
        block = block_of(array.tobytes(), array)
        assert len(block) == length
        assert (block * (array.nbytes // length + 1))[: array.nbytes] == array.tobytes()


def test_a_check_has_what_a_call_changed():
    before = np.zeros((10, 64), np.uint8)
    want = before.copy()
    want[3] = np.arange(64) + 1
    made = check_of(2, want, before.tobytes(), ROUNDED)
    assert (made.first, made.stride, made.most, made.bound) == (192, 1, 1, EQUAL)
    np.testing.assert_array_equal(made.want, want[3])


def test_the_command(tmp_path, monkeypatch, capsys):
    """On the stand-in, whose kernels compute nothing."""
    path = tmp_path / "file"
    path.write_bytes(runtime.file("v4"))
    runtime.compiler()
    monkeypatch.setattr(library, "LIBCUDA", str(runtime.folder() / "libstandin.so"))
    line = error_line(capsys, ["export", "--test", path], 1)
    ctypes.CDLL(library.LIBCUDA).stand_in_launches((runtime.Launched * 64)())  # other tests count their own
    assert re.search(r"--test: quantize_and_insert_k_cache .*: k_cache\[\d+\]: got \d+, expected \d+ within 0$", line)
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    line = error_line(capsys, ["export", "--test", path])
    assert "--test: there is no C compiler: no-such-compiler was not found" in line
    monkeypatch.setenv("CC", "false")
    assert "false did not compile the C runtime" in error_line(capsys, ["export", "--test", path], 1)


def test_the_command_says_how_many_calls_were_right(monkeypatch, capsys):
    monkeypatch.setattr("cumla.cli.export.self_test", lambda path: 24)
    assert main(["export", "--test", "v4.cumla"]) == 0
    assert capsys.readouterr().out == "v4.cumla: 24 calls, all results within their bounds\n"
