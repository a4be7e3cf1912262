"""DLPack capsules with wrong fields raise errors that name the argument, for any values of the fields.

Runs in a separate process: using such a field unchecked crashes the process.
"""

import ctypes
import os
import pathlib
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from cumla.arrays import dlpack
from support.capsules import Described, InDeviceMemory

MOST = 2**48  # bytes of an array, of a stride and of an offset
TESTS = pathlib.Path(__file__).parents[1]
BUFFER = np.arange(24, dtype=np.float32)
SEEDS = range(3)
DRAWS = 2000  # draws for each seed


def longs(*numbers):
    """64 values; only `ndim` determines how many a consumer reads."""
    return [*numbers, *[1] * (64 - len(numbers))]


# Fields of a capsule over BUFFER, and the error message; "used": the capsule is valid, so there is no error.
CASES = {
    "as it is": ({}, "used"),
    "DLPack 0": ({"version": None}, "used"),
    "minor version": ({"version": (1, 2**32 - 1)}, "used"),
    "flags": ({"flags": 2**64 - 1}, "used"),
    "strides": ({"ndim": 2, "shape": longs(3, 4), "strides": longs(8, 2)}, "used"),
    "negative strides": ({"strides": longs(-1), "byte_offset": 92}, "used"),
    "no axes": ({"ndim": 0, "shape": None}, "used"),
    "64 axes": ({"ndim": 64, "shape": longs(24)}, "used"),
    "nothing in it": ({"shape": longs(0), "data": None}, "used"),
    "nothing in it, at an offset": ({"shape": longs(0), "byte_offset": MOST}, "used"),
    "negative ndim": ({"ndim": -1}, "of -1 dimensions, expected 0 to 64"),
    "least ndim": ({"ndim": -(2**31)}, "of -2147483648 dimensions, expected 0 to 64"),
    "65 axes": ({"ndim": 65}, "of 65 dimensions, expected 0 to 64"),
    "greatest ndim": ({"ndim": 2**31 - 1}, "of 2147483647 dimensions, expected 0 to 64"),
    "no shape": ({"shape": None}, "of 1 dimensions whose shape is a null pointer"),
    "negative size": ({"shape": longs(-3)}, r"got shape \(-3,\), expected sizes from 0 up"),
    "negative size beside none": ({"ndim": 2, "shape": longs(0, -3)}, "expected sizes from 0 up"),
    "greatest size": ({"shape": longs(2**63 - 1)}, "expected an extent of at most"),
    "sizes whose product overflows": ({"ndim": 2, "shape": longs(2**62, 2**62)}, "expected (an extent of )?at most"),
    "sizes whose product is 0 modulo 2^64": (
        {"ndim": 2, "shape": longs(2**32, 2**32), "strides": longs(0, 0)}, "expected an extent of at most"
    ),
    "a huge size beside none": ({"ndim": 2, "shape": longs(2**62, 0)}, "expected an extent of at most"),
    "greatest stride": ({"strides": longs(2**63 - 1)}, "expected at most"),
    "least stride": ({"strides": longs(-(2**63))}, "expected at most"),
    "a huge stride that is not used": ({"shape": longs(1), "strides": longs(2**62)}, "expected at most"),
    "strides whose extent overflows": (
        {"ndim": 2, "shape": longs(2**20, 2**20), "strides": longs(2**46, 2**46)}, "expected an extent of at most"
    ),
    "strides before memory": ({"strides": longs(-(2**41))}, "outside of the 64-bit address space"),
    "greatest byte_offset": ({"byte_offset": 2**64 - 1}, "byte_offset 18446744073709551615, expected at most"),
    "byte_offset of a negative number": ({"byte_offset": 2**64 - 4}, "byte_offset 18446744073709551612"),
    "byte_offset 2^63": ({"byte_offset": 2**63}, "byte_offset 9223372036854775808"),
    "an end beyond memory": ({"data": 2**64 - 8}, "outside of the 64-bit address space"),
    "no data": ({"data": None}, r"got shape \(24,\) at a null pointer, expected an address"),
    "no data, at an offset": ({"data": None, "byte_offset": 64}, "at a null pointer"),
    "no lanes": ({"lanes": 0}, "32 bits, 0 lanes, which has no counterpart"),
    "lanes": ({"lanes": 65535}, "32 bits, 65535 lanes, which has no counterpart"),
    "no bits": ({"bits": 0}, "type code 2, 0 bits"),
    "an unknown type": ({"code": 255}, "type code 255, 32 bits"),
    "complex": ({"code": 5, "bits": 64}, "type code 5, 64 bits"),
    "DLPack 2": ({"version": (2, 0)}, "got DLPack version 2.0, expected 1.x"),
    "another device": ({"device_type": 2}, "got a tensor on CUDA 0 from an array that says it is on CPU 0"),
    "a device of a negative type": ({"device_type": -1}, "got a tensor on DLPack device type -1 0"),
    "pinned memory": ({"device": (3, 0)}, "got an array in pinned host memory"),
    "a type that is none": ({"device": (2**31, 0)}, "got an array in type 2147483648 memory"),
    "a device alone": ({"device": 5}, "got 5 from __dlpack_device__, expected a device's type and number"),
    "three numbers": ({"device": (1, 0, 0)}, r"got \(1, 0, 0\) from __dlpack_device__"),
    "a device by name": ({"device": ("cpu", 0)}, r"got \('cpu', 0\) from __dlpack_device__"),
    "an infinite device": ({"device": (float("inf"), 0)}, r"got \(inf, 0\) from __dlpack_device__"),
}  # fmt: skip


def outcome(**fields):
    """The error of borrowing BUFFER with this description; None if it succeeds with the given fields."""
    fields = {"shape": longs(24), **fields}
    array = Described(BUFFER.copy(), **fields)
    said = borrowed(array, fields)
    assert array.released == array.exported  # the exported capsule is released, with an error or without
    return said


def borrowed(array, fields):
    try:
        native = dlpack.borrow(array, "kv")
    except (ValueError, TypeError) as error:
        return str(error)
    ndim = fields.get("ndim", 1)
    size = tuple(fields["shape"] or ())[:ndim]
    assert native.shape == size, (native.shape, size)
    if native.size:
        itemsize = fields.get("bits", 32) // 8
        assert native.itemsize == itemsize
        first = fields.get("data", array.array.ctypes.data) + fields.get("byte_offset", 0)
        assert native.ctypes.data == first
        if fields.get("strides") is not None:
            assert native.strides == tuple(itemsize * stride for stride in fields["strides"][:ndim])
        low, high = np.lib.array_utils.byte_bounds(native)
        begin = array.array.ctypes.data
        if begin <= low and high <= begin + BUFFER.nbytes and native.dtype.kind in "iuf":
            native.astype(np.float64).sum()  # all of the memory exists and can be read
    return None


def check_case(name):
    fields, expected = CASES[name]
    got = outcome(**fields)
    if expected == "used":
        assert got is None, got
    else:
        assert got is not None, "no error"
        assert got.startswith("kv: ")
        assert re.search(expected, got), got


def drawn(rng):
    """Some fields, each with any value of its type; 1 in 3 near a value that overflows a computation."""

    def number(low, high):
        edges = [edge + step for edge in (0, 64, 2**31, 2**32, MOST, 2**61, 2**62, 2**63, 2**64) for step in (-1, 0, 1)]
        edges += [-edge for edge in edges]
        kind = rng.randrange(3)
        if kind == 0:
            return rng.choice([edge for edge in edges if low <= edge <= high])
        return rng.randint(low, high) if kind == 1 else rng.randint(max(low, -8), min(high, 25))

    def long():
        return number(-(2**63), 2**63 - 1)

    makers = {
        "ndim": lambda: rng.choice([number(-(2**31), 2**31 - 1), rng.randint(0, 4)]),
        "shape": lambda: rng.choice([None, longs(*(long() for _ in range(4))), longs(rng.randint(0, 3), 2, 2, 2)]),
        "strides": lambda: rng.choice([None, longs(*(long() for _ in range(4)))]),
        "byte_offset": lambda: number(0, 2**64 - 1),
        "data": lambda: rng.choice([None, number(0, 2**64 - 1)]),
        "lanes": lambda: number(0, 2**16 - 1),
        "code": lambda: number(0, 255),
        "bits": lambda: rng.choice([number(0, 255), 8, 16, 32, 64]),
        "device_type": lambda: number(-(2**31), 2**31 - 1),
        "device_id": lambda: number(-(2**31), 2**31 - 1),
        "device": lambda: (number(-(2**65), 2**65), long()),
        "version": lambda: rng.choice([None, (number(0, 2**32 - 1), number(0, 2**32 - 1)), (1, 3)]),
        "flags": lambda: number(0, 2**64 - 1),
    }
    return {name: makers[name]() for name in rng.sample(list(makers), rng.choice((1, 1, 2, 3, 5)))}


def check_draws(seed):
    rng = random.Random(seed)
    used = 0
    for draw in range(DRAWS):
        fields = drawn(rng)
        print(f"draw {draw}: {fields}", flush=True)
        got = outcome(**fields)
        assert got is None or got.startswith("kv: "), got
        used += got is None
    assert DRAWS // 20 < used < DRAWS * 19 // 20, used


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"status {done.returncode} at {last}\n{done.stderr}"


def test_every_field_is_bounded_before_it_is_used():
    run("cases")


@pytest.mark.parametrize("seed", SEEDS)
def test_fields_of_any_value(seed):
    run(str(seed))


@pytest.mark.parametrize("device", [-1, 99, 2**31, 2**63])
def test_devices_that_the_machine_lacks(emulated, device):
    array = Described(BUFFER, device=(2, device), device_type=2, device_id=ctypes.c_int32(device).value)
    with pytest.raises(ValueError, match=f"^kv: got an array on CUDA device {device}, expected a device that CuPy"):
        dlpack.borrow(array, "kv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": (0, False)}, "got shape (24,) at a null pointer"),
        ({"data": (2**64 - 8, False)}, "outside of the 64-bit address space"),
        ({"shape": (-1,)}, "got shape (-1,), expected sizes from 0 up"),
        ({"shape": (2**62, 2**62)}, "bytes, expected at most"),
        ({"strides": (2**63,)}, "got strides (9223372036854775808,) bytes"),
    ],
)
def test_the_cuda_array_interface_is_bounded_too(emulated, changes, message):
    interface = {"shape": (24,), "typestr": "<f4", "data": (BUFFER.ctypes.data, False), "version": 3, **changes}
    with pytest.raises(ValueError, match="^kv: .*" + re.escape(message)):
        dlpack.borrow(InDeviceMemory(**interface), "kv")


def test_a_mask_of_the_cuda_array_interface_is_refused(emulated):
    """Columns of a data frame with missing values have one; a mask of None is no mask."""
    interface = {"shape": (24,), "typestr": "<f4", "data": (BUFFER.ctypes.data, False), "version": 3}
    mask = InDeviceMemory(**interface | {"typestr": "|b1"})
    message = r"^kv: got a InDeviceMemory with a mask \(__cuda_array_interface__\), whose mask would be lost"
    with pytest.raises(TypeError, match=message):
        dlpack.borrow(InDeviceMemory(**interface, mask=mask), "kv")
    assert dlpack.borrow(InDeviceMemory(**interface, mask=None), "kv").shape == (24,)


def test_an_array_that_does_not_say_where_it_is():
    class Silent:
        __dlpack__ = Described(BUFFER).__dlpack__

    with pytest.raises(TypeError, match=r"^kv: got Silent, expected an array .* and __dlpack_device__"):
        dlpack.borrow(Silent(), "kv")


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        for case in CASES:
            print(case, flush=True)
            check_case(case)
    else:
        check_draws(int(sys.argv[1]))
