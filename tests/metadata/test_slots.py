"""Positions and slots of a step's tokens, compared with the requests written out token by token."""

import numpy as np
import pytest

from cumla.metadata import compute_positions, compute_slot_mapping, get_compressed_slot_mapping
from metadata.batches import assert_equal, compressed_slot, make_batch, tokens_of

SEQ_LENS, QUERY_LENS, BLOCK = [300, 0, 4, 700], [130, 0, 4, 257], 2


def test_positions(lab):
    batch = make_batch(lab, SEQ_LENS, QUERY_LENS)
    want = [position for _, position in tokens_of(SEQ_LENS, QUERY_LENS)]
    arguments = (batch.query_start_loc, batch.seq_lens)
    assert_equal(lab, compute_positions(len(want), *arguments, backend=lab.backend), want)

    out = lab.put(np.full(len(want) + 7, 5, np.int64))
    got = compute_positions(len(want) + 3, *arguments, out=out, backend=lab.backend)  # three tokens of padding
    assert_equal(lab, got, want + [-1] * 3)
    assert_equal(lab, out, want + [-1] * 7)


def test_positions_of_the_longest_sequence(lab):
    starts, lens = np.array([0, 2], np.int32), np.array([2**31 - 1], np.int32)
    got = compute_positions(2, lab.put(starts), lab.put(lens), backend=lab.backend)
    assert_equal(lab, got, [2**31 - 3, 2**31 - 2])


def test_slot_mapping(lab):
    batch = make_batch(lab, SEQ_LENS, QUERY_LENS, block_size=BLOCK)
    want = lab.get(batch.slot_mapping)
    arguments = (batch.query_start_loc, batch.seq_lens, batch.block_table_tensor, BLOCK)
    assert_equal(lab, compute_slot_mapping(len(want), *arguments, backend=lab.backend), want)

    out = lab.put(np.full(len(want) + 7, 5, np.int64))
    got = compute_slot_mapping(len(want), *arguments, out=out, backend=lab.backend)
    assert_equal(lab, got, want)
    assert_equal(lab, out, [*want, *[-1] * 7])


def test_tokens_without_a_page_have_no_slot(lab):
    table, lens, starts = np.array([[3, -1]], np.int32), np.array([6], np.int32), np.array([0, 6], np.int32)
    got = compute_slot_mapping(6, *map(lab.put, (starts, lens, table)), BLOCK, backend=lab.backend)
    assert_equal(lab, got, [6, 7, -1, -1, -1, -1])


def test_errors_name_the_argument():
    starts, lens, table = np.array([0, 4], np.int32), np.array([4], np.int32), np.zeros((1, 2), np.int32)
    with pytest.raises(ValueError, match="query_start_loc: got 2 entries, expected 3, one more than seq_lens has"):
        compute_positions(4, starts, np.array([4, 4], np.int32))
    with pytest.raises(ValueError, match="out: got 3 entries, expected at least num_tokens = 4"):
        compute_positions(4, starts, lens, np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="seq_lens: got dtype int64, expected int32"):
        compute_positions(4, starts, lens.astype(np.int64))
    with pytest.raises(ValueError, match="block_size: got 0, expected at least 1"):
        compute_slot_mapping(4, starts, lens, table, 0)
    with pytest.raises(ValueError, match=r"block_table: got shape \(1, 2\), expected \[R, any\] with R = 2"):
        compute_slot_mapping(4, np.array([0, 2, 4], np.int32), np.array([4, 4], np.int32), table, 2)


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_compressed_slot_mapping(lab, ratio):
    seq_lens, query_lens, block_size = [300, 0, 4, 700], [130, 0, 4, 257], 2
    batch = make_batch(lab, seq_lens, query_lens, block_size=block_size * ratio)
    table = lab.get(batch.block_table_tensor)
    want = [compressed_slot(table, r, p, block_size, ratio) for r, p in tokens_of(seq_lens, query_lens)]
    arguments = (batch.query_start_loc, batch.seq_lens, batch.block_table_tensor, block_size, ratio)
    assert_equal(lab, get_compressed_slot_mapping(len(want), *arguments, backend=lab.backend), want)

    out = lab.put(np.full(len(want) + 7, 5, np.int64))
    got = get_compressed_slot_mapping(len(want) - 1, *arguments, out=out, backend=lab.backend)
    assert_equal(lab, got, want[:-1])
    assert_equal(lab, out, want[:-1] + [-1] * 8)


def test_compressed_slots_are_64_bit_and_bounded_by_the_table(lab):
    table = np.array([[2**31 - 1, -1]], np.int32)
    lens = np.array([32], np.int32)
    starts = np.array([0, 32], np.int32)
    got = get_compressed_slot_mapping(32, *map(lab.put, (starts, lens, table)), 3, 4, backend=lab.backend)
    want = np.full(32, -1)
    want[[3, 7, 11]] = (2**31 - 1) * 3 + np.arange(3)
    assert_equal(lab, got, want)


def test_compressed_slot_mapping_errors():
    starts, lens, table = np.array([0, 4], np.int32), np.array([4], np.int32), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="query_start_loc: got 2 entries, expected 3, one more than seq_lens has"):
        get_compressed_slot_mapping(4, starts, np.array([4, 4], np.int32), np.zeros((2, 1), np.int32), 2, 4)
    with pytest.raises(ValueError, match="out: got 3 entries, expected at least num_tokens = 4"):
        get_compressed_slot_mapping(4, starts, lens, table, 2, 4, out=np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="compress_ratio: got 0"):
        get_compressed_slot_mapping(4, starts, lens, table, 2, 0)
