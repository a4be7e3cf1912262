"""Kinds of RoPE, Hadamard rotation and SSMax in the operations of index keys and queries, and on heads."""

import numpy as np
import pytest

import cumla
from oracles.basics import layer_norm, rotated
from oracles.key_pools import hadamard
from support.golden import DATA
from support.lab import BF16, bfloat16, to_float

DIM, EPS = 128, 1e-6
KINDS = {"first, halves": (True, True), "first, neighbours": (True, False), "last, halves": (False, True),
         "last, neighbours": (False, False), "none": None}  # fmt: skip


def bf16(x):
    return x.astype(np.float32).astype(BF16).astype(np.float64)


def rope(x, table, positions, kind):
    if kind is None:
        return x
    first, halves = kind
    at = table[np.clip(positions, 0, len(table) - 1)]
    return rotated(x, at.reshape(len(at), *[1] * (x.ndim - 2), -1), halves=halves, first=first)


def flags(kind):
    return {} if kind is None else {"rope_first": kind[0], "is_neox": kind[1]}


def table_of(rng):
    angles = rng.uniform(-3, 3, (16, 32))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_golden_page_of_pooled_keys(lab):
    """A ring has a key and a token whose gate is -inf completes its pool: the bytes that SGLang and vLLM store."""
    golden = np.load(DATA / "family.npz")
    keys, page = bfloat16(golden["bytes/pooled"]), golden["bytes/pooled_page"]
    tokens = 64
    state = np.zeros((tokens, 2, 2 * DIM), BF16)
    state[:, 0, :DIM] = keys
    bytes_before = np.full((1, cumla.INDEXER_FP8.page_bytes(tokens)), 9, np.uint8)
    assert bytes_before.shape[1] == 8640
    cache, ones = lab.put(bytes_before), np.ones(DIM, np.float32)
    cumla.indexer_kpool_and_insert(
        *(lab.put(x) for x in (np.ones((tokens, DIM), BF16), np.full((tokens, DIM), -np.inf).astype(BF16), ones, ones)),
        lab.put(np.zeros((2, DIM), np.float32)), lab.put(state), lab.put(2 * np.arange(tokens) + 1), cache,
        lab.put(np.arange(tokens)), lab.put(np.ones(tokens, np.int64)), lab.put(np.arange(tokens + 1, dtype=np.int32)),
        block_size=tokens, layout="INDEXER_FP8", backend=lab.backend,
    )  # fmt: skip
    found = lab.get(cache)[0]
    np.testing.assert_array_equal(found[:8448].reshape(-1, 128), page.reshape(-1, 128))
    np.testing.assert_array_equal(found[8448:], 9)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_keys(lab, rng, kind, turns):
    tokens, kind = 5, KINDS[kind]
    k, (weight, bias) = rng.normal(size=(tokens, DIM)).astype(BF16), rng.standard_normal((2, DIM), np.float32)
    table, positions = table_of(rng), np.array([3, 0, 15, -4, 40])
    cache = lab.put(np.zeros((1, 8, DIM), BF16))
    cumla.indexer_knorm_rope_and_insert(
        *(lab.put(x) for x in (k, weight, bias)), cache, lab.put(np.arange(tokens)), lab.put(positions),
        None if kind is None else lab.put(table), hadamard=turns, backend=lab.backend, **flags(kind),
    )  # fmt: skip
    want = rope(layer_norm(to_float(k), EPS, weight, bias), table, positions, kind)
    want = hadamard(bf16(want)) if turns else want
    np.testing.assert_allclose(to_float(lab.get(cache))[0, :tokens], want, rtol=2.0**-7, atol=2e-2 if turns else 1e-4)


@pytest.mark.parametrize("out", ["float32", "fp8", "mxfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_queries(lab, rng, kind, out):
    """SSMax before RoPE, also negative factors and position 0; then the rotation."""
    tokens, heads, kind = 3, 4, KINDS[kind]
    q, weights = rng.normal(size=(tokens, heads, DIM)).astype(BF16), np.ones((tokens, heads), np.float32)
    table, positions = table_of(rng), np.array([0, 7, 15])
    scale, bias = np.array([0.3, -0.9, 0, 1], np.float32), np.array([1, 0.2, -1, 0], np.float32)
    options = flags(kind) | {"quantize": out != "float32", "q_format": "fp8" if out == "float32" else out}
    factors = scale * np.log(positions + 1.0)[:, None] + bias
    assert factors[1, 1] < 0 < factors[0, 1]
    for turns in (False, True):
        found, folded = cumla.fused_indexer_q_rope_quant(
            lab.put(positions), lab.put(q), None if kind is None else lab.put(table), lab.put(weights), 1.0, 1.0,
            hadamard=turns, ssmax_scale=lab.put(scale), ssmax_bias=lab.put(bias), backend=lab.backend, **options,
        )  # fmt: skip
        want = rope(to_float(q) * factors[:, :, None], table, positions, kind)
        if turns:
            want = hadamard(want if out == "float32" else bf16(want))
        got = lab.get(found)
        if out != "float32":
            from cumla.kernels.reference.rows import E4M3_VALUES

            got = E4M3_VALUES[got].astype(np.float64) * lab.get(folded)[..., None]
        largest = abs(want).max(axis=-1, keepdims=True)
        bound = {"float32": 1e-5, "fp8": 2.0**-4, "mxfp4": 0.26}[out]
        assert (abs(got - want) <= bound * np.maximum(abs(want), largest / 3)).all()


def test_scores_do_not_change_by_the_rotation(lab, rng):
    """A rotated cache and rotated queries: other bytes, the same scores but for rounding."""
    tokens, heads = 16, 4
    k, q = rng.normal(size=(tokens, DIM)).astype(BF16), rng.normal(size=(2, heads, DIM)).astype(BF16)
    ones, weights = np.ones(DIM, np.float32), rng.normal(size=(2, heads)).astype(np.float32)
    scores, caches = [], []
    for key_turns, query_turns in ((False, False), (True, True), (True, False)):
        cache = lab.put(np.zeros((1, tokens, 132), np.uint8))
        cumla.indexer_knorm_rope_and_insert(
            lab.put(k), lab.put(ones), lab.put(0 * ones), cache, lab.put(np.arange(tokens)), lab.put(np.arange(tokens)),
            None, hadamard=key_turns, backend=lab.backend,
        )  # fmt: skip
        rows, folded = cumla.fused_indexer_q_rope_quant(
            lab.put(np.arange(2)), lab.put(q), None, lab.put(weights), hadamard=query_turns, backend=lab.backend
        )
        logits = cumla.fp8_paged_mqa_logits(
            rows[:, None], cache, folded, lab.put(np.full(2, tokens, np.int32)), lab.put(np.zeros((2, 1), np.int32)),
            backend=lab.backend,
        )  # fmt: skip
        scores.append(to_float(lab.get(logits)))
        caches.append(lab.get(cache).copy())
    assert (caches[0] != caches[1]).any()
    spread = scores[0].std()
    assert (scores[1] - scores[0]).std() < 0.15 * spread
    assert (scores[2] - scores[0]).std() > 0.5 * spread  # a reader that does not agree with the writer


@pytest.mark.parametrize("dim", [64, 128, 66])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("dim") == 64)
def test_heads(lab, rng, kind, dim):
    """Each kind, in place and not, with and without SSMax; rotated values that no vector access fits."""
    kind = KINDS[kind]
    for rope_dim in (64,) if dim != 66 else (6, 2):
        x = rng.normal(size=(3, 2, dim)).astype(BF16)
        angles = rng.uniform(-3, 3, (16, rope_dim // 2))
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        positions, (scale, bias) = np.array([0, 31, 7], np.int32), rng.standard_normal((2, 2), np.float32)
        for ssmax in (False, True):
            if kind is None and not ssmax:
                continue
            factors = scale * np.log(positions + 1.0)[:, None] + bias if ssmax else np.ones((3, 2))
            want = to_float(x) * factors[:, :, None]
            if kind is not None:
                first, halves = kind
                cos, sin = np.split(table[np.clip(positions, 0, 15)][:, None].astype(np.float64), 2, axis=-1)
                at = np.arange(rope_dim).reshape((2, -1) if halves else (-1, 2)) + (0 if first else dim - rope_dim)
                low, high = at if halves else at.T
                a, b = want[..., low].copy(), want[..., high].copy()
                want[..., low], want[..., high] = a * cos - b * sin, b * cos + a * sin
            both = {"ssmax_scale": lab.put(scale), "ssmax_bias": lab.put(bias)} if ssmax else {}
            for in_place in (False, True):
                given = lab.put(x.copy())
                got = cumla.apply_rope(
                    given, lab.put(positions), None if kind is None else lab.put(table), backend=lab.backend,
                    out=given if in_place else None, **flags(kind), **both,
                )  # fmt: skip
                np.testing.assert_allclose(to_float(lab.get(got)), want, rtol=2.0**-8, atol=1e-6)


def test_inverse_in_halves(lab, rng):
    x, table = rng.normal(size=(3, 2, 64)).astype(BF16), table_of(rng)
    positions = np.array([3, 5, 9])
    turned = cumla.apply_rope(lab.put(x), lab.put(positions), lab.put(table), is_neox=True, backend=lab.backend)
    back = cumla.apply_rope(turned, lab.put(positions), lab.put(table), is_neox=True, inverse=True, backend=lab.backend)
    np.testing.assert_allclose(to_float(lab.get(back)), to_float(x), atol=0.05)


def test_refused():
    x, at = np.zeros((2, 4, 64), BF16), np.arange(2)
    with pytest.raises(ValueError, match=r"^cos_sin_cache: got None without ssmax_scale"):
        cumla.apply_rope(x, at, None)
    with pytest.raises(ValueError, match=r"^ssmax_bias: got one of ssmax_scale and ssmax_bias"):
        cumla.apply_rope(x, at, None, ssmax_scale=np.ones(4, np.float32))
    with pytest.raises(ValueError, match=r"^ssmax_scale: got shape \(3,\)"):
        cumla.apply_rope(x, at, None, ssmax_scale=np.ones(3, np.float32), ssmax_bias=np.ones(4, np.float32))
    q, w = np.zeros((2, 4, 128), BF16), np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match=r"^hadamard: got 1"):
        cumla.fused_indexer_q_rope_quant(at, q, None, w, hadamard=1)
    with pytest.raises(ValueError, match=r"^ssmax_bias: got one of"):
        cumla.fused_indexer_q_rope_quant(at, q, None, w, ssmax_bias=w[0])
    with pytest.raises(TypeError, match=r"^cos_sin_cache: got None"):
        cumla.norm_rope_and_insert(np.zeros((1, 512), BF16), np.zeros((1, 8, 512), BF16), at[:1], at[:1], None)
