"""Batches at the edges of what a V4.1 layer takes."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.metadata.batch import CommonAttentionMetadata
from cumla.models import StepBuilder, serving_of
from support.models import PagedRequests, relative_rms
from support.v41_stack import Stack, StartedStack

BF16 = ml_dtypes.bfloat16
WINDOW, C2A, REINDEX, C1A, CANDIDATES, REUSE = range(6)  # layers of case 0


def test_a_layer_before_its_owner():
    """In the next step: rows and keys of the step before are not enough."""
    s = StartedStack(REINDEX)
    s.run(REINDEX)
    s.steps = [(1, 6, 1)]
    later = {"metadata": s.metadata()}
    for number in (REINDEX, CANDIDATES, REUSE):
        given = {"hidden_states": s.hidden(number), "layer_caches": s.stack.caches[number]} | later
        with pytest.raises(ValueError, match="selection: "):
            s.run(number, **given)


def test_metadata_of_an_earlier_build_is_found_in_debug_mode():
    s = StartedStack(C2A)
    stale = s.given["metadata"]
    s.steps = [(1, 6, 1)]
    s.metadata()
    with cumla.debug(), pytest.raises(ValueError, match=r"metadata\.tokens"):
        s.run(C2A, metadata=stale)


def test_a_batch_without_requests():
    s = StartedStack(C2A)
    table = np.zeros((0, 8), np.int32)
    batch = CommonAttentionMetadata.from_lengths([], [], table, 64)
    metadata, before = s.stack.builder.build(batch, {"compressed": table}, np.zeros(0, np.int32)), s.held()
    for number, layer in enumerate(s.stack.layers):
        none = np.zeros((0, s.stack.config.hidden_size), BF16)
        assert layer.step(none, s.stack.caches[number], metadata, s.stack.selection).shape == none.shape
    assert s.held() == before


@pytest.mark.parametrize(("page", "compressed"), [(53, 106), (32, 64), (7, 14), (1, 2)])
def test_pages_of_any_size(page, compressed):
    """Window pages and pages of both ratios' rows; those of ratio 2 have half as many rows."""
    whole, other = Stack(0), Stack(0, pages=(page, compressed))
    steps = [[(1, 0, 3), (0, 0, 61)], [(1, 3, 2), (0, 61, 7)], [(0, 68, 1), (1, 5, 1)]]
    for step in steps:
        for got, want in zip(other.step(step), whole.step(step), strict=True):
            assert relative_rms(got, want) < 1e-5


def test_rings_that_requests_share_or_that_are_absent_are_found_in_debug_mode():
    stack = Stack(0)
    for rings, text in (([1, 1], "slot_mapping: requests 0 and 1 both have ring 1"), ([0, 9], "row 4 .* slot 72")):
        batch, tables = stack.paged.batch([(0, 0, 4), (1, 0, 4)])
        metadata = stack.builder.build(batch, tables, np.array(rings, np.int32))
        x = np.concatenate([stack.hidden[r][C2A, :4] for r in (0, 1)])
        with cumla.debug(), pytest.raises(ValueError, match=text):
            stack.layers[C2A].step(x, stack.caches[C2A], metadata, stack.selection)


def test_padding_changes_nothing():
    """Tokens without slots after those of requests, as in a captured graph, and a request without tokens."""
    plain, padded = Stack(0), Stack(0)
    for stack in (plain, padded):
        stack.step([(0, 0, 30), (1, 0, 8)])
    want = plain.step([(0, 30, 1), (1, 8, 1)])
    batch, tables = padded.paged.batch([(0, 30, 1), (1, 8, 1)])
    batch = CommonAttentionMetadata.from_lengths(
        [1, 1, 0],
        [31, 9, 0],
        np.concatenate([batch.block_table_tensor, -np.ones_like(batch.block_table_tensor[:1])]),
        64,
    )
    slots = np.concatenate([batch.slot_mapping, [-1, -1]])
    batch = dataclasses.replace(batch, slot_mapping=slots)
    table = np.concatenate([tables["compressed"], -np.ones_like(tables["compressed"][:1])])
    metadata = padded.builder.build(batch, {"compressed": table}, np.array([0, 1, -1], np.int32))
    assert all((rows.row_positions[2:] == -1).all() for rows in metadata.rows.values())
    for number, (layer, caches) in enumerate(zip(padded.layers, padded.caches, strict=True)):
        x = np.concatenate([padded.hidden[r][number, first : first + 1] for r, first in ((0, 30), (1, 8))])
        x = np.concatenate([x, np.full((2, x.shape[1]), np.nan, x.dtype)])
        out = layer.step(x, caches, metadata, padded.selection)
        for i in range(2):
            assert relative_rms(out[i], want[i][number, 0]) < 1e-6
    for ours, theirs in zip(padded.caches, plain.caches, strict=True):
        for name, array in vars(ours).items():
            if array is not None:
                np.testing.assert_allclose(array, getattr(theirs, name), rtol=1e-4, atol=1e-5)


def test_windows_of_a_replayed_request():
    """Windows begin at replay_start: rows of the window before it are not read, whatever they are."""
    stack = Stack(0)
    stack.step([(0, 0, 100)])
    start, outs = 90, []
    for poison in (0.0, np.nan):
        again = Stack(0)
        again.step([(0, 0, 100)])
        slots = again.paged.tables["window"][0].repeat(64)[:start] * 64 + np.arange(start) % 64
        for caches in again.caches:
            caches.window.reshape(-1, 512)[slots] += poison
        batch, tables = again.paged.batch([(0, 100, 3)])
        rings, replay = np.zeros(1, np.int32), np.array([start], np.int32)
        metadata = again.builder.build(batch, tables, rings, replay)
        outs.append([
            layer.step(again.hidden[0][number, 100:103], caches, metadata, again.selection)
            for number, (layer, caches) in enumerate(zip(again.layers, again.caches, strict=True))
        ])  # fmt: skip
    for one, other in zip(*outs, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


def test_a_draft_layer_s_block_is_a_decode():
    """Of the longest decode: its row has window and block; a longer one is a prefill."""
    stack = Stack(2)
    serving = serving_of(stack.config, num_speculative_tokens=4, noncausal_decodes=True)
    serving = dataclasses.replace(serving, compress_ratios=(0,), window_size=60)
    builder = StepBuilder([stack.config.spec(stack.config.num_hidden_layers)], serving, "cpu")
    paged = PagedRequests(1, 80, {"window": 64}, 0)
    window = builder.build(paged.batch([(0, 70, 5)])[0]).tokens
    assert window.decode_swa_lens.tolist() == [65] * 5
    assert builder.build(paged.batch([(0, 70, 6)])[0]).tokens.num_prefills == 1
