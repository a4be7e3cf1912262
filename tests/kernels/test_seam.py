"""Every backend has the reference's operations, and takes their arguments in the same order, with the same defaults."""

import ast
import pathlib
import runpy

import pytest

from cumla.dispatch.backends import BACKENDS
from cumla.kernels import types

KERNELS = pathlib.Path(types.__file__).parent.parent
OPERATIONS = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "tools/seam.py"))["operations"]()


def signatures(backend, file):
    """A file's functions by name: parameters and defaults, or None for those of another backend, checked there."""
    found = {}
    for node in ast.parse((KERNELS / backend / f"{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
            found[node.name] = names, [ast.unparse(default) for default in node.args.defaults]
        elif isinstance(node, ast.ImportFrom):
            found |= dict.fromkeys(alias.asname or alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
@pytest.mark.parametrize("file", OPERATIONS)
def test_operations(backend, file):
    reference, defined = signatures("reference", file), signatures(backend, file)
    for name in OPERATIONS[file]:
        assert name in defined, f"{backend}/{file}.py has no {name}"
        assert defined[name] in (None, reference[name]), name


def test_every_file_of_the_reference_has_operations():
    files = {path.stem for path in (KERNELS / "reference").glob("*.py")} - {"__init__", "rows"}
    assert files == OPERATIONS.keys()
