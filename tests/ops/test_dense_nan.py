"""A query of NaN in dense attention: its lse is NaN, so that a merge shows it, and not +inf as without keys."""

import numpy as np
import pytest

import cumla
from support.lab import BF16, to_float

pytestmark = [pytest.mark.attention, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]


def assert_nan_at(lab, out, lse, out_at, lse_at):
    out, lse = to_float(lab.get(out)), lab.get(lse)
    assert np.isnan(out[out_at]).all()
    assert np.isnan(lse[lse_at])
    assert np.isnan(out).any(axis=-1).sum() == np.isnan(lse).sum() == 1


@pytest.mark.parametrize("head_dims", [(192, 128), (48, 32)])
def test_mha_varlen(lab, rng, head_dims):
    d, d_v = head_dims
    q, k, v = (rng.standard_normal((n, 2, width)).astype(BF16) for n, width in ((5, d), (9, d), (9, d_v)))
    q[3, 1, 7] = np.nan
    starts = [lab.put(np.array([0, n], np.int32)) for n in (5, 9)]
    out, lse = cumla.mha_varlen(*map(lab.put, (q, k, v)), *starts, backend=lab.backend)
    assert_nan_at(lab, out, lse, (3, 1), (1, 3))


@pytest.mark.parametrize("length", [9, 3 * 64])
def test_dense_mla_decode(lab, rng, length):
    q = rng.standard_normal((2, 1, 3, 576)).astype(BF16)
    q[1, 0, 2, 7] = np.nan
    cache = (0.1 * rng.standard_normal((6, 64, 576))).astype(BF16)
    table, lens = np.arange(6, dtype=np.int32).reshape(2, 3), np.full(2, length, np.int32)
    out, lse = cumla.dense_mla_decode(*map(lab.put, (q, cache, table, lens)), backend=lab.backend)
    assert_nan_at(lab, out, lse, (1, 0, 2), (1, 2, 0))
