"""How sparse decode is divided among thread blocks, which the host decides."""

from hypothesis import given
from hypothesis import strategies as st

from cumla.kernels.cuda.sparse import division

TOKENS, HEADS, BLOCKS = st.integers(1, 5000), st.integers(1, 256), st.integers(1, 2000)
SMS = st.integers(1, 600)


@given(TOKENS, BLOCKS, st.booleans(), st.booleans(), SMS, st.sampled_from([*division.HOPPER_COSTS.values()]))
def test_everybody_has_something(tiles, blocks, ragged, may_cut, sms, costs):
    made, cost = division.divide(tiles, blocks, ragged, may_cut, sms, costs)
    assert cost > 0
    assert 1 <= made.shares <= min(sms, division.MAX_SHARES)
    assert made.shares <= (tiles * blocks if made.cut else tiles)
    assert made.planned == ragged
    assert may_cut or not made.cut
    if made.parts:
        assert made.shares == tiles * made.parts
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


def test_few_tokens_are_cut_and_many_are_not():
    for tokens in (1, 2):
        height = division.tile_heads(tokens, 64, 10, True, 132)
        made, _ = division.divide(tokens * 64 // height, 10, False, True, 132, division.HOPPER_COSTS[height])
        assert made.parts > 1
    assert division.tile_heads(256, 64, 10, True, 132) == 64
    assert not division.divide(256, 10, False, True, 132, division.HOPPER_COSTS[64])[0].cut
