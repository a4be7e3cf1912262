"""The README is correct: its examples run, its table of layouts and its extras match the code."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from cumla.layout import LAYOUTS

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def framework_of(example):
    return re.match(r"import (\w+)", example.replace("import ml_dtypes\n", "")).group(1)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(text, id=framework_of(text), marks=[pytest.mark.gpu] if framework_of(text) == "cupy" else [])
        for text in EXAMPLES
    ],
)
def test_example(example):
    pytest.importorskip(framework_of(example))
    exec(compile(example, "README.md", "exec"), {})


def test_every_framework_has_an_example():
    assert [framework_of(example) for example in EXAMPLES] == ["numpy", "cupy", "torch", "jax"]


def test_table_of_layouts():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", README, re.MULTILINE)
    assert {name: (int(size), int(values)) for name, size, values in rows} == {
        name: (layout.token_bytes, layout.head_dim) for name, layout in LAYOUTS.items()
    }


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"'\.\[(\w+)\]'", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named == {"test", "dev", "docs", "cuda12", "cuda13"}
    assert named <= set(extras)


def test_files_that_are_named_exist():
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path


def test_a_checkout_can_be_imported_from_its_own_folder():
    """As by Python started there after a plain `pip install .`, which an editable install's import hook would hide."""
    code = (
        "import sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]\n"
        "import cumla, cumla.kernels\n"
        "print(cumla.kernels.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert pathlib.Path(done.stdout.strip()).resolve() == ROOT / "kernels" / "__init__.py"
