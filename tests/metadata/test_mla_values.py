"""Dense MLA metadata of host integers of any type, and of blocks of any number."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from errors.metadata import built, decodes, group

from cumla.metadata import SequenceGroup
from metadata.batches import BLOCK

RIGHT = group().arguments


def test_lengths_stay_pythons_integers():
    metadata = decodes()
    model_input = SimpleNamespace(input_tokens=np.zeros(2, np.int64), input_positions=np.zeros(2, np.int64))
    metadata.advance_step(model_input, np.array([1, 2]), BLOCK, np.int8(2), np.uint8(1))
    assert metadata.seq_lens == [6, 9]
    assert {type(n) for n in (*metadata.seq_lens, metadata.num_decodes, metadata.num_decode_tokens)} == {int}


def test_a_copy_has_views_of_its_own():
    metadata = decodes()
    before = metadata.decode_metadata
    other = copy.copy(metadata)
    other.seq_lens = [50, 60]
    assert other.decode_metadata.seq_lens == [50, 60]
    assert metadata.decode_metadata is before


def test_small_numpy_integers_of_a_group():
    small = {name: np.array(RIGHT[name], np.uint8) for name in ("orig_seq_lens", "query_lens", "context_lens")}
    metadata, grouped = built(SequenceGroup(**RIGHT | small | {"seq_lens": np.array([5], np.int8)}))
    assert grouped.slot_mapping.tolist() == [3 * BLOCK + i for i in range(5)]
    assert metadata.seq_lens == [5]


@pytest.mark.parametrize("block", [-(2**31), 2**31 - 1])
def test_blocks_are_any_that_int32_holds(block):
    """Slots of the largest overflow it."""
    metadata, grouped = built(SequenceGroup(**RIGHT | {"block_tables": {0: [block]}}))
    assert metadata.block_tables.tolist() == [[block]]
    assert grouped.slot_mapping.tolist() == [block * BLOCK + i for i in range(5)]
