"""A step of any decode-first batch: each token's output equals the output of its whole sequence in one step."""

import dataclasses

import numpy as np
import pytest
from hypothesis import strategies as st

from support.lab import Lab
from support.models import GoldenLayer, V4Layer, V32Layer, relative_rms
from support.properties import for_all

CASES = [pytest.param(8, id="v4"), pytest.param(13, id="v32")]
REQUESTS, LONGEST = 6, 150
HOST = Lab("cpu", on_device=False)


class Computed:
    """A golden layer whose requests' first LONGEST tokens are in its caches, and steps that continue at any of them."""

    def __init__(self, case, backend="cpu"):
        self.golden = GoldenLayer(case)
        make = V4Layer if self.golden.record["model"] == "v4" else V32Layer
        self.made = make(self.golden, REQUESTS, backend=backend)
        for request in range(REQUESTS):
            self.made.step([(request, 0, LONGEST)], given=False)
        self.kept = [(pool, array, array.copy()) for pool, array in self.arrays()]

    def arrays(self):
        """The caches by their pool of pages."""
        if isinstance(self.made, V4Layer):
            return self.made.arrays()
        return [("window", array) for array in vars(self.made.caches).values() if array is not None]

    def draft(self, tokens):
        """From now on use metadata of a server with `tokens` draft tokens."""
        builder = self.made.builder
        self.made.builder = type(builder)(
            builder.specs, dataclasses.replace(builder.config, num_speculative_tokens=tokens), self.made.layer.backend
        )

    def forget(self, request, first):
        """Overwrite with NaN all that a request's tokens from this one on have written."""
        for pool, array, _ in self.kept:
            per_row = self.made.paged.pages[pool] // array.shape[1]
            pages = self.made.paged.tables[pool][request]
            rows = (pages[:, None] * array.shape[1] + np.arange(array.shape[1])).ravel()[first // per_row :]
            array.reshape(-1, array.shape[2])[rows] = np.nan

    def step(self, scheduled, padding):
        """A step's output, the golden output, and the metadata; `padding` tokens follow the requests'."""
        for _, array, kept in self.kept:
            array[...] = kept
        for request, first, count in scheduled:
            if count:
                self.forget(request, first)
        batch, tables = self.made.paged.batch(scheduled)
        tokens = batch.num_actual_tokens
        spans = [slice(first, first + count) for _, first, count in scheduled]
        x = np.full((tokens + padding, self.golden.hidden.shape[1]), np.nan, np.float32)
        x[:tokens] = np.concatenate([self.golden.hidden[span] for span in spans])
        slots = np.append(batch.slot_mapping, np.full(padding, -1))
        batch = dataclasses.replace(batch, num_actual_tokens=tokens + padding, slot_mapping=slots)
        metadata = self.made.build(batch, tables)
        out = self.made.layer.step(x, self.made.caches, metadata)
        return out[:tokens], np.concatenate([self.golden.out[span] for span in spans]), metadata


@pytest.fixture(scope="module", params=CASES)
def computed(request):
    return Computed(request.param)


@st.composite
def batches(draw):
    """Draft tokens, query lengths of decodes, prefills and padding requests, their first positions, padding tokens."""
    drafts = draw(st.integers(0, 4))
    decode = st.integers(0, drafts + 1)
    if draw(st.booleans()):
        decode = st.sampled_from([0, draw(st.integers(1, drafts + 1))])
    counts = draw(st.lists(decode, min_size=1, max_size=REQUESTS))
    counts += draw(st.lists(st.integers(drafts + 2, 30), max_size=2))
    counts = [*counts, *[0] * draw(st.integers(0, 2))][:REQUESTS]
    firsts = [draw(st.integers(0, LONGEST - count)) for count in counts]
    return (
        drafts,
        [(r, first, count) for r, (first, count) in enumerate(zip(firsts, counts, strict=True))],
        draw(st.integers(0, 12)),
    )


def addresses(indexer):
    """The arrays of decodes that are in the builder's buffers, and the block table."""
    decode = indexer.decode
    return [array.ctypes.data for array in (decode.seq_lens, decode.schedule_metadata, decode.block_table)]


def test_any_decodes_and_prefills(computed):
    @for_all(HOST, 60, drawn=batches())
    def check(drawn):
        drafts, scheduled, padding = drawn
        computed.draft(drafts)
        got, want, metadata = computed.step(scheduled, padding)
        if len(got):
            assert relative_rms(got, want) < 1e-5
        assert indexer_of(metadata).decode is None or indexer_of(metadata).decode.packed


def indexer_of(metadata):
    (rows,) = metadata.rows.values()
    return rows.indexer


RAGGED = ([2, 1], [1, 2], [0, 2], [0, 1], [2, 0, 1], [2, 2, 1], [2, 0, 2])


@pytest.mark.parametrize("padding", [0, 3])
def test_one_draft_token_that_not_all_decodes_have(computed, padding):
    """Ragged steps of one builder read the same buffers; steps of one length read the batch's block table."""
    computed.draft(1)
    seen = []
    for counts in RAGGED:
        scheduled = [(r, 40 + 7 * r, count) for r, count in enumerate(counts)]
        got, want, metadata = computed.step(scheduled, padding)
        assert relative_rms(got, want) < 1e-5
        decode = indexer_of(metadata).decode
        assert decode.seq_lens.shape == (sum(counts) + padding,)
        seen.append(addresses(indexer_of(metadata)))
    assert seen == seen[:1] * len(RAGGED)
    for counts in ([2, 2], [2, 2, 0], [1, 1], [1, 0]):
        scheduled = [(r, 40 + 7 * r, count) for r, count in enumerate(counts)]
        got, want, metadata = computed.step(scheduled, padding)
        assert relative_rms(got, want) < 1e-5
        assert indexer_of(metadata).decode.seq_lens.shape == ((len(counts), 2) if 2 in counts else (len(counts),))
        assert addresses(indexer_of(metadata))[:2] == seen[0][:2]
        assert addresses(indexer_of(metadata))[2] != seen[0][2]


def test_more_padding_than_decodes_could_have(computed):
    """With two or more draft tokens every token is an entry: padding takes no entry from the requests."""
    for drafts in (1, 3):
        computed.draft(drafts)
        got, want, _ = computed.step([(0, 40, 2), (1, 60, 1)], 64)
        assert relative_rms(got, want) < 1e-5
