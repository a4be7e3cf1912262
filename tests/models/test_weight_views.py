"""Weights of any strides: a layer takes them as it takes contiguous ones, and its step neither fails nor differs."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from models.test_fp8_weights import one, quantized, values

from cumla.layers import MLACommonImpl
from cumla.layers.weights import BlockQuantizedWeight, weight_of
from cumla.models.block_scaled import BlockScaledWeight, block_scaled
from cumla.models.products import in_groups, multiply_block_scaled, stacked
from cumla.models.scratch import Scratch
from support import v41_stack
from support.lab import BF16
from support.models import GoldenLayer, V4Layer, V32Layer
from support.refused import read_only
from support.v41_stack import Stack

# An array -> one of the same values, of other strides.
VIEWS = {
    "transposed": np.asfortranarray,
    "columns of more": lambda x: np.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    "every other column": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "rows backwards": lambda x: x[::-1].copy()[::-1],
    "columns backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "read-only": read_only,
    "not aligned": lambda x: np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
}


def viewed(weight, view):
    if isinstance(weight, BlockQuantizedWeight):
        return BlockQuantizedWeight(view(weight.weight), view(weight.scale), weight.block)
    return view(weight)


def as_they_are(weights):
    return weights


def outputs_of(kind, case, change):
    golden = GoldenLayer(case)
    golden.weights = change(golden.weights)
    return kind(golden).run(golden.splits[:3])


@pytest.fixture(scope="module")
def contiguous():
    """Outputs of layers of contiguous weights."""
    return functools.cache(outputs_of)


@pytest.mark.parametrize("change", [quantized, as_they_are])
@pytest.mark.parametrize(("kind", "case"), [(V4Layer, 8), (V32Layer, 13)])
@pytest.mark.parametrize("view", VIEWS)
def test_layers(contiguous, kind, case, change, view):
    got = outputs_of(kind, case, lambda weights: {n: viewed(w, VIEWS[view]) for n, w in change(weights).items()})
    np.testing.assert_array_equal(got, contiguous(kind, case, change))


@pytest.mark.parametrize("view", VIEWS)
def test_layers_of_v41(monkeypatch, view):
    """Weights are FP8, with blocks of 32 by 32, if the published checkpoint has them so."""
    outputs, weights = [], v41_stack.weights_of(2)
    for change in (as_they_are, VIEWS[view]):
        monkeypatch.setattr(v41_stack, "weights_of", lambda case, change=change: of_v41(weights, change))
        stack = Stack(2)
        assert isinstance(stack.layers[0].output.o_b, BlockScaledWeight)
        outputs.append(stack.run(0, [40, 1]))
    np.testing.assert_array_equal(*outputs)


def of_v41(weights, change):
    in_fp8 = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_b.weight", "indexer.wq_b.weight", "indexer.wk.weight")
    return {
        name: viewed(one(weight, (32, 32)) if name.rpartition(".attn.")[2] in in_fp8 else weight, change)
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("groups", [1, 2])
def test_products(lab, rng, view, groups):
    """Of a weight's groups, and of two stacked weights. On a device the alignment decides the order of sums."""
    given = [one(rng.standard_normal((rows, 96), np.float32) / 4, (32, 32)) for rows in (64, 32)]
    x, products = rng.standard_normal((3, groups, 96)).astype(BF16), []
    for change in (as_they_are, VIEWS[view]):
        views = [
            BlockQuantizedWeight(lab.put(change(w.weight).view(np.uint8)), change(w.scale), w.block) for w in given
        ]
        weight = in_groups(stacked(views[: 3 - groups], BF16, lab.xp, Scratch()), groups)
        out = lab.put(np.zeros((3, groups, weight.shape[1]), np.float32))
        multiply_block_scaled(lab.put(x), weight, out, lab.backend)
        products.append(lab.get(out))
    np.testing.assert_allclose(*products, rtol=1e-6, atol=1e-5)


def test_which_codes_are_copied():
    """A layer has the file's memory if rows are contiguous, a slice's too; rows that overlap are copied."""
    whole, scale = np.arange(8 * 192, dtype=np.uint8).reshape(8, 192) % 120, np.ones((1, 1), np.float32)
    for codes in (whole[:, :96], whole[3:4, 96:], whole[::2, 96:], whole[:5, 7:8]):
        codes.flags.writeable = False
        made = block_scaled([BlockQuantizedWeight(codes, scale)], np, Scratch())
        assert np.shares_memory(made.codes, codes)
    rows = np.broadcast_to(whole[:1, :96], (5, 96))
    windows = np.lib.stride_tricks.sliding_window_view(whole[0], 96)[:5]
    for codes in (rows, windows, whole[:, 95::-1], whole[::-1, :96]):
        made = block_scaled([BlockQuantizedWeight(codes, scale)], np, Scratch())
        np.testing.assert_array_equal(made.codes, codes)
        assert not np.shares_memory(made.codes, codes)


@pytest.mark.parametrize("view", VIEWS)
def test_weights_of_dense_layers(rng, view):
    weight = one(rng.standard_normal((2 * 256, 512), np.float32) / 4)
    want = values(weight)
    for source in (viewed(weight, VIEWS[view]), SimpleNamespace(
        weight=VIEWS[view](weight.weight), weight_scale_inv=VIEWS[view](weight.scale)
    ), VIEWS[view](want)):  # fmt: skip
        np.testing.assert_array_equal(weight_of("kv_b_proj", source), want)
        impl = MLACommonImpl(2, 576, 0.1, kv_b_proj=source)
        impl.process_weights_after_loading()
        np.testing.assert_array_equal(impl.W_UK_T, want.reshape(2, 256, 512)[:, :128].astype(BF16))
        assert impl.W_UK_T.strides[-1] == 2


@pytest.mark.parametrize("case", [8, 13])
def test_an_out_of_other_strides_is_refused_before_anything_is_written(case):
    """Hidden states are taken in any strides, in bfloat16 and FP8 weights."""
    golden = GoldenLayer(case)
    golden.weights = quantized(golden.weights)
    kind = V4Layer if case == 8 else V32Layer
    outputs = []
    for x_view in VIEWS.values():
        paged = kind(golden)
        count = 3
        batch, tables = paged.paged.batch([(0, 0, count)])
        metadata, x = paged.build(batch, tables), golden.hidden[:count].copy()
        before = [np.array(cache) for cache in arrays_of(paged.caches)]
        for out in (np.zeros(x.shape[::-1], x.dtype).T, np.zeros((count, 2 * x.shape[1]), x.dtype)[:, ::2]):
            with pytest.raises(ValueError, match=r"^out: got strides \(.*\) bytes, expected the last axis contiguous"):
                paged.layer.step(x, paged.caches, metadata, out=out)
        for cache, its in zip(arrays_of(paged.caches), before, strict=True):
            np.testing.assert_array_equal(cache, its)
        if x_view is not VIEWS["not aligned"]:
            outputs.append(paged.layer.step(x_view(x), paged.caches, metadata))
            np.testing.assert_array_equal(outputs[-1], outputs[0])


def arrays_of(caches):
    return [cache for cache in vars(caches).values() if isinstance(cache, np.ndarray)]


@pytest.mark.parametrize("case", [8, 13])
def test_a_weight_on_another_device_is_refused(here, case):
    """A layer computes on one device: an array in host memory is copied there, one on another device is an error."""
    golden, kind = GoldenLayer(case), V4Layer if case == 8 else V32Layer
    options = {"activations": "bfloat16", "cache_format": "bfloat16", "backend": "cuda", "lab": here}
    host, device = quantized(golden.weights), here.xp.cuda.Device
    fp8, vector = ("o_b_proj.weight", "sinks") if case == 8 else ("o_proj.weight", "indexer.k_norm.bias")
    for name in (fp8, "q_a_proj.weight", vector):
        golden.weights = host | {name: viewed(host[name], here.put)}
        kind(golden, **options)
        with pytest.raises(
            ValueError, match=rf"^{name}: got an array on CUDA device 0, expected the layer's host memory"
        ):
            kind(golden)
        with (
            device(1),
            pytest.raises(ValueError, match=rf"^{name}: got an array on CUDA device 0, expected CuPy's current"),
        ):
            kind(golden, **options)
        with device(1):
            golden.weights = host | {name: viewed(host[name], here.put)}
            kind(golden, **options)


@pytest.mark.parametrize("case", [8, 13])
def test_hidden_states_on_another_device_than_the_layer(here, case):
    golden = GoldenLayer(case)
    paged = (V4Layer if case == 8 else V32Layer)(
        golden, activations="bfloat16", cache_format="bfloat16", backend="cuda", lab=here
    )
    batch, tables = paged.paged.batch([(0, 0, 3)])
    metadata, x = paged.build(batch, tables), golden.hidden[:3].astype(BF16)
    paged.layer.step(here.put(x), paged.caches, metadata)
    with (
        here.xp.cuda.Device(1),
        pytest.raises(ValueError, match=r"^hidden_states: got an array on CUDA device 1, expected"),
    ):
        paged.layer.step(here.put(x), paged.caches, metadata)
