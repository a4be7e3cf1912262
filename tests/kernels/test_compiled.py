"""Machine code is kept by what it follows from and made anew where it is damaged, and need not be kept at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    shutil.copytree(CHECKOUT / "cumla", site / "cumla", ignore=shutil.ignore_patterns("__pycache__"))
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


def test_what_is_kept_is_used(package, tmp_path):
    before = [(path, path.stat().st_mtime_ns) for path in kept(package)]
    assert run(package, tmp_path) == ("[21, 22]\n", "")
    assert before == [(path, path.stat().st_mtime_ns) for path in kept(package)]


def test_a_change_in_a_helper_is_seen(package, tmp_path):
    slots = package / "cumla" / "kernels" / "numba_common" / "slots.py"
    text = slots.read_text()
    changed = text.replace("slot = block * block_size + position % block_size", "slot = block * block_size + 3")
    assert changed != text
    slots.write_text(changed)
    assert run(package, tmp_path) == ("[23, 23]\n", "")
    slots.write_text(text)
    assert run(package, tmp_path) == ("[21, 22]\n", "")


def test_damaged_machine_code_is_made_anew(package, tmp_path):
    files = kept(package)
    assert len(files) >= 3  # the function and its helpers
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes((data, path.read_bytes()[:-1], b"")[number % 3])
    output, warnings = run(package, tmp_path)
    assert output == "[21, 22]\n"
    damaged = {path for path in files if f"{path} is compiled again" in warnings}
    assert damaged
    assert run(package, tmp_path) == ("[21, 22]\n", "")


def test_what_cannot_be_read_is_passed_by(package, tmp_path):
    folder = kept(package)[0].parent
    shutil.rmtree(folder)
    folder.write_text("no folder")
    output, warnings = run(package, tmp_path)
    assert output == "[21, 22]\n"
    assert f"{folder} cannot be read" in warnings
    assert kept(tmp_path / ".cache" / "cumla")


def test_where_nothing_can_be_kept(package, tmp_path):
    """As in a hardened container, whose site-packages and home cannot be written. The reference compiles nothing."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").write_text("no folder")
    shutil.rmtree(package / "cumla" / "kernels" / "__pycache__")
    (package / "cumla" / "kernels" / "__pycache__").write_text("no folder")
    assert run(package, home, BUILD) == ("False\n[[[21, 22]]]\n" * 2, "")
    assert not kept(tmp_path)


def test_few_folders_are_kept(tmp_path, monkeypatch):
    from cumla.kernels.numba_common import compiled

    for number in range(compiled.MOST_FOLDERS + 3):
        folder = tmp_path / f"{compiled.PREFIX}{number}"
        compiled._write(folder, "f", b"machine code")
        os.utime(folder, (number, number))
    left = sorted(int(path.name.removeprefix(compiled.PREFIX)) for path in tmp_path.iterdir())
    assert left == list(range(3, compiled.MOST_FOLDERS + 3))
