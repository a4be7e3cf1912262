"""The C runtime makes the launches that the Python launchers make, word for word, and refuses other calls by name."""

import re
import struct
import subprocess
import threading

import numpy as np
import pytest

from cumla.export.fields import ARRAY
from cumla.export.record import Sampler
from support import runtime
from support.runtime import H200, Runtime, words_of

KINDS = [x if x == "v4" else pytest.param(x, marks=pytest.mark.slow) for x in runtime.MODELS]
OK, DRIVER_ERROR, BAD_FILE, WRONG_DEVICE, WRONG_STRUCT, NOT_SERVED = 0, 2, 3, 4, 5, 6


@pytest.fixture
def opened():
    """The runtime with V4's file."""
    found = Runtime(runtime.file("v4"))
    assert found.status == OK, found.message
    yield found
    found.driver.stand_in_launches((runtime.Launched * 64)())
    found.close()


def sample(name, seed=0, **sizes):
    """A random call of V4's of this name, with its launches."""
    call = next(x for x in runtime.calls("v4") if x.name == name)
    sampler = Sampler(call, H200, np.random.default_rng(seed))
    return call.fields, sampler.sample(sampler.sizes(**sizes))


@pytest.mark.parametrize("kind", KINDS)
def test_launches_are_those_of_python(kind):
    runtime.assert_launches_are_those_of_python(runtime.calls(kind), Runtime(runtime.file(kind))).close()


def test_a_plan_serves_the_layers_of_a_step():
    """A planned call has the launches of the call that plans, without the plan."""
    name = "sparse_mla_decode DSV4_FP8, two lists, 2 tokens a request"
    names = [[x[0] for x in words_of(sample(each, requests=100)[1].launches)] for each in (name, f"{name}, planned")]
    assert names[0] == ["plan_decode", *names[1]]


def test_workspace_has_the_size_that_python_needs(opened):
    for number, call in enumerate(runtime.calls("v4")):
        sampler = Sampler(call, H200, np.random.default_rng(number))
        made = sampler.sample(sampler.sizes())
        words = list(made.values)
        needed = 0
        if "workspace.data" in call.fields.names:
            at = call.fields.names.index("workspace.data") + ARRAY.index("shape[0]")
            needed, words[at] = words[at], 0
        assert opened.workspace(call.fields.spec.name, words) == (OK, needed)


DECODE = "sparse_mla_decode DSV4_FP8, 1 tokens a request"
WRONG = {
    "q.data": (lambda x: x + 8, "q.data: got .*, expected a multiple of 16"),
    "q.dtype": (lambda x: 8, "q.dtype: got 8, expected 7"),
    "q.shape[0]": (lambda x: 13, "q.shape.0.: got 13, expected a multiple of 1 from 1 to 12"),
    "q.strides[0]": (lambda x: x + 8, "q.strides.0.: got .*, expected a multiple of 16"),
    "q.strides[2]": (lambda x: 16, "q.data: its rows overlap"),
    "indices.shape[2]": (lambda x: x + 1, "indices.shape.2.: got 129, expected 128"),
    "k_cache.shape[0]": (lambda x: 1, "k_cache.shape.0.: got 1, expected a multiple of 1 from 2"),
    "out.data": (lambda x: 0, "out.data: got 0"),
    "extra_k_cache.data": (lambda x: 1 << 40, "extra_"),
    "workspace.shape[0]": (lambda x: x - 1, "workspace.shape.0.: got .*, expected at least"),
    "softmax_scale": (lambda x: 0, "softmax_scale: got 0, expected a number from"),
    "softmax_scale, absent": (lambda x: -(1 << 63), "softmax_scale: got CUMLA_NO_NUMBER, expected a number from"),
    "layout": (lambda x: x + 1, "layout: got"),
    "planned": (lambda x: 2, "planned: got 2"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_call_that_is_not_served_names_the_field(opened, field):
    fields, made = sample(DECODE, requests=4)
    words, (change, message) = list(made.values), WRONG[field]
    at = fields.names.index(field.split(",")[0])
    words[at] = change(words[at])
    for function in ("cumla_call", "cumla_supported"):
        assert opened.call("sparse_mla_decode", words, function) == NOT_SERVED
        assert re.search(f"sparse_mla_decode: ({message})", opened.message), opened.message
    assert not opened.launches()


def test_a_struct_of_another_size(opened):
    _, made = sample(DECODE)
    assert opened.call("sparse_mla_decode", made.values[:-1]) == WRONG_STRUCT
    assert "got a struct of" in opened.message
    assert opened.call("mha_varlen", [0] * 10) == WRONG_STRUCT


def test_an_operation_that_the_file_lacks(opened):
    from cumla.export.header import OPERATIONS

    fields = next(x for x in OPERATIONS if x.spec.name == "dense_mla_decode")
    assert opened.call("dense_mla_decode", [0] * fields.words) == NOT_SERVED
    assert "the file has no such operation" in opened.message


def test_an_error_of_the_driver(opened):
    _, made = sample(DECODE)
    error = runtime.ctypes.c_int.in_dll(opened.driver, "stand_in_error")
    error.value = 700
    try:
        assert opened.call("sparse_mla_decode", made.values) == DRIVER_ERROR
    finally:
        error.value = 0
    assert opened.message == "cuLaunchKernelEx: the driver returned 700 (CUDA_ERROR_ILLEGAL_ADDRESS)"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("stand_in_sms", 114, "capability 9.0 with 114 SMs; the file is for 9.0 with 132 SMs"),
        ("stand_in_capability", 100, "capability 10.0 with 132 SMs"),
        ("stand_in_clusters", 5, "runs 5 clusters of 2 CTAs at a time; the file is for 66"),
    ],
)
def test_a_device_that_is_not_in_the_file(variable, value, message):
    number = runtime.ctypes.c_int.in_dll(runtime.ctypes.CDLL(str(runtime.folder() / "libstandin.so")), variable)
    before, number.value = number.value, value
    try:
        found = Runtime(runtime.file("v4"))
    finally:
        number.value = before
    assert found.status == WRONG_DEVICE
    assert message in found.message
    assert not found.handle.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:100], "its header says"),
        (lambda x: b"", "was not written by cumla export"),
        (lambda x: b"PK" + x[2:], "was not written by cumla export"),
        (lambda x: x[:8] + struct.pack("<I", 3) + x[12:], "version 3"),
        (lambda x: x[:12] + struct.pack("<I", 7) + x[16:], "structs 00000007"),
        (lambda x: x[:-1] + bytes([x[-1] ^ 1]), "the checksum is wrong"),
    ],
)
def test_a_file_that_is_none(change, message):
    found = Runtime(change(runtime.file("v4")))
    assert found.status == BAD_FILE
    assert message in found.message


def test_threads_share_a_library(opened):
    """Each thread's calls have its own words, and its own message."""
    samples = [sample(DECODE, seed) for seed in range(4)]
    failures = []

    def work(number):
        fields, made = samples[number]
        wrong = list(made.values)
        wrong[fields.names.index("q.shape[0]")] = 100 + number
        for _ in range(200):
            if opened.call("sparse_mla_decode", made.values):
                failures.append(opened.message)
            if opened.call("sparse_mla_decode", wrong) != NOT_SERVED or f"got {100 + number}," not in opened.message:
                failures.append(opened.message)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def calls_file(path, kind):
    """Calls of a model's file, for fuzz.c."""
    words = []
    for number, call in enumerate(runtime.calls(kind)):
        sampler = Sampler(call, H200, np.random.default_rng(number))
        made = sampler.sample(sampler.sizes())
        words += [runtime.number_of(call.fields.spec.name), len(made.values), *made.values]
    path.write_bytes(struct.pack(f"<{len(words)}q", *words))
    return len(runtime.calls(kind))


@pytest.mark.parametrize(("kind", "mutations"), [("v4", 300), pytest.param("v32", 5_000, marks=pytest.mark.slow)])
def test_damaged_files_and_calls_with_sanitizers(tmp_path, kind, mutations):
    place = runtime.folder()
    runtime.built(
        "-fsanitize=address,undefined", "-fno-sanitize-recover=all", runtime.libcuda(place), "-I", place, "-o",
        tmp_path / "fuzz", runtime.HERE / "fuzz.c", place / "cumla.c", "-ldl",
    )  # fmt: skip
    (tmp_path / "file").write_bytes(runtime.file(kind))
    count = calls_file(tmp_path / "calls", kind)
    done = subprocess.run(
        [tmp_path / "fuzz", tmp_path / "file", tmp_path / "calls", str(mutations)], capture_output=True, text=True,
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} calls\n" in done.stdout


def test_the_header_is_c_plus_plus_too(tmp_path):
    (tmp_path / "use.cpp").write_text(
        '#include "cumla_operations.h"\n'
        "int use(const cumla_library *x, void *stream) {\n"
        "    cumla_sparse_mla_decode_arguments a{};\n"
        "    a.softmax_scale = 0.5; a.layout = CUMLA_DSV4_FP8; a.q.type = CUMLA_BFLOAT16;\n"
        "    return cumla_sparse_mla_decode(x, &a, stream, CUMLA_ORDINARY);\n}\n"
    )
    done = subprocess.run(
        [runtime.compiler(), "-x", "c++", "-std=c++17", "-Wall", "-Werror", "-c", "-I", runtime.folder(),
         tmp_path / "use.cpp", "-o", tmp_path / "use.o"], capture_output=True, text=True,
    )  # fmt: skip
    if "cc1plus" in done.stderr:
        pytest.skip("there is no C++ compiler")
    assert done.returncode == 0, done.stderr


def test_the_guide_s_code_compiles(tmp_path):
    (code,) = re.findall(
        r"```c\n(.*?)```", (runtime.HERE.parents[1] / "docs/guide/without-python.md").read_text(), re.DOTALL
    )
    (tmp_path / "guide.c").write_text(f"#include <stdio.h>\n{code}\nint main(void) {{ (void)merge; return 0; }}\n")
    runtime.built("-I", runtime.folder(), "-c", tmp_path / "guide.c", "-o", tmp_path / "guide.o")
