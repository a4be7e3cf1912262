"""The README is correct: its example runs, its commands, extras and files exist, and it stays short."""

import collections
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import cumla
from cumla.layout import BUILT_IN

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_example():
    (example,) = EXAMPLES
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.gpu
def test_example_on_a_gpu():
    (example,) = EXAMPLES
    exec(compile(example.replace("import numpy as xp", "import cupy as xp"), "README.md", "exec"), {})


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("cumla.sparse_mla_decode(q, cache, indices, plan=plan)", 25),
        ("cumla.sparse_mla_decode(q, cache, indices)", 25),
        ("cumla.sparse_mla_decode(q, cache, indices, plan=plan, out=out, lse=lse)", 25),
        ("cumla.quantize_and_insert_k_cache(k, cache, slot_mapping)", 15),
    ],
    ids=["as the example types it", "without a plan", "with outputs", "insert"],
)
@pytest.mark.usefixtures("emulated")
def test_a_repeated_call_takes_few_python_calls(call, most):
    """Calls of the package's functions, which the host's time consists of. A call in full takes hundreds."""
    import cupy

    (example,) = EXAMPLES
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    names |= {name: cupy.array(x) for name, x in names.items() if isinstance(x, np.ndarray)}
    names |= {"plan": cumla.DecodePlan(), "slot_mapping": cupy.array(np.arange(1000))}
    repeated = compile(call, "README.md", "eval")
    for _ in range(3):
        eval(repeated, names)
    with recorded_calls() as calls:
        eval(repeated, names)
    assert len(calls) <= most, collections.Counter(calls).most_common(10)


@contextlib.contextmanager
def recorded_calls():
    """The Python functions of the package that are called within the context."""
    package, found = str(pathlib.Path(cumla.__file__).parent.parent), []

    def profile(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((f"{package}/cumla/", f"{package}/kernels/")):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_it_fits_a_visit():
    assert len(README.splitlines()) <= 120


def test_table_of_layouts():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", (ROOT / "docs" / "layouts.md").read_text(), re.MULTILINE)
    assert {name: (int(size), int(values)) for name, size, values in rows} == {
        layout.name: (layout.token_bytes, layout.head_dim) for layout in BUILT_IN
    }


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"'\.\[(\w+)\]'", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named == {"test", "dev", "docs", "cuda12", "cuda13"}
    assert named <= set(extras)


def test_files_that_are_named_exist():
    for path in re.findall(r"\]\(([\w/.-]+)\)", README):
        assert (ROOT / path).exists(), path


def test_a_checkout_can_be_imported_from_its_own_folder():
    """Like Python started there after `pip install .`; an editable install's import hook would hide this."""
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
