"""Layers of GLM-5.3-Flash in any schedule: chunks within pools, drafts and their rejection, padding, repeated steps."""

import functools

import numpy as np
import pytest

import cumla
from cumla.layers.selected_attention import SelectedAttention
from cumla.metadata import CommonAttentionMetadata
from cumla.models import (
    Glm5NextAttention,
    LayerCaches,
    SharedSelection,
    StepBuilder,
    attended,
    selected_tokens,
    serving_of,
)
from support.batch_kinds import padded
from support.family_stack import FamilyStack, weights_of

POOLS_OF_4, WITH_LINEAR, POOLS_OF_16 = 2, 3, 4  # golden cases
DRAFTS = 3  # as FamilyStack serves


@pytest.mark.parametrize(
    ("case", "request_number", "splits"),
    [
        (POOLS_OF_4, 3, [1] * 9 + [55, 4, 2, 194]), *((POOLS_OF_4, 3, [128 + i, 136 - i]) for i in range(4)),
        (POOLS_OF_4, 2, [7]), (WITH_LINEAR, 1, [64] * 3 + [7]), (WITH_LINEAR, 0, [5, 37, 3, 2, 1, 200, 142]),
        *((POOLS_OF_16, 0, [i, 169 - i]) for i in (1, 15, 63, 79)), (POOLS_OF_16, 0, [1] * 33 + [136]),
    ],
)  # fmt: skip
def test_any_schedule_gives_the_same(case, request_number, splits):
    stack = FamilyStack(case)
    stack.check(request_number, stack.run(request_number, splits))


def keys_of(stack):
    return [stack.caches[number].indexer for number in stack.numbers if stack.caches[number].indexer is not None]


@pytest.mark.parametrize(("case", "first"), [(POOLS_OF_4, 61), (POOLS_OF_4, 64), (WITH_LINEAR, 62), (POOLS_OF_16, 60)])
def test_rejected_drafts(case, first):
    """Drafts have hidden states of their own; with any number of them accepted, later tokens are as without drafts."""
    request = {POOLS_OF_4: 3, WITH_LINEAR: 1, POOLS_OF_16: 0}[case]
    end = first + 24
    alone = FamilyStack(case)
    want = alone.run(request, [first, end - first])
    for accepted in range(1, DRAFTS + 2):
        stack = FamilyStack(case)
        stack.step([(request, 0, first)])
        right = stack.hidden[request]
        wrong = right.copy()
        wrong[:, first + accepted :] = np.random.default_rng(accepted).normal(size=wrong[:, first + accepted :].shape)
        stack.hidden[request] = wrong
        drafted = stack.step([(request, first, DRAFTS + 1)])[0][:, :accepted]
        stack.hidden[request] = right
        start, parts = first + accepted, [drafted]
        while start < end:  # rounds of drafts that are all accepted, and single tokens
            count = min(DRAFTS + 1 if start % 2 else 1, end - start)
            parts += stack.step([(request, start, count)])
            start += count
        got = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(got, want[:, first:], rtol=0, atol=2e-5 * np.abs(want).max())
        for mine, theirs in zip(keys_of(stack), keys_of(alone), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_requests_in_one_step():
    """Decodes, a round with drafts, and chunks that begin and end within pools."""
    stack, parts = FamilyStack(WITH_LINEAR), {0: [], 1: []}
    for scheduled in (
        [(0, 0, 41)], [(0, 41, 1), (1, 0, 23)], [(1, 23, 1), (0, 42, 70)], [(0, 112, 4), (1, 24, 3)],
        [(1, 27, 2), (0, 116, 274)], [(1, 29, 170)],
    ):  # fmt: skip
        for (request, _, _), out in zip(scheduled, stack.step(scheduled), strict=True):
            parts[request].append(out)
    for request in (0, 1):
        stack.check(request, np.concatenate(parts[request], axis=1))


@pytest.mark.parametrize(("first", "tokens"), [(38, 1), (38, 4), (0, 70), (41, 70)])
def test_padding_changes_nothing(first, tokens):
    """Padding tokens have hidden states without meaning, and write no row, key or ring."""
    results = []
    for padding in (0, 5):
        stack = FamilyStack(POOLS_OF_16)
        if first:
            stack.step([(0, 0, first)])
        batch = stack.paged.batch([(0, first, tokens)])[0]
        metadata = stack.builder.build(padded(batch, padding), rings=np.array([0], np.int32))
        outs = []
        for index, (layer, number) in enumerate(zip(stack.layers, stack.numbers, strict=True)):
            x = np.full((tokens + padding, 128), np.nan, np.float32)
            x[:tokens] = stack.hidden[0][index, first : first + tokens]
            outs.append(layer.step(x, stack.caches[number], metadata, stack.selection)[:tokens])
        arrays = [x for caches in stack.caches.values() for x in vars(caches).values() if x is not None]
        results.append([*outs, *arrays])
    for got, want in zip(*results, strict=True):  # products of few tokens differ by rounding
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(np.abs(want).max(), 1))
        np.testing.assert_array_equal(got == 0, want == 0)


@pytest.mark.parametrize("scheduled", [(13, 19), (13, 1), (13, 4), (12, 19), (14, 9), (0, 21)])
def test_a_step_may_be_run_again(scheduled):
    """Also one that begins within a pool and is longer than a ring."""
    first, count = scheduled
    results = []
    for times in (1, 3):
        stack = FamilyStack(POOLS_OF_4)
        if first:
            stack.step([(3, 0, first)])
        for _ in range(times):
            out = stack.step([(3, first, count)])[0]
        arrays = [x.tobytes() for caches in stack.caches.values() for x in vars(caches).values() if x is not None]
        results.append((out.tobytes(), arrays))
    assert results[0] == results[1]


class DraftLayer:
    """The layer that predicts further tokens, with the weights of layer 0."""

    def __init__(self, tokens):
        self.stack = FamilyStack(POOLS_OF_4)
        config, self.number = self.stack.config, self.stack.config.num_hidden_layers
        prefix = "model.layers.0.self_attn."
        weights = {
            name.removeprefix(prefix): x for name, x in weights_of(POOLS_OF_4).items() if name.startswith(prefix)
        }
        self.layer = Glm5NextAttention(
            config, self.number, weights, activations="float32", cache_format="float32", max_position=tokens + 8
        )
        serving = serving_of(config, num_speculative_tokens=DRAFTS, max_num_batched_tokens=256, max_model_len=512)
        self.caches = LayerCaches.allocate(self.layer.spec, serving, {"rows": 8, "rings": 1}, cache_format="float32")
        self.builder = StepBuilder([self.layer.spec], serving)
        self.selection = SharedSelection([self.layer.spec], serving)
        self.table = np.random.default_rng(0).permutation(8).astype(np.int32)[None]
        self.hidden = np.random.default_rng(1).normal(size=(tokens + 8, 128)).astype(np.float32)

    def step(self, first, count, **options):
        batch = CommonAttentionMetadata.from_lengths([count], [first + count], self.table, 64)
        self.metadata = self.builder.build(batch, rings=np.zeros(1, np.int32))
        x = self.hidden[first : first + count]
        return self.layer.step(x, self.caches, self.metadata, **options)

    def slots(self, tokens):
        return self.table[0, tokens // 64] * 64 + tokens % 64


@pytest.mark.parametrize("tokens", [21, 100, 102, 103])
def test_one_selection_serves_all_draft_steps_of_a_round(tokens):
    """The tokens that the last verified token attends to, and no others: also not the drafts' own."""
    draft = DraftLayer(tokens)
    draft.step(0, tokens, selection=draft.selection)
    picked = slice(tokens - 1, tokens)  # of the newest verified token
    pools, at = draft.selection.topk_indices[picked].copy(), draft.metadata.positions[picked]
    seed = selected_tokens(pools, at, draft.layer.spec.pool)
    assert seed.shape == (1, draft.layer.spec.listed_rows)
    of_pools = (pools[pools >= 0][:, None] * 4 + np.arange(4)).reshape(-1)
    want = [*of_pools, *range(tokens // 4 * 4, tokens)]
    np.testing.assert_array_equal(seed[seed >= 0], want)
    draft.step(tokens, 1, topk_indices=seed)
    for position in range(tokens, tokens + DRAFTS):
        exact = draft.step(position, 1, topk_indices=seed)
        rows = draft.caches.rows.reshape(-1, 512)
        kept = rows.copy()
        others = np.setdiff1d(np.arange(position), want)
        rows[draft.slots(others)] = np.nan
        np.testing.assert_array_equal(draft.step(position, 1, topk_indices=seed), exact)
        rows[draft.slots(np.array(want[-1:]))] = np.nan
        assert np.isnan(draft.step(position, 1, topk_indices=seed)).all()
        rows[:] = kept
    # The next round computes the drafts' positions again, from the main model's hidden states.
    again = DraftLayer(tokens)
    again.step(0, tokens, selection=again.selection)
    np.testing.assert_array_equal(
        draft.step(tokens, 4, selection=draft.selection), again.step(tokens, 4, selection=again.selection)
    )


def test_a_ring_is_needed():
    stack = FamilyStack(POOLS_OF_4)
    batch = stack.paged.batch([(0, 0, 1)])[0]
    with pytest.raises(ValueError, match="rings: got None, expected the ring of each request for the layers that have"):
        stack.builder.build(batch)
    metadata = stack.builder.build(batch, rings=np.zeros(1, np.int32))
    x, caches = stack.hidden[0][0, :1], stack.caches[0]
    for changes, match in (
        ({"ring": None}, "layer_caches.ring: got None, expected an array for layer 0"),
        ({"ring": caches.ring[:, :4]}, r"layer_caches.ring: got shape .*, expected \[rings, 8, 256\]"),
        ({"ring": caches.ring[..., :128]}, "layer_caches.ring: got shape"),
        ({"restart_rows": None}, "layer_caches.restart_positions: got one of"),
        ({"restart_rows": caches.restart_rows[:, :2]}, "layer_caches.restart_rows: got shape"),
        ({"indexer": np.zeros((9, 64, 128), np.float32)}, "layer_caches.indexer: got"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            stack.layers[0].step(x, LayerCaches(**vars(caches) | changes), metadata, stack.selection)


@pytest.mark.parametrize(
    ("ring", "match"), [(9, r"state_slot_mapping: row 0 \(position 51\) has slot 75"), (3, "request 0 has page -1 for")]
)
def test_debug_finds_wrong_rings_and_absent_pages(ring, match):
    stack = FamilyStack(POOLS_OF_4)
    with cumla.debug():
        for first, count in ((0, 50), (50, 1)):
            stack.step([(3, first, count)])
        batch = stack.paged.batch([(3, 51, 2)])[0]
        if ring == 3:
            batch.block_table_tensor[0, 0] = -1

        def step():
            metadata = stack.builder.build(batch, rings=np.array([ring], np.int32))
            stack.layers[0].step(stack.hidden[3][0, 51:53], stack.caches[0], metadata, stack.selection)

        with pytest.raises(ValueError, match=match):
            step()


@pytest.mark.parametrize("path", ["rows", "pages"])
@pytest.mark.parametrize(("case", "request_number", "splits"), [(WITH_LINEAR, 0, [203, 187]), (POOLS_OF_16, 0, [169])])
def test_prompts_over_gathered_rows_and_over_pages(monkeypatch, path, case, request_number, splits):
    """Also with lengths that are no multiples of a pool."""
    monkeypatch.setattr(attended, "SelectedAttention", functools.partial(SelectedAttention, path=path))
    stack = FamilyStack(case)
    stack.check(request_number, stack.run(request_number, splits))
    if case == WITH_LINEAR:  # several requests in one workspace
        stack = FamilyStack(case)
        for out, request in zip(stack.step([(0, 0, 101), (1, 0, 198)]), (0, 1), strict=True):
            want = FamilyStack(case).run(request, [out.shape[1]])
            np.testing.assert_allclose(out, want, rtol=0, atol=2e-5 * np.abs(want).max())
