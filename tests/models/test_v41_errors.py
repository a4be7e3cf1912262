"""What a V4.1 layer does not take is named before anything is written; batches at the edges of what it takes."""

import copy
import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from seeded_weights import seeded_weights

import cumla
from cumla.metadata.batch import CommonAttentionMetadata
from cumla.models.caches import DeepseekV41Caches
from cumla.models.deepseek_v41 import DeepseekV41Attention
from cumla.models.v41_step import DeepseekV41Selection, DeepseekV41StepBuilder, serving_of
from support.models import PagedRequests, relative_rms
from support.v41_stack import Stack

BF16 = ml_dtypes.bfloat16
TOKENS = 20
WINDOW, C2A, REINDEX, C1A, CANDIDATES, REUSE = range(6)  # layers of case 0


class Started:
    """A step of which the layers before `number` have run."""

    def __init__(self, number):
        self.stack, self.number = Stack(0, "fp8", activations="bfloat16"), number
        self.stack.step([(1, 0, 5), (0, 0, 9)])
        self.steps = [(1, 5, 1), (0, 9, TOKENS - 1)]
        self.given = {
            "hidden_states": self.hidden(number), "layer_caches": self.stack.caches[number],
            "metadata": self.metadata(), "selection": self.stack.selection,
        }  # fmt: skip
        for before in range(number):
            self.run(before, hidden_states=self.hidden(before), layer_caches=self.stack.caches[before])

    def hidden(self, number):
        spans = [self.stack.hidden[r][number, first : first + count] for r, first, count in self.steps]
        return np.concatenate(spans).astype(BF16)

    def metadata(self, builder=None):
        batch, tables = self.stack.paged.batch(self.steps)
        rings = np.array([request for request, _, _ in self.steps], np.int32)
        return (builder or self.stack.builder).build(batch, tables["compressed"], rings)

    def run(self, number, **changes):
        return self.stack.layers[number].step(**(self.given | changes))

    def held(self):
        arrays = [x for caches in self.stack.caches for x in vars(caches).values() if x is not None]
        return [x.tobytes() for x in (*arrays, self.stack.selection.topk_indices)]


def caches(**changes):
    return lambda s: {
        "layer_caches": dataclasses.replace(
            s.given["layer_caches"], **{name: make(s) for name, make in changes.items()}
        )
    }  # fmt: skip


def of(layout, block):
    return lambda s: getattr(s.stack.layers[0].layouts, layout).allocate(40, block)


def of_layer(number, name):
    return lambda s: getattr(s.stack.caches[number], name)


def other_builder(**changes):
    def make(s):
        return {"metadata": s.metadata(DeepseekV41StepBuilder(dataclasses.replace(s.stack.serving, **changes), "cpu"))}

    return make


def metadata(**changes):
    return lambda s: {
        "metadata": dataclasses.replace(
            s.given["metadata"], **{name: make(s.given["metadata"]) for name, make in changes.items()}
        )
    }  # fmt: skip


def short(name):
    """The selection with an array of 8 tokens."""

    def make(s):
        selection = copy.copy(s.stack.selection)
        setattr(selection, name, getattr(selection, name)[:8])
        return {"selection": selection}

    return make


def indexer_of_another_batch(s):
    batch, tables = s.stack.paged.batch([(1, 5, 1), (0, 9, 7)])
    other = s.stack.builder.build(batch, tables["compressed"], np.array([1, 0], np.int32)).rows
    return {"metadata": dataclasses.replace(s.given["metadata"], rows=other)}


WRONG = {
    "hidden_states as a list": (C2A, "hidden_states", lambda s: {"hidden_states": [[1.0]]}, TypeError),
    "hidden_states float32": (C2A, "hidden_states", lambda s: {"hidden_states": s.hidden(1).astype("f4")}, TypeError),
    "hidden_states short": (WINDOW, "hidden_states", lambda s: {"hidden_states": s.hidden(0)[1:]}, ValueError),
    "no caches": (C1A, "layer_caches", lambda s: {"layer_caches": None}, TypeError),
    "no window": (REUSE, "layer_caches.window", caches(window=lambda s: None), TypeError),
    "no keys": (REINDEX, "layer_caches.indexer", caches(indexer=lambda s: None), ValueError),
    "no rows": (REUSE, "layer_caches.compressed", caches(compressed=lambda s: None), ValueError),
    "no ring": (C2A, "layer_caches.ring", caches(ring=lambda s: None), ValueError),
    "a ring of another capacity": (
        C2A, "layer_caches.ring", caches(ring=lambda s: np.zeros((3, 16, 1024), np.float32)), ValueError
    ),
    "fewer rings than requests": (
        C2A, "layer_caches.ring: got 1 rings, expected at least 2 for the 2 requests of the step, a ring each",
        caches(ring=lambda s: s.given["layer_caches"].ring[:1]),
    ),
    **{
        f"{name} of no pages": (
            number, f"layer_caches.{name}: got 0 pages, expected at least 1",
            caches(**{name: lambda s, name=name: getattr(s.given["layer_caches"], name)[:0]}),
        )
        for number, name in ((WINDOW, "window"), (C1A, "compressed"), (C2A, "indexer"))
    },
    "a ring of float64": (C2A, "layer_caches.ring", caches(ring=lambda s: np.zeros((3, 8, 1024))), TypeError),
    "restart rows alone": (C2A, "layer_caches.restart_positions: got one", caches(restart_positions=lambda s: None)),
    "restart rows of fewer rings": (
        C2A, "layer_caches.restart_rows: got shape",
        caches(restart_rows=lambda s: s.given["layer_caches"].restart_rows[1:]),
    ),
    "restart positions of int64": (
        C2A, "layer_caches.restart_positions: got dtype int64",
        caches(restart_positions=lambda s: np.zeros(3, np.int64)), TypeError,
    ),
    "a window of another page": (WINDOW, "layer_caches.window", caches(window=of("window", 32)), ValueError),
    "rows of the other ratio": (C1A, "layer_caches.compressed", caches(compressed=of("compressed", 64)), ValueError),
    "keys of another page": (C2A, "layer_caches.indexer", caches(indexer=of("indexer", 32)), ValueError),
    "rows of another format": (
        C1A, "layer_caches.compressed", caches(compressed=lambda s: np.zeros((9, 128, 512), BF16)), TypeError
    ),
    "another owner's rows": (
        REINDEX, "layer_caches.compressed: got another array than that of layer 1",
        caches(compressed=of("compressed", 64)), ValueError,
    ),
    "another owner's keys": (
        REUSE, "layer_caches.indexer: got another array than that of layer 3", caches(indexer=of("indexer", 128)),
        ValueError,
    ),
    "no selection": (REUSE, "selection", lambda s: {"selection": None}, TypeError),
    "a selection that nothing wrote": (
        REINDEX, "selection: layer 1, which owns the rows, has not run in this step",
        lambda s: {"selection": DeepseekV41Selection(s.stack.config, s.stack.serving)}, ValueError,
    ),
    "a selection of fewer tokens": (
        C1A, "selection.topk_indices: got 8 tokens",
        lambda s: {
            "selection": DeepseekV41Selection(
                s.stack.config, dataclasses.replace(s.stack.serving, max_num_batched_tokens=8)
            )
        }, ValueError,
    ),
    "slots of fewer tokens": (C1A, "selection.slots: got 8 tokens, expected at least", short("slots")),
    "lens of fewer tokens": (C1A, "selection.lens: got 8 tokens, expected at least", short("lens")),
    "candidate blocks of fewer tokens": (
        CANDIDATES, "selection.candidate_blocks: got 8 tokens, expected at least", short("candidate_blocks")
    ),
    "a selection of another model": (
        C1A, "selection.topk_indices",
        lambda s: {
            "selection": DeepseekV41Selection(dataclasses.replace(s.stack.config, index_topk=16), s.stack.serving)
        }, ValueError,
    ),
    "no metadata": (WINDOW, "metadata", lambda s: {"metadata": None}, TypeError),
    "another window": (C2A, "metadata: got window_size 64", other_builder(window_size=64), ValueError),
    "another top-k": (C2A, "metadata: got index_topk 512", other_builder(index_topk=512), ValueError),
    "no rows of the ratio": (C1A, "metadata: got rows of ratios", other_builder(compress_ratios=(0, 2)), ValueError),
    "metadata of more drafts": (C2A, "layer_caches.ring", other_builder(num_speculative_tokens=9), ValueError),
    "the indexer's of another batch": (C1A, "metadata.indexer", indexer_of_another_batch, ValueError),
    "out of another shape": (REUSE, "out", lambda s: {"out": np.zeros((3, 3), BF16)}, ValueError),
}  # fmt: skip


@pytest.fixture(scope="module")
def started():
    return {}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named_before_anything_is_written(started, wrong):
    number, text, change, error = (*WRONG[wrong], ValueError)[:4]
    if number not in started:
        started[number] = Started(number)
    of, before = started[number], started[number].held()
    with pytest.raises(error, match=text.replace(".", r"\.")):
        of.run(number, **change(of))
    assert of.held() == before


def test_a_layer_before_its_owner():
    """In the next step: rows and keys of the step before are not enough."""
    s = Started(REINDEX)
    s.run(REINDEX)
    s.steps = [(1, 6, 1)]
    later = {"metadata": s.metadata()}
    for number in (REINDEX, CANDIDATES, REUSE):
        given = {"hidden_states": s.hidden(number), "layer_caches": s.stack.caches[number]} | later
        with pytest.raises(ValueError, match="selection: "):
            s.run(number, **given)


def test_metadata_of_an_earlier_build_is_found_in_debug_mode():
    s = Started(C2A)
    stale = s.given["metadata"]
    s.steps = [(1, 6, 1)]
    s.metadata()
    with cumla.debug(), pytest.raises(ValueError, match=r"metadata\.window"):
        s.run(C2A, metadata=stale)


def test_a_batch_without_requests():
    s = Started(C2A)
    table = np.zeros((0, 8), np.int32)
    batch = CommonAttentionMetadata.from_lengths([], [], table, 64)
    metadata, before = s.stack.builder.build(batch, table, np.zeros(0, np.int32)), s.held()
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


def test_an_odd_page_is_refused():
    stack = Stack(0)
    with pytest.raises(ValueError, match="compressed_block_size: got 65, expected a multiple of 2"):
        serving_of(stack.config, compressed_block_size=65)


def test_a_table_that_is_too_narrow_and_rings_of_other_requests():
    stack = Stack(0)
    batch, tables = stack.paged.batch([(0, 0, 200)])
    with pytest.raises(ValueError, match=r"compressed_block_table: .*request 0"):
        stack.builder.build(batch, tables["compressed"][:, :1].copy(), np.zeros(1, np.int32))
    pages = stack.paged.pages["compressed"]
    column = tables["compressed"][:, :1].copy()
    stack.builder.build(stack.paged.batch([(0, 0, pages)])[0], column, np.zeros(1, np.int32))
    batch, builds = stack.paged.batch([(0, 0, pages + 1)])[0], stack.builder._window._builds[0]
    with pytest.raises(ValueError, match=rf"^compressed_block_table: request 0 has {pages + 1} tokens, but 1 columns"):
        stack.builder.build(batch, column, np.zeros(1, np.int32))  # the last one completes a row of ratio 1 alone
    assert stack.builder._window._builds[0] == builds  # nothing was written
    batch = stack.paged.batch([(0, 0, 200)])[0]
    with pytest.raises(ValueError, match=r"rings: got shape \(2,\)"):
        stack.builder.build(batch, tables["compressed"], np.zeros(2, np.int32))
    with pytest.raises(TypeError, match="rings: got dtype int64"):
        stack.builder.build(batch, tables["compressed"], np.zeros(1, np.int64))


def test_rings_that_requests_share_or_that_are_absent_are_found_in_debug_mode():
    stack = Stack(0)
    for rings, text in (([1, 1], "slot_mapping: requests 0 and 1 both have ring 1"), ([0, 9], "row 4 .* slot 72")):
        batch, tables = stack.paged.batch([(0, 0, 4), (1, 0, 4)])
        metadata = stack.builder.build(batch, tables["compressed"], np.array(rings, np.int32))
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
    metadata = padded.builder.build(batch, table, np.array([0, 1, -1], np.int32))
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
        metadata = again.builder.build(batch, tables["compressed"], rings, replay)
        outs.append([
            layer.step(again.hidden[0][number, 100:103], caches, metadata, again.selection)
            for number, (layer, caches) in enumerate(zip(again.layers, again.caches, strict=True))
        ])  # fmt: skip
    for one, other in zip(*outs, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


@pytest.mark.parametrize("wrong", [
    ({"cache_format": "fp16"}, "cache_format: got 'fp16'"), ({"activations": "float16"}, "activations: got 'float16'"),
    ({"layer": -1}, "layer: got -1"), ({"round_pooled": 1}, "round_pooled: got 1"),
    ({"weights": None}, "weights: got None"), ({"scratch": 3}, "scratch: got 3 of type int"),
    ({"key_format": "fp4"}, "key_format: got 'fp4'"),
    ({"key_format": "mxfp4", "cache_format": "bfloat16"}, "key_format: got 'mxfp4' with cache_format 'bfloat16'"),
    ({"config": {}}, "config: got {} of type dict"), ({"max_position": 0}, "max_position: got"),
])  # fmt: skip
def test_a_layer_says_what_it_does_not_take(wrong):
    stack = Stack(2)
    weights = seeded_weights(stack.record["parameters"], 0)
    given = {"config": stack.config, "layer": 0, "weights": weights} | wrong[0]
    with pytest.raises((TypeError, ValueError, KeyError), match=re.escape(wrong[1])):
        DeepseekV41Attention(given.pop("config"), given.pop("layer"), given.pop("weights"), **given)


def test_a_cache_of_a_layer_says_what_it_does_not_take():
    stack = Stack(0)
    allocate = DeepseekV41Caches.allocate
    for given, text in (
        ({"rings": -1}, "rings: got -1"), ({"blocks": -1}, "blocks: got -1"), ({"layer": 1.5}, "layer: got"),
        ({"cache_format": "fp16"}, "cache_format: got 'fp16'"), ({"serving": None}, "serving: got None of type"),
        ({"compressed_blocks": -1}, "compressed_blocks: got -1"), ({"layer": 5, "owner": 3}, "owner: got 3 of type"),
        ({"blocks": 0}, "blocks: got 0"), ({"compressed_blocks": 0}, "compressed_blocks: got 0, expected at least 1"),
        ({"rings": 0}, "rings: got 0, expected at least 1"),
    ):  # fmt: skip
        arguments = {"config": stack.config, "layer": C2A, "serving": stack.serving, "blocks": 2}
        arguments |= {"compressed_blocks": 2, "rings": 1, "cache_format": "float32"} | given
        with pytest.raises((TypeError, ValueError), match=f"^{text}"):
            allocate(**arguments)


def test_only_layers_of_ratio_0_insert_alone():
    s = Started(C2A)
    with pytest.raises(ValueError, match="layer: got 1 of ratio 2, expected one of ratio 0"):
        s.stack.layers[C2A].insert(s.given["hidden_states"], s.given["layer_caches"], s.given["metadata"])


def test_a_draft_layer_s_block_is_a_decode():
    """Of the longest decode: its row has window and block; a longer one is a prefill."""
    stack = Stack(2)
    serving = serving_of(stack.config, num_speculative_tokens=4, noncausal_decodes=True)
    builder = DeepseekV41StepBuilder(dataclasses.replace(serving, compress_ratios=(0,), window_size=60), "cpu")
    paged = PagedRequests(1, 80, {"window": 64}, 0)
    window = builder.build(paged.batch([(0, 70, 5)])[0]).window
    assert window.decode_swa_lens.tolist() == [65] * 5
    assert builder.build(paged.batch([(0, 70, 6)])[0]).window.num_prefills == 1
