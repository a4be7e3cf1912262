"""Sparse decode where a cluster of thread blocks splits the keys of a tile and combines the result.

The scheduler chooses clusters only for some shapes; here they run for all shapes that they support.
"""

import numpy as np
import pytest

import cumla
from cumla.kernels.cuda.launch import recorded_launches
from support.attention import Problem, make_cache, make_indices, make_q, nothing_attended_again, steep
from support.lab import BF16, to_float

FP8 = (cumla.DSV4_FP8, cumla.V32_FP8)
pytestmark = [
    pytest.mark.thorough(when=lambda x: x.emulated),
    pytest.mark.attention,
    pytest.mark.nowhere(when=lambda x: x.backend != "cuda"),
    pytest.mark.parametrize("tile", [16, 32, 64]),
]


@pytest.fixture
def parts():
    return 2


@pytest.fixture
def divided(lab, tile, parts, monkeypatch):
    """The recorded divisions, with clusters for tiles of `height` heads."""
    from cumla.kernels.cuda.device import is_hopper
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels
    from cumla.kernels.cuda.sparse import work as sparse_work
    from cumla.kernels.cuda.sparse.division import Division

    if not is_hopper(0):
        pytest.skip("clusters are Hopper's")
    made, divide = [], sparse_work.divide

    def divide_into_clusters(work, may_split, *rest):
        cluster = Division(work.tiles * parts, False, False, parts, cluster=True)
        can = may_split and work.most_blocks >= parts
        made.append(cluster if can else divide(work, may_split, *rest))
        return made[-1]

    monkeypatch.setattr(sparse_kernels, "tile_heads", lambda *_: tile)
    monkeypatch.setattr(sparse_work, "divide", divide_into_clusters)
    with recorded_launches():
        yield made


def assert_same_bits(first, second, lab):
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(lab.get(x).view(np.uint8), lab.get(y).view(np.uint8))


def two_lists(rng, tile, layout, batch=3, s_q=2, heads=None):
    """The second list has the last of the three blocks of keys, or a part of the blocks after the first split."""
    heads = heads or tile + 3
    return Problem(
        make_q(rng, batch, s_q, heads, layout, steep(heads)), make_cache(rng, layout, 9, 16, spread=0),
        make_indices(rng, batch, s_q, 70, 144), extra_k_cache=make_cache(rng, layout, 5, 64, spread=0),
        extra_indices=make_indices(rng, batch, s_q, 40, 320),
        attn_sink=np.linspace(-3, 3, heads, dtype=np.float32), layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("tile") == 16) != (x.get("layout").name == "V32_FP8"))
def test_two_lists(lab, divided, rng, tile, layout):
    """An odd number of requests with two tokens each, and of groups of heads; the last group has three."""
    with nothing_attended_again():
        two_lists(rng, tile, layout).check(lab)
    assert [division.cluster for division in divided] == [True]


@pytest.mark.parametrize("blocks", [2, 3, 5])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("tile"), x.get("blocks")) not in ((16, 5), (32, 2)))
def test_parts_of_one_length_and_of_two(lab, divided, rng, tile, blocks):
    layout = cumla.DSV4_FP8
    with nothing_attended_again():
        Problem(
            make_q(rng, 1, 1, tile, layout, steep(tile)), make_cache(rng, layout, 4, 64, spread=0),
            make_indices(rng, 1, 1, 64 * blocks - 9, 256),
        ).check(lab)  # fmt: skip
    assert divided[0].cluster


@pytest.mark.parametrize("parts", [3, 4, 5, 6])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("tile"), x.get("parts")) not in ((16, 6), (32, 5)))
def test_more_parts(lab, divided, rng, tile, parts):
    """The number of splits of a token is the cluster's size, smaller, or 0."""
    layout, heads = cumla.DSV4_FP8, tile - 1
    problem = Problem(
        make_q(rng, 2, 1, heads, layout, steep(heads)), make_cache(rng, layout, 9, 16, spread=0),
        make_indices(rng, 2, 1, 70, 144), extra_k_cache=make_cache(rng, layout, 5, 64, spread=0),
        extra_indices=make_indices(rng, 2, 1, 64 * parts - 100, 320),
        attn_sink=np.linspace(-3, 3, heads, dtype=np.float32),
    )  # fmt: skip
    with nothing_attended_again():
        first = problem.check(lab)
        assert_same_bits(first, problem.on(lab), lab)
    assert [division.cluster for division in divided] == [True, True]


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("tile"), x.get("parts")) not in ((16, 6), (32, 3)))
def test_lengths_leave_splits_few_blocks_or_none(lab, divided, rng, tile, parts):
    """Lists of seven blocks with no key, one key, one block, blocks of one list, fewer blocks than splits, or all."""
    layout, heads = cumla.DSV4_FP8, tile - 1
    lengths = np.array([[0, 1, 64, 0, 128, 65, 128], [0, 0, 0, 300, 0, 64, 300]], np.int32)
    batch = lengths.shape[1]
    problem = Problem(
        make_q(rng, batch, 1, heads, layout, steep(heads)), make_cache(rng, layout, 9, 16, spread=0),
        make_indices(rng, batch, 1, 128, 144), extra_k_cache=make_cache(rng, layout, 5, 64, spread=0),
        extra_indices=make_indices(rng, batch, 1, 300, 320), topk_length=lengths[0], extra_topk_length=lengths[1],
        attn_sink=np.linspace(-3, 3, heads, dtype=np.float32),
    )  # fmt: skip
    with nothing_attended_again():
        first = problem.check(lab)
        assert_same_bits(first, problem.on(lab), lab)
    assert [(division.cluster, division.planned) for division in divided] == [(True, False)] * 2
    assert np.isposinf(lab.get(first[1])[0]).all()


def test_tokens_with_few_keys_and_none(lab, divided, rng, tile):
    """Keys in the first part only, in the second only, one key, and none: no keys must not give NaN."""
    layout, heads = cumla.DSV4_FP8, 5
    indices = make_indices(rng, 5, 1, 160, 256, absent=0.0)
    indices[0, 0, :128], indices[1, 0, 128:], indices[2, 0, :-1], indices[3] = -1, -1, -1, -1
    problem = Problem(
        make_q(rng, 5, 1, heads, layout), make_cache(rng, layout, 4, 64), indices,
        attn_sink=np.linspace(-3, 3, heads, dtype=np.float32),
    )  # fmt: skip
    with nothing_attended_again():
        out, lse = problem.check(lab)
    assert divided[0].cluster
    assert not to_float(out[3]).any()
    assert np.isposinf(lse[3]).all()
    assert np.isfinite(lse[[0, 1, 2, 4]]).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6, 3e38])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("tile"), x.get("value")) not in ((16, 1e6), (32, np.inf)))
def test_poison_stays_with_its_request_and_leaves_no_traces(lab, divided, rng, tile, value, monkeypatch):
    """Poison in the last split of one token of three: one CTA of its cluster flags the tile for the exact kernel."""
    layout, heads = cumla.DSV4_FP8, 20
    cache, plan = make_cache(rng, layout, 5, 64), cumla.DecodePlan()
    rows = cache[4].reshape(-1)[: 64 * layout.row_bytes].reshape(64, layout.row_bytes)
    rows[:, layout.rope_offset :].view(BF16)[:, 3] = value
    indices = make_indices(rng, 3, 1, 150, 256, absent=0.0)
    indices[1, 0, 140] = 256 + 5
    problem = Problem(make_q(rng, 3, 1, heads, layout), cache, indices)
    first = problem.check(lab, plan=plan)
    assert np.isfinite(first[1][[0, 2]]).all()
    assert not lab.get(plan.workspace.array("unsafe", 0, np.int32, lab.put(np.zeros(1, np.int32)))).any()
    for count in (1, 20):  # participating thread blocks of the exact kernel
        monkeypatch.setattr("cumla.kernels.cuda.sparse.kernels.epilogue_ctas", lambda *_, count=count: count)
        assert_same_bits(first, problem.on(lab, plan=plan), lab)
    assert all(division.cluster for division in divided)


@pytest.mark.thorough(when=lambda x: x.emulated and x.get("tile") != 16)
def test_who_takes_turns_with_clusters(lab, divided, rng, tile):
    """One plan: clusters, then tiles of other lengths, then a batch-invariant call, then clusters again."""
    layout, plan = cumla.DSV4_FP8, cumla.DecodePlan()
    problem = two_lists(rng, tile, layout, batch=1, heads=7)
    first = problem.check(lab, plan=plan)
    ragged = Problem(problem.q, problem.cache, problem.indices, **problem.options, topk_length=np.array([5], np.int32))
    ragged.check(lab, plan=plan)
    own = cumla.DecodePlan(plan.workspace, batch_invariant=True)
    alone = problem.check(lab, plan=own, batch_invariant=True)
    assert_same_bits(first, problem.on(lab, plan=plan), lab)
    from cumla.kernels.cuda.sparse.kernels import _clusters

    in_clusters = 2 in dict(_clusters(0))  # which emulated devices do not have
    assert [division.cluster for division in divided] == [True, True, in_clusters, True]
    np.testing.assert_allclose(to_float(first[0]), to_float(alone[0]), atol=2e-3, rtol=2.01 / 128)
