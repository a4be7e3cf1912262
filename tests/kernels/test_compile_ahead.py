"""Programs of a first call are compiled in parallel, each once; an error is raised where the program is needed."""

import contextlib
import sys
import threading
import types

import pytest

from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.launch import recorded_launches
from support.calls import call, put
from support.lab import Lab

TOGETHER = 3  # programs under way at a time before one of them is ready


class Device(contextlib.nullcontext):
    def __init__(self, number=0):
        super().__init__()
        self.id = number


class FailedError(RuntimeError):
    pass


@pytest.fixture
def made(monkeypatch):
    """Texts that a fake CuPy compiles, in the order of their start; it waits for TOGETHER of them."""
    texts, meet = [], threading.Barrier(TOGETHER)

    class RawModule:
        def __init__(self, code, options):
            self.code, self.compiled = code, False

        def compile(self):
            texts.append(self.code)
            if "WAITS 1" in self.code and threading.current_thread() is not threading.main_thread():
                meet.wait(timeout=30)
            if "FAILS 1" in self.code:
                raise FailedError("does not compile")
            self.compiled = True

        def get_function(self, name):
            if not self.compiled:
                self.compile()
            return name

    cupy = types.ModuleType("cupy")
    cupy.cuda, cupy.RawModule = types.SimpleNamespace(Device=Device, nvrtc=True), RawModule
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(compiler, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(compiler, "Kernel", lambda raw, packing, parameters: raw)
    monkeypatch.setattr(compiler, "_note", lambda *rest: None)
    monkeypatch.setattr(compiler, "_result_file", lambda *rest: None)
    monkeypatch.setattr(compiler, "_cores", threading.BoundedSemaphore(TOGETHER))  # on any number of cores
    monkeypatch.setattr(compiler, "_builds", {})
    monkeypatch.setattr(compiler, "_loaded", set())
    compiler.kernel.cache_clear()
    yield texts
    compiler.kernel.cache_clear()


def kernel(**defines):
    return compiler.kernel("common/clear.cu", "clear", **defines)


def test_programs_are_compiled_side_by_side_and_once(made):
    for number in range(TOGETHER):
        compiler.start("common/clear.cu", WAITS=1, NUMBER=number)
        compiler.start("common/clear.cu", WAITS=1, NUMBER=number)
    for number in range(TOGETHER):
        kernel(WAITS=1, NUMBER=number)
    assert len(made) == TOGETHER
    compiler.start("common/clear.cu", WAITS=1, NUMBER=0)  # already compiled
    assert len(made) == TOGETHER
    assert not compiler._builds


def test_an_error_comes_where_the_program_is_needed(made):
    compiler.start("common/clear.cu", FAILS=1)
    with pytest.raises(FailedError, match="does not compile"):
        kernel(FAILS=1)
    assert len(made) == 2


def test_a_program_that_nothing_began_is_compiled_at_once(made):
    kernel(NUMBER=7)
    assert len(made) == 1


@pytest.mark.parametrize("folder", ["{place}", "{place}/none", "place", "~/place", ""])
def test_results_are_kept_beside_compiled_code_of_this_user_alone(folder, tmp_path, monkeypatch, emulated):
    """Not in the current directory, which CuPy may use for its code: anyone may have written a result there."""
    import cupy

    (tmp_path / "place").mkdir()
    (tmp_path / "~" / "place").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "~")  # a user without a home
    monkeypatch.setenv("CUPY_CACHE_DIR", folder.format(place=tmp_path / "place"))
    monkeypatch.setattr(cupy, "__version__", "14.0", raising=False)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.1")
    found = compiler._result_file("text", ())
    assert (found is not None) == (folder == "{place}")
    assert found is None or (found.parent == tmp_path / "place" and found.suffix == ".verdict")


@pytest.mark.parametrize(
    "name", ["sparse_mla_decode-V32_FP8", "sparse_mla_prefill-512-special-values", "fp8_block_linear"]
)
def test_a_kernel_that_was_only_asked_for_is_launched_later(emulated, name):
    """No launcher caches the object that replaces an unlaunched kernel."""
    right, lab = call(name), Lab("cuda", on_device=True)
    arguments = {key: put(lab, value) for key, value in right.arguments.items()}
    compiler.look_first_in()
    with compiler.programs_asked_for() as programs:
        right.function(**arguments)
    assert programs
    with recorded_launches() as launches:
        right.function(**arguments)
    assert launches
