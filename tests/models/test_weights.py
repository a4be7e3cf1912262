"""Weights by transformers' and by published names, FP8 blocks, and files."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

from cumla.models import safetensors
from cumla.models.deepseek_v4 import DeepseekV4Attention
from cumla.models.weights import V4_ATTENTION, V32_ATTENTION, V41_ATTENTION, weights_of_layer
from support.models import GoldenLayer, V4Layer

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize(
    ("name", "layer", "table", "within"),
    [
        ("layers.2.attn.indexer.wq_b.weight", 2, V4_ATTENTION, "compressor.indexer.q_b_proj.weight"),
        ("model.layers.7.attn.wkv_b.scale", 7, V32_ATTENTION, "kv_b_proj.scale"),
        ("model.layers.0.self_attn.o_proj.weight_scale_inv", 0, V32_ATTENTION, "o_proj.weight_scale_inv"),
        ("layers.0.self_attn.o_proj.weight", 0, V32_ATTENTION, "o_proj.weight"),
        ("layers.2.ffn.gate.weight", 2, V4_ATTENTION, None),
        ("layers.12.attn.wq_a.weight", 1, V4_ATTENTION, None),
        ("layers.1.attn.wq_a.weight", 12, V4_ATTENTION, None),
        ("mtp.0.attn.wq_a.weight", 12, V4_ATTENTION, None),
        ("mtp.1.attn.wo_a.scale", 13, V41_ATTENTION, "wo_a.scale"),
        ("model.mtp.0.attn.wq_a.weight", 12, V41_ATTENTION, "wq_a.weight"),
        ("layers.13.attn.wq_a.weight", 13, V41_ATTENTION, "wq_a.weight"),
        ("mtp.0.attn.wq_a.weight", 0, V41_ATTENTION, None),
        ("mtp.0.ffn.w1.weight", 12, V41_ATTENTION, None),
    ],
)
def test_names(name, layer, table, within):
    """Layer 12 of V4.1 is the first one that predicts further tokens."""
    first_draft = 12 if table is V41_ATTENTION else None
    tensors = {name: 1, f"layers.{layer}.attn.attn_sink": 2}
    found = weights_of_layer(tensors, layer, table, first_draft=first_draft)
    assert {within: 1}.items() <= dict(found).items() if within else 1 not in found.values()


@pytest.mark.parametrize(("case", "table"), [(8, V4_ATTENTION), (3, V4_ATTENTION), (13, V32_ATTENTION)])
def test_every_golden_name_has_a_published_one(case, table):
    assert set(GoldenLayer(case).weights) <= set(table.values())


@pytest.mark.parametrize("scale_type", [np.float32, E8M0])
@pytest.mark.parametrize("case", [0, 8])
def test_a_published_checkpoint_with_fp8_blocks(tmp_path, case, scale_type):
    """Dequantised from a file, it gives the same bits as the dequantised matrices under transformers' names."""
    golden = GoldenLayer(case)
    published, plain = {}, {}
    names = {value: name for name, value in V4_ATTENTION.items()}
    for name, weight in golden.weights.items():
        key = f"layers.0.attn.{names[name]}"
        if weight.ndim == 2 and "proj" in name and "compressor.kv" not in name:
            rows, columns = (-(-size // 128) for size in weight.shape)
            scale = np.exp2(np.arange(rows * columns) % 3 - 9).reshape(rows, columns).astype(np.float32)
            spread = scale.repeat(128, 0)[: weight.shape[0]].repeat(128, 1)[:, : weight.shape[1]]
            values = (weight / spread).astype(E4M3)
            published[key], published[key.removesuffix("weight") + "scale"] = values, scale.astype(scale_type)
            plain[name] = values.astype(np.float32) * spread
        else:
            published[key] = plain[name] = weight
    safetensors.write(tmp_path / "a.safetensors", published)
    golden.weights = plain
    layer = V4Layer(golden)
    other = DeepseekV4Attention(
        layer.layer.config, 0, safetensors.Checkpoint(tmp_path), activations="float32", cache_format="float32",
        weight_format="bfloat16", max_position=2048,
    )  # fmt: skip
    for name, array in vars(layer.layer).items():
        if isinstance(array, np.ndarray):
            np.testing.assert_array_equal(array, getattr(other, name), err_msg=name)


def test_what_is_missing_is_named():
    weights = weights_of_layer({"layers.0.attn.wq_a.weight": np.zeros((2, 2))}, 0, V32_ATTENTION)
    assert list(weights) == ["q_a_proj.weight"]
    with pytest.raises(KeyError, match=r"o_proj\.weight"):
        weights["o_proj.weight"]


def test_files(tmp_path, rng):
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16), "b": np.arange(7), "empty": np.empty((0, 4), "f4"),
        "c": rng.standard_normal((2, 2, 2)).astype(np.float16), "d": np.array([1.0, 448.0], E4M3),
    }  # fmt: skip
    safetensors.write(tmp_path / "x.safetensors", arrays)
    found = safetensors.Checkpoint(tmp_path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"^d: x\.safetensors is cut off: it has 103 bytes of data, expected 104"):
        safetensors.Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="folder: got"):
        safetensors.Checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="dtype complex128"):
        safetensors.write(tmp_path / "y.safetensors", {"z": np.zeros(1, complex)})


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_b_proj.bias", "layers.0.attn.q_scale.weight"])
def test_an_unknown_weight_of_a_checkpoint(name):
    golden = GoldenLayer(0)
    tensors = {f"model.layers.0.self_attn.{within}": weight for within, weight in golden.weights.items()}
    others = {"model.layers.1.self_attn.o_b_proj.bias": 0, "model.layers.0.self_attn.rotary_emb.inv_freq": 0}
    golden.weights = tensors | others
    V4Layer(golden)
    golden.weights = tensors | {name: np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=f"weights: got .*{name.rpartition('.')[2]}"):
        V4Layer(golden)


def test_names_as_transformers_saves_them():
    """The inverse mapping to the published names turns "kv_norm" into "norm"."""
    golden = GoldenLayer(0)
    names = {within: name for name, within in V4_ATTENTION.items()} | {"kv_norm.weight": "norm.weight"}
    golden.weights = {f"model.layers.0.attn.{names[within]}": weight for within, weight in golden.weights.items()}
    np.testing.assert_array_equal(V4Layer(golden).layer.rows.norm, GoldenLayer(0).weights["kv_norm.weight"])


def sharded(folder, **files):
    """Files of arrays by name and an index of all; returns the index's path."""
    where = {}
    for file, arrays in files.items():
        safetensors.write(folder / f"{file}.safetensors", arrays)
        where |= dict.fromkeys(arrays, f"{file}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def test_an_index_says_which_file_has_what(tmp_path):
    first, second, stale = (np.full(3, n, np.float32) for n in range(3))
    index = sharded(tmp_path, a={"x": first}, b={"y": second})
    safetensors.write(tmp_path / "stale.safetensors", {"x": stale, "z": stale})
    found = safetensors.Checkpoint(tmp_path)
    assert set(found) == {"x", "y"}
    np.testing.assert_array_equal(found["x"], first)
    index.unlink()
    with pytest.raises(ValueError, match=r"x: got it in a\.safetensors and stale\.safetensors, expected one"):
        safetensors.Checkpoint(tmp_path)


def test_what_is_wrong_with_files_is_named(tmp_path):
    array = np.zeros(3, np.float32)
    index = sharded(tmp_path, a={"x": array}, b={"y": array})
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"without b\.safetensors, which the index names"):
        safetensors.Checkpoint(tmp_path)
    safetensors.write(tmp_path / "b.safetensors", {"z": array})
    with pytest.raises(ValueError, match=r"y: b\.safetensors lacks it, where the index says"):
        safetensors.Checkpoint(tmp_path)
    for damaged in (
        b"",
        b"abc",
        b"\xff" * 64,
        (3).to_bytes(8, "little") + b"{x}    ",
        (2).to_bytes(8, "little") + b"[]a",
        (12).to_bytes(8, "little") + b"{}  ",  # a header as long as the whole file
    ):
        (tmp_path / "b.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"b\.safetensors: got no header"):
            safetensors.Checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: got no weight_map"):
        safetensors.Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data_offsets": [-16, 0]}, "a: model.safetensors describes it as"),
        ({"data_offsets": [16, 0]}, "a: model.safetensors has -16 bytes"),
        ({"data_offsets": [0.0, 16.0]}, "describes it as"),
        ({"data_offsets": 16}, "describes it as"),
        ({"shape": [-2, -2]}, "describes it as"),
        ({"shape": "22"}, "describes it as"),
        ({"shape": [True, 4]}, "describes it as"),
        ({"shape": [2**32, 2**32], "data_offsets": [0, 0]}, r"has 0 bytes for \(4294967296, 4294967296\)"),
        ({"shape": [0, 2**62], "data_offsets": [0, 0]}, "describes it as"),
        ({"shape": [1] * 65}, "describes it as"),
        ({"dtype": 5}, "describes it as"),
        ({"dtype": "F4"}, "a: got type F4"),
    ],
)
def test_headers_that_describe_no_array(change, says, tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | change}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match=says):
        safetensors.Checkpoint(tmp_path)["a"]


def file_of(entries, size):
    """A file with a header given as pairs, so that names may repeat, and each array's bytes."""
    texts = [f'"{name}": {{"dtype": "U8", "shape": [{end - start}], "data_offsets": [{start}, {end}]}}'
             for name, start, end in entries]  # fmt: skip
    header = "{" + ", ".join(texts) + "}"
    return len(header).to_bytes(8, "little") + header.encode() + bytes(size)


@pytest.mark.parametrize(
    ("entries", "size", "says"),
    [
        ([("a", 0, 8), ("b", 4, 12)], 12, "^b: model.safetensors has it from byte 4 on, before a ends at 8"),
        ([("a", 0, 8), ("b", 0, 8)], 8, "^b: model.safetensors has it from byte 0 on, before a ends at 8"),
        ([("b", 2, 3), ("a", 0, 8)], 8, "^b: model.safetensors has it from byte 2 on, before a ends at 8"),
        ([("a", 0, 8), ("b", 12, 16)], 16, "^b: model.safetensors has it from byte 12 on, a hole after a's end at 8"),
        ([("a", 4, 8)], 8, "^a: model.safetensors has it from byte 4 on, a hole after the header's end at 0"),
        ([("a", 0, 8)], 9, "^model.safetensors: got 1 bytes after the end of a, expected none"),
        ([], 1, "^model.safetensors: got 1 bytes after the end of the header"),
        ([("a", 0, 8), ("b", 8, 16)], 15, "^b: model.safetensors is cut off: it has 15 bytes of data, expected 16"),
        ([("a", 0, 2**70)], 15, "^a: model.safetensors is cut off: it has 15 bytes of data"),
        ([("a", 0, 8), ("a", 8, 16)], 16, "^model.safetensors: got no header .*; it has a twice$"),
    ],
)
def test_arrays_fill_a_file(entries, size, says, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(file_of(entries, size))
    with pytest.raises(ValueError, match=says):
        safetensors.Checkpoint(tmp_path)


def test_arrays_fill_a_file_in_any_order(tmp_path):
    entries = [("b", 8, 16), ("none", 8, 8), ("a", 0, 8), ("last", 16, 16)]
    (tmp_path / "model.safetensors").write_bytes(file_of(entries, 16))
    assert {name: array.shape for name, array in safetensors.Checkpoint(tmp_path).items()} == {
        name: (end - start,) for name, start, end in entries
    }


@pytest.mark.parametrize("name", ["a.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_opened(name, kind, tmp_path):
    """Reading a pipe would wait forever."""
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).mkdir()
    message = {"pipe": "no regular file", "folder": "a folder"}[kind]
    with pytest.raises(ValueError, match=f"^{name}: got {message}, expected a file"):
        safetensors.Checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../x.safetensors", "..", "", "sub/x.safetensors", "/etc/passwd", "./x", "a\0b"])
def test_an_index_names_files_of_its_folder(file, tmp_path, monkeypatch):
    safetensors.write(tmp_path / "x.safetensors", {"a": np.zeros(3)})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    monkeypatch.setattr(safetensors, "_File", None)  # opens files
    with pytest.raises(ValueError, match=r"^a: model\.safetensors\.index\.json says that .*, expected a file of its"):
        safetensors.Checkpoint(folder)


def test_an_index_has_an_array_once(tmp_path):
    array = np.zeros(3, np.float32)
    index = sharded(tmp_path, a={"x": array}, b={"y": array})
    second = tmp_path / "other.safetensors.index.json"
    second.write_text('{"weight_map": {"x": "a.safetensors"}}')
    assert set(safetensors.Checkpoint(tmp_path)) == {"x", "y"}
    second.write_text('{"weight_map": {"x": "b.safetensors"}}')
    with pytest.raises(
        ValueError, match=r"^x: other\.safetensors\.index\.json says that b\.safetensors has it, another"
    ):
        safetensors.Checkpoint(tmp_path)
    second.unlink()
    index.write_text('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}')
    with pytest.raises(ValueError, match=r"index\.json: got no weight_map, .*; it has x twice$"):
        safetensors.Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "a.safetensors", "b": 5}}',
        "[]",
        "[" * 100_000,
    ],
)
def test_an_index_that_names_no_files(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: got no weight_map"):
        safetensors.Checkpoint(tmp_path)
