"""The programs of examples/ that have no Python make the launches of a decode step, on libcuda's stand-in."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cumla.export.header import OPERATIONS
from support import runtime

EXAMPLES = runtime.HERE.parents[1] / "examples"
LAYER = (
    "qnorm_rope_and_insert", "quantize_and_insert_k_cache", "indexer_k_quant_and_cache", "fused_indexer_q_rope_quant",
    "indexer_logits_sm90", "top_k_in_registers", "sparse_mla_decode", "attention_epilogue", "apply_rope",
)  # fmt: skip
STEP = ["compute_swa_indices_and_lens", *LAYER, *LAYER]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "v4.cumla"
    path.write_bytes(runtime.file("v4"))
    return path


@pytest.fixture(scope="module")
def program_in_c(tmp_path_factory):
    """The example with the runtime, with sanitizers."""
    place, out = runtime.folder(), tmp_path_factory.mktemp("c") / "decode_step"
    runtime.built(
        "-fsanitize=address,undefined", "-fno-sanitize-recover=all", runtime.libcuda(place), "-I", place, "-o", out,
        EXAMPLES / "c/decode_step.c", place / "cumla.c", place / "libstandin.so", f"-Wl,-rpath,{place}", "-ldl", "-lm",
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def program_in_rust(tmp_path_factory):
    cargo = shutil.which("cargo") or shutil.which("cargo", path="/root/.cargo/bin")
    if cargo is None or shutil.which("make") is None:
        pytest.skip("there is no Rust compiler (cargo), or no make")
    folders = f"{Path(cargo).parent}:{os.environ['PATH']}"
    if subprocess.run([cargo, "--version"], capture_output=True, env=os.environ | {"PATH": folders}).returncode:
        pytest.skip("cargo has no toolchain, or no home")
    runtime.compiler()
    place, build = runtime.folder(), tmp_path_factory.mktemp("rust")
    (build / "libcuda.so").symlink_to(place / "libstandin.so")
    flags = runtime.libcuda(place).replace('"', '\\"')
    done = subprocess.run(
        ["make", "-C", EXAMPLES / "rust", f"CUMLA_RUNTIME={place}", f"CUDA_LIBRARIES={build}", f"BUILD={build}",
         f"CFLAGS=-O1 {flags}"], capture_output=True, text=True, env=os.environ | {"PATH": folders},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr
    return build / "release/decode_step"


def run(program, *arguments):
    environment = {
        "STAND_IN_TRACE": "1", "ASAN_OPTIONS": "detect_leaks=0",  # no ptrace in some containers
        "LD_LIBRARY_PATH": str(program.parents[1]),  # Rust's libcuda
    }  # fmt: skip
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, env=environment)


def launches(done):
    """Kernels that were captured, then the launches of each replayed graph."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert not [line for line in lines if not line.startswith(("captured ", "graph of "))]
    captured = [line.removeprefix("captured ") for line in lines if line.startswith("captured ")]
    return captured, [int(line.split()[2]) for line in lines if line.startswith("graph of ")]


def check_step(program, file):
    """The step of 1, several and the most requests that the file serves; and of more."""
    for requests in (1, 7, runtime.CLAIMS.decodes):
        done = run(program, file, requests, 3)
        assert launches(done) == (STEP, [len(STEP)] * 3)
        lengths = re.findall(rf"{requests} requests, lengths (\d+) to", done.stdout)
        assert [int(x) - int(lengths[0]) for x in lengths] == [0, 1, 2]
    done = run(program, file, runtime.CLAIMS.decodes + 1)
    assert done.returncode == 1
    assert (
        f"q.shape[0]: got {runtime.CLAIMS.decodes + 1}, expected a multiple of 1 from 1 to {runtime.CLAIMS.decodes}"
        in done.stderr
    )
    done = run(program, "/does/not/exist")
    assert done.returncode == 1
    assert "/does/not/exist: cannot be opened" in done.stderr


def test_the_step_in_c(program_in_c, file):
    check_step(program_in_c, file)
    assert run(program_in_c).returncode == 2


def test_the_step_in_rust(program_in_rust, file):
    check_step(program_in_rust, file)
    assert run(program_in_rust).returncode == 2


def test_structs_in_rust_are_those_of_the_header():
    """The operations' numbers, and their fields in order."""
    text = (EXAMPLES / "rust/src/cumla.rs").read_text()
    found = re.findall(r"operation!\(\s*(\w+),\s*(\d+),\s*\{([^}]*)\},\s*\{([^}]*)\}\s*\);", text)
    assert len(found) == 7
    for name, number, arrays, scalars in found:
        fields = OPERATIONS[int(number)]
        assert fields.spec.name.replace("_", "") == name.lower()
        names = [x.strip() for x in arrays.split(",")] + [x.split(":")[0].strip() for x in scalars.split(",")]
        assert [x for x in names if x] == [x.name for x in fields.parameters]
        kinds = re.findall(r"\w+: (\w+)", scalars)
        assert kinds == ["f64" if x.kind == "number" else "i64" for x in fields.parameters if not x.is_array]


def test_the_example_builds_with_cmake(tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("there is no CMake")
    runtime.compiler()
    place = runtime.folder()
    options = f"-DCUMLA_RUNTIME={place}", f"-DCUDA_DRIVER={place}/libstandin.so"
    for command in (["cmake", "-S", EXAMPLES / "c", "-B", tmp_path, *options], ["cmake", "--build", tmp_path]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert Path(tmp_path, "decode_step").exists()
