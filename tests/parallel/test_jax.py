"""cumla.parallel inside jax.shard_map, on several CPU devices or GPUs: each number needs a separate process."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("jax")

FOLDER = pathlib.Path(__file__).parent


@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 8))])
def test_shard_map(size):
    run_ranks(size, "cpu")


def test_shard_map_where_jax_has_64_bits(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    run_ranks(2, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_shard_map_on_gpus(size, need_gpus):
    need_gpus(size)
    run_ranks(size, "cuda")


def run_ranks(size, platform):
    environment = {
        "JAX_PLATFORMS": platform,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={size}",  # devices of the CPU
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "jax_ranks.py"), str(size)],
        env={**os.environ, **environment, "PYTHONPATH": path, "NUMBA_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["right"] * 6
