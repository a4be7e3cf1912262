"""One step forward of a decode batch."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.guarded import Guarded
from support.lab import Lab
from support.properties import INT32_MAX, for_all, fuzzed, seeds

pytestmark = pytest.mark.filterwarnings("error")

REFERENCE = Lab("reference", on_device=False)
integers = st.sampled_from((np.int64, np.int32))


def token_ids(rng, count, dtype):
    """Ids, two thirds from a vocabulary, the others at and next to the limits of int32 and of `dtype`."""
    ids = rng.integers(0, 150_000, count)
    ends = [end for kind in (np.int32, dtype) for end in (np.iinfo(kind).min, np.iinfo(kind).max)]
    edges = [end + step for end in ends for step in (-1, 0, 1)]
    held = [edge for edge in edges if np.iinfo(dtype).min <= edge <= np.iinfo(dtype).max]
    return np.where(rng.random(count) < 1 / 3, rng.choice(held, count), ids).astype(dtype)


def test_every_batch(lab):
    @for_all(
        lab,
        num_queries=st.integers(0, 12),
        padding=st.integers(0, 5),
        block_size=st.sampled_from((1, 2, 53, 64)),
        token_dtype=integers,
        sampled_dtype=integers,
        slot_dtype=integers,
        column=st.booleans(),
        gap=st.sampled_from((0, 0, 8)),
        seed=seeds,
    )
    def check(num_queries, padding, block_size, token_dtype, sampled_dtype, slot_dtype, column, gap, seed):
        rng = np.random.default_rng(seed)
        num_seqs = num_queries + padding
        sampled = token_ids(rng, num_queries, sampled_dtype)[:, None]
        table = fuzzed(rng, (num_queries, 3), 9)
        lens = fuzzed(rng, num_seqs, 4 * block_size)
        results = []
        for place in (lab, REFERENCE):
            tokens, positions = (Guarded(place, np.full(num_seqs, 7, token_dtype), (gap,)) for _ in range(2))
            slots = Guarded(place, np.full(num_seqs, 7, slot_dtype), (gap,))
            seq_lens = Guarded(place, lens)
            cumla.advance_step(
                num_seqs, num_queries, block_size, tokens.array, place.put(sampled if column else sampled[:, 0]),
                positions.array, seq_lens.array, slots.array, place.put(table), backend=place.backend,
            )  # fmt: skip
            results.append([x.everything() for x in (tokens, positions, seq_lens, slots)])
        for got, want in zip(*results, strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_it_does(lab):
    tokens, positions, slots = (lab.put(np.full(6, 9)) for _ in range(3))
    seq_lens = lab.put(np.array([3, 4, 0, INT32_MAX, -5, 8], np.int32))
    table = lab.put(np.array([[7, 2], [7, 2], [1, 0], [1, 1], [1, 1]], np.int32))
    cumla.advance_step(
        6, 5, 4, tokens, lab.put(np.array([11, 12, 13, 14, 15])), positions, seq_lens, slots, table,
        backend=lab.backend,
    )  # fmt: skip
    assert lab.get(tokens).tolist() == [11, 12, 13, 14, 15, 0]
    assert lab.get(positions).tolist() == [3, 4, 0, INT32_MAX, -5, 0]
    assert lab.get(seq_lens).tolist() == [4, 5, 1, INT32_MAX, -4, 8]
    assert lab.get(slots).tolist() == [7 * 4 + 3, 2 * 4, 4, -1, -1, -1]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_token_ids_that_the_input_cannot_hold_are_minus_one(lab, dtype):
    sampled = np.array([7, INT32_MAX, INT32_MAX + 1, 2**32 + 7, 2**63 - 1, -1, -(2**31), -(2**31) - 1, -(2**63)])
    tokens, positions, slots = (lab.put(np.full(9, 9, dtype)) for _ in range(3))
    seq_lens, table = lab.put(np.zeros(9, np.int32)), lab.put(np.zeros((9, 1), np.int32))
    cumla.advance_step(9, 9, 4, tokens, lab.put(sampled), positions, seq_lens, slots, table, backend=lab.backend)
    narrow = [7, INT32_MAX, -1, -1, -1, -1, -(2**31), -1, -1]
    assert lab.get(tokens).tolist() == (sampled.tolist() if dtype == np.int64 else narrow)


def test_errors_leave_everything_as_it_was(lab):
    def arguments(**changes):
        arrays = {
            "input_tokens": np.full(4, 9),
            "sampled_token_ids": np.zeros((3, 1), np.int64),
            "input_positions": np.full(4, 9),
            "seq_lens": np.ones(4, np.int32),
            "slot_mapping": np.full(4, 9),
            "block_tables": np.zeros((4, 2), np.int32),
        }
        numbers = {"num_seqs": 4, "num_queries": 3, "block_size": 2}
        return {**numbers, **{name: lab.put(array) for name, array in arrays.items()}, **changes}

    for changes, kind, text in (
        ({"num_queries": 5}, ValueError, "num_seqs: got 4, expected at least 5"),
        ({"num_queries": -1}, ValueError, "num_queries: got -1"),
        ({"block_size": 0}, ValueError, "block_size: got 0"),
        ({"block_size": 2.0}, TypeError, "block_size: got 2.0"),
        ({"num_seqs": 5}, ValueError, "input_tokens: got shape"),
        ({"sampled_token_ids": np.zeros((3, 2), np.int64)}, ValueError, "sampled_token_ids: got shape"),
        ({"input_positions": np.zeros(4, np.float32)}, TypeError, "input_positions: got dtype float32"),
        ({"seq_lens": np.zeros(4, np.int64)}, TypeError, "seq_lens: got dtype int64"),
        ({"slot_mapping": np.zeros(3, np.int64)}, ValueError, "slot_mapping: got shape"),
        ({"block_tables": np.zeros((2, 2), np.int32)}, ValueError, "block_tables: got 2 rows"),
        ({"block_tables": np.zeros(4, np.int32)}, ValueError, "block_tables: got shape"),
    ):
        changes = {name: lab.put(x) if isinstance(x, np.ndarray) else x for name, x in changes.items()}
        given = arguments(**changes)
        with pytest.raises(kind, match=text):
            cumla.advance_step(**given, backend=lab.backend)
        for name in {"input_tokens", "input_positions", "slot_mapping"} - changes.keys():
            assert (lab.get(given[name]) == 9).all()
        assert "seq_lens" in changes or (lab.get(given["seq_lens"]) == 1).all()
