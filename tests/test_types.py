"""Types of the public functions, as mypy sees them in a user's program."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import cumla

pytest.importorskip("mypy")
CHECKOUT = pathlib.Path(cumla.__file__).parent.parent

ACCEPTED = """
from typing import Any
import cumla
import cumla.metadata
{imports}

def step(q: {array}, cache: {array}, indices: {array}, lens: {array}, sink: {array} | None) -> None:
    cumla.quantize_and_insert_k_cache(q, cache, lens)
    out, lse = cumla.sparse_mla_decode(q, cache, indices, topk_length=lens, attn_sink=sink, out=q)
    merged, lens = cumla.compute_swa_indices_and_lens(lens, lens, lens, lens, indices, 4, 8, 64, out=(indices, lens))
    cumla.dense_mla_decode(q, cache, indices, lens, scale=0.5)
    cumla.copy_blocks([cache, cache], indices)
    cumla.fp8_mqa_logits(q, (cache, lens), lens, lens, lens)
    cumla.metadata.compute_positions(3, lens, lens)
    kept: list[cumla.Array] = [q, cache]
    print(out.shape, lse.dtype, merged, kept)
"""
FRAMEWORKS = {
    "numpy": (
        "import numpy as np\nimport numpy.typing as npt",
        "npt.NDArray[np.float32] | npt.NDArray[np.uint8] | npt.NDArray[np.bool_] | npt.NDArray[Any]",
    ),
    "torch": ("import torch", "torch.Tensor"),
    "jax": ("import jax", "jax.Array"),
    "cupy": ("import cupy  # type: ignore[import-untyped, unused-ignore]", "cupy.ndarray"),
}
REFUSED = """
import numpy as np
import cumla
import cumla.layers

q = np.zeros((1, 1, 8, 512), np.float32)
cumla.sparse_mla_decode(1, "cache", None)
cumla.sparse_mla_decode(q, q, q, topk_length=3)
cumla.sparse_mla_decode(q, q, [[[0, 1]]])
cumla.quantize_and_insert_k_cache(q, q, None)
cumla.dense_mla_decode(q, q, q, q, scale="1")
cumla.compute_swa_indices_and_lens(q, q, q, q, q, 4, 8, 64, out=q)
cumla.copy_blocks(3, q)

def step(layer: cumla.layers.SparseMLALayer, metadata: cumla.metadata.DeepseekSparseSWAMetadata) -> None:
    layer.step(q, q, "cache", metadata)
"""


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """mypy's lines over a program outside of the checkout, as a user runs it."""
    folder = tmp_path_factory.mktemp("types")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]

    def run(program):
        (folder / "program.py").write_text(program)
        path = {**os.environ, "MYPYPATH": str(CHECKOUT)}
        found = subprocess.run(
            [*command, "program.py"], capture_output=True, text=True, cwd=folder, env=path, timeout=600
        )
        return (found.stdout + found.stderr).splitlines()

    return run


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_of_frameworks_are_accepted(mypy, framework):
    imports, array = FRAMEWORKS[framework]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    assert mypy(ACCEPTED.format(imports=imports, array=array)) == []


@pytest.mark.timeout(900)
def test_other_values_are_refused(mypy):
    lines = mypy(REFUSED)
    found = [(int(line.split(":")[1]), line.split("[")[-1].rstrip("]")) for line in lines if ": error: " in line]
    first = REFUSED.splitlines().index('cumla.sparse_mla_decode(1, "cache", None)') + 1
    wrong = [first] * 3 + [first + i for i in range(1, 7)] + [len(REFUSED.splitlines())]
    assert found == [(line, "arg-type") for line in wrong]
