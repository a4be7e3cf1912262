"""Decodes with an indexer: the selection writes their slots, and no index map is launched."""

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.layers.prefill_path import chunk_paths
from cumla.layers.selection import IndexerInputs, score_bytes, select_rows
from cumla.layers.sparse import LayerWorkspace, not_observed
from cumla.metadata import DeepseekV32IndexerMetadataBuilder
from layers.test_sparse import batch_of, step_of
from support.graphs import graph_of
from support.lab import BF16, Lab

HOST = Lab("cpu", on_device=False)
TOPK, HEADS = 8, 4
STEPS = {
    "decodes": ([3, 200, 147], [1, 1, 1]),
    "drafts": ([3, 200, 147], [2, 2, 2]),
    "drafts of any length": ([3, 200, 147], [2, 1, 3]),
    "mixed": ([3, 200, 147], [2, 1, 9]),
    "prefills": ([60, 147], [5, 9]),
}


def selecting_step(rng, lab, seq_lens, query_lens, **indexer_config):
    """A layer, and arguments of a step with an indexer; drafts: decodes of up to two tokens."""
    layer, given, pool = step_of(rng, lab, 4, seq_lens, query_lens, index_topk=TOPK, num_speculative_tokens=2)
    compressed, config = given["compressed"], given["metadata"].config
    tokens, rows = sum(query_lens), compressed.cache.shape[1]
    keys = rng.normal(size=(len(compressed.cache) * rows, 128)).astype(BF16)
    cache = cumla.INDEXER_FP8.allocate(len(compressed.cache), rows)
    cumla.indexer_k_quant_and_cache(keys, cache, np.arange(len(keys)), backend="reference")
    q = rng.normal(size=(tokens, HEADS, 128)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    weights = rng.normal(size=(tokens, HEADS)).astype(np.float32)
    metadata = DeepseekV32IndexerMetadataBuilder(replace(config, **indexer_config), backend=lab.backend).build(
        0, batch_of(lab, seq_lens, query_lens, pool), block_table=compressed.block_table
    )
    inputs = IndexerInputs(lab.put(q), lab.put(weights), lab.put(cache), metadata)
    given["compressed"] = replace(compressed, topk_indices=None, k=None, slot_mapping=None, indexer=inputs)
    return layer, {**given, "backend": lab.backend}


def with_selection(lab, given):
    """The same step with its selected rows as an argument: attention maps them."""
    compressed, metadata = given["compressed"], given["metadata"]
    arrays = [metadata.positions, metadata.token_to_req_indices, compressed.block_table]
    selected = lab.put(np.full((len(given["q"]), TOPK), 7, np.int32))
    select_rows(compressed.indexer, *arrays, selected, lambda _, shape, dtype: lab.xp.empty(shape, dtype), lab.backend)
    return {**given, "compressed": replace(compressed, indexer=None, topk_indices=selected)}


def observed(layer, given):
    """The step's result and its operations."""
    seen = []
    out = layer.step(**given, observe=lambda op: seen.append(op) or not_observed(op))
    return out, seen


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("name") != "drafts of any length")
@pytest.mark.thorough(when=lambda x: x.simulated)
def test_a_step_that_selects_maps_prefills_alone(lab, rng, name):
    """The result has the bits of a layer that gets the selection; slots and lengths equal the map's."""
    seq_lens, query_lens = STEPS[name]
    layer, given = selecting_step(rng, lab, seq_lens, query_lens)
    metadata, compressed = given["metadata"], given["compressed"]
    mapped = with_selection(lab, given)
    want, all_maps = observed(layer, mapped)
    workspace = LayerWorkspace.allocate(given["q"], TOPK + 1, score_bytes(compressed.indexer))
    workspace = replace(workspace, selected=workspace.selected[:, :TOPK].copy())
    together = lab.backend == "cuda" and metadata.num_prefills  # decodes and these prefills attend in one call
    for given_workspace in ({}, {"workspace": workspace}):
        got, maps = observed(layer, given | given_workspace)
        assert lab.get(got).tobytes() == lab.get(want).tobytes()
        assert maps.count("map") == all_maps.count("map") - (metadata.num_decode_tokens > 0 and not together)
    decodes = metadata.num_decode_tokens
    slots, lens = cumla.compute_global_topk_indices_and_lens(
        mapped["compressed"].topk_indices[:decodes], metadata.token_to_req_indices, compressed.block_table,
        compressed.cache.shape[1], metadata.is_valid_token, compact=True, positions=metadata.positions,
        compress_ratio=4, backend=lab.backend,
    )  # fmt: skip
    assert (lab.get(workspace.topk_indices)[:decodes, :TOPK] == lab.get(slots)).all()
    assert (lab.get(workspace.topk_lens)[:decodes] == lab.get(lens)).all()


def test_an_indexers_metadata_of_the_other_mode_is_refused(rng):
    """It selects by other kernels; nothing is written."""
    lab = Lab("cpu", on_device=False)
    layer, given = selecting_step(rng, lab, [3, 200], [1, 2], batch_invariant=True)
    caches = given["swa_cache"], given["compressed"].cache
    before = [x.tobytes() for x in caches]
    message = "compressed.indexer.metadata: got batch_invariant=True in the builder's config, expected False"
    with pytest.raises(ValueError, match=message):
        layer.step(**given)
    assert [x.tobytes() for x in caches] == before


@pytest.mark.thorough(when=lambda x: x.simulated)
def test_decodes_that_are_prefills_to_the_indexer_are_mapped(lab, rng):
    layer, given = selecting_step(rng, lab, [3, 200, 147], [1, 2, 2], num_speculative_tokens=0)
    assert given["metadata"].num_decode_tokens == 5
    assert given["compressed"].indexer.metadata.num_decode_tokens == 1
    want, _ = observed(layer, with_selection(lab, given))
    got, maps = observed(layer, given)
    assert lab.get(got).tobytes() == lab.get(want).tobytes()
    assert maps.count("map") == 1


@pytest.mark.thorough(when=lambda x: x.simulated)
def test_padding_attends_to_no_selected_row(lab, rng):
    """The length of padding is 0, for any selection of its request."""
    layer, given = selecting_step(rng, lab, [150, 200, 147], [1, 1, 1])
    is_valid = lab.put(np.array([True, False, True]))
    given["metadata"] = replace(given["metadata"], is_valid_token=is_valid)
    want, _ = observed(layer, with_selection(lab, given))
    workspace = LayerWorkspace.allocate(given["q"], TOPK, score_bytes(given["compressed"].indexer))
    got, _ = observed(layer, given | {"workspace": workspace})
    assert lab.get(got).tobytes() == lab.get(want).tobytes()
    assert lab.get(workspace.topk_lens)[:3].tolist() == [TOPK, 0, TOPK]


def names_of_launches(step):
    from cumla.kernels.cuda.launch import recorded_launches

    with recorded_launches() as launches:
        step()
    return [launch.kernel.raw.name for launch in launches]


@pytest.mark.parametrize("name", ["decodes", "drafts", "drafts of any length"])
def test_decodes_take_one_launch_less(emulated, rng, name):
    lab = Lab("cuda", True, emulated=True)
    layer, given = selecting_step(rng, lab, *STEPS[name])
    mapped = with_selection(lab, given)
    workspace = LayerWorkspace.allocate(given["q"], TOPK, 1 << 20)  # for all scores at once
    step = functools.partial(layer.step, out=lab.xp.zeros_like(given["q"]), workspace=workspace)
    step(**given)  # the first step plans the decodes
    ours, theirs = (names_of_launches(functools.partial(step, **x)) for x in (given, mapped))
    selection = names_of_launches(lambda: with_selection(lab, given))
    assert len(selection) == 2
    assert len(ours) == len(theirs) + 2 - 1
    assert [name for name in theirs if name not in ours] == ["compute_compact_topk_indices_and_lens"]


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")
def test_a_captured_step_selects_other_rows_when_lengths_change(lab, rng):
    """Slots and lengths are at fixed addresses, and hold the selection of the replay."""
    layer, given = selecting_step(rng, lab, [150, 200, 147], [1, 1, 1])
    workspace = LayerWorkspace.allocate(given["q"], TOPK, score_bytes(given["compressed"].indexer))
    out = lab.xp.zeros_like(given["q"])
    arguments = {**given, "out": out, "workspace": workspace}
    layer.step(**arguments)
    graph = graph_of(lambda: layer.step(**arguments))
    lens = given["compressed"].indexer.metadata.decode.seq_lens
    for changed in ([37, 50, 36], [0, 7, 20], [37, 0, 1]):
        lens[...] = lab.put(np.array(changed, np.int32).reshape(lens.shape))
        lab.xp.cuda.Device().synchronize()
        graph.launch()
        lab.xp.cuda.Device().synchronize()
        want, _ = observed(layer, with_selection(lab, given))
        assert lab.get(out).tobytes() == lab.get(want).tobytes()
        assert lab.get(workspace.topk_lens)[:3].tolist() == [min(n, TOPK) for n in changed]


@pytest.mark.thorough(when=lambda x: x.simulated)
def test_slots_of_decodes_may_be_given(lab, rng):
    layer, given = selecting_step(rng, lab, *STEPS["mixed"])
    mapped = with_selection(lab, given)
    want, maps = observed(layer, mapped)
    metadata, compressed = given["metadata"], mapped["compressed"]
    slots, lens = cumla.compute_global_topk_indices_and_lens(
        compressed.topk_indices, metadata.token_to_req_indices, compressed.block_table, compressed.cache.shape[1],
        metadata.is_valid_token, compact=True, positions=metadata.positions, compress_ratio=4, backend=lab.backend,
    )  # fmt: skip
    own = replace(compressed, decode_slots=slots, decode_lens=lens)
    got, fewer = observed(layer, mapped | {"compressed": own, "workspace": LayerWorkspace.allocate(given["q"])})
    assert lab.get(got).tobytes() == lab.get(want).tobytes()
    assert fewer.count("map") == maps.count("map") - (lab.backend != "cuda")  # cuda maps decodes with the prefills
    before = lab.get(given["swa_cache"]).tobytes()
    decodes = metadata.num_decode_tokens
    for change, text in (
        ({"decode_lens": None}, "compressed.decode_lens: got one of decode_slots and decode_lens"),
        ({"decode_slots": None}, "compressed.decode_lens: got one of decode_slots and decode_lens"),
        ({"decode_slots": slots[: decodes - 1]}, f"compressed.decode_slots: got {decodes - 1} tokens"),
        ({"decode_lens": lens[: decodes - 1]}, f"compressed.decode_lens: got {decodes - 1} tokens"),
        ({"decode_slots": slots[..., None]}, "compressed.decode_slots: got shape"),
        ({"decode_lens": slots}, "compressed.decode_lens: got shape"),
        (
            {"topk_indices": None, "indexer": given["compressed"].indexer},
            "compressed.decode_slots: got an array and an indexer, expected only one",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            layer.step(**mapped | {"compressed": replace(own, **change)})
    assert lab.get(given["swa_cache"]).tobytes() == before
    layer, all_rows, _ = step_of(rng, lab, 128, [300, 400], [1, 1])
    wrong = replace(all_rows["compressed"], decode_slots=slots, decode_lens=lens)
    with pytest.raises(ValueError, match=r"compressed.decode_slots: got arrays, expected None at compress_ratio 128"):
        layer.step(**all_rows | {"compressed": wrong}, backend=lab.backend)


@pytest.mark.parametrize("short", ["decode_slots", "decode_lens"])
def test_prefills_attend_apart_where_an_array_has_rows_of_decodes_only(rng, monkeypatch, short):
    """Slots of prefills that attend in the call of the decodes are written behind the slots of those."""
    layer, given = selecting_step(rng, HOST, *STEPS["mixed"])
    given = with_selection(HOST, given)
    metadata, compressed = given["metadata"], given["compressed"]
    decodes, tokens = metadata.num_decode_tokens, len(given["q"])
    slots, lens = cumla.compute_global_topk_indices_and_lens(
        compressed.topk_indices, metadata.token_to_req_indices, compressed.block_table, compressed.cache.shape[1],
        metadata.is_valid_token, compact=True, positions=metadata.positions, compress_ratio=4, backend="cpu",
    )  # fmt: skip
    arrays = {"decode_slots": slots, "decode_lens": lens}
    assert decodes < tokens
    arrays[short] = arrays[short][:decodes]
    want, _ = observed(layer, given)
    monkeypatch.setattr("cumla.layers.sparse.chunk_paths", lambda *x: [c._replace(ahead=4) for c in chunk_paths(*x)])
    got, _ = observed(layer, given | {"compressed": replace(compressed, **arrays)})
    assert got.tobytes() == want.tobytes()
