"""Formulas are found from samples, and not where a word follows from none."""

import dataclasses

import numpy as np
import pytest

from cumla.export import recorded
from cumla.export.record import ExportError, Sampler
from cumla.export.words import Fields, Word, found
from support import runtime

RNG = np.random.default_rng(3)
COUNT = 200
TOKENS, PAGES, ADDRESS = (RNG.integers(1, end, COUNT) for end in (500, 1 << 20, 1 << 44))
VALUES = np.stack([TOKENS, PAGES, 16 * ADDRESS], axis=1)
FIELDS = Fields(VALUES, (0, 1), ((2, np.full(COUNT, 1 << 20)),), TOKENS)
WORDS = {
    "constant": np.full(COUNT, 7),
    "a field": PAGES,
    "a multiple": 64 * PAGES,
    "a half": 2 * (PAGES // 2) // 2 * 0 + TOKENS * 4 // 2,
    "plus one": TOKENS + 1,
    "rounded up": -(-TOKENS // 4),
    "rounded down": TOKENS // 8,
    "at most": np.minimum(-(-TOKENS // 4), 50),
    "a product": 3 * TOKENS * PAGES,
    "a difference": PAGES - TOKENS,
    "a sum, rounded up": PAGES + -(-TOKENS // 4),
    "an address": 16 * ADDRESS + 1024,
    "an address and a field": 16 * ADDRESS + 64 * TOKENS,
    "a table": TOKENS * TOKENS % 97,
    "a field and a table": PAGES + TOKENS * TOKENS % 97,
}


@pytest.mark.parametrize("name", WORDS)
def test_a_formula_gives_the_word(name):
    word = found(WORDS[name], FIELDS)
    assert [word.evaluate(row, by) for row, by in zip(VALUES.tolist(), TOKENS.tolist(), strict=True)] == WORDS[
        name
    ].tolist()
    assert bool(word.runs) == name.endswith("a table")
    assert (word.base == 2) == ("address" in name)


def test_a_word_that_follows_from_nothing():
    assert found(RNG.integers(0, 1 << 30, COUNT), FIELDS) is None
    assert found(WORDS["a table"], FIELDS, table=False) is None


def test_a_table_has_one_run_for_a_line():
    word = found(np.where(TOKENS < 100, 3 * TOKENS, 300 - TOKENS // 300), FIELDS)
    assert len(word.runs) <= 4
    assert word.evaluate([50, 0, 0], 50) == 150


def test_a_run_that_starts_later():
    word = Word(runs=((1, 10, 1), (5, 100, 0), (9, 7, -1)))
    assert [word.evaluate([], by) for by in (1, 4, 5, 8, 9, 11)] == [10, 13, 100, 100, 7, 5]


def test_launches_that_follow_from_nothing_are_an_error():
    """A scale that an argument function draws anew is in no field."""
    call = runtime.calls("v4")[0]
    drawn = iter(range(10_000))

    def arguments(size):
        given = call.arguments(size)
        return given | {"block_size": 64, "k": np.empty((len(given["k"]), 512), given["k"].dtype), "drawn": next(drawn)}

    class Odd(type(call.fields)):
        def call(self, given, plan=None):
            given = dict(given)
            shift = given.pop("drawn") % 7
            super().call(
                given | {"slot_mapping": given["slot_mapping"][: len(given["k"])], "k_cache": given["k_cache"][shift:]},
                plan,
            )

    odd = Odd(call.fields.spec, (), False)
    with pytest.raises(ExportError, match="follows from no f"):
        recorded([dataclasses.replace(call, fields=odd, arguments=arguments)], runtime.H200)


class Aligned(np.random.Generator):
    """Random integers that are multiples of 8."""

    def integers(self, low, high):
        return max(super().integers(low, high) // 8 * 8, low)


def test_strides_that_calls_may_have_do_not_depend_on_chance():
    """Random strides of 2 bytes' multiples were aligned by chance, and then the export claimed any."""
    call = next(x for x in runtime.calls("v4") if x.name == "apply_rope inverse")
    assert Sampler(call, runtime.H200, Aligned(np.random.PCG64(0))).steps["x"] == (16, 16, 0)


def test_the_ends_of_sizes_that_bound_each_other_are_served():
    """A gather of many rows has at least 8192 of all requests together: 683 of each of 12."""
    call = next(x for x in runtime.calls("v4") if x.name == "dequantize_and_gather_k_cache DSV4_FP8, many rows")
    (record,) = recorded([call], runtime.H200)
    (rows,) = (x for x in record.conditions if call.fields.names[x.field] == "out.shape[1]" and not x.is_product)
    assert (rows.least, rows.most) == (-(-8192 // 12), 8192)
