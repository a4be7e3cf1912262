"""sparse_mla_prefill(precision="fp8") against float64; Hopper has such products, and the reference rounds likewise."""

import numpy as np
import pytest

import cumla
from cumla.bounds import PREFILL_FP8_LOGITS, PREFILL_FP8_OUT
from support.attention import make_indices, nothing_attended_again, steep
from support.bounds import assert_prefill, assert_same_direction, assert_within
from support.lab import BF16, to_float


def run(lab, q, kv, indices, **options):
    put = {name: lab.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    arguments = map(lab.put, (q, kv, indices))
    got = cumla.sparse_mla_prefill(*arguments, precision="fp8", **put, backend=lab.backend)
    want = cumla.sparse_mla_prefill(q, kv, indices, **options, backend="reference")
    return [to_float(lab.get(got[0])), *map(lab.get, got[1:])], [to_float(want[0]), *want[1:]]


def check(lab, q, kv, indices, **options):
    """Results are within the bounds of FP8 products, which are relative to values and logits' magnitudes."""
    got, want = run(lab, q, kv, indices, **options)
    assert_fp8(got, want, to_float(q), to_float(kv), options.get("softmax_scale", q.shape[2] ** -0.5))


def assert_fp8(got, wanted, q, kv, scale=None):
    """q and kv in float32."""
    (out, *logits), (want, *want_logits) = got, wanted
    values, size = np.abs(kv), np.linalg.norm(kv, axis=1).max()
    absolute, relative, cosine = PREFILL_FP8_OUT.of_values(values[np.isfinite(values)].max())
    assert_within("out", out, want, absolute, relative)
    assert_same_direction("out", out, want, cosine)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    limits = PREFILL_FP8_LOGITS.absolute * abs(scale) * np.linalg.norm(q, axis=2) * size
    for name, x, y in zip(("max_logits", "lse"), logits, want_logits, strict=True):
        assert_within(name, x, y, 1e-6 + limits, PREFILL_FP8_LOGITS.relative)


@pytest.mark.parametrize(("heads", "topk"), [(64, 200), (100, 64), (40, 700)])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") != 64)
def test_normal_data(lab, rng, heads, topk):
    """Lengths, a sink, absent rows; rows of different magnitudes; an empty list between others."""
    tokens, heads = 5, heads // 16 if lab.tiny else heads
    kv = rng.standard_normal((400, 512)) * np.exp2(rng.integers(-3, 2, (400, 1)))
    kv[17] = 0
    q = rng.standard_normal((tokens, heads, 512)) * steep(heads) / 32
    indices = make_indices(rng, tokens, 1, topk, 400)[:, 0]
    indices[3] = -1
    lengths = np.array([topk, topk // 2, 0, topk, 1], np.int32)
    sink = np.linspace(-3, 3, heads, dtype=np.float32)
    check(lab, q.astype(BF16), kv.astype(BF16), indices, topk_length=lengths, attn_sink=sink)


def integers(rng, *shape):
    """Random numbers that e4m3 represents exactly."""
    return (rng.integers(-8, 9, shape) * 2.0 ** rng.integers(-2, 3, (*shape[:-1], 1))).astype(BF16)


@pytest.mark.parametrize("scale", [0.01, -0.02, 0.0])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("scale") == 0.01)
def test_numbers_that_e4m3_has(lab, rng, scale):
    """Scores are exact, and so is the value of a single key; every value is different."""
    q, kv = integers(rng, 3, 2 if lab.tiny else 64, 512), integers(rng, 300, 512)
    kv[:, :2] = 8  # so that a row's scale does not depend on its other values
    indices = rng.permutation(300)[: 3 * 90].reshape(3, 90).astype(np.int32)
    lengths = np.array([90, 1, 65], np.int32)
    got, want = run(lab, q, kv, indices, topk_length=lengths, softmax_scale=scale)
    np.testing.assert_array_equal(got[0][1], want[0][1])
    for x, y in zip(got[1:], want[1:], strict=True):
        assert_within("logits", x, y, 1e-4, 1e-3)  # Hopper's sums of FP8 products have some 13 bits


@pytest.mark.parametrize("where", ["row", "query"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -3e38, 1e30, 1e-30])
@pytest.mark.nowhere(when=lambda x: x.backend == "numba_cuda")  # attends in float32 only, as documented
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("where"), x.get("value")) != ("row", np.inf))
def test_values_out_of_range(lab, rng, where, value):
    """Tiles with values outside the range of e4m3 and its scales are computed exactly; others do not change."""
    q, kv = rng.standard_normal((2, 64, 512)).astype(BF16), rng.standard_normal((200, 512)).astype(BF16)
    indices = make_indices(rng, 2, 1, 80, 200, absent=0.1)[:, 0]
    indices[indices == 5] = 6
    indices[0, 7] = 5
    if where == "row":
        kv[5] = (to_float(kv[5]) * value).astype(BF16)
    else:
        q[0] = (to_float(q[0]) * value).astype(BF16)
    got, want = run(lab, q, kv, indices)
    if where == "row" or not 0 < abs(value) < 1:
        assert_prefill(*(x[:1] for x in got), *(x[:1] for x in want), largest=1.0 if np.isnan(value) else 1e30)
    clean = kv.copy()
    clean[5] = 0
    check(lab, q[1:], clean, indices[1:])


def test_special_sinks_and_lists_without_a_key(lab, rng):
    """Every special sink with absent rows alone, a length of 0, one key, and many."""
    heads = 8 if lab.tiny else 64
    q, kv = rng.standard_normal((4, heads, 512)).astype(BF16), rng.standard_normal((120, 512)).astype(BF16)
    indices = make_indices(rng, 4, 1, 100, 120)[:, 0]
    indices[0] = -1
    sink = np.resize(np.array([-np.inf, np.inf, 0, 1e30, -1e30, 3, -3, -np.inf], np.float32), heads)
    check(lab, q, kv, indices, topk_length=np.array([100, 0, 1, 100], np.int32), attn_sink=sink)


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")
def test_no_tile_of_normal_data_is_computed_again(lab, rng):
    q, kv = rng.standard_normal((1, 64, 512)).astype(BF16), rng.standard_normal((100, 512)).astype(BF16)
    with nothing_attended_again():
        check(lab, q, kv, make_indices(rng, 1, 1, 64, 100)[:, 0])


@pytest.mark.parametrize(("width", "heads"), [(576, 64), (512, 16)])
@pytest.mark.thorough(when=lambda x: (x.emulated or x.simulated) and x.get("heads") == 64)
def test_what_has_no_fp8_kernel_is_as_without(lab, rng, width, heads):
    q, kv = rng.standard_normal((2, heads, width)).astype(BF16), rng.standard_normal((90, width)).astype(BF16)
    arguments = [lab.put(x) for x in (q, kv, make_indices(rng, 2, 1, 50, 90)[:, 0])]
    results = (cumla.sparse_mla_prefill(*arguments, precision=x, backend=lab.backend) for x in ("fp8", None))
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(lab.get(x).view(np.uint8), lab.get(y).view(np.uint8))


LAYOUTS = [cumla.DSV4_FP8, cumla.V32_NOPE_FP8, cumla.V32_FP8]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("heads", [64, 16])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("heads"), x.get("layout")) != (64, cumla.DSV4_FP8))
@pytest.mark.thorough(when=lambda x: x.simulated and x.get("heads") == 64)
def test_pages_and_quantised_rows(lab, rng, layout, heads):
    """Slots of pages; gathered rows, as pages of one token; against attention over the rows that they hold."""
    block_size, heads = 1 if layout is cumla.V32_NOPE_FP8 else 16, heads // 16 if lab.tiny else heads
    rows = rng.standard_normal((96, layout.head_dim)).astype(BF16)
    pages = np.zeros((96 // block_size, block_size, layout.token_bytes), np.uint8)
    cumla.quantize_and_insert_k_cache(rows, pages, np.arange(96), layout=layout, backend="reference")
    table = np.arange(len(pages), dtype=np.int32)[None]
    held = np.zeros((1, 96, layout.head_dim), np.float32)
    lengths = np.full(1, 96, np.int32)
    cumla.dequantize_and_gather_k_cache(held, pages, lengths, None, table, layout=layout, backend="reference")
    q = (rng.standard_normal((3, heads, layout.head_dim)) / 4).astype(BF16)
    indices = make_indices(rng, 3, 1, 80, 96)[:, 0]
    if block_size == 1:
        pages = pages[:, 0]
    got = cumla.sparse_mla_prefill(
        *map(lab.put, (q, pages, indices)), precision="fp8", layout=layout, backend=lab.backend,
        block_size=1 if block_size == 1 else None,
    )  # fmt: skip
    want = cumla.sparse_mla_prefill(q.astype(np.float32), held[0], indices, backend="reference")
    assert_fp8([to_float(lab.get(got[0])), *map(lab.get, got[1:])], want, to_float(q), held[0])


@pytest.mark.nowhere(when=lambda x: x.backend not in ("cuda", "reference"))
def test_numerics(lab, rng):
    """The reference rounds queries and rows as Hopper does: only the rounding of weights differs."""
    q = (rng.standard_normal((2, 70, 512)) * steep(70)).astype(BF16)
    kv = (rng.standard_normal((150, 512)) * np.exp2(rng.integers(-6, 3, (150, 1)))).astype(BF16)
    indices = make_indices(rng, 2, 1, 130, 150)[:, 0]
    arguments = {"softmax_scale": 0.003, "precision": "fp8"}
    got = cumla.sparse_mla_prefill(*map(lab.put, (q, kv, indices)), **arguments, backend=lab.backend)
    want = cumla.sparse_mla_prefill(q, kv, indices, **arguments, backend="reference")
    size = 0.003 * np.linalg.norm(to_float(q), axis=2) * np.linalg.norm(to_float(kv), axis=1).max()
    for name, x, y in zip(("max_logits", "lse"), map(lab.get, got[1:]), want[1:], strict=True):
        assert_within(name, x, y, 1e-4 + 2.0**-12 * size, 1e-3)  # Hopper's sums of FP8 products have some 13 bits


def test_wrong_arguments(device, rng):
    q, kv = (device.put(rng.standard_normal(shape).astype(BF16)) for shape in ((1, 64, 512), (30, 512)))
    indices = device.put(np.zeros((1, 8), np.int32))
    with pytest.raises(ValueError, match="precision: got 'fp16', expected None or 'fp8'"):
        cumla.sparse_mla_prefill(q, kv, indices, precision="fp16")
    with pytest.raises(ValueError, match="layout: expected None, except for quantised rows"):
        cumla.sparse_mla_prefill(q, kv, indices, precision="fp8", layout="DSV4_FP8")
    pages = device.put(np.zeros((2, 16, cumla.V32_FP8.token_bytes), np.uint8))
    with pytest.raises(ValueError, match="layout: got V32_FP8, expected a quantised format of cumla"):
        cumla.sparse_mla_prefill(q, pages, indices, precision="fp8")
    with pytest.raises(TypeError, match="kv: got dtype uint8"):
        cumla.sparse_mla_prefill(q, pages, indices)
    small = device.put(np.zeros(30 * 516 - 1, np.uint8))
    with pytest.raises(ValueError, match="workspace: got 15479 bytes, expected at least 15480"):
        cumla.sparse_mla_prefill(q, kv, indices, precision="fp8", workspace=small)
