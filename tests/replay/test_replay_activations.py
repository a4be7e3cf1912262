"""The generator of rows."""

import numpy as np
import pytest

from cumla.replay.activations import HEAD_DIM, NOPE_DIM, Activations, apply_rope
from support.lab import BF16, to_float

KEYS = np.arange(700, dtype=np.uint64) * np.uint64(12345678901)


def test_rows_depend_on_their_key_alone(rng):
    made = Activations(3, 1, 4, np).k_rows(KEYS)
    order = rng.permutation(len(KEYS))
    np.testing.assert_array_equal(Activations(3, 1, 4, np).k_rows(KEYS[order]), made[order])
    np.testing.assert_array_equal(Activations(3, 1, 9, np).k_rows(KEYS[5:6]), made[5:6])


@pytest.mark.parametrize(("seed", "layer", "kind"), [(4, 1, "k_rows"), (3, 2, "k_rows"), (3, 1, "q_rows")])
def test_other_streams_are_other_rows(seed, layer, kind):
    made = Activations(3, 1, 4, np).k_rows(KEYS)
    other = getattr(Activations(seed, layer, 4, np), kind)(KEYS)
    assert abs(np.corrcoef(made[:, 1], other[:, 1])[0, 1]) < 0.2
    assert np.isfinite(other).all()


def test_rows_have_outliers():
    made = to_float(Activations(0, 0, 4, np).k_rows(np.arange(4000, dtype=np.uint64)))
    mean, std = made.mean(axis=0), made.std(axis=0)
    hot = np.abs(mean) > 4 * np.median(std)
    assert 3 <= hot.sum() <= 12
    assert not hot[NOPE_DIM:].any()
    ordinary = made[:, ~hot]
    kurtosis = ((ordinary / ordinary.std()) ** 4).mean()
    assert kurtosis > 5, "tails as light as a normal's"
    assert abs(ordinary.mean()) < 0.01
    assert np.abs(np.corrcoef(ordinary[:, :40].T) - np.eye(40)).max() < 0.1


def test_queries_are_patterns_of_one_row():
    activations = Activations(0, 0, 3, np)
    base = apply_rope(activations.q_rows(KEYS[:300]), np.arange(300), np)
    q = np.empty((300, 3, HEAD_DIM), BF16)
    activations.queries(base, q)
    pattern = to_float(q[0]) / to_float(base[0])
    np.testing.assert_allclose(to_float(q), to_float(base)[:, None] * pattern, rtol=2.0**-7)
    np.testing.assert_allclose(pattern[:, NOPE_DIM::2], pattern[:, NOPE_DIM + 1 :: 2], rtol=2.0**-7)


def test_rope_keeps_lengths_and_depends_on_distance(rng):
    x, y = rng.standard_normal((2, 1, HEAD_DIM)).astype(np.float32)
    rotated = apply_rope(x, np.array([977]), np)
    np.testing.assert_array_equal(rotated[:, :NOPE_DIM], x[:, :NOPE_DIM])
    np.testing.assert_allclose(np.linalg.norm(rotated), np.linalg.norm(x), rtol=1e-6)
    np.testing.assert_array_equal(apply_rope(x, np.array([0]), np), x)
    near = float((apply_rope(x, np.array([107]), np) @ apply_rope(y, np.array([100]), np).T)[0, 0])
    far = float((apply_rope(x, np.array([9007]), np) @ apply_rope(y, np.array([9000]), np).T)[0, 0])
    assert near == pytest.approx(far, rel=1e-3)
