"""V4.1's layers by CUDA's kernels, with bfloat16 activations: outputs, poison, graphs."""

import numpy as np
import pytest

from cumla.metadata.batch import CommonAttentionMetadata
from support.graphs import graph_of
from support.lab import Lab
from support.models import relative_rms
from support.v41_stack import Stack, golden_arrays

BOUNDS = {"bfloat16": 0.02, "fp8": 0.06, "fp4": 0.13, "fp4_split": 0.13, "fp4, mxfp4": 0.13}
QUICK = [5, 1, 2]  # tokens of the steps on an emulated device


def stack_of(lab, formats, case=0):
    """formats: the format of rows, and of index keys if they are MXFP4."""
    cache_format, _, key_format = formats.partition(", ")
    return Stack(case, cache_format, "cuda", "bfloat16", lab, key_format=key_format or None)


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")  # the other backends' layers are tested on the host
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("cache_format") != "fp4" or x.get("case") != 2))
@pytest.mark.parametrize("cache_format", BOUNDS)
@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.nowhere(when=lambda x: x.emulated and x.get("case") == 1)
def test_outputs_are_near_the_published_ones(lab, case, cache_format):
    """For tokens whose selections rounding does not change; on an emulated device, with few tokens, for all."""
    stack = stack_of(lab, cache_format, case)
    splits = QUICK if lab.emulated else stack.record["requests"][0]
    got = stack.run(0, splits).astype(np.float32)
    want, rows = golden_arrays()[f"{case}/0/out"], golden_arrays()[f"{case}/0/rows"]
    rows, want = rows[rows < sum(splits)], want[:, rows < sum(splits)]
    for layer in range(len(got)):
        source, same = stack.config.index_source(layer), np.ones(len(rows), bool)
        if source is not None:
            pairs = [
                (set(golden_arrays()[f"{case}/0/picks{source}"][row]), set(stack.picks[source][0][row])) for row in rows
            ]
            same = np.array([chosen == picks for chosen, picks in pairs])
            assert np.mean([len(chosen & picks) / len(chosen | picks) for chosen, picks in pairs]) > 0.75
        assert same.any()
        assert relative_rms(got[layer][rows[same]], want[layer][same]) < BOUNDS[cache_format]


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")
@pytest.mark.thorough(when=lambda x: x.emulated)
def test_poison_stays_with_its_request(lab):
    """NaN in the tokens of the other request and in unwritten pages: the same bits."""
    found = []
    for poison in (None, np.nan, np.inf):
        stack = stack_of(lab, "fp4")
        if poison is not None:
            stack.hidden[1][...] = poison
            for caches in stack.caches:
                for array in filter(lambda x: x is not None, vars(caches).values()):
                    if array is not None and array.dtype == np.uint8:
                        array[...] = 255
        with np.errstate(all="ignore"):
            parts = [stack.step([(0, 0, 4), (1, 0, 5)])[0], stack.step([(0, 4, 1), (1, 5, 1)])[0]]
        found.append(np.concatenate(parts, axis=1).view(np.uint16))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")
@pytest.mark.thorough(when=lambda x: x.emulated)
def test_the_first_tokens_one_by_one(lab):
    """At ratio 2 the first token sees no row; the second completes a row whose first half is in the ring."""
    one, by_one = stack_of(lab, "bfloat16", 2), stack_of(lab, "bfloat16", 2)
    want = one.run(0, [4]).astype(np.float32)
    got = by_one.run(0, [1, 1, 1, 1]).astype(np.float32)
    for layer in range(len(want)):
        for token in range(4):
            assert relative_rms(got[layer, token], want[layer, token]) < BOUNDS["bfloat16"]
    assert (by_one.picks[0][0][0] == -1).all()
    assert by_one.picks[0][0][1].tolist() == [0] + [-1] * (by_one.config.index_topk - 1)


@pytest.mark.gpu
def test_a_captured_step_of_all_layers():
    """One graph of a step of decodes, replayed for later positions, which complete rows and select again."""
    lab = Lab("cuda", on_device=True)
    prompts = [(1, 0, 3), (0, 0, 40)]  # 3 tokens, no more than with drafts, are a decode, which comes first
    steps = [[(0, 40 + i, 1), (1, 3 + i, 1)] for i in range(4)]
    want = stack_of(lab, "fp4")
    want.step(prompts)
    wanted = [np.concatenate(want.step(step), axis=1) for step in steps]

    stack = stack_of(lab, "fp4")
    stack.step(prompts)
    kept = {}

    def keep(name, array):
        placed = lab.put(np.ascontiguousarray(array))
        kept.setdefault(name, placed)[...] = placed
        return kept[name]

    def prepare(step):
        batch, tables = stack.paged.batch(step)
        names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        fixed = [keep(name, lab.get(getattr(batch, name))) for name in names]
        batch = CommonAttentionMetadata(
            fixed[0], batch.query_start_loc_cpu, fixed[1], batch.seq_lens_cpu, batch.num_computed_tokens_cpu, 2,
            batch.num_actual_tokens, batch.max_query_len, fixed[2], fixed[3], max_seq_len=473,
        )  # fmt: skip
        rings = keep("rings", np.array([0, 1], np.int32))
        metadata = stack.builder.build(batch, {"compressed": keep("compressed", lab.get(tables["compressed"]))}, rings)
        for layer in range(len(stack.layers)):
            x = np.concatenate([stack.hidden[r][layer, first : first + count] for r, first, count in step])
            keep(f"x{layer}", x.astype(stack.layers[layer].activations))
            keep(f"out{layer}", np.zeros_like(x, stack.layers[layer].activations))
        return metadata

    def run(metadata):
        for number, (layer, caches) in enumerate(zip(stack.layers, stack.caches, strict=True)):
            layer.step(kept[f"x{number}"], caches, metadata, stack.selection, out=kept[f"out{number}"])

    def results():
        import cupy

        cupy.cuda.Device().synchronize()
        return np.stack([lab.get(kept[f"out{number}"]) for number in range(len(stack.layers))])

    metadata = prepare(steps[0])
    run(metadata)
    np.testing.assert_array_equal(results().view(np.uint16), wanted[0].view(np.uint16))
    metadata = prepare(steps[1])
    graph = graph_of(lambda: run(metadata))
    for step, expected in zip(steps[1:], wanted[1:], strict=True):
        prepare(step)
        graph.launch()
        np.testing.assert_array_equal(results().view(np.uint16), expected.view(np.uint16))
