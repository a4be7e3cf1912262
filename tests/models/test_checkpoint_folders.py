"""Folders of safetensors files: mapping and writing of files, and the tensors that layers read."""

import errno
import gc
import json
import os
import pathlib
import stat
from collections.abc import Mapping

import numpy as np
import pytest
from seeded_weights import seeded_weights

from cumla import fp8_block_linear
from cumla.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Config
from cumla.models.deepseek_v32 import DeepseekV32Attention, DeepseekV32Config
from cumla.models.deepseek_v41 import DeepseekV41Attention, DeepseekV41Config
from cumla.models.safetensors import Checkpoint, write
from cumla.models.weight_shapes import expected_weights
from cumla.models.weights import V4_ATTENTION, V32_ATTENTION, V41_ATTENTION, weights_of_layer
from support.lab import BF16

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "index_n_heads": 2, "index_topk": 8}
V4 = DeepseekV4Config(**SIZES, o_groups=1, o_lora_rank=8, compress_ratios=(1, 4))
V32 = DeepseekV32Config(**SIZES)
V41 = DeepseekV41Config(
    **SIZES, o_groups=1, o_lora_rank=8, compress_ratios=(0, 2), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
    num_hidden_layers=2, sliding_window=16,
)  # fmt: skip


def write_by_hand(path, header, data):
    """A file of this header, without its alignment."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def open_files():
    return {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}


def mappings(folder):
    """The process's mappings of files in a folder."""
    return [line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_a_hundred_thousand_tensors_in_forty_files(tmp_path):
    """A mapping and at most a file descriptor for each file, however many arrays are used at a time."""
    files, each = 40, 2500
    values = np.arange(files * each, dtype=np.float32).reshape(files, each)
    for file in range(files):
        header = {
            f"model.layers.{file}.mlp.experts.{i}.up_proj.weight": {
                "dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4],
            } for i in range(each)
        }  # fmt: skip
        write_by_hand(tmp_path / f"model-{file}.safetensors", header, values[file].tobytes())
    names = {within: name for name, within in V4_ATTENTION.items()}  # kv_norm has two published names
    attention = {f"layers.7.attn.{name}": np.full(3, i, BF16) for i, name in enumerate(names.values())}
    write(tmp_path / "attention.safetensors", attention)
    checkpoint = Checkpoint(tmp_path)
    arrays = dict(checkpoint)
    assert len(arrays) == files * each + len(attention)
    for file in range(files):
        found = [arrays[f"model.layers.{file}.mlp.experts.{i}.up_proj.weight"] for i in range(each)]
        np.testing.assert_array_equal(np.concatenate(found), values[file])
    assert len(mappings(tmp_path)) == files + 1
    assert sum(str(tmp_path) in path for path in open_files()) <= files + 1
    weights = weights_of_layer(checkpoint, 7, V4_ATTENTION)
    assert {name: array[0] for name, array in weights.items()} == {name: i for i, name in enumerate(names)}
    with pytest.raises(KeyError, match=f"no weights of layer 8's attention among {len(arrays)} names"):
        weights_of_layer(checkpoint, 8, V4_ATTENTION)
    del found, arrays, weights, checkpoint
    gc.collect()
    assert not mappings(tmp_path)


def test_arrays_keep_their_values(tmp_path, monkeypatch):
    """Also when the current directory changes, and when the file is replaced, renamed or removed."""
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    for folder, value in ((there, 1), (elsewhere, 2)):
        (folder / "model").mkdir(parents=True)
        write(folder / "model" / "a.safetensors", {"x": np.full(3, value, np.float32)})
    monkeypatch.chdir(there)
    checkpoint = Checkpoint("model")
    before = checkpoint["x"]
    monkeypatch.chdir(elsewhere)
    file = there / "model" / "a.safetensors"
    for change in (
        lambda: None,
        lambda: write(file, {"x": np.full(3, 3, np.float32)}),
        lambda: file.rename(there / "b.safetensors"),
        lambda: (there / "b.safetensors").unlink(),
    ):
        change()
        assert [*before, *checkpoint["x"]] == [1] * 6


def test_a_file_is_opened_once(tmp_path, monkeypatch):
    write(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32), "y": np.ones(3, BF16)})
    opened, os_open = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(path) or os_open(path, *rest))
    checkpoint = Checkpoint(tmp_path)
    assert opened == [tmp_path / "a.safetensors"]
    monkeypatch.setattr(os, "open", None)
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr(np, "memmap", None)
    assert sum(len(array) for array in checkpoint.values()) == 6


def test_arrays_are_read_only(tmp_path):
    write(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32), "none": np.ones((0, 2))})
    write_by_hand(tmp_path / "b.safetensors", {"odd": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    assert not any(array.flags.writeable for array in Checkpoint(tmp_path).values())


def test_a_tensor_is_added_to_a_checkpoint(tmp_path):
    """The new file replaces the mapped one, and its arrays come from that mapping."""
    path = tmp_path / "model.safetensors"
    write(path, {"a": np.arange(20_000, dtype=np.float32)})
    mapped = dict(Checkpoint(tmp_path))
    write(path, mapped | {"b": np.ones(3, np.float32)})
    for found in (mapped, Checkpoint(tmp_path)):
        np.testing.assert_array_equal(found["a"], np.arange(20_000, dtype=np.float32))
    assert list(Checkpoint(tmp_path)) == ["a", "b"]
    write(path, Checkpoint(tmp_path))
    assert list(Checkpoint(tmp_path)) == ["a", "b"]
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "model.safetensors"
    write(path, {"a": np.ones(3, np.float32)})

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (pathlib.Path, "replace")), fail)
    with pytest.raises(OSError, match="No space left"):
        write(path, {"a": np.zeros(3, np.float32)})
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["model.safetensors"]
    np.testing.assert_array_equal(Checkpoint(tmp_path)["a"], np.ones(3))


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"a": np.zeros(1), "z": np.zeros(1, complex)}, ValueError, "^z: got dtype complex128, expected one of"),
        ({"z": np.zeros(1, ">f4")}, ValueError, "^z: got dtype >f4, expected one of"),
        ({"z": [1.0]}, TypeError, "^z: got list, expected a NumPy array"),
        ({"z": np.ma.array([1.0], mask=[True])}, TypeError, "^z: got a masked array, whose mask would be lost"),
        ({5: np.zeros(1)}, TypeError, "^5: got a name of type int, expected a string"),
        ({"__metadata__": np.zeros(1)}, ValueError, "^__metadata__: got an array of this name"),
    ],
)
def test_arrays_that_no_file_can_have(tmp_path, arrays, error, message):
    path = tmp_path / "model.safetensors"
    write(path, {"a": np.ones(3)})
    before = path.read_bytes()
    with pytest.raises(error, match=message):
        write(path, arrays)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["model.safetensors"])


def test_a_file_keeps_its_permissions_and_a_link_its_target(tmp_path):
    path, link = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write(path, {"a": np.ones(3)})
    assert not stat.S_IMODE(path.stat().st_mode) & 0o100
    path.chmod(0o640)
    write(path, {"a": np.ones(3)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    link.symlink_to(path)
    write(link, {"b": np.ones(3)})
    assert not link.is_symlink()
    assert set(Checkpoint(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_only_files_are_written_over(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    with pytest.raises(ValueError, match=r"^model\.safetensors: got (a folder|no regular file), expected a file"):
        write(path, {"a": np.ones(3)})
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_written_arrays_are_aligned(tmp_path, rng):
    """Arrays are aligned to their type, and to 64 bytes if their size allows it: operations need no copies."""
    x, codes = rng.standard_normal((2, 96)).astype(BF16), rng.integers(0, 120, (5, 96)).astype(np.uint8)
    scale = rng.uniform(1, 2, (1, 3)).astype(np.float32)
    arrays = {
        "odd": np.zeros(3, np.uint8), "codes": codes, "flag": np.array(True), "scale": scale, "double": np.ones(3),
        "none": np.ones((0, 3)), "x": x, "half": np.ones(5, np.float16), "matrix": np.ones((32, 32), BF16),
    }  # fmt: skip
    write(tmp_path / "model.safetensors", arrays)
    found = Checkpoint(tmp_path)
    assert list(found) == list(arrays)
    for name, array in found.items():
        np.testing.assert_array_equal(array, arrays[name], name)
        unit = 64 if array.nbytes % 64 == 0 else array.itemsize
        assert array.ctypes.data % unit == 0, name
    got = fp8_block_linear(found["x"], found["codes"], found["scale"], block_columns=32)
    want = fp8_block_linear(x, codes, scale, block_columns=32)
    np.testing.assert_array_equal(got, want)


def test_arrays_that_a_file_does_not_align_are_copied(tmp_path):
    """Other programs write such files: the header's length is odd, or bytes precede the array."""
    want, codes = np.arange(4, dtype=np.float32), np.arange(3, dtype=np.uint8)
    places = {"codes": ("U8", 3, 0, 3), "x": ("F32", 4, 3, 19), "y": ("BF16", 2, 19, 23)}
    header = {
        name: {"dtype": kind, "shape": [size], "data_offsets": [start, end]}
        for name, (kind, size, start, end) in places.items()
    }
    data = codes.tobytes() + want.tobytes() + np.ones(2, BF16).tobytes()
    for blanks in range(4):
        write_by_hand(tmp_path / "model.safetensors", header | {"__metadata__": {"blanks": " " * blanks}}, data)
        found = Checkpoint(tmp_path)
        assert all(array.flags.aligned for array in found.values())
        np.testing.assert_array_equal(found["x"], want)
        np.testing.assert_array_equal(found["codes"], codes)


def test_a_header_that_is_too_long(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((150_000_000).to_bytes(8, "little") + b"{}")
        file.truncate(200_000_000)  # without blocks on the disk
    with pytest.raises(
        ValueError, match=r"^model\.safetensors: got a header of 150000000 bytes, expected at most 100000"
    ):
        Checkpoint(tmp_path)


def test_a_link_without_its_file(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"^model\.safetensors: got a link to a missing file, expected a file"):
        Checkpoint(tmp_path)


def test_a_type_that_numpy_lacks(tmp_path):
    """Its name is known; its values are an error. (tests/models/test_weights.py: the error's text)"""
    header = {
        "strange": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]},
        "x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    write_by_hand(tmp_path / "model.safetensors", header, bytes(8))
    checkpoint = Checkpoint(tmp_path)
    assert list(checkpoint) == ["strange", "x"]
    assert "strange" in checkpoint
    assert "other" not in checkpoint
    for read in (checkpoint.__getitem__, checkpoint.get):
        with pytest.raises(ValueError, match=r"^strange: got type F4 in model\.safetensors, expected one of F64, F32"):
            read("strange")
    with pytest.raises(ValueError, match=r"^strange: got type F4"):
        dict(checkpoint)


class Recorded(Mapping):
    """Tensors, and the names of those that were read."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, []

    def __getitem__(self, name):
        if name in self.tensors:
            self.read.append(name)
        return self.tensors[name]

    def __contains__(self, name):
        return name in self.tensors

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def shapes_of(config, layer):
    return {name: weight.shape for name, weight in expected_weights(config, layer).items()}


V4_WINDOW, V4_INDEXED = (shapes_of(V4, layer) for layer in range(2))
V32_OWN = {weight.transformers: weight.shape for weight in expected_weights(V32, 0).values()}
# The layer's class, its configuration, the number of the layer to load, and shapes by the prefix of each layer.
LAYERS = {
    "v4": (DeepseekV4Attention, V4, 1, {
        "layers.0.attn": V4_WINDOW, "layers.1.attn": V4_INDEXED, "mtp.0.attn": V4_WINDOW, "mtp.1.attn": V4_WINDOW,
    }),
    "v32": (DeepseekV32Attention, V32, 1, {
        f"model.layers.{i}.self_attn": V32_OWN for i in range(12)
    } | {"mtp.1.attn": shapes_of(V32, 0)}),
    "v41": (DeepseekV41Attention, V41, 1, {
        "layers.0.attn": shapes_of(V41, 0), "layers.1.attn": shapes_of(V41, 1),
        "mtp.0.attn": shapes_of(V41, 2), "mtp.1.attn": shapes_of(V41, 3),
    }),
}  # fmt: skip
LAYERS["v41 draft"] = (*LAYERS["v41"][:2], 3, LAYERS["v41"][3])
OWN = {"v4": "layers.1.attn", "v32": "model.layers.1.self_attn", "v41": "layers.1.attn", "v41 draft": "mtp.1.attn"}


@pytest.mark.parametrize("model", LAYERS)
def test_a_layer_reads_its_own_tensors_alone(tmp_path, model):
    """Names before values: tensors of drafts, experts and types that NumPy lacks are not mapped."""
    kind, config, layer, shapes = LAYERS[model]
    arrays = {
        f"{prefix}.{name}": array for seed, (prefix, its) in enumerate(shapes.items())
        for name, array in seeded_weights(its, seed).items()
    }  # fmt: skip
    write(tmp_path / "a.safetensors", arrays)
    strange = [*(f"{prefix.rpartition('.')[0]}.ffn.experts.0.w1.weight" for prefix in shapes), "mtp.9.attn.wq_a.weight"]
    header = {name: {"dtype": "F4", "shape": [8], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(strange)}
    write_by_hand(tmp_path / "b.safetensors", header, bytes(4 * len(strange)))
    tensors = Recorded(Checkpoint(tmp_path))
    options = {"activations": "float32", "cache_format": "float32", "max_position": 64}
    made = kind(config, layer, tensors, **options)
    own = OWN[model]
    assert set(tensors.read) == {f"{own}.{name}" for name in shapes[own]}
    assert len(tensors.read) <= len(shapes[own]) + 1  # the first tensor decides the place
    within = {name.removeprefix(own + "."): array for name, array in arrays.items() if name.startswith(own + ".")}
    table = {} if model == "v32" or "v41" in model else V4_ATTENTION
    alone = kind(config, layer, {table.get(name, name): array for name, array in within.items()}, **options)
    for name, value in vars(alone).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(made, name), value, name)


def test_a_tensor_under_two_names():
    """Neither is dropped silently: in the main model and in drafts, with and without the prefix "model."."""
    for names, layer, table in (
        (("layers.2.attn.wq_a.weight", "mtp.0.attn.wq_a.weight"), 2, V41_ATTENTION),
        (("layers.0.attn.wq_a.weight", "model.layers.0.attn.wq_a.weight"), 0, V41_ATTENTION),
        (("layers.0.attn.wq_a.weight", "layers.0.self_attn.q_a_proj.weight"), 0, V32_ATTENTION),
        (("layers.0.attn.norm.weight", "layers.0.attn.kv_norm.weight"), 0, V4_ATTENTION),
    ):
        message = f"^{names[1]}: got it in addition to {names[0]}, expected one of them"
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            weights_of_layer(dict.fromkeys(names, np.zeros(3)), layer, table, first_draft=2)
