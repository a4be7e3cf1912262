"""Tokens sharded across ranks: every token is on one rank, at the computed place; results of all ranks merge to one."""

import itertools

import numpy as np
import pytest

from cumla.metadata.batch import get_dcp_local_seq_lens
from cumla.parallel import (
    Shard,
    local_block_table,
    local_seq_lens,
    local_slot_mapping,
    localise_indices,
    merge_partials,
)
from support.bounds import assert_within
from support.lab import BF16, to_float

SHARDED = [(1, 1), (3, 4), (8, 2)]  # ranks, interleave
BLOCK = 4


def shards(size, interleave):
    return [Shard(rank, size, interleave) for rank in range(size)]


def owners(count, size, interleave):
    """The rank of each of `count` tokens, and its index on that rank, computed token by token."""
    rank, local, held = np.empty(count, int), np.empty(count, int), [0] * size
    for token in range(count):
        rank[token] = token // interleave % size
        local[token] = held[rank[token]]
        held[rank[token]] += 1
    return rank, local


def tables(rng, requests, columns):
    """A separate block table for each rank: no page twice, some entries missing."""
    table = rng.permutation(requests * columns).reshape(requests, columns).astype(np.int32)
    table[rng.random(table.shape) < 0.1] = -1
    return table


@pytest.mark.parametrize(("size", "interleave"), SHARDED)
def test_lengths_of_every_query(lab, rng, size, interleave):
    seq_lens, s_q = rng.integers(0, 300, 20).astype(np.int32), 3
    seq_lens[:3] = 0, 1, 2
    for shard in shards(size, interleave):
        got = lab.get(local_seq_lens(lab.put(seq_lens), shard, s_q=s_q, backend=lab.backend))
        assert got.dtype == np.int32
        seen = np.maximum(seq_lens[:, None] - s_q + 1 + np.arange(s_q), 0)
        np.testing.assert_array_equal(got, [(owners(n, size, interleave)[0] == shard.rank).sum() for n in seen.flat])
        one = lab.get(local_seq_lens(lab.put(seq_lens), shard, backend=lab.backend))
        np.testing.assert_array_equal(one, get_dcp_local_seq_lens(seq_lens, size, shard.rank, interleave))


def test_columns_of_a_table_of_whole_sequences(lab, rng):
    table = tables(rng, 5, 7)
    for size in (1, 2, 3, 8):
        for shard in shards(size, BLOCK):
            want = np.repeat(table[:, shard.rank :: size], 2, axis=0)
            got = local_block_table(lab.put(table), shard, s_q=2, backend=lab.backend)
            np.testing.assert_array_equal(lab.get(got), want)
            wide = lab.put(np.full((10, 9), 77, np.int32))
            local_block_table(lab.put(table), shard, s_q=2, out=wide, backend=lab.backend)
            np.testing.assert_array_equal(lab.get(wide)[:, : want.shape[1]], want)
            assert (lab.get(wide)[:, want.shape[1] :] == -1).all()


@pytest.mark.parametrize(("size", "interleave"), SHARDED)
@pytest.mark.parametrize("ratio", [1, 4])
def test_every_row_has_one_place(lab, rng, size, interleave, ratio):
    """Over all ranks each row that a step completes gets one slot, where its rank finds it later."""
    new = np.array([3, 0, 1, 9, 6], np.int32)
    seq_lens = new + np.array([0, 5, 40, 3, 11], np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    num_tokens = int(starts[-1]) + 2  # entries of padding
    found = np.zeros(num_tokens, int)
    for shard in shards(size, interleave):
        table = tables(rng, len(new), 14)
        arguments = [lab.put(x) for x in (starts, seq_lens, table)]
        got = local_slot_mapping(
            *arguments, BLOCK, shard, num_tokens=num_tokens, compress_ratio=ratio, backend=lab.backend
        )
        got = lab.get(got)
        assert got.dtype == np.int64
        for request, (first, end) in enumerate(itertools.pairwise(starts)):
            for token in range(first, end):
                tokens, want = seq_lens[request] - end + token + 1, -1
                if tokens % ratio == 0:
                    rank, local = (x[-1] for x in owners(tokens // ratio, size, interleave))
                    if rank == shard.rank:
                        page = table[request, local // BLOCK]
                        want = page * BLOCK + local % BLOCK if page >= 0 else -1
                        found[token] += 1
                assert got[token] == want
        assert (got[starts[-1] :] == -1).all()
    assert found.max(initial=0) <= 1
    assert found.sum() == (seq_lens // ratio - (seq_lens - new) // ratio).sum()


@pytest.mark.parametrize(("size", "interleave"), SHARDED)
def test_selected_rows_are_found_where_they_were_written(lab, rng, size, interleave):
    """Every selected row is in the list of one rank, as the slot that local_slot_mapping gave it; order is kept."""
    rows, requests, width = 50, 3, 37
    starts, lens = np.arange(requests + 1, dtype=np.int32) * rows, np.full(requests, rows, np.int32)
    token_to_req = rng.integers(-1, requests + 1, 6).astype(np.int32)
    indices = rng.integers(-2, rows + 3, (6, width)).astype(np.int32)
    valid = np.array([True, True, False, True, True, True])
    for shard in shards(size, interleave):
        table = tables(rng, requests, 13)
        slots = local_slot_mapping(starts, lens, table, BLOCK, shard, num_tokens=requests * rows, backend="reference")
        slots = slots.reshape(requests, rows)
        got, counts = localise_indices(
            lab.put(indices), lab.put(token_to_req), lab.put(table), BLOCK, shard, lab.put(valid), backend=lab.backend
        )
        got, counts = lab.get(got), lab.get(counts)
        for token, request in enumerate(token_to_req):
            want = []
            if 0 <= request < requests:
                for i in indices[token]:
                    if 0 <= i < rows and slots[request, i] >= 0:
                        want.append(slots[request, i])
                    elif i >= rows:  # after the written rows, but in the table
                        local = local_slot_mapping(
                            np.array([0, 1], np.int32), np.array([i + 1], np.int32), table[request : request + 1],
                            BLOCK, shard, num_tokens=1, backend="reference",
                        )  # fmt: skip
                        want += [local[0]] if local[0] >= 0 else []
            np.testing.assert_array_equal(got[token, : len(want)], want)
            assert (got[token, len(want) :] == -1).all()
            assert counts[token] == (len(want) if valid[token] else 0)


def test_long_rows_of_indices(lab, rng):
    """More rows than a thread block maps at a time; all, none and some of them on the rank."""
    size, columns, width = 3, 500, 700 if lab.tiny else 1300
    indices = rng.integers(0, 3 * BLOCK * columns, (4, width)).astype(np.int32)
    indices[1] = indices[1] // size * size + 1
    indices[2] = indices[2] // size * size
    indices[3, 5:] = -1
    table, shard = rng.permutation(columns)[None].astype(np.int32), Shard(1, size)
    slots, lens = localise_indices(
        lab.put(indices), lab.put(np.zeros(4, np.int32)), lab.put(table), BLOCK, shard, backend=lab.backend
    )
    slots, lens = lab.get(slots), lab.get(lens)
    for row, got, count in zip(indices, slots, lens, strict=True):
        local = row[(row >= 0) & (row % size == 1)] // size
        local = local[local < BLOCK * columns]
        assert count == len(local)
        np.testing.assert_array_equal(got[:count], table[0, local // BLOCK] * BLOCK + local % BLOCK)
        assert (got[count:] == -1).all()
    assert lens[1] > 512
    assert lens[2] == 0


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize(("count", "dim"), [(1, 40), (3, 512), (8, 67)])
def test_merge(lab, rng, dtype, count, dim):
    batch, s_q, heads = 2, 2, 3
    parts = rng.standard_normal((count, batch, s_q, heads, dim)).astype(dtype)
    lses = rng.standard_normal((count, heads, batch, s_q)).astype(np.float32).transpose(0, 2, 1, 3)
    lses[0, 0, 0], lses[count // 2, 1, 1] = np.inf, -np.inf
    lses[:, 1, 0, 1] = np.inf
    sink = np.array([0.3, -np.inf, 2.0], np.float32)
    empty = np.isinf(lses).transpose(0, 1, 3, 2)
    parts[empty] = np.nan
    weights = np.where(np.isinf(lses), 0, np.exp(lses.astype(np.float64)))
    total = weights.sum(axis=0)
    none = total == 0
    with np.errstate(divide="ignore"):
        want_lse = np.where(none, np.inf, np.log(total))
    values = np.where(empty[..., None], 0, to_float(parts))
    want = (weights.transpose(0, 1, 3, 2)[..., None] * values).sum(axis=0)
    for given in (None, sink):
        whole = np.where(none, 1, total + (0 if given is None else np.exp(sink.astype(np.float64))[:, None]))
        out, lse = merge_partials(
            lab.put(parts), lab.put(lses), None if given is None else lab.put(sink), backend=lab.backend
        )
        bound = (1e-6, 1e-5) if dtype is np.float32 else (1e-6, 1.01 / 128)
        assert_within("out", to_float(lab.get(out)), want / whole.transpose(0, 2, 1)[..., None], *bound)
        assert_within("lse", lab.get(lse), want_lse, 1e-6, 1e-5)


def test_a_part_that_is_no_number_shows(lab):
    parts, lses = np.ones((2, 1, 1, 2, 16), np.float32), np.zeros((2, 1, 2, 1), np.float32)
    lses[1, 0, 1] = np.nan
    out, lse = merge_partials(lab.put(parts), lab.put(lses), backend=lab.backend)
    assert np.isnan(lab.get(lse)).tolist() == [[[False], [True]]]
    assert np.isnan(lab.get(out))[0, 0].any(axis=1).tolist() == [False, True]


def test_hostile_numbers_stay_inside(lab, rng):
    """Any value in any array: slots that are found are in the table, and nothing is written outside of the outputs."""
    extremes = np.array([-(2**31), -1, 0, 1, 7, 2**31 - 1], np.int32)

    def any_of(*shape):
        return lab.put(rng.choice(extremes, shape))

    for shard in (Shard(0, 1, 1), Shard(2, 3, 2**31 - 1), Shard(1, 1 << 16, 5)):
        lens = lab.get(local_seq_lens(any_of(6), shard, s_q=2, backend=lab.backend))
        assert (lens >= 0).all()
        slots, counts = localise_indices(
            any_of(5, 9), any_of(5), any_of(2, 3), BLOCK, shard, backend=lab.backend
        )  # fmt: skip
        assert (lab.get(slots) >= -1).all()
        assert ((lab.get(counts) >= 0) & (lab.get(counts) <= 9)).all()
        mapping = local_slot_mapping(
            any_of(4), any_of(3), any_of(3, 2), BLOCK, shard, num_tokens=6, backend=lab.backend
        )
        assert (lab.get(mapping) >= -1).all()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"shard": (0, 2, 1)}, TypeError, "shard: got"),
        ({"shard": Shard(2, 2)}, ValueError, "shard.rank: got 2, expected 0 to 1"),
        ({"shard": Shard(0, 0)}, ValueError, "shard.size: got 0, expected at least 1"),
        ({"shard": Shard(0, 2, 0)}, ValueError, "shard.interleave: got 0"),
        ({"shard": Shard(True, 2)}, TypeError, "shard.rank: got True"),
        ({"indices": np.zeros((2, 3), np.int64)}, TypeError, "indices: got dtype int64"),
        ({"token_to_req_indices": np.zeros(1, np.int32)}, ValueError, "token_to_req_indices: got 1 entries"),
        ({"block_size": 0}, ValueError, "block_size: got 0"),
        ({"block_size": 2.0}, TypeError, r"block_size: got 2\.0"),
        ({"is_valid_token": np.ones(2, np.int32)}, TypeError, "is_valid_token: got dtype int32"),
        ({"out": np.zeros((2, 3), np.int32)}, TypeError, r"out: got .*, expected \(slots, lens\)"),
    ],
)
def test_errors(change, error, says):
    arguments = {
        "indices": np.zeros((2, 3), np.int32), "token_to_req_indices": np.zeros(2, np.int32),
        "block_table": np.zeros((1, 2), np.int32), "block_size": BLOCK, "shard": Shard(0, 2),
    }  # fmt: skip
    with pytest.raises(error, match=f"(?s){says}"):
        localise_indices(**(arguments | change))


@pytest.mark.parametrize(
    ("parts", "lses", "sink", "error", "says"),
    [
        (np.ones((2, 1, 1, 3), np.float32), np.ones((2, 1, 3, 1), np.float32), None, ValueError, "parts: got shape"),
        (np.ones((2, 1, 1, 3, 8)), np.ones((2, 1, 3, 1), np.float32), None, TypeError, "parts: got dtype float64"),
        (np.ones((2, 1, 1, 3, 8), BF16), np.ones((2, 1, 1, 3), np.float32), None, ValueError, "lses: got shape"),
        (np.ones((2, 1, 1, 3, 8), BF16), np.ones((2, 1, 3, 1)), None, TypeError, "lses: got dtype float64"),
        (np.ones((0, 1, 1, 3, 8), BF16), np.ones((0, 1, 3, 1), np.float32), None, ValueError, "parts: got .* 0 ranks"),
        (
            np.ones((2, 1, 1, 3, 8), BF16), np.ones((2, 1, 3, 1), np.float32), np.full(3, np.nan, np.float32),
            ValueError, "attn_sink: got NaN for head 0",
        ),
    ],
)  # fmt: skip
def test_merge_errors(parts, lses, sink, error, says):
    with pytest.raises(error, match=says):
        merge_partials(parts, lses, sink)
