"""Layers whose matrices stay FP8: their values, their memory, and products of many tokens."""

import ml_dtypes
import numpy as np
import pytest

from cumla.layers.weights import BlockQuantizedWeight
from cumla.models import products
from cumla.models.block_scaled import BlockScaledWeight, Parts
from cumla.models.products import in_groups, multiply, multiply_groups, rows_of, stacked, transposed, width
from cumla.models.scratch import Scratch
from support.lab import BF16
from support.models import GoldenLayer, V4Layer, V32Layer, parts_of, relative_rms

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
IN_FP8 = ("proj.weight", "indexer.wk.weight", "indexer.wq_b.weight")
NOT_IN_FP8 = ("compressor.kv_proj", "gate_proj", "indexer.kv_proj", "weights_proj")


def quantized(weights, block=(128, 128), scale_type=np.float32):
    """Matrices that published checkpoints have in FP8 as BlockQuantizedWeights."""
    found = dict(weights)
    for name, weight in weights.items():
        if name.endswith(IN_FP8) and not any(part in name for part in NOT_IN_FP8):
            found[name] = one(weight, block, scale_type)
    return found


def one(weight, block=(128, 128), scale_type=np.float32):
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scale = np.exp2(np.arange(rows * columns) % 3 - 7).reshape(rows, columns).astype(scale_type)
    spread = scale.astype(np.float32).repeat(block[0], 0)[: weight.shape[0]].repeat(block[1], 1)[:, : weight.shape[1]]
    return BlockQuantizedWeight((weight / spread).astype(E4M3), scale, block)


def values(weight):
    spread = weight.scale.astype(np.float32).repeat(weight.block[0], 0)[: weight.weight.shape[0]]
    return weight.weight.astype(np.float32) * spread.repeat(weight.block[1], 1)[:, : weight.weight.shape[1]]


def golden_of(case, change):
    golden = GoldenLayer(case)
    golden.weights = change(golden.weights)
    return golden, V4Layer if golden.record["model"] == "v4" else V32Layer


def as_values(weights):
    return {name: values(w) if isinstance(w, BlockQuantizedWeight) else w for name, w in quantized(weights).items()}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", [0, 8, 13])
def test_a_layer_equals_one_of_the_dequantised_weights(case, backend):
    outputs = []
    for change in (quantized, as_values):
        golden, kind = golden_of(case, change)
        layer = kind(golden, backend=backend)
        outputs.append(layer.run(golden.splits))
    assert relative_rms(*outputs) < 1e-6
    layer = kind(golden_of(case, quantized)[0]).layer
    assert isinstance(layer.queries.q_b, BlockScaledWeight)


def all_weights(layer):
    return [w for _, w in parts_of(layer) if isinstance(w, (np.ndarray, BlockScaledWeight, Parts))]


@pytest.mark.parametrize("scale_type", [np.float32, E8M0])
@pytest.mark.parametrize("case", [8, 13])
def test_memory_is_that_of_the_file(case, scale_type):
    golden, kind = golden_of(case, lambda weights: quantized(weights, scale_type=scale_type))
    layer = kind(golden).layer
    theirs = {name: w for name, w in golden.weights.items() if isinstance(w, BlockQuantizedWeight)}
    file_bytes = sum(w.weight.nbytes + w.scale.nbytes for w in theirs.values())
    ours = 0
    for weight in all_weights(layer):
        parts = weight if isinstance(weight, Parts) else (weight,)
        ours += sum(part.nbytes for part in parts if isinstance(part, BlockScaledWeight))
    assert 0.99 * file_bytes <= ours <= 1.05 * file_bytes
    ours, name = (layer.output.o, "o_proj.weight") if kind is V32Layer else (layer.output.o_b, "o_b_proj.weight")
    assert np.shares_memory(ours.codes, golden.weights[name].weight.view(np.uint8))


def test_a_layer_of_bfloat16_weights_has_arrays():
    golden, kind = golden_of(8, lambda weights: weights)
    assert not any(isinstance(weight, (BlockScaledWeight, Parts)) for weight in all_weights(kind(golden).layer))


def test_weights_of_several_types_are_parts(lab, rng):
    """Rows that are no multiples of a block, other blocks, plain matrices: one product writes the columns of all."""
    dense = [rng.standard_normal((n, 96), np.float32).astype(BF16) for n in (40, 72, 24, 8, 16)]
    blocks = [(64, 32), (64, 32), (64, 32), None, (128, 96)]
    given = [w if block is None else one(w, block) for w, block in zip(dense, blocks, strict=True)]
    plain = [w if block is None else values(g) for w, g, block in zip(dense, given, blocks, strict=True)]
    placed = [g if isinstance(g, BlockQuantizedWeight) else lab.put(g) for g in given]
    weight = stacked(placed, BF16, lab.xp, Scratch())
    assert isinstance(weight, Parts)
    assert (len(weight), width(weight), weight[0].block_rows) == (3, 160, 8)
    x, out = rng.standard_normal((3, 96)).astype(BF16), lab.put(np.zeros((3, 160), np.float32))
    multiply(lab.put(x), weight, out, lab.backend)
    want = x.astype(np.float64) @ np.concatenate(plain).astype(np.float64).T
    np.testing.assert_allclose(lab.get(out), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [96, 40])
def test_groups_and_their_transposes(lab, rng, rows):
    """V3.2's kv_b: some rows of each head, and other rows transposed."""
    given = one(rng.standard_normal((2 * (rows + 32), 64), np.float32), (32, 64))
    weight = in_groups(stacked([given], BF16, lab.xp, Scratch()), 2)
    first, rest = rows_of(weight, 0, rows), rows_of(weight, rows, rows + 32)
    want = values(given).astype(np.float64).reshape(2, rows + 32, 64)
    x = rng.standard_normal((2, 3, rows)).astype(BF16)
    out = lab.put(np.zeros((2, 3, 64), np.float32))
    multiply_groups(
        lab.put(x), transposed(first, np.float32 if lab.backend in ("reference", "cpu") else BF16), out, lab.backend
    )
    np.testing.assert_allclose(lab.get(out), x.astype(np.float64) @ want[:, :rows], rtol=1e-2, atol=1e-1)
    x = rng.standard_normal((2, 3, 64)).astype(BF16)
    out = lab.put(np.zeros((2, 3, 32), np.float32))
    multiply_groups(lab.put(x), rest, out, lab.backend)
    np.testing.assert_allclose(
        lab.get(out), x.astype(np.float64) @ want[:, rows:].transpose(0, 2, 1), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("columns", [96, 83])
def test_many_tokens_multiply_dequantised_rows(device, rng, monkeypatch, columns):
    """A slice of rows at a time, the last slice smaller, in bounded memory that is reused."""
    monkeypatch.setattr(products, "MOST_TOKENS", 4)
    monkeypatch.setattr(products, "VALUES_AT_A_TIME", 70 * columns)
    given, scratch = one(rng.standard_normal((150, columns), np.float32), (32, 32)), Scratch()
    weight = stacked([given], BF16, device.xp, scratch)
    x, out = rng.standard_normal((5, columns)).astype(BF16), device.put(np.zeros((5, 150), np.float32))
    multiply(device.put(x), weight, out, device.backend)
    rounded = values(given).astype(BF16).astype(np.float64)
    np.testing.assert_allclose(device.get(out), x.astype(np.float64) @ rounded.T, rtol=1e-5, atol=1e-4)
    groups = in_groups(stacked([one(rng.standard_normal((96, columns), np.float32))], BF16, device.xp, scratch), 3)
    x, out = rng.standard_normal((3, 5, columns)).astype(BF16), device.put(np.zeros((3, 5, 32), BF16))
    multiply_groups(device.put(x), groups, out, device.backend)
    rounded = groups.dequantized(np.float32)
    want = x.astype(np.float64) @ device.get(rounded).astype(BF16).astype(np.float64).transpose(0, 2, 1)
    np.testing.assert_allclose(device.get(out).astype(np.float64), want, rtol=2.0**-7, atol=1e-2)


def test_a_large_weight_is_dequantised_in_16_mb():
    """As docs/reference/models.md says: one row of blocks at a time would take a call each."""
    codes, scratch = np.zeros((8192, 2048), np.uint8), Scratch()
    codes[5000] = 0x38  # 1.0
    weight = stacked([BlockQuantizedWeight(codes, np.full((64, 16), 0.5, np.float32), (128, 128))], BF16, np, scratch)
    x, out = np.ones((1, 1, 2048), BF16), np.full((1, 1, 8192), np.nan, np.float32)
    products.multiply_dequantized(x, weight, out, "cpu")
    assert np.flatnonzero(out).tolist() == [5000]
    assert out[0, 0, 5000] == 1024
    assert sum(array.nbytes for array in scratch.arrays()) == 16 << 20


@pytest.mark.parametrize(
    ("scales", "are"),
    [
        ([2.0**-100, 2.0**7], True), ([2.0**-101], False), ([2.0**8], False), ([0.0], False), ([1.0, 1.5], False),
        ([-1.0], False), ([np.nan], False), ([np.inf], False), ([2.0**-120, 1.0], False),
    ],
)  # fmt: skip
def test_which_scales_are_powers_of_two(scales, are):
    """Scales that the device's kernel multiplies into a bfloat16 weight; others would be rounded there."""
    scales = np.array(scales, np.float32)[None]
    weight = BlockQuantizedWeight(np.zeros((32, 32 * scales.shape[1]), np.uint8), scales, (32, 32))
    assert stacked([weight], BF16, np, Scratch()).is_ue8m0 is are


@pytest.mark.parametrize("exponent", [-126, -121, -101, -100, 7, 8, 100])
@pytest.mark.thorough(when=lambda x: x.simulated)
def test_scales_of_any_exponent(lab, exponent):
    """Products as in layers: with the flags that `stacked` finds."""
    x, codes = np.full((2, 32), 2.0 ** (-exponent // 2), BF16), np.full((16, 32), 0x38, np.uint8)
    given = BlockQuantizedWeight(lab.put(codes), np.full((1, 1), 2.0**exponent, np.float32), (32, 32))
    out = lab.put(np.zeros((2, 16), np.float32))
    multiply(lab.put(x), stacked([given], BF16, lab.xp, Scratch()), out, lab.backend)
    np.testing.assert_array_equal(lab.get(out), np.float32(32 * float(x[0, 0]) * 2.0**exponent))


@pytest.mark.parametrize("rows", [(0, 48), (48, 96), (24, 72), (40, 41), (32, 96), (95, 96)])
def test_rows_of_a_group_begin_anywhere_in_a_block(rng, rows):
    given = one(rng.standard_normal((2 * 96, 64), np.float32) / 4, (32, 32))
    weight = in_groups(stacked([given], BF16, np, Scratch()), 2)
    assert weight.block_rows == 32
    want = values(given).reshape(2, 96, 64)[:, slice(*rows)]
    np.testing.assert_array_equal(rows_of(weight, *rows).dequantized(np.float32), want)


def test_another_format_is_an_error():
    golden, kind = golden_of(0, quantized)
    layer = kind(golden).layer
    with pytest.raises(ValueError, match="weight_format: got 'fp4', expected 'fp8' or 'bfloat16'"):
        type(layer)(layer.config, 0, golden.weights, activations="float32", weight_format="fp4")


@pytest.mark.parametrize("most_tokens", [products.MOST_TOKENS, 0], ids=["as they are", "dequantised"])
@pytest.mark.parametrize("case", [8, 13])
@pytest.mark.thorough(when=lambda x: not x.device and (x.get("case") == 8) == (x.get("most_tokens") == 0))
def test_layers_on_a_device(device, monkeypatch, case, most_tokens):
    """Results differ from a float32 layer's by the rounding of activations."""
    monkeypatch.setattr(products, "MOST_TOKENS", most_tokens)
    golden, kind = golden_of(case, as_values)
    splits = [7, 1, 1] if device.emulated else golden.splits
    want = kind(golden).run(splits)
    golden, kind = golden_of(case, quantized)
    options = {"activations": "bfloat16", "cache_format": "bfloat16"}
    got = kind(golden, **options, backend="cuda", lab=device).run(splits)
    assert relative_rms(got, want) < 0.01
