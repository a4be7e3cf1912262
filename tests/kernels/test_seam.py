"""Every backend has the operations that the seam promises, and takes their arguments in the same order."""

import ast
import inspect
import pathlib

import pytest

from cumla.dispatch.backends import BACKENDS
from cumla.kernels import types
from cumla.kernels.types.operations import FILES

KERNELS = pathlib.Path(types.__file__).parent.parent


def parameters(function):
    return [argument.arg for argument in function.args.posonlyargs + function.args.args]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("file", FILES)
def test_operations(backend, file):
    body = ast.parse((KERNELS / backend / f"{file}.py").read_text()).body
    defined = {node.name: parameters(node) for node in body if isinstance(node, ast.FunctionDef)}
    imported = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name, function in inspect.getmembers(FILES[file], inspect.isfunction):
        if name.startswith("_") or name in imported:  # re-exported from another backend, where it is checked
            continue
        assert name in defined, f"{backend}/{file}.py has no {name}"
        assert defined[name] == list(inspect.signature(function).parameters)[1:], name


def test_every_file_of_operations_has_a_protocol():
    reference = {path.stem for path in (KERNELS / "reference").glob("*.py")} - {"__init__", "rows"}
    assert reference == FILES.keys()
