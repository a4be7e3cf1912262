"""The number formats of the Numba backends against ml_dtypes and NumPy, code by code."""

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from cumla.kernels.cpu import rows
from cumla.kernels.numba_common import numbers
from support.lab import BF16

E4M3 = ml_dtypes.float8_e4m3fn
PATTERNS = np.arange(65536, dtype=np.uint16)
CODES = np.arange(256, dtype=np.uint8)


def each(function, values, dtype):
    """function of every value, compiled."""

    @njit
    def apply(values, results):
        for i in range(len(values)):
            results[i] = function(values[i])

    results = np.empty(len(values), dtype)
    apply(values, results)
    return results


def assert_same_values(got, want):
    """Equal numbers and signs; NaN where NaN is."""
    np.testing.assert_array_equal(got, want)
    numbers_only = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[numbers_only], np.signbit(want)[numbers_only])


def float32_of(stored):
    with np.errstate(invalid="ignore"):  # signalling NaN
        return stored.astype(np.float32)


@pytest.mark.parametrize(
    ("function", "stored"),
    [
        (numbers.bfloat16_value, PATTERNS.view(BF16)),
        (numbers.float16_value, PATTERNS.view(np.float16)),
        (numbers.e4m3_value, CODES.view(E4M3)),
        (numbers.ue8m0_value, CODES.view(ml_dtypes.float8_e8m0fnu)),
    ],
    ids=["bfloat16", "float16", "e4m3", "ue8m0"],
)
def test_every_code_to_float32(function, stored):
    codes = CODES if stored.itemsize == 1 else PATTERNS
    assert_same_values(each(function, codes, np.float32), float32_of(stored))


def rounding_cases(dtype):
    """Every value of a format, every midpoint between two, their neighbours, and float32 values of all kinds."""
    rng = np.random.default_rng(0)
    codes = CODES if np.dtype(dtype).itemsize == 1 else PATTERNS
    values = float32_of(codes.view(dtype)).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    points = np.concatenate([values.astype(np.float32), middles])
    anything = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    beyond = np.array([np.inf, -np.inf, np.nan, -np.nan, 448, 449, 464, 65519.996, 65520, 3.4e38, 1e-45], np.float32)
    near = (np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf)))
    return np.concatenate([points, *near, anything, beyond, -beyond])


@pytest.mark.parametrize(
    ("function", "dtype", "limit"),
    [
        (numbers.bfloat16_bits, BF16, None),
        (rows.round_to_bfloat16, BF16, None),
        (numbers.float16_bits, np.float16, None),
        (numbers.e4m3_byte, E4M3, 448),
    ],
    ids=["bfloat16", "bfloat16-in-32-bits", "float16", "e4m3"],
)
def test_rounding(function, dtype, limit):
    with np.errstate(all="ignore"):
        cases = rounding_cases(dtype)
        want = np.clip(cases, -limit, limit) if limit else cases
        want = want.astype(dtype)
    got = each(function, cases, CODES.dtype if limit else PATTERNS.dtype)
    assert_same_values(float32_of(got.view(dtype)), float32_of(want))
    if limit:
        assert (got[np.isnan(cases)] == 0x7F).all()


def test_kinds_and_back():
    values = np.array([1.5, -0.0, 448.0, 2.0**-14, np.inf], np.float32)
    for name, kind in numbers.KINDS.items():
        stored = values.astype(np.dtype(name))
        bits = stored.view(f"uint{8 * stored.itemsize}")
        got = [numbers.to_float32(int(x), kind) for x in bits]
        np.testing.assert_array_equal(np.array(got, np.float32), values)
        np.testing.assert_array_equal([numbers.from_float32(x, kind) for x in values], bits)


def test_scale_exponents():
    amax = np.ldexp(np.array([[1.0], [1.75]]), np.arange(-30, 128)).astype(np.float32).ravel()
    amax = np.concatenate([amax, np.nextafter(amax, np.float32(np.inf))[: -1 if amax[-1] > 3e38 else None]])
    amax = amax[np.isfinite(amax)]
    want = np.maximum(np.ceil(np.log2(amax.astype(np.float64) / 448)), -22)
    np.testing.assert_array_equal([numbers.scale_exponent(x, -22) for x in amax], want)
    assert numbers.scale_exponent(np.float32(0), -13) == -13
