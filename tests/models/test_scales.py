"""Scales of FP8 weights: the names that layers accept, blocks and types, and numbers that count as 0."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from models.test_fp8_weights import one, quantized
from seeded_weights import seeded_weights

from cumla.layers.weights import BlockQuantizedWeight, weight_of
from cumla.models.block_scaled import BlockScaledWeight, Parts, block_scaled
from cumla.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Config
from cumla.models.deepseek_v32 import DeepseekV32Attention, DeepseekV32Config
from cumla.models.deepseek_v41 import DeepseekV41Attention, DeepseekV41Config
from cumla.models.products import multiply
from cumla.models.safetensors import Checkpoint, write
from cumla.models.scratch import Scratch
from cumla.models.weights import V4_ATTENTION, V32_ATTENTION, V41_ATTENTION
from support.models import GoldenLayer, parts_of
from support.v41_stack import GOLDEN

SCALE_NAMES = "scale", "weight_scale_inv"
V41_IN_FP8 = "wq_a.weight", "wq_b.weight", "wkv.weight", "wo_b.weight", "indexer.wq_b.weight"
V41_LAYER = 2


def model_of(name):
    """A layer's class, configuration, number, weights with BlockQuantizedWeights, and table of published names."""
    if name == "v41":
        record = GOLDEN["cases"][0]
        config, prefix = DeepseekV41Config.from_dict(record["config"]), f"layers.{V41_LAYER}.attn."
        whole = seeded_weights(record["parameters"], record["seed"])
        weights = {n.removeprefix(prefix): w for n, w in whole.items() if n.startswith(prefix)}
        weights = {n: one(w, (32, 32)) if n in V41_IN_FP8 else w for n, w in weights.items()}
        return DeepseekV41Attention, config, V41_LAYER, weights, V41_ATTENTION
    golden = GoldenLayer(13 if name == "v32" else 8)
    kind, config, table = (
        (DeepseekV32Attention, DeepseekV32Config, V32_ATTENTION) if name == "v32"
        else (DeepseekV4Attention, DeepseekV4Config, V4_ATTENTION)
    )  # fmt: skip
    return kind, config.from_dict(golden.config), 0, quantized(golden.weights), table


def made(model, weights, **options):
    kind, config, layer, *_ = model
    options = {"activations": "float32", "cache_format": "float32", "max_position": 64} | options
    return kind(config, layer, weights, **options)


def apart(weights, scale_name):
    """Matrices and their scales as separate tensors."""
    found = {}
    for name, weight in weights.items():
        if isinstance(weight, BlockQuantizedWeight):
            found[name], found[name.removesuffix("weight") + scale_name] = weight.weight, weight.scale
        else:
            found[name] = weight
    return found


def assert_same_layer(got, want):
    compared = 0
    ours = dict(parts_of(got))
    for name, value in parts_of(want):
        for a, b in zip(*(x if isinstance(x, Parts) else (x,) for x in (ours[name], value)), strict=True):
            if isinstance(b, BlockScaledWeight):
                assert (a.block_rows, a.block_columns, a.is_ue8m0) == (b.block_rows, b.block_columns, b.is_ue8m0)
                np.testing.assert_array_equal(a.codes, b.codes, name)
                np.testing.assert_array_equal(a.scales, b.scales, name)
                compared += 1
            elif isinstance(b, np.ndarray):
                np.testing.assert_array_equal(a, b, name)
    assert compared >= 4


@pytest.mark.parametrize("scale_name", SCALE_NAMES)
@pytest.mark.parametrize("name", ["v4", "v32", "v41"])
def test_scales_under_names_within_the_module(name, scale_name):
    model = model_of(name)
    assert_same_layer(made(model, apart(model[3], scale_name)), made(model, model[3]))


@pytest.mark.parametrize("scale_name", SCALE_NAMES)
@pytest.mark.parametrize("name", ["v4", "v32", "v41"])
@pytest.mark.parametrize("published", [True, False], ids=["published", "transformers"])
def test_scales_in_files(tmp_path, name, scale_name, published):
    """Under transformers' names and under published ones; V4.1 has only published names."""
    model = model_of(name)
    _, _, layer, weights, table = model
    tensors, names = {}, {within: own for own, within in table.items()}
    for within, array in apart(weights, scale_name).items():
        if not published and name != "v41":
            tensors[f"model.layers.{layer}.self_attn.{within}"] = array
        elif within.endswith(SCALE_NAMES):
            module = names[within.removesuffix(scale_name) + "weight"].removesuffix("weight")
            tensors[f"layers.{layer}.attn.{module}{scale_name}"] = array
        else:
            tensors[f"layers.{layer}.attn.{names[within]}"] = array
    write(tmp_path / "model.safetensors", tensors)
    assert_same_layer(made(model, Checkpoint(tmp_path)), made(model, weights))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q_b_proj.weight_scale_inv": "scale"},
            ValueError,
            r"weight_scale_inv: got scales in addition to .*proj\.scale,",
        ),
        ({"q_b_proj.weight": "FP8"}, ValueError, r"weight: got a BlockQuantizedWeight and .*q_b_proj\.scale, expected"),
        ({"other.scale": "scale"}, ValueError, r"weights: got other\.scale, which such a layer does not have"),
        ({"q_b_proj.weight": "float32"}, TypeError, "weight: got dtype float32 with scales"),
        (
            {"q_b_proj.scale": None},
            ValueError,
            r"without scales, expected q_b_proj\.scale or q_b_proj\.weight_scale_inv",
        ),
        ({"kv_norm.scale": "scale"}, TypeError, r"kv_norm\.weight: got dtype float32 with scales"),
        ({"kv_proj.weight": None}, KeyError, r"kv_proj\.weight: the weights lack it"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.layers.0.self_attn."])
def test_scales_and_matrices_that_do_not_fit_are_named(change, error, message, prefix):
    """None is dropped silently."""
    model = model_of("v4")
    weights = apart(model[3], "scale")
    values = {
        "scale": weights["q_b_proj.scale"], "FP8": model[3]["q_b_proj.weight"],
        "float32": np.zeros((4096, 128), np.float32), None: None,
    }  # fmt: skip
    weights |= {name: values[value] for name, value in change.items()}
    with pytest.raises(error, match=message):
        made(model, {prefix + name: array for name, array in weights.items() if array is not None})


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (128, TypeError, "block: got 128, expected the rows and the columns"),
        ((128,), TypeError, r"block: got \(128,\), expected the rows and the columns"),
        ((128, 128, 1), TypeError, r"block: got \(128, 128, 1\), expected the rows and the columns"),
        (None, TypeError, "block: got None, expected the rows"),
        ((128.0, 128), TypeError, r"block\[0\]: got 128.0 of type float, expected an integer"),
        ((128, "128"), TypeError, r"block\[1\]: got '128' of type str"),
        ((True, 128), TypeError, r"block\[0\]: got True of type bool"),
        ((0, 128), ValueError, r"block\[0\]: got 0, expected at least 1"),
        ((128, -128), ValueError, r"block\[1\]: got -128, expected at least 1"),
        ((2**31, 128), ValueError, r"block\[0\]: got 2147483648, expected at most 2147483647"),
    ],
)
def test_blocks_are_checked_where_they_are_given(block, error, message):
    codes, scale = np.zeros((256, 256), np.uint8), np.ones((2, 2), np.float32)
    with pytest.raises(error, match="^" + message):
        BlockQuantizedWeight(codes, scale, block)
    if block is not None:
        layer = SimpleNamespace(weight=codes, weight_scale_inv=scale, weight_block_size=block)
        with pytest.raises(error, match=r"^kv_b_proj\.weight_" + message.replace("block", "block_size", 1)):
            weight_of("kv_b_proj", layer)


def test_a_block_is_a_pair_of_integers():
    """A configuration's list, NumPy's integers, and blocks larger than the matrix."""
    codes, scale = np.full((4, 64), 0x38, np.uint8), np.full((1, 1), 3, np.float32)
    for block in ([128, 128], np.array([4, 64]), (np.int64(5), np.int32(96)), (2**31 - 1, 2**31 - 32)):
        weight = BlockQuantizedWeight(codes, scale, block)
        assert weight.block == tuple(map(int, block))
        assert [type(size) for size in weight.block] == [int, int]
        np.testing.assert_array_equal(weight_of("kv_b_proj", weight), np.full((4, 64), 3))
        stays = block_scaled([weight, weight], np, Scratch())
        np.testing.assert_array_equal(stays.dequantized(np.float32), np.full((8, 64), 3))
        for backend in ("reference", "cpu"):
            out = np.zeros((1, 8), np.float32)
            multiply(np.ones((1, 64), np.float32), stays, out, backend)
            np.testing.assert_array_equal(out, np.full((1, 8), 192))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "int32", "bool"])
def test_scales_of_other_types(dtype):
    """8-bit floats are not read as UE8M0."""
    scale = np.ones((1, 1), np.float32).astype(getattr(ml_dtypes, dtype, dtype))
    weight = BlockQuantizedWeight(np.zeros((4, 64), np.uint8), scale)
    with pytest.raises(
        TypeError, match=rf"^kv_b_proj\.weight: got scales of dtype {dtype}, expected float32 or float8_e8"
    ):
        weight_of("kv_b_proj", weight)


@pytest.mark.parametrize("kind", [np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, np.uint8])
def test_subnormal_scales_of_weights_count_as_0(kind):
    """In either weight_format: the byte 0 of UE8M0 is 2^-127. The smallest normal number is taken."""
    model = model_of("v4")
    scale = np.exp2(np.arange(32.0) - 130)[:, None]
    its = (np.arange(32) - 3).clip(0).astype(np.uint8)[:, None] if kind is np.uint8 else scale.astype(kind)
    weights = model[3] | {"q_b_proj.weight": BlockQuantizedWeight(np.full((4096, 128), 0x38, np.uint8), its)}
    want = np.where(scale < 2.0**-126, 0, scale).astype(np.float32)
    kept, dequantized = (made(model, weights, weight_format=name) for name in ("fp8", "bfloat16"))
    np.testing.assert_array_equal(kept.queries.q_b.scales, want)
    np.testing.assert_array_equal(dequantized.queries.q_b, want.repeat(128, 0).repeat(128, 1))
