"""Every builder accepts every kind of batch: the same requests are decodes, and padding belongs to no request."""

import dataclasses

import numpy as np
import pytest

from cumla.metadata import (
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
    split_decodes_and_prefills,
)
from cumla.models.step import StepIndexerMetadataBuilder, V41IndexerMetadataBuilder
from metadata.batches import make_batch
from support.batch_kinds import BEHIND, CAPACITY, KINDS, padded

WINDOW, BLOCK = 6, 8
INDEXERS = {
    "plain": DeepseekV32IndexerMetadataBuilder,
    "of a step": StepIndexerMetadataBuilder,
    "of V4.1": V41IndexerMetadataBuilder,
}
BUILDERS = {"window": DeepseekSparseSWAMetadataBuilder, "mla": MLACommonMetadataBuilder, **INDEXERS}


def made(name, kind, backend):
    config = ServingConfig if name != "mla" else MLAConfig
    return BUILDERS[name](
        config(
            window_size=WINDOW, block_size=BLOCK, num_speculative_tokens=kind.drafts, max_num_batched_tokens=64,
            max_num_seqs=CAPACITY, max_model_len=128, num_sms=3,
        ),
        backend,
    )  # fmt: skip


def batch_of(lab, kind):
    batch = make_batch(lab, [first + count for _, first, count in kind.scheduled], kind.counts, block_size=BLOCK)
    return padded(batch, kind.padding, lab.put, lab.get)


def counts_of(metadata):
    return metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens, metadata.num_prefill_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.thorough(when=lambda x: x.simulated)
def test_every_builder_takes_it(lab, name, kind):
    kind = KINDS[kind]
    batch = batch_of(lab, kind)
    metadata = made(name, kind, lab.backend).build(0, batch)
    decodes, prefills, decode_tokens, prefill_tokens = counts_of(metadata)
    assert decodes + prefills == len(kind.counts)
    assert decode_tokens + prefill_tokens == sum(kind.counts) + kind.padding * (name != "mla" or not prefills)
    if name in ("window", "of a step", "of V4.1"):  # builders of one step agree
        first = next((r for r, count in enumerate(kind.counts) if count > kind.drafts + 1), len(kind.counts))
        assert decodes == first
        assert counts_of(metadata) == split_decodes_and_prefills(batch, kind.drafts + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_of_padding_is_empty(lab, kind):
    kind = KINDS[kind]
    metadata = made("window", kind, lab.backend).build(0, batch_of(lab, kind))
    positions = np.concatenate([np.zeros(0), *(np.arange(first, first + n) for _, first, n in kind.spans)])
    tokens = len(positions)
    of_padding = {"positions": -1, "is_valid_token": False, "token_to_req_indices": 0, "swa_lens": 0}
    for name, value in of_padding.items():
        array = lab.get(getattr(metadata, name))
        assert len(array) == tokens + kind.padding
        assert (array[tokens:] == value).all()
    np.testing.assert_array_equal(lab.get(metadata.positions)[:tokens], positions)
    np.testing.assert_array_equal(lab.get(metadata.swa_lens)[:tokens], np.minimum(positions + 1, WINDOW))
    np.testing.assert_array_equal(
        lab.get(metadata.token_to_req_indices)[:tokens], np.repeat(range(len(kind.counts)), kind.counts)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INDEXERS)
@pytest.mark.thorough(when=lambda x: x.simulated)
def test_entries_of_decodes(lab, name, kind):
    """Tokens see the rows up to their own; later entries, for padding, see none."""
    kind = KINDS[kind]
    batch = batch_of(lab, kind)
    metadata = made(name, kind, lab.backend).build(0, batch)
    decode = metadata.decode
    assert (decode is None) == (metadata.num_decodes == 0)
    if decode is None:
        return
    lens, table = lab.get(decode.seq_lens), lab.get(decode.block_table)
    assert len(lens) == len(table) <= max(CAPACITY * (1 + kind.drafts), len(kind.counts))
    if not decode.packed:  # requests of different lengths, which the caller pads
        assert name == "plain"
        assert decode.requires_padding
        return
    each = lens.shape[1] if lens.ndim == 2 else 1
    seen = [(r, p + 1) for r, first, n in kind.spans if r < metadata.num_decodes for p in range(first, first + n)]
    np.testing.assert_array_equal(lens.ravel()[: len(seen)], [rows for _, rows in seen])
    of_requests = len(lens) == metadata.num_decodes
    if not of_requests:  # entries beyond are padding tokens
        assert not lens.ravel()[len(seen) :].any()
    pages = lab.get(batch.block_table_tensor)
    for token, (request, rows) in enumerate(seen):
        columns = -(-rows // BLOCK)
        np.testing.assert_array_equal(table[token // each, :columns], pages[request, :columns])


@pytest.mark.parametrize("kind", BEHIND)
@pytest.mark.parametrize("name", [*BUILDERS, "split", "split, uniform"])
def test_a_decode_behind_a_prefill_is_refused(lab, name, kind):
    """By each builder and by the function, before anything is written."""
    kind = BEHIND[kind]
    batch = batch_of(lab, kind)
    first = next(r for r, count in enumerate(kind.counts) if count > kind.drafts + 1)
    wrong = next(r for r, n in enumerate(kind.counts) if r > first and 0 < n <= kind.drafts + 1)
    message = rf"^query_start_loc_cpu: request {wrong} with {kind.counts[wrong]} query tokens follows a prefill"
    calls = {
        "split": lambda: split_decodes_and_prefills(batch, kind.drafts + 1),
        "split, uniform": lambda: split_decodes_and_prefills(batch, kind.drafts + 1, require_uniform=True),
    }
    with pytest.raises(ValueError, match=message):
        calls.get(name, lambda: made(name, kind, lab.backend).build(0, batch))()


def test_one_builder_for_all_kinds(lab):
    """One after another: contents of an earlier batch do not remain visible in the buffers."""
    most = KINDS["drafts and prefills"]
    assert most.drafts == max(kind.drafts for kind in KINDS.values())
    for name in BUILDERS:
        builder = made(name, most, lab.backend)
        for kind in KINDS.values():
            batch = batch_of(lab, kind)
            found, alone = builder.build(0, batch), made(name, most, lab.backend).build(0, batch)
            assert counts_of(found) == counts_of(alone)
            for field, array in arrays_of(lab, alone).items():
                np.testing.assert_array_equal(arrays_of(lab, found)[field], array, err_msg=f"{name}, {field}")


def arrays_of(lab, metadata):
    """The metadata's arrays and its decodes' arrays, by name."""
    found = {}
    for part in (metadata, getattr(metadata, "decode", None)):
        for field in () if part is None else dataclasses.fields(part):
            value = getattr(part, field.name)
            if hasattr(value, "dtype") and not field.name.startswith("_"):
                found[f"{type(part).__name__}.{field.name}"] = np.array(lab.get(value))
    return found
