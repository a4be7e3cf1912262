"""Files of named arrays (safetensors): a header in JSON, then the arrays' bytes, contiguous."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..dispatch.values import shown

# The format's names of the types of weights.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_ALIGNMENT = 8
MAX_NDIM, MAX_VALUES = 64, 2**59  # of NumPy's arrays


class Checkpoint(Mapping[str, np.ndarray]):
    """The arrays of a folder's .safetensors files, by name; each is mapped from its file on access.

    An index (model.safetensors.index.json) names the files; without one they are all such files in the folder.

    The constructor raises ValueError for a folder without such files; for a file that is missing, truncated or not of
    the format (arrays must fill it without overlaps and holes); for an index that names files in other folders; and for
    an array that is present twice or missing from the file that the index names. Access raises ValueError for an array
    of a type that NumPy lacks.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self._places: dict[str, tuple[pathlib.Path, int, _Entry]] = {}
        folder = pathlib.Path(folder)
        indexed = _indexed(folder)
        files = {folder / name for name in indexed.values()} if indexed else folder.glob("*.safetensors")
        for path in sorted(files):
            data, header = _header(path)
            for name, entry in header.items():
                if indexed and indexed.get(name) != path.name:
                    continue
                if name in self._places:
                    raise ValueError(f"{name}: got it in {self._places[name][0].name} and {path.name}, expected one")
                self._places[name] = (path, data, entry)
        for name in indexed.keys() - self._places.keys():
            raise ValueError(f"{name}: {indexed[name]} lacks it, where the index says that it is")
        if not self._places:
            raise ValueError(f"folder: got {folder}, expected one with .safetensors files")

    def __getitem__(self, name: str) -> np.ndarray:
        path, data, (kind, shape, start, end) = self._places[name]
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise ValueError(f"{name}: got type {kind} in {path.name}, expected one of {', '.join(DTYPES)}")
        if start == end:
            return np.empty(shape, dtype)
        return np.memmap(path, np.uint8, "r", data + start, end - start).view(dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Entry(NamedTuple):
    """Type, shape, first byte and end of an array, from its file's header."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def _described(name: str, path: pathlib.Path, entry: Any) -> _Entry:
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, start, end)) or not isinstance(kind, str):
            raise TypeError("numbers that are none")
        if len(shape) > MAX_NDIM or (0 in shape and math.prod(size for size in shape if size) > MAX_VALUES):
            raise ValueError("more than an array may have")
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{name}: {path.name} describes it as {shown(entry)}, expected dtype, shape and data_offsets from 0 up"
        ) from None
    dtype = DTYPES.get(kind)
    if end < start or (dtype is not None and end - start != dtype.itemsize * math.prod(shape)):
        raise ValueError(f"{name}: {path.name} has {end - start} bytes for {shape} of {kind}")
    return _Entry(kind, shape, start, end)


def _indexed(folder: pathlib.Path) -> dict[str, str]:
    """The file of each array by the folder's index; empty without an index."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors.index.json")):
        _check_is_file(path)
        try:
            files = json.loads(path.read_bytes(), object_pairs_hook=_once)["weight_map"].items()
            if not all(isinstance(file, str) for _, file in files):
                raise TypeError("files that are no names")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path.name}: got no weight_map, expected the file of each array{_twice(error)}"
            ) from None
        for name, file in files:
            if file in ("", "..") or "\0" in file or pathlib.PurePath(file).name != file:
                raise ValueError(f"{name}: {path.name} says that {shown(file)} has it, expected a file of its folder")
            if found.setdefault(name, file) != file:
                raise ValueError(f"{name}: {path.name} says that {file} has it, another index {found[name]}")
    return found


def _header(path: pathlib.Path) -> tuple[int, dict[str, _Entry]]:
    """The offset of the data, and the header's entry of each array, checked as far as the header alone allows."""
    if not path.exists():
        raise ValueError(f"folder: got {path.parent} without {path.name}, which the index names")
    _check_is_file(path)
    whole = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if size < whole else b""
    try:
        header: dict[str, Any] = json.loads(text, object_pairs_hook=_once)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name}: got no header of safetensors, or the file is cut off{_twice(error)}") from None
    entries = {name: _described(name, path, entry) for name, entry in header.items()}
    _check_data(path, entries, whole - 8 - size)
    return 8 + size, entries


def _check_data(path: pathlib.Path, entries: dict[str, _Entry], size: int) -> None:
    """Raise ValueError unless the arrays fill the file's `size` bytes of data contiguously."""
    filled, before = 0, "the header"
    for name, (_, _, start, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start < filled:
            raise ValueError(f"{name}: {path.name} has it from byte {start} on, before {before} ends at {filled}")
        if start > filled:
            raise ValueError(
                f"{name}: {path.name} has it from byte {start} on, a hole after {before}'s end at {filled}"
            )
        if end > size:
            raise ValueError(f"{name}: {path.name} is cut off: it has {size} bytes of data, expected {end} or more")
        filled, before = end, name
    if filled < size:
        raise ValueError(f"{path.name}: got {size - filled} bytes after the end of {before}, expected none")


def _check_is_file(path: pathlib.Path) -> None:
    """Raise ValueError for a folder, and for a pipe or a device, whose end a read might never reach."""
    if not path.is_file():
        raise ValueError(f"{path.name}: got {'a folder' if path.is_dir() else 'no regular file'}, expected a file")


class _TwiceError(ValueError):
    """A JSON object has a name twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _TwiceError(name)
        found[name] = value
    return found


def _twice(error: Exception) -> str:
    return f"; it has {error} twice" if isinstance(error, _TwiceError) else ""


def write(path: str | pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays under their names. Raises ValueError for a type that the format lacks."""
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        if array.dtype not in NAMES:
            raise ValueError(f"{name}: got dtype {array.dtype}, expected one of {', '.join(map(str, NAMES))}")
        places = [offset, offset + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": places}
        offset = places[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with pathlib.Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())
