"""Every file of examples/ runs and prints the expected output."""

import pathlib
import runpy
import sys

import pytest

import emulation

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
EXPECTED = {
    "from_flash_mla.py": [
        "sparse: out torch.bfloat16 (2, 2, 128, 512), lse (2, 128, 2)",
        "dense:  out torch.bfloat16",
        "prefill: out torch.bfloat16 (4, 128, 512), lse (4, 128)",
    ],
    "glm.py": [
        "GLM-5.2: modes of layers ['full', 'full', 'reuse', 'reuse', 'reuse']\n16 tokens after a prompt of 100: [",
        "GLM-5.3-Flash: modes of layers ['full', 'reuse', 'full', 'full']\n16 tokens after a prompt of 100: [",
    ],
    "graph_loop.py": ["20 steps, lengths from ["],
    "mini_engine.py": ["33 steps, 384 of 1309 prompt tokens were cached, all outputs as in one shot"],
    "with_cupy.py": ["out bfloat16 (32, 1, 64, 512) on <CUDA Device 0>"],
    "with_jax.py": ["out bfloat16 (4, 16, 512) on ", "cache updated in place: True"],
    "with_numpy.py": ["out bfloat16 (4, 1, 16, 512), lse float32 (4, 16, 1), keys attended [1, 70, 128, 128]"],
    "with_ranks.py": ["rank 3: 252 rows", "every rank has the result of one device"],
    "with_torch.py": ["out torch.bfloat16 (4, 1, 16, 512) on ", "as eager: True"],
}
NEEDS = {"from_flash_mla.py": "torch", "with_jax.py": "jax", "with_torch.py": "torch"}
# A backend that is not the default.
BACKENDS = {"with_numpy.py": ("reference",), "with_torch.py": ("reference",), "mini_engine.py": ("numpy", "reference")}
GPU_BACKENDS = dict.fromkeys(("graph_loop.py", "with_cupy.py", "with_torch.py"), ("numba_cuda",)) | {
    "mini_engine.py": ("cupy", "numba_cuda")
}
DEVICE_ARGUMENTS = {"mini_engine.py": ("cupy",)}
NEEDS_GPU = {"graph_loop.py", "with_cupy.py"}


def run(name, capsys, *arguments):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for text in EXPECTED[name]:
        assert text in printed
    return printed


# Whole models and their shared files: tests/models/test_models.py, test_example_v41.py, test_disaggregated.py and
# tests/test_example_server.py run them.
MODELS = {
    "checkpoint.py", "deepseek_v4.py", "deepseek_v32.py", "deepseek_v41.py", "disaggregated.py", "page_cache.py",
    "seeded_weights.py", "server.py", "serving.py", "tiny_checkpoint.py",
}  # fmt: skip


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED) | MODELS


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - NEEDS_GPU))
def test_example(name, capsys):
    run(name, capsys)


def test_glm_that_is_batch_invariant(capsys):
    run("glm.py", capsys, "--batch-invariant")


@pytest.mark.parametrize("name", BACKENDS)
def test_example_on_another_backend(name, capsys):
    run(name, capsys, *BACKENDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_example_on_another_backend_of_the_device(name, capsys):
    run(name, capsys, *GPU_BACKENDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example_on_the_device(name, capsys):
    printed = run(name, capsys, *DEVICE_ARGUMENTS.get(name, ()))
    if name == "graph_loop.py":
        before, after = (eval_list(part) for part in printed.split("from ")[1].split(" to "))
        assert [b + 20 for b in before] == after


@pytest.mark.slow
@pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))
def test_the_engine_on_an_emulated_device(capsys):
    with emulation.devices():
        run("mini_engine.py", capsys, "cupy")


def eval_list(text):
    return [int(number) for number in text.strip().strip("[]").split(",")]
