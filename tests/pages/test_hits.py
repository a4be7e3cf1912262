"""A hit moves exactly the described pages: with them a request goes on bit for bit, without any of them it does not."""

import functools

import numpy as np
import pytest

import cumla
from cumla import pages
from support.page_groups import MovingFamily, MovingLayer, MovingStack

WINDOW, C128, C4, V32, V41 = 2, 3, 6, 12, "v41"  # cases of golden layers, and stacks
GLM, FLASH, MISTRAL, HY = "glm", "flash", "mistral", "hy"
LENGTHS = {WINDOW: (5, 64, 130, 195), C128: (127, 128, 200, 384), C4: (3, 4, 127, 256, 258), V32: (1, 64, 150)}
LENGTHS |= {V41: (31, 64, 127, 130), GLM: (5, 64, 150), FLASH: (3, 64, 127, 150)}
LENGTHS |= {MISTRAL: (5, 64, 150), HY: (5, 64, 150)}
STACKS = {GLM: 0, FLASH: 3, MISTRAL: 6, HY: 8}  # golden cases
REST = 135  # tokens after a hit: enough to complete a row of 128 positions


@functools.cache
def moving(case, cache_format="float32", seed=0):
    make = {V41: MovingStack, **dict.fromkeys(STACKS, MovingFamily)}.get(case, MovingLayer)
    return make(case if make is MovingLayer else STACKS.get(case, 0), cache_format, seed)


def computed(case, cache_format, tokens):
    """A request of n computed tokens, and its next outputs."""
    source = moving(case, cache_format)
    source.poison(-1)
    source.step(0, 0, tokens)
    return source


def goes_on(model, request, tokens):
    """Outputs of a prompt's rest, token by token at first."""
    count = min(REST, model.tokens - tokens - 2)
    parts = [model.step(request, tokens, 1), model.step(request, tokens + 1, 1)]
    return np.concatenate([*parts, model.step(request, tokens + 2, count)], axis=-2)


def same(got, want):
    return got.tobytes() == want.tobytes()


@pytest.mark.parametrize("cache_format", ["float32", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", LENGTHS)
def test_described_pages_are_enough(case, cache_format):
    target = moving(case, cache_format, 1)
    for tokens in LENGTHS[case]:
        source = computed(case, cache_format, tokens)
        target.poison(tokens)
        target.receive(source, 0, 1, tokens)
        want = goes_on(source, 0, tokens)
        assert np.isfinite(want).all()
        assert same(goes_on(target, 1, tokens), want), tokens


@pytest.mark.parametrize("case", LENGTHS)
def test_every_described_page_is_needed(case):
    """Without one, the outputs differ, and `missing` names it."""
    target, left_out = moving(case, "float32", 1), 0
    for tokens in LENGTHS[case][2 : 3 if case == V41 else None]:
        source = computed(case, "float32", tokens)
        after = [array.copy() for *_, array in source.pages()]
        want = goes_on(source, 0, tokens)
        for (*_, array), content in zip(source.pages(), after, strict=True):
            array[:] = content
        for part in target.description.needs(tokens).parts:
            for column in part.pages:
                target.poison(tokens)
                target.receive(source, 0, 1, tokens, without=(part.group, column))
                assert not same(goes_on(target, 1, tokens), want), (tokens, part.group, column)
                tables = {name: table.copy() for name, table in target.tables([0, 1]).items()}
                tables[part.group][1, column] = -1
                (found,) = pages.missing(target.description, tables, [tokens, tokens])
                assert (found.request, found.group, found.column, found.page) == (1, part.group, column, -1)
                left_out += 1
    assert left_out > 2


def test_a_ring_that_another_request_had_is_restored_whole():
    """Its next step seems to be a step of that request that is run again, and would pool that request's token."""
    tokens = 127
    source, target = computed(V41, "float32", tokens), moving(V41, "float32", 1)
    target.poison(tokens)
    target.receive(source, 0, 1, tokens)
    for layer in (1, 3):
        caches = target.caches_of(layer)
        if caches.restart_positions is not None:
            caches.restart_positions[1] = tokens  # not restored
    assert not same(goes_on(target, 1, tokens), goes_on(source, 0, tokens))


@pytest.mark.parametrize("case", [C4, V41])
def test_two_requests_share_pages(case):
    """The second copies the partly filled pages that it writes into, and ends with the bits of a request alone."""
    tokens, model = 130, moving.__wrapped__(case)
    model.step(0, 0, tokens)
    needs = model.description.needs(tokens)
    for group, _, _, array in model.pages():
        part = needs.part(group.name)
        for column in part.pages:
            mine, theirs = model.table(group.name, 1), model.table(group.name, 0)
            if group.tokens and column != part.written:
                mine[column] = theirs[column]
            else:
                array[mine[column]] = array[theirs[column]]
    second = goes_on(model, 1, tokens)
    assert same(goes_on(model, 0, tokens), second)


@pytest.mark.parametrize(("column", "position"), [(31, 124), (32, 128)])
def test_debug_finds_states_before_a_row_needs_them(column, position):
    """Position 130 completes no row; position 131 will pool the states of 124 to 130."""
    model = computed(C4, "fp8", 130)
    table = model.table("states4", 0)
    page, table[column] = table[column], -1
    try:
        with (
            cumla.debug(),
            pytest.raises(ValueError, match=f"state_block_table: request 0 has page -1 for position {position}"),
        ):
            model.step(0, 130, 1)
        table[30] = -1  # no longer needed
        table[column] = page
        with cumla.debug():
            model.step(0, 130, 1)
    finally:
        moving.cache_clear()
