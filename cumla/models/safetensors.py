"""Files of named arrays (safetensors): a header in JSON, then the arrays' bytes one behind another."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..dispatch.values import shown

# The format's names of types that weights come in.
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


class Checkpoint(Mapping[str, np.ndarray]):
    """The arrays of a folder's .safetensors files, by name; each is mapped from its file when it is asked for.

    With an index (model.safetensors.index.json) the files are those that it names, else all there are.

    Raises ValueError for a folder without such files, a file that is missing, cut off or none of the format, an array
    that two files have or that is not where the index says, or one whose type NumPy lacks.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self._places: dict[str, tuple[pathlib.Path, int, dict[str, Any]]] = {}
        folder = pathlib.Path(folder)
        indexed = _indexed(folder)
        files = {folder / name for name in indexed.values()} if indexed else folder.glob("*.safetensors")
        for path in sorted(files):
            size, header = _header(path)
            for name, entry in header.items():
                if indexed and indexed.get(name) != path.name:
                    continue
                if name in self._places:
                    raise ValueError(f"{name}: got it in {self._places[name][0].name} and {path.name}, expected one")
                self._places[name] = (path, 8 + size, entry)
        for name in indexed.keys() - self._places.keys():
            raise ValueError(f"{name}: {indexed[name]} lacks it, where the index says that it is")
        if not self._places:
            raise ValueError(f"folder: got {folder}, expected one with .safetensors files")

    def __getitem__(self, name: str) -> np.ndarray:
        path, data, entry = self._places[name]
        kind, shape, start, end = _described(name, path, entry)
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise ValueError(f"{name}: got type {kind}, expected one of {', '.join(DTYPES)}")
        if end - start != dtype.itemsize * math.prod(shape) or data + end > path.stat().st_size:
            raise ValueError(f"{name}: {path.name} has {end - start} bytes for {shape} of {dtype}, or is cut off")
        if start == end:
            return np.empty(shape, dtype)
        return np.memmap(path, np.uint8, "r", data + start, end - start).view(dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _described(name: str, path: pathlib.Path, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, first byte and end of an array, as its file's header has them."""
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, start, end)) or not isinstance(kind, str):
            raise TypeError("numbers that are none")
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{name}: {path.name} describes it as {shown(entry)}, expected dtype, shape and data_offsets from 0 up"
        ) from None
    return kind, shape, start, end


def _indexed(folder: pathlib.Path) -> dict[str, str]:
    """The file of each array by the folder's index; nothing without one."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors.index.json")):
        try:
            found |= json.loads(path.read_text())["weight_map"]
            if not all(isinstance(file, str) for file in found.values()):
                raise TypeError("files that are no names")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path.name}: got no weight_map, expected the file of each array") from None
    return found


def _header(path: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Its length in bytes, and what it says of each array."""
    if not path.exists():
        raise ValueError(f"folder: got {path.parent} without {path.name}, which the index names")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if size < path.stat().st_size else b""
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path.name}: got no header of safetensors, or the file is cut off") from None
    return size, header


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
