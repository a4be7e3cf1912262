"""Files of named arrays (safetensors): a header in JSON, then the arrays' bytes, contiguous."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import pathlib
import stat
import uuid
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
ALIGNMENT = 64  # bytes; of the data of a written file, and of arrays whose size is a multiple of it
MOST_HEADER_BYTES = 100_000_000  # limit of the format
METADATA = "__metadata__"  # a name in headers that is not an array's
MAX_NDIM, MAX_VALUES = 64, 2**59  # limits of NumPy's arrays


class Checkpoint(Mapping[str, np.ndarray]):
    """The arrays of a folder's .safetensors files by name: read-only views of one mapping for each file.

    An index (model.safetensors.index.json) names the files; without one they are all such files in the folder.

    The constructor opens, maps and checks each file once. The system reads values from the disk when they are used.
    Arrays keep their values when a file is renamed, removed or replaced (`write` replaces files), and when the current
    directory changes. They change when another program writes to the file in place, and reading them ends the process
    after another program has truncated it. A mapping holds one file descriptor, and lives as long as the checkpoint and
    the arrays. An array that is not aligned in its file is copied on access.

    The constructor raises ValueError for a folder without such files; for a file that is missing, truncated or not of
    the format (arrays must fill it without overlaps and holes); for an index that names files in other folders; and for
    an array that is present twice or missing from the file that the index names. Access raises ValueError for an array
    of a type that NumPy lacks; names and `in` do not depend on types.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self._places: dict[str, tuple[_File, _Entry]] = {}
        folder = pathlib.Path(folder)
        indexed = _indexed(folder)
        paths = {folder / name for name in indexed.values()} if indexed else folder.glob("*.safetensors")
        for path in sorted(paths):
            file = _File(path)
            for name, entry in file.entries.items():
                if indexed and indexed.get(name) != path.name:
                    continue
                if name in self._places:
                    raise ValueError(f"{name}: got it in {self._places[name][0].name} and {path.name}, expected one")
                self._places[name] = (file, entry)
        for name in indexed.keys() - self._places.keys():
            raise ValueError(f"{name}: {indexed[name]} lacks it, where the index says that it is")
        if not self._places:
            raise ValueError(f"folder: got {folder}, expected one with .safetensors files")

    def __getitem__(self, name: str) -> np.ndarray:
        file, (kind, shape, start, end) = self._places[name]
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise ValueError(f"{name}: got type {kind} in {file.name}, expected one of {', '.join(DTYPES)}")
        values = np.frombuffer(file.memory, np.uint8, end - start, file.data + start)
        if (file.data + start) % dtype.itemsize:
            values = values.copy()
            values.flags.writeable = False
        return values.view(dtype).reshape(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._places

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
        text = _mapped(path)[:]
        try:
            files = json.loads(text, object_pairs_hook=_once)["weight_map"].items()
            if not files or not all(isinstance(file, str) for _, file in files):
                raise TypeError("no names of files")
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


class _File:
    """A file, mapped.

    Attributes:
        name: without its folder
        memory: its bytes
        data: where its arrays begin
        entries: the header's entry of each array, checked
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.name, self.memory = path.name, _mapped(path)
        size = int.from_bytes(self.memory[:8], "little")
        self.data = 8 + size
        if MOST_HEADER_BYTES < size <= len(self.memory):
            raise ValueError(f"{path.name}: got a header of {size} bytes, expected at most {MOST_HEADER_BYTES}")
        try:
            if self.data > len(self.memory):
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(self.memory[8 : self.data], object_pairs_hook=_once)
            header.pop(METADATA, None)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path.name}: got no header of safetensors, or the file is cut off{_twice(error)}"
            ) from None
        self.entries = {name: _described(name, path, entry) for name, entry in header.items()}
        _check_data(path, self.entries, len(self.memory) - self.data)


def _mapped(path: pathlib.Path) -> mmap.mmap | bytes:
    """A file's bytes. Raises ValueError for a missing file, a folder, a pipe and a device."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for a writer
    except FileNotFoundError:
        if path.is_symlink():
            raise ValueError(f"{path.name}: got a link to a missing file, expected a file") from None
        raise ValueError(f"folder: got {path.parent} without {path.name}, which the index names") from None
    try:
        status = os.fstat(opened)
        _check_is_file(path, status)
        return mmap.mmap(opened, 0, access=mmap.ACCESS_READ) if status.st_size else b""
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(opened)


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


def _check_is_file(path: pathlib.Path, status: os.stat_result) -> None:
    """Raise ValueError for a folder, and for a pipe or a device, whose end a read might never reach."""
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise ValueError(f"{path.name}: got {what}, expected a file")


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
    """Write arrays under their names: whole, to a temporary file in the same folder that then replaces `path`.

    `path` may be the file that some of the arrays are mapped from: arrays of a `Checkpoint` keep their values. A link
    is replaced, not the file that it names. Arrays are aligned to their type's size, and to 64 bytes if their size is a
    multiple of 64. If an array cannot be written or the disk is full, `path` stays as it was.

    Raises TypeError for a name that is no string and a value that is no NumPy array, ValueError for a type that the
    format lacks and for a path that is no file.
    """
    path, arrays = pathlib.Path(path), dict(arrays)
    if path.exists():
        _check_is_file(path, path.stat())
    for name, array in arrays.items():
        _check_entry(name, array)
    # Largest alignment first: the offset of each array is then a multiple of its alignment.
    order = sorted(arrays, key=lambda name: -math.gcd(arrays[name].nbytes, ALIGNMENT))
    places, end = {}, 0
    for name in order:
        places[name], end = [end, end + arrays[name].nbytes], end + arrays[name].nbytes
    header = {
        name: {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": places[name]}
        for name, array in arrays.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _check_entry(name: Any, array: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{shown(name)}: got a name of type {type(name).__name__}, expected a string")
    if name == METADATA:
        raise ValueError(f"{name}: got an array of this name, which the format reserves")
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: got {type(array).__name__}, expected a NumPy array")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: got a masked array, whose mask would be lost, expected a plain one")
    if array.dtype not in NAMES:
        raise ValueError(f"{name}: got dtype {array.dtype}, expected one of {', '.join(map(str, NAMES))}")
