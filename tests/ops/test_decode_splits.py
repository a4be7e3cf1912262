"""Sparse decode with lengths: every tile has the same number of splits, and some splits have no keys.

The scheduler chooses the number of splits by the widths of lists; here it takes each number for any lengths.
"""

import numpy as np
import pytest

import cumla
from cumla.kernels.cuda.launch import recorded_launches
from support.attention import Problem, make_cache, make_indices, make_q, nothing_attended_again, steep

pytestmark = [
    pytest.mark.attention, pytest.mark.nowhere(when=lambda x: x.backend != "cuda"),
    pytest.mark.thorough(when=lambda x: x.emulated),
]  # fmt: skip

LENGTHS = np.array([[0, 1, 64, 0, 128, 65, 128], [0, 0, 0, 300, 0, 64, 300]], np.int32)  # lists of 128 and 300


@pytest.fixture
def divisions(monkeypatch, splits):
    """The divisions of calls, with a fixed number of splits per tile."""
    from cumla.kernels.cuda.sparse import work as sparse_work
    from cumla.kernels.cuda.sparse.division import Division

    made = []

    def divide(work, *_):
        made.append(Division(work.tiles * splits, planned=False, split=True, parts=splits))
        return made[-1]

    monkeypatch.setattr(sparse_work, "divide", divide)
    with recorded_launches():
        yield made


def ragged(rng, heads, layout=cumla.DSV4_FP8):
    batch = LENGTHS.shape[1]
    return Problem(
        make_q(rng, batch, 1, heads, layout, steep(heads)), make_cache(rng, layout, 9, 16, spread=0),
        make_indices(rng, batch, 1, 128, 144), extra_k_cache=make_cache(rng, layout, 5, 64, spread=0),
        extra_indices=make_indices(rng, batch, 1, 300, 320), topk_length=LENGTHS[0], extra_topk_length=LENGTHS[1],
        attn_sink=np.linspace(-3, 3, heads, dtype=np.float32), layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [2, 5, 7, 9])
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("tile"), x.get("splits")) not in ((16, 9), (32, 2), (64, 5)))
def test_splits_of_few_blocks_and_of_none(lab, rng, tile, divisions, monkeypatch):
    monkeypatch.setattr("cumla.kernels.cuda.sparse.kernels.tile_heads", lambda *_: tile)
    with nothing_attended_again():
        out, lse = ragged(rng, tile + 3).check(lab)
    assert len(divisions) == 1
    assert np.isposinf(lab.get(lse)[0]).all()
    assert not lab.get(out)[0].astype(np.float32).any()


@pytest.mark.parametrize("splits", [3, 9])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("splits") != 9)
def test_splits_of_the_portable_kernel(lab, rng, divisions):
    from cumla.kernels.cuda.sparse import kernels

    with kernels.forced("portable"):
        ragged(rng, 20).check(lab)
    assert len(divisions) == 1


@pytest.mark.parametrize("splits", [4])
def test_lengths_that_change_between_calls_of_one_plan(lab, rng, divisions):
    """A division without a plan keeps no state between calls."""
    problem, plan = ragged(rng, 16), cumla.DecodePlan()
    for lengths in (LENGTHS, LENGTHS[:, ::-1].copy(), np.full_like(LENGTHS, 1000)):
        options = problem.options | {"topk_length": lengths[0], "extra_topk_length": lengths[1]}
        Problem(problem.q, problem.cache, problem.indices, **options).check(lab, plan=plan)
