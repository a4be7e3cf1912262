"""Compare results with the bounds of cumla.bounds; errors are described in words."""

import numpy as np

from cumla.bounds import DECODE_LSE, DECODE_OUT, PREFILL_LSE, PREFILL_OUT


def assert_within(name, got, want, absolute, relative, rounding=None):
    """rounding: a function that gives a minimum of each absolute bound, called only where it matters."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"{name}: NaN in other places")
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=f"{name}: infinities")
    finite = np.isfinite(want)
    error = np.abs(got[finite] - want[finite])
    allowed = np.broadcast_to(absolute, want.shape)[finite] + relative * np.abs(want[finite])
    worst = np.max(error - allowed, initial=-np.inf)
    if worst > 0 and rounding is not None:
        assert_within(name, got, want, np.maximum(absolute, rounding()), relative)
        return
    assert worst <= 0, f"{name}: {worst:.3g} beyond the bound (largest error {error.max():.3g})"


def assert_same_direction(name, got, want, largest):
    """1 - cosine similarity, the zero vector matching only itself."""
    got, want = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    keep = np.isfinite(want)
    got, want = got[keep], want[keep]
    denominator = (got**2).sum() + (want**2).sum()
    distance = 1 - 2 * (got * want).sum() / denominator if denominator else 0.0
    assert distance < largest, f"{name}: cosine distance {distance:.3g}, expected below {largest}"


def assert_decode(out, lse, want_out, want_lse, rounding=None):
    """rounding: error of each result due to a kernel's 16-bit weights, relevant for large values (cumla.bounds)."""
    assert_within("out", out, want_out, *DECODE_OUT[:2], rounding)
    assert_same_direction("out", out, want_out, DECODE_OUT.cosine)
    assert_within("lse", lse, want_lse, *DECODE_LSE[:2])


def assert_prefill(out, max_logits, lse, want_out, want_max, want_lse, rounded_sides=1, largest=1.0):
    """Bounds for results of prefill.

    Args:
        rounded_sides: 2 where `want_out` is not exact but another kernel's result with its own errors
        largest: see Bound.of_values: for a kernel with bfloat16 weights and data that is not FlashMLA's
    """
    assert_prefill_out(out, want_out, rounded_sides, largest)
    assert_within("max_logits", max_logits, want_max, *PREFILL_LSE[:2])
    assert_within("lse", lse, want_lse, *PREFILL_LSE[:2])


def assert_dense_prefill(out, lse, want_out, want_lse):
    assert_prefill_out(out, want_out)
    assert_within("lse", lse, want_lse, *PREFILL_LSE[:2])


def assert_prefill_out(out, want_out, rounded_sides=1, largest=1.0):
    absolute, relative, cosine = PREFILL_OUT.of_values(largest)
    assert_within("out", out, want_out, rounded_sides * absolute, rounded_sides * relative)
    assert_same_direction("out", out, want_out, cosine)


def largest_values(kv, indices):
    """The largest magnitude of V among the rows that each query lists, [s_q, 1, 1]."""
    present = (indices >= 0) & (indices < len(kv))
    of_row = np.abs(kv[:, :512].astype(np.float64)).max(axis=1)
    return np.where(present, of_row[np.where(present, indices, 0)], 0.0).max(axis=1)[:, None, None]
