"""The host's division of sparse decode among thread blocks."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumla.kernels.cuda.sparse import division
from cumla.kernels.cuda.sparse.work import BLOCK, AttentionCall

TOKENS, HEADS, BLOCKS = st.integers(1, 5000), st.integers(1, 256), st.integers(1, 2000)
SMS = st.integers(1, 600)
CLUSTERS = st.dictionaries(st.integers(2, 8), st.integers(0, 70)).map(lambda x: tuple(x.items()))


@given(TOKENS, BLOCKS, st.booleans(), st.booleans(), SMS, st.sampled_from([*division.HOPPER_COSTS.values()]), CLUSTERS)
def test_everybody_has_something(tiles, blocks, ragged, may_split, sms, costs, clusters):
    made, cost = division.divide(tiles, blocks, ragged, may_split, sms, costs, clusters)
    assert cost > 0
    if made.cluster:  # clusters that run at a time
        assert tiles <= dict(clusters)[made.parts]
        assert may_split
        assert not made.split
    else:
        assert 1 <= made.ranges <= min(sms, division.MAX_RANGES)
    assert made.ranges <= (tiles * blocks if made.split or made.cluster else tiles)
    assert may_split or not made.split
    if made.planned:
        assert ragged
    if made.parts:
        assert made.ranges == tiles * made.parts
        assert 2 <= made.parts <= blocks


@given(TOKENS, TOKENS, HEADS, BLOCKS, BLOCKS, SMS, SMS)
def test_tiles_do_not_depend_on_what_else_there_is_where_that_is_asked_for(
    tokens, others, heads, blocks, more, sms, less
):
    height = division.tile_heads(tokens, heads, blocks, False, sms)
    assert height == division.tile_heads(others, heads, more, False, less)
    assert height >= min(heads, 64)


@given(TOKENS, HEADS, BLOCKS, SMS)
def test_no_tile_is_half_empty_if_a_lower_one_is_not(tokens, heads, blocks, sms):
    height = division.tile_heads(tokens, heads, blocks, True, sms)
    assert height in division.HOPPER_COSTS
    assert height == min(division.HOPPER_COSTS) or heads > height // 2


@given(TOKENS, BLOCKS, st.booleans(), SMS, st.sampled_from([*division.HOPPER_COSTS.values()]), CLUSTERS)
def test_lengths_change_the_division_only_where_a_plan_evens_out_more_than_it_costs(
    tiles, blocks, may_split, sms, costs, clusters
):
    full, _ = division.divide(tiles, blocks, False, may_split, sms, costs, clusters)
    ragged, _ = division.divide(tiles, blocks, True, may_split, sms, costs, clusters)
    splits = max(full.parts, 1)
    one_each = full.ranges == tiles * splits
    assert ragged.planned == (not one_each or (may_split and blocks > splits * division.MOST_UNPLANNED))
    assert ragged.planned or ragged == full


def test_few_tokens_are_split_and_many_are_not():
    for tokens in (1, 2):
        height = division.tile_heads(tokens, 64, 10, True, 132)
        made, _ = division.divide(tokens * 64 // height, 10, False, True, 132, division.HOPPER_COSTS[height])
        assert made.parts > 1
    assert division.tile_heads(256, 64, 10, True, 132) == 64
    assert not division.divide(256, 10, False, True, 132, division.HOPPER_COSTS[64])[0].split


@given(TOKENS, BLOCKS, SMS, st.sampled_from([*division.HOPPER_COSTS.values()]), CLUSTERS)
def test_nothing_costs_less_than_what_is_chosen(tiles, blocks, sms, costs, clusters):
    _, cost = division.divide(tiles, blocks, False, True, sms, costs, clusters)
    ranges = min(sms, division.MAX_RANGES)
    for other in division.choices(tiles, blocks, ranges, clusters):
        counts = division.terms(other, tiles, blocks, ranges)
        assert cost <= sum(count * each for count, each in zip(counts, costs, strict=True)) * (1 + 1e-12)


RUN_AT_A_TIME = ((2, 66), (3, 39), (4, 30), (5, 22), (6, 17))  # clusters of an H200


@pytest.mark.parametrize(
    ("tokens", "heads", "blocks", "height", "parts"),
    [
        (32, 64, 10, 32, 2), (32, 128, 18, 64, 2), (32, 128, 32, 64, 2), (8, 64, 10, 32, 5), (8, 128, 18, 32, 3),
        (2, 128, 18, 16, 6), (2, 64, 10, 16, 5), (32, 16, 18, 16, 3), (32, 32, 18, 32, 3), (8, 64, 2, 16, 2),
    ],
)  # fmt: skip
def test_clusters_are_taken_where_they_were_measured_to_be_faster(tokens, heads, blocks, height, parts):
    cluster = division.Division(tokens * heads // height * parts, False, False, parts, cluster=True)
    assert chosen(tokens, heads, blocks) == (height, cluster)
    assert not chosen(tokens, heads, blocks, ())[1].cluster


def test_clusters_are_not_taken_where_they_do_not_run_at_a_time_or_are_slower():
    assert chosen(34, 64, 10)[1].parts == 3  # tiles of 64 heads: 68 tiles of 32 would need two more clusters
    assert not chosen(67, 64, 10)[1].cluster
    assert not chosen(34, 128, 18)[1].cluster
    assert not chosen(1, 128, 32)[1].cluster


def chosen(tokens, heads, blocks, clusters=RUN_AT_A_TIME):
    height = division.tile_heads(tokens, heads, blocks, True, 132, clusters)
    costs = division.HOPPER_COSTS[height]
    return height, division.divide(tokens * -(-heads // height), blocks, False, True, 132, costs, clusters)[0]


def starts_of(tokens, heads, blocks, ranges, made):
    """Tile and block at which each split begins, as csrc/common/sparse/work.cuh computes them; groups of heads."""
    q = SimpleNamespace(shape=(tokens, 1, heads, 576))
    segment = SimpleNamespace(indices=SimpleNamespace(shape=(tokens, 1, blocks * BLOCK)), lengths=None)
    work = AttentionCall(q, [segment], None, 1.0, q, None, (0, 0), None, (0, 0, 0))
    split = SimpleNamespace(**work._period(made))
    starts = []
    for cta in range(ranges + 1):
        part = cta % split.period_ranges
        tile, block = divmod(part * split.range_length + min(part, split.range_rest), split.tile_units)
        starts.append((cta // split.period_ranges * split.period_tiles + tile, block))
    return starts, work.groups


@given(st.integers(1, 66), st.integers(2, 2000))
def test_clusters_share_a_tile_each(tiles, blocks):
    made = division.Division(2 * tiles, False, False, 2, cluster=True)
    starts, _ = starts_of(tiles, 64, blocks, made.ranges, made)
    assert starts == [(i // 2, i % 2 * -(-blocks // 2)) for i in range(2 * tiles + 1)]


@given(TOKENS, HEADS, BLOCKS, st.booleans(), SMS)
def test_ranges_go_through_all_tiles_and_those_of_other_heads_go_along(tokens, heads, blocks, may_split, sms):
    costs = division.HOPPER_COSTS[64]
    made, _ = division.divide(tokens * -(-heads // 64), blocks, False, may_split, sms, costs)
    starts, groups = starts_of(tokens, heads, blocks, made.ranges, made)
    assert starts[0] == (0, 0)
    assert starts[-1] == (tokens * groups, 0)
    assert starts == sorted(starts)
    if made.ranges % groups == 0 and not made.parts:
        of_group = np.array(starts[:-1]).reshape(groups, -1, 2)
        assert (of_group[:, :, 0] - tokens * np.arange(groups)[:, None] == of_group[0, :, 0]).all()
        assert (of_group[:, :, 1] == of_group[0, :, 1]).all()
