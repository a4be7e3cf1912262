"""Machine code is cached by the inputs of its compilation and replaced where it is damaged; the cache is optional."""

import collections
import concurrent.futures
import contextlib
import hashlib
import importlib
import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import cumla
from cumla.kernels import check_results, cpu
from cumla.kernels.numba_common import code_folder, compiled
from support.operations import CASES, operation

CHECKOUT = Path(__file__).parent.parent.parent

HELPER = """
import numpy as np
from cumla.kernels.cpu.indices import write_window  # whose helpers are in other files
row = np.zeros(2, np.int32)
write_window(np.array([[5]], np.int32), 0, 2, 4, 4, row)
print(row.tolist())
"""
BUILD = """
import sys
import numpy as np
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
starts, lens, table = np.array([0, 1], np.int32), np.array([3], np.int32), np.array([[5]], np.int32)
batch = CommonAttentionMetadata(starts, starts, lens, lens, lens - 1, 1, 1, 1, table, np.array([22]))
config = ServingConfig(block_size=4, window_size=2, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=8)
for backend in ("reference", "cpu"):
    print("numba" in sys.modules)
    print(DeepseekSparseSWAMetadataBuilder(config, backend=backend).build(0, batch).decode_swa_indices.tolist())
"""


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """cumla as pip installs it, and used once."""
    site = tmp_path_factory.mktemp("site-packages")
    # Its links to kernels/ and interop/ become folders.
    shutil.copytree(CHECKOUT / "cumla", site / "cumla")
    assert run(site, site) == ("[21, 22]\n", "")
    return site


@pytest.fixture
def package(used, tmp_path):
    return shutil.copytree(used, tmp_path / "site-packages")


def run(site, home, script=HELPER):
    """Output and warnings of a script with this package and this home."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "XDG_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(site), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=home, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def kept(place):
    return sorted(path for path in place.rglob("compiled-*/*") if path.is_file())


@pytest.mark.slow
def test_nothing_is_kept_in_the_package(package, tmp_path):
    """`pip uninstall` leaves what it did not install."""
    before = sorted((package / "cumla").rglob("*"))
    assert run(package, tmp_path) == ("[21, 22]\n", "")
    assert sorted((package / "cumla").rglob("*")) == before
    assert not kept(package / "cumla")
    assert kept(tmp_path / ".cache" / "cumla")


def test_what_is_kept_is_used(package):
    before = [(path, path.stat().st_mtime_ns) for path in kept(package)]
    assert run(package, package) == ("[21, 22]\n", "")
    assert before == [(path, path.stat().st_mtime_ns) for path in kept(package)]


def test_a_change_in_a_helper_is_seen(package, tmp_path):
    slots = package / "cumla" / "kernels" / "numba_common" / "slots.py"
    text = slots.read_text()
    changed = text.replace("slot = block * block_size + position % block_size", "slot = block * block_size + 3")
    assert changed != text
    slots.write_text(changed)
    assert run(package, package) == ("[23, 23]\n", "")
    slots.write_text(text)
    assert run(package, package) == ("[21, 22]\n", "")


@pytest.mark.parametrize("damage", ["a bit", "the end", "all of it", "its digest alone is right"])
@pytest.mark.thorough(when=lambda x: x.get("damage") != "a bit")
def test_damaged_machine_code_is_made_anew(package, tmp_path, damage):
    (path,) = kept(package)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes({
        "a bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "the end": data[:-1],
        "all of it": b"",
        "its digest alone is right": hashlib.sha256(b"{}").digest() + b"{}",
    }[damage])  # fmt: skip
    output, warnings = run(package, package)
    assert output == "[21, 22]\n"
    assert f"{path} is compiled again" in warnings
    assert run(package, package) == ("[21, 22]\n", "")


WARM = """
import sys
import ml_dtypes, numpy as np
import cumla
print("numba" in sys.modules)
from numba.core import event
cache = cumla.DSV4_FP8.allocate(1, 64)
k = np.ones((8, 512), ml_dtypes.bfloat16)
with event.install_recorder("numba:compile") as recorder:
    cumla.quantize_and_insert_k_cache(k, cache, np.arange(8))
    if {attends}:
        out, lse = cumla.sparse_mla_decode(k[None, None, :4], cache, np.arange(8, dtype=np.int32)[None, None])
        assert (out == 1).all()
print(len(recorder.buffer) > 0)
"""


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.thorough(when=lambda x: x.get("attends"))
def test_a_warm_process_compiles_nothing(package, tmp_path, attends):
    """And Numba is imported by the first call of the CPU backend, not with cumla."""
    script = WARM.format(attends=attends)
    assert run(package, package, script) == ("False\nTrue\n", "")
    assert run(package, package, script) == ("False\nFalse\n", "")


def test_two_processes_that_compile_for_different_types_do_not_disturb_each_other(package, tmp_path):
    script = """
import sys, numpy as np
from cumla.kernels.numba_common.numbers import to_float32
kind = {{"int64": np.int64, "uint16": np.uint16}}["{}"]
print([to_float32(kind(3), 1) for _ in range(2)])
"""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda name: run(package, package, script.format(name)), ["int64", "uint16"]))
    assert len(set(done)) == 1
    assert not done[0][1]
    assert len([path for path in kept(package) if path.name.startswith("to_float32")]) == 2
    assert run(package, package, script.format("int64")) == done[0]


@pytest.mark.slow
def test_other_settings_of_numba_have_other_machine_code(package, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    before = kept(package)
    script = "import os; os.environ['NUMBA_BOUNDSCHECK'] = '1'\n" + HELPER
    assert run(package, package, script) == ("[21, 22]\n", "")
    assert len(kept(package)) == len(before) + 1


class Numbers(NamedTuple):
    n: int
    yes: bool
    x: float


def _mix(array, row, numbers, scale, flag):
    total = np.float64(0)
    for i in range(array.shape[0]):
        for j in range(array.shape[1]):
            total += np.float64(array[i, j]) * row[j] * (i + numbers.n)
    if flag and numbers.yes:
        total += array.size + numbers.x
    return total * scale


def _twice(x):
    return 2 * x


mix = compiled.compiled(_mix)
counts = compiled.compiled(lambda array: len(array))
refuses = compiled.compiled(lambda x, y: x // y)


NUMBERS = (Numbers(3, True, 0.5), Numbers(-(2**40), False, 1.5), Numbers(0, np.bool_(True), np.float64(2)))
SCALES = (2.0, np.float32(1.1), np.int64(3), -7, True)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64"])
def test_arguments_arrive_as_they_are(dtype):
    whole = np.arange(96).reshape(8, 12).astype(dtype)
    still = whole.copy()
    still.flags.writeable = False
    arrays = (whole, whole.T, whole[::2], whole[:, ::-1], whole[1:3, 2:9:3], whole[:0], still, whole[:1])
    for number, array in enumerate(arrays):
        row = np.arange(array.shape[1], dtype=np.int32)
        rest = NUMBERS[number % 3], SCALES[number % 5], (True, np.bool_(True), False)[number % 3]
        assert mix(array, row, *rest) == pytest.approx(float(_mix(array, row, *rest)), rel=1e-12)


def test_results_and_exceptions():
    assert counts(np.zeros(5)) == 5
    assert refuses(7, 2) == 3
    with pytest.raises(ZeroDivisionError):
        refuses(7, 0)


def test_a_number_is_never_converted_to_the_type_of_an_earlier_call():
    double = compiled.compiled(lambda x: x * np.float32(3))
    for x in (0.1, np.float32(0.1), np.int64(2), True):
        assert type(double(x)) is float
        assert double(x) == double.py_func(x)
    assert len(double.overloads) == 4


def takes_slots(op):
    return "slot_mapping" in inspect.signature(getattr(cumla, op)).parameters


@pytest.mark.parametrize(
    ("op", "case"), [x for x in {operation(case): case for case in CASES}.items() if takes_slots(x[0])]
)
def test_slots_of_int32_take_the_machine_code_of_int64(op, case, rng):
    """A warm process compiles nothing for an engine whose slots are of the other type."""
    modules = [importlib.import_module(f"cumla.kernels.cpu.{x.name}") for x in pkgutil.iter_modules(cpu.__path__)]
    functions = {
        (x.__module__, x.__name__): x
        for module in modules
        for x in vars(module).values()
        if type(x) is compiled.Compiled
    }
    for function in functions.values():
        function._reset_overloads()  # of earlier tests
    given, counts = CASES[case](rng), []
    for dtype in (np.int64, np.int32):
        for name in given.keys() & {"slot_mapping", "state_slot_mapping"}:
            given[name] = given[name].astype(dtype)
        getattr(cumla, op)(**given, backend="cpu")
        counts.append({name: len(function.overloads) for name, function in functions.items()})
    assert counts[0] == counts[1]


def test_many_threads_at_once_compile_it_once(monkeypatch):
    asked = []
    fresh = compiled.compiled(lambda x: x + 1)
    monkeypatch.setattr(fresh._cache, "load_overload", lambda *arguments: asked.append(1))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fresh, range(64))) == list(range(1, 65))
    assert len(asked) == 1


def test_what_cannot_be_kept_is_counted(monkeypatch, tmp_path):
    """By the reason, for `cumla warmup`; code that is on disk already counts for nothing."""
    unkept = collections.Counter()
    monkeypatch.setattr(check_results, "UNSAVED", unkept)
    (tmp_path / "file").touch()  # not even root can create a folder below it
    for folder, reason in (
        (tmp_path / "file" / "compiled", f"{tmp_path / 'file' / 'compiled'}: Not a directory"),
        (None, "no folder can be used"), (tmp_path / "compiled", None), (tmp_path / "compiled", None),
    ):  # fmt: skip
        unkept.clear()
        monkeypatch.setattr(code_folder, "folder", lambda folder=folder: folder)
        assert compiled.compiled(_twice)(21) == 42
        assert unkept == ({reason: 1} if reason else {})
    result_file = tmp_path / "file" / "a.verdict"
    check_results.conclude(check_results.Fresh("a", "cpu", "", "", result_file), check_results.RIGHT)
    assert unkept == {f"{tmp_path / 'file'}: Not a directory": 1}


def test_a_file_that_cannot_be_replaced_is_an_error_and_leaves_no_other(tmp_path):
    (tmp_path / "code").mkdir()
    with pytest.raises(OSError, match="code"):
        code_folder.write(tmp_path / "code", b"data")
    assert list(tmp_path.iterdir()) == [tmp_path / "code"]


@pytest.mark.slow
def test_what_cannot_be_read_is_passed_by(package, tmp_path):
    folder = kept(package)[0].parent
    shutil.rmtree(folder)
    folder.write_text("no folder")
    output, warnings = run(package, package)
    assert output == "[21, 22]\n"
    assert f"{folder} cannot be read" in warnings
    assert not kept(package)


@pytest.mark.slow
def test_where_nothing_can_be_kept(package, tmp_path):
    """As in a hardened container, with read-only site-packages and home. The reference compiles nothing."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").write_text("no folder")
    assert run(package, home, BUILD) == ("False\n[[[21, 22]]]\n" * 2, "")
    assert not kept(home)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "/home/me/.cache/cumla"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/cumla"),
        ({"XDG_CACHE_HOME": "caches"}, "/home/me/.cache/cumla"),
        ({"XDG_CACHE_HOME": "~/caches"}, "/home/me/.cache/cumla"),
        ({"NUMBA_CACHE_DIR": "/code", "XDG_CACHE_HOME": "/caches"}, "/code"),
        ({"NUMBA_CACHE_DIR": ""}, "/home/me/.cache/cumla"),
        ({"NUMBA_CACHE_DIR": "code"}, "/home/me/.cache/cumla"),
        ({"NUMBA_CACHE_DIR": ".", "XDG_CACHE_HOME": "/caches"}, "/caches/cumla"),
        ({"NUMBA_CACHE_DIR": "~/code", "HOME": "~"}, None),
        ({"HOME": "home"}, None),
        ({"HOME": None}, None),
    ],
)
def test_no_code_is_loaded_from_the_current_directory(variables, place, monkeypatch):
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        if value is None:  # a user who is not in the password database
            monkeypatch.delenv(name)
            monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        else:
            monkeypatch.setenv(name, value)
    relative = variables.get("NUMBA_CACHE_DIR", "").removeprefix("/code")
    warns = pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR: got .* expected an absolute path")
    with warns if relative else contextlib.nullcontext():
        assert code_folder._place() == (None if place is None else Path(place))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
@pytest.mark.slow
def test_a_user_without_a_home_leaves_nothing_in_the_current_directory(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    command = ["unshare", "--user", "--map-user=54321", sys.executable, "-c", HELPER]
    environment["PYTHONPATH"] = str(CHECKOUT)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.stdout == "[21, 22]\n", done.stderr
    assert not list(tmp_path.iterdir())


def test_few_folders_are_kept(tmp_path, monkeypatch):
    for number in range(code_folder.MOST_FOLDERS + 3):
        folder = tmp_path / f"{code_folder.PREFIX}{number}"
        code_folder.write(folder / "f", b"machine code")
        os.utime(folder, (number, number))
    left = sorted(int(path.name.removeprefix(code_folder.PREFIX)) for path in tmp_path.iterdir())
    assert left == list(range(3, code_folder.MOST_FOLDERS + 3))


LOGGED = f"""
import logging
logging.basicConfig(format="%(message)s")
logging.getLogger("cumla").setLevel(logging.INFO)
import numpy as np
import cumla
for _ in range(2):
    exec({HELPER!r})
    keys, cache = np.ones((1, 128), np.float32), np.zeros((1, 64, 132), np.uint8)
    cumla.indexer_k_quant_and_cache(keys, cache, np.array([3]), backend="cpu")
"""


def test_a_process_says_once_that_an_operation_compiles(tmp_path):
    """Also where no operation runs. Code that was compiled before is loaded without a word."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "NUMBA_CACHE_DIR": str(tmp_path)}
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", LOGGED], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        said.append([line.partition(":")[0] for line in done.stderr.splitlines()])
    assert said == [["indices", "indexer_k_quant_and_cache"], []]
