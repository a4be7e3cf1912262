"""Values and dtypes that kernels do not support: errors on all backends, where some would give NaN."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.layers import BlockQuantizedWeight, MLACommonImpl
from cumla.layers.weights import weight_of
from cumla.models.weights import plain
from support.lab import BF16
from support.operations import EXAMPLES, arguments_of

OTHER_FLOAT8 = ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e8m0fnu"]
SCALED = {
    "sparse_mla_decode-DSV4_FP8-two-caches": False, "sparse_mla_prefill-512": False,
    "dense_mla_decode-bfloat16": True, "mha_varlen": True,
}  # fmt: skip


def example(name):
    name = name if name in EXAMPLES else next(key for key in EXAMPLES if key.startswith(name))
    return EXAMPLES[name].spec.function, arguments_of(EXAMPLES[name], 0)


@pytest.mark.parametrize("name", SCALED)
def test_scales_that_kernels_do_not_have(name):
    """Scales beyond float32; for dense attention, whose kernels take the largest product first, also scales <= 0."""
    function, arguments = example(name)
    for scale in (1e39, -1e300, 2.0**128, float("inf"), float("nan")):
        with pytest.raises(
            ValueError, match=r"softmax_scale: got .* expected a (number that float32 has|finite number)"
        ):
            function(**{**arguments, "softmax_scale": scale, "backend": "reference"})
    for scale in (0.0, -0.0, -0.05, 1e-46) if SCALED[name] else ():
        with pytest.raises(ValueError, match=r"softmax_scale: got .* expected a positive number"):
            function(**{**arguments, "softmax_scale": scale, "backend": "reference"})


@pytest.mark.parametrize("name", [name for name, dense in SCALED.items() if not dense])
@pytest.mark.parametrize("scale", [-0.05, 0.0, 1e-46])
@pytest.mark.attention
def test_sparse_attention_takes_any_scale(lab, name, scale):
    function, arguments = example(name)
    want = function(**{**arguments, "softmax_scale": scale, "backend": "reference"})
    given = {key: lab.put(x) if isinstance(x, np.ndarray) else x for key, x in arguments.items()}
    got = function(**{**given, "softmax_scale": scale, "backend": lab.backend})
    np.testing.assert_allclose(lab.get(got[-1]), want[-1], rtol=1e-3, atol=1e-5)
    got, want = (x.astype(np.float32) for x in (lab.get(got[0]), want[0]))
    np.testing.assert_allclose(got, want, rtol=2 / 128, atol=2e-3)


@pytest.mark.parametrize(("name", "wrong"), [
    ("scale", None), ("scale", True), ("scale", float("nan")), ("scale", -1.0), ("scale", 0), ("scale", "1"),
    ("scale", 1e39), ("num_heads", None), ("num_heads", 0), ("num_heads", 129), ("num_heads", True),
    ("qk_nope_head_dim", 0), ("v_head_dim", 128.0), ("kv_cache_dtype", None), ("kv_cache_dtype", "fp8_e5m2"),
])  # fmt: skip
def test_numbers_of_a_dense_layer(name, wrong):
    """The constructor raises, not the first step after it has written."""
    arguments = {"num_heads": 2, "head_size": 576, "scale": 0.1, "kv_b_proj": None}
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got"):
        MLACommonImpl(**arguments | {name: wrong})


def test_eps_beyond_float32():
    function, arguments = example("fused_q_kv_rmsnorm")
    with pytest.raises(ValueError, match=r"eps: got 1e\+39, expected a number that float32 has"):
        function(**{**arguments, "eps": 1e39, "backend": "reference"})


@pytest.mark.parametrize("dtype", OTHER_FLOAT8)
def test_other_8_bit_floats_are_not_taken_for_e4m3(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype))
    q, table, lens = np.zeros((1, 1, 2, 576), BF16), np.arange(2, dtype=np.int32)[None], np.array([6], np.int32)
    cache = np.ones((2, 4, 576), np.float32).astype(dtype)
    with pytest.raises(TypeError, match=rf"k_cache: got dtype {dtype}, expected float8_e4m3fn or bytes \(uint8\)"):
        cumla.dense_mla_decode(q, cache, table, lens)
    queries, keys = np.ones((1, 2, 128), np.float32).astype(dtype), np.zeros((2, 128), np.uint8)
    rest = np.ones((1, 2), np.float32), np.zeros(1, np.int32), np.ones(1, np.int32)
    with pytest.raises(TypeError, match=f"q: got dtype {dtype}"):
        cumla.fp8_mqa_logits(queries, (keys, np.ones(2, np.float32)), *rest)
    pages = np.zeros((2, 4, 584), np.uint8)
    with pytest.raises(TypeError, match=f"k_cache: got dtype {dtype}"):
        cumla.quantize_and_insert_k_cache(np.ones((1, 512), BF16), pages.view(dtype), np.zeros(1, np.int64))
    assert not pages.any()


@pytest.mark.parametrize("dtype", OTHER_FLOAT8)
def test_weights_of_other_8_bit_floats(dtype):
    values, scales = np.ones((4, 4), np.float32).astype(getattr(ml_dtypes, dtype)), np.ones((1, 1), np.float32)
    for source in (BlockQuantizedWeight(values, scales), SimpleNamespace(weight=values, weight_scale=scales)):
        with pytest.raises(TypeError, match=f"kv_b_proj.weight: got dtype {dtype}"):
            weight_of("kv_b_proj", source)
    with pytest.raises(TypeError, match=f"wo_a.weight: got dtype {dtype}"):
        plain(BlockQuantizedWeight(values, scales), "wo_a.weight")


def test_scales_that_are_powers_of_two(rng):
    """As bytes, as 8-bit floats and as float32: the same weight, for a user's layer and a model's."""
    values, exponents = rng.integers(0, 120, (200, 130), np.uint8), rng.integers(118, 132, (2, 2), np.uint8)
    made = [
        weight_of("kv_b_proj", BlockQuantizedWeight(values, scales))
        for scales in (
            exponents,
            exponents.view(ml_dtypes.float8_e8m0fnu),
            np.exp2(exponents.astype(np.float32) - 127),
        )
    ]
    made.append(plain(BlockQuantizedWeight(values, exponents), "wo_a.weight"))
    for weight in made:
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, made[0])
    assert made[0][199, 129] == values.view(ml_dtypes.float8_e4m3fn)[199, 129] * 2.0 ** (exponents[1, 1] - 127.0)


def test_weights_that_are_no_matrix_of_bytes():
    scales = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight: got shape"):
        weight_of("kv_b_proj", SimpleNamespace(weight=np.zeros(4, np.uint8), weight_scale=scales))
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight: got FP8 values of shape \(4,\)"):
        weight_of("kv_b_proj", BlockQuantizedWeight(np.zeros(4, np.uint8), scales))


@pytest.mark.parametrize("dtype", [*OTHER_FLOAT8, "float8_e4m3fn", "int4"])
def test_pages_of_any_type_are_copied(dtype):
    cache = np.arange(4, dtype=np.float32).repeat(8).reshape(4, 8).astype(getattr(ml_dtypes, dtype))
    cumla.copy_blocks([cache], np.array([[1, 0]]))
    other = np.zeros_like(cache)
    cumla.swap_blocks(cache, other, np.array([[0, 2], [1, 3]]))
    assert cache[0].tobytes() == cache[1].tobytes() == other[2].tobytes() == other[3].tobytes()


def test_other_8_bit_floats_of_torch():
    torch = pytest.importorskip("torch")
    q, cache = torch.zeros(1, 1, 2, 576, dtype=torch.bfloat16), torch.ones(2, 4, 576).to(torch.float8_e5m2)
    table, lens = torch.arange(2, dtype=torch.int32)[None], torch.tensor([6], dtype=torch.int32)
    with pytest.raises(TypeError, match="k_cache: got dtype float8_e5m2"):
        cumla.dense_mla_decode(q, cache, table, lens)
    cumla.copy_blocks([cache], torch.tensor([[1, 0]]))
