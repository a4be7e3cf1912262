#!/usr/bin/env python3
"""Print a program with which mypy checks every backend's functions against the reference's (`make types`).

tools/seam.py > FILE && mypy FILE
"""

import ast
import pathlib
import re

import cumla
from cumla.dispatch.backends import BACKENDS


def operations() -> dict[str, list[str]]:
    """Functions that every backend has, by file of kernels: the reference's functions that cumla calls."""
    package = pathlib.Path(cumla.__file__).parent
    called = {name for path in package.rglob("*.py") for name in re.findall(r"\bkernels\.(\w+)\(", path.read_text())}
    found = {}
    for path in sorted((package / "kernels/reference").glob("*.py")):
        defined = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        found[path.stem] = [name for name in defined if name in called]
    return {file: names for file, names in found.items() if names}


def main() -> None:
    for file, names in operations().items():
        for backend in BACKENDS:
            print(f"from cumla.kernels.{backend} import {file} as {backend}_{file}")
        for name in names:
            for backend in BACKENDS:  # the first assignment gives the variable its type
                print(f"{file}_{name} = {backend}_{file}.{name}")


if __name__ == "__main__":
    main()
