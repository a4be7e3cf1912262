"""V4.1 attention layers against outputs and selections that equal the published inference code's."""

import dataclasses
import operator

import ml_dtypes
import numpy as np
import pytest
from seeded_weights import seeded_weights

from cumla.layers import selection
from cumla.layers.weights import BlockQuantizedWeight
from cumla.models import DeepseekV41Attention, DeepseekV41Config, LayerCaches, StepBuilder, serving_of
from cumla.ops.candidates import candidate_topk
from support.models import PagedRequests, relative_rms
from support.v41_stack import GOLDEN, Stack, check_outputs, check_picks, golden_arrays

BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3, "fp8": 0.05, "fp4": 0.12}


CASES = [(case, request) for case, record in enumerate(GOLDEN["cases"]) for request in range(len(record["requests"]))]


@pytest.mark.parametrize(("case", "request_number"), CASES)
def test_outputs_and_choices_are_the_published_ones(case, request_number):
    stack = Stack(case)
    got = stack.run(request_number, stack.record["requests"][request_number])
    check_outputs(stack, case, request_number, got, BOUNDS["float32"])
    check_picks(stack, case, request_number)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "request_number"), CASES)
def test_on_the_reference_backend(case, request_number):
    stack = Stack(case, backend="reference")
    got = stack.run(request_number, stack.record["requests"][request_number])
    check_outputs(stack, case, request_number, got, BOUNDS["float32"])
    check_picks(stack, case, request_number)


@pytest.mark.parametrize("splits", [[473], [1] * 5 + [7, 2, 128, 3, 200, 1, 127], [255, 2, 216]])
def test_any_schedule_equals_one_call(splits):
    """Odd and even first positions, chunks of one token, decodes with drafts: the same rows, rings and selections."""
    stack = Stack(0)
    check_outputs(stack, 0, 0, stack.run(0, splits), BOUNDS["float32"])
    check_picks(stack, 0, 0)


def test_a_batch_equals_each_request_alone():
    """Decodes of different lengths and prefills of two requests in one step."""
    stack, parts = Stack(0), [[], []]
    for scheduled in (
        [(1, 0, 3), (0, 0, 251)],
        [(0, 251, 1), (1, 3, 30)],
        [(0, 252, 6), (1, 33, 2)],
        [(1, 35, 1), (0, 258, 215)],
    ):
        for (request, _, _), out in zip(scheduled, stack.step(scheduled), strict=True):
            parts[request].append(out)
    for request in range(2):
        check_outputs(stack, 0, request, np.concatenate(parts[request], axis=1), BOUNDS["float32"])
        check_picks(stack, 0, request)


def test_rejected_drafts_leave_no_trace():
    """A step of drafts, then the step again from the first rejected one: the same bits as without the drafts."""
    plain, drafted = Stack(0), Stack(0)
    for stack in (plain, drafted):
        stack.step([(0, 0, 131)])
    want = [plain.step([(0, first, 1)])[0] for first in range(131, 136)]
    for first, accepted in ((131, 2), (133, 1), (134, 2)):
        stale = [hidden.copy() for hidden in drafted.hidden]
        drafted.hidden[0] = stale[0].copy()
        drafted.hidden[0][:, first + accepted :] += 1  # tokens that will be rejected
        got = drafted.step([(0, first, 6)])[0]
        drafted.hidden = stale
        for i in range(accepted):
            assert relative_rms(got[:, i], want[first - 131 + i][:, 0]) < 1e-6


@pytest.mark.parametrize("drafts", range(6))
def test_requests_of_guesses_are_entries_of_the_indexer(drafts):
    """Keys are then read once for all tokens of a request, which see different numbers of rows."""
    stack, each = Stack(0), 1 + drafts
    batch, tables = stack.paged.batch([(0, 40, each), (1, 31, each)])
    metadata = stack.builder.build(batch, tables, np.array([0, 1], np.int32))
    for ratio, rows in metadata.rows.items():
        lens = [[(first + j + 1) // ratio for j in range(each)] for first in (40, 31)]
        np.testing.assert_array_equal(rows.indexer.decode.seq_lens.reshape(2, each), lens)
        assert rows.indexer.decode.packed


SPLIT = [pytest.param(f, None, marks=pytest.mark.slow) for f in ("fp8_split", "fp4_split")]


@pytest.mark.parametrize(
    ("cache_format", "key_format"), [("bfloat16", None), ("fp8", None), ("fp4", None), ("fp8", "mxfp4"), *SPLIT]
)
def test_rounded_caches_stay_near(cache_format, key_format):
    """Rounded keys change some of a token's selections; where they change none, the output is near."""
    stack = Stack(0, cache_format, key_format=key_format)
    assert (
        stack.caches[3].indexer.shape[2] == {None: 128 if cache_format == "bfloat16" else 132, "mxfp4": 68}[key_format]
    )
    got = stack.run(0, stack.record["requests"][0])
    want, rows = golden_arrays()["0/0/out"], golden_arrays()["0/0/rows"]
    for layer in range(len(got)):
        source, same = stack.config.index_source(layer), np.ones(len(rows), bool)
        if source is not None:
            pairs = [
                (set(golden_arrays()[f"0/0/picks{source}"][row]), set(stack.picks[source][0][row])) for row in rows
            ]
            same = np.array([chosen == picks for chosen, picks in pairs])
            shared = np.mean([len(chosen & picks) / len(chosen) for chosen, picks in pairs])
            print(cache_format, key_format, layer, f"{shared:.3f}")
            assert shared > (0.9 if key_format is None else 0.8)
        error = relative_rms(got[layer][rows[same]], want[layer][same])
        print(cache_format, layer, f"{same.mean():.2f}", f"{error:.2%}")
        assert same.sum() > (4 if key_format is None else 0)
        assert error < BOUNDS[cache_format.removesuffix("_split")]


def test_pooled_rows_may_be_rounded_before_their_norm():
    """DeepSeek's code and SGLang do so: rows of ratio 2 differ by bfloat16's steps, outputs hardly."""
    plain, rounded = Stack(0), Stack(0, round_pooled=True)
    want, got = (np.stack(stack.step([(0, 0, 60)])[0]) for stack in (plain, rounded))
    differences = []
    for layer in (1, 3):
        ours, theirs = (stack.caches[layer].compressed for stack in (rounded, plain))
        differences.append(relative_rms(ours, theirs))
        assert 2.0**-12 < differences[-1] < 2.0**-8
    assert 0 < relative_rms(got[1], want[1]) < 2.0**-7


@pytest.mark.parametrize("cache_format", ["fp8", "fp4"])
def test_rows_may_be_quantised_as_they_are(cache_format):
    """vLLM does so: some bytes of window rows and compressed rows differ, outputs hardly."""
    plain, exact = Stack(0, cache_format), Stack(0, cache_format, round_rows=False)
    want, got = (np.stack(stack.step([(0, 0, 60)])[0]) for stack in (plain, exact))
    for name in ("window", "compressed"):
        ours, theirs = (getattr(stack.caches[1], name) for stack in (exact, plain))
        assert 0 < (ours != theirs).mean() < 0.05
    assert 0 < relative_rms(got[1], want[1]) < 0.03


def test_prompts_whose_rows_are_all_candidates_score_them_together(monkeypatch):
    """They select the same rows as among their candidates; longer prompts select among candidates."""
    calls = []

    def counted(*arguments, **options):
        calls.append(len(arguments[0]))
        return candidate_topk(*arguments, **options)

    monkeypatch.setattr(selection, "candidate_topk", counted)
    together, apart = Stack(0), Stack(0)
    reach = together.config.candidate_topk_blocks * together.config.candidate_block_size
    together.step([(1, 0, 33), (0, 0, reach)])
    assert not calls
    together.step([(0, reach, 9)])
    assert calls == [9]
    monkeypatch.setattr(selection.Candidates, "reach", 0)
    apart.step([(1, 0, 33), (0, 0, reach)])
    for layer, (found, *_) in together.picks.items():
        for token in range(reach):
            np.testing.assert_array_equal(found[token], apart.picks[layer][0][token])


def draft_layer(**options):
    record = GOLDEN["draft"]
    config = DeepseekV41Config.from_dict(record["config"])
    weights = seeded_weights(record["parameters"], record["seed"])
    layer = DeepseekV41Attention(
        config, config.num_hidden_layers, weights, activations="float32", cache_format="float32", max_position=512,
        backend="cpu", **options,
    )  # fmt: skip
    return record, config, layer


@pytest.mark.parametrize("number", range(3))
def test_a_draft_layer_attends_within_its_block(number):
    """DSpark: each of the block's five tokens sees the main model's rows before the block, and the whole block."""
    record, config, layer = draft_layer()
    assert layer.mode == "window"
    prefix = record["positions"][number] + 1
    generator = np.random.Generator(np.random.PCG64(record["seed"] + 7 + number))
    main = generator.standard_normal((prefix, config.hidden_size), dtype=np.float32)
    block = generator.standard_normal((5, config.hidden_size), dtype=np.float32)
    serving = serving_of(config, num_speculative_tokens=4, noncausal_decodes=True, max_num_batched_tokens=512)
    builder, paged = StepBuilder(config.specs(), serving, "cpu"), PagedRequests(1, prefix + 5, {"window": 64}, 3)
    caches = LayerCaches.allocate(layer.spec, serving, paged.num_blocks, cache_format="float32")
    half = prefix // 2
    for first, count in ((0, half), (half, prefix - half)):
        layer.insert(main[first : first + count], caches, builder.build(paged.batch([(0, first, count)])[0]))
    got = layer.step(block, caches, builder.build(paged.batch([(0, prefix, 5)])[0]))
    assert relative_rms(got, golden_arrays()[f"draft/{number}/out"]) < BOUNDS["float32"]


def test_modes_of_the_published_model():
    """V4.1-Flash: four layers own rows, eight select, layer 20 selects the candidates of the last four."""
    config = flash()
    modes = [config.spec(layer).mode for layer in range(43)]
    assert [layer for layer, mode in enumerate(modes) if mode == "full"] == [2, 8, 14, 20]
    assert [layer for layer, mode in enumerate(modes) if mode == "reindex"] == [24, 28, 32, 36]
    assert (
        modes[:2] == modes[40:] == ["window"] * 2 + ["window"] * (len(modes[40:]) - 2) or modes[40:] == ["window"] * 3
    )
    assert [layer for layer in range(43) if config.reads_candidates(layer)] == [24, 28, 32, 36]
    assert [config.kv_source(layer) for layer in (2, 7, 19, 20, 39)] == [2, 2, 14, 20, 20]
    assert [config.index_source(layer) for layer in (19, 23, 24, 39)] == [14, 20, 24, 36]
    assert config.rms_norm_eps == 1e-20


def flash(**changes):
    text = {
        "model_type": "deepseek_v41_text", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
        "o_groups": 8, "sliding_window": 128, "rms_norm_eps": 1e-20, "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0], "max_position_embeddings": 1048576,
        "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 65536},
    }  # fmt: skip
    return DeepseekV41Config.from_dict({"model_type": "deepseek_v41", "text_config": text | changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "deepseek_v4"}, "model_type: got 'deepseek_v4'"),
        ({"head_dim": 256}, "head_dim: got 256, expected 512"),
        ({"compress_ratios": [0, 0] + [4] * 38}, r"compress_ratios\[2\]: got 4"),
        ({"compress_ratios": [0] * 39}, "compress_ratios: got 39 entries, expected one for each of 40 layers"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "kv_source_layer_ids: got no layer for layer 2, expected one of"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "kv_source_layer_ids: got layer 14 of ratio 2 for layer 20"),
        ({"kv_source_layer_ids": [0, 2, 8, 14, 20]}, "kv_source_layer_ids: got 0, expected layers of ratio 1 or 2"),
        ({"index_source_layer_ids": [2, 8, 14]}, "index_source_layer_ids: got none for 20"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id: got 21, expected one of"),
        ({"candidate_source_layer_id": 14}, "candidate_source_layer_id: got 14 of ratio 2, but layer 20"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks: got 0"),
        ({"o_groups": 7}, "o_groups: got 7, expected a divisor of 64 heads"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type: got 'linear'"),
    ],
)  # fmt: skip
def test_configurations_of_other_models(changes, text):
    with pytest.raises((ValueError, TypeError), match=text):
        flash(**changes)


def test_a_selection_of_another_layer_or_step_is_refused():
    stack = Stack(0)
    batch, tables = stack.paged.batch([(0, 0, 20)])
    rings = np.zeros(1, np.int32)
    metadata = stack.builder.build(batch, tables, rings)
    x = [hidden[:20] for hidden in stack.hidden[0]]
    modes = [layer.mode for layer in stack.layers]
    assert modes == ["window", "full", "reindex", "full", "reindex", "reuse"]

    def step(number, metadata, **changes):
        given = {"layer_caches": stack.caches[number], "selection": stack.selection} | changes
        return stack.layers[number].step(x[number], metadata=metadata, **given)

    with pytest.raises(ValueError, match="selection: got no rows, expected rows of layer 4 of this step"):
        step(5, metadata)
    with pytest.raises(ValueError, match="selection: got no candidates, expected candidates of layer 3 of this step"):
        step(4, metadata)
    for number in range(4):
        step(number, metadata)
    before = [array.copy() for array in vars(stack.caches[5]).values() if array is not None]
    with pytest.raises(ValueError, match="selection: got rows of layer 3, expected rows of layer 4 of this step"):
        step(5, metadata)
    with pytest.raises(TypeError, match="selection: got None of type NoneType, expected a SharedSelection"):
        step(3, metadata, selection=None)
    with pytest.raises(
        ValueError, match=r"layer_caches.compressed: got None, expected an array for layer 3 of ratio 1"
    ):
        step(3, metadata, layer_caches=stack.caches[0])
    with pytest.raises(ValueError, match=r"layer_caches.ring: got None, expected an array for layer 1 of ratio 2"):
        step(1, metadata, layer_caches=dataclasses.replace(stack.caches[1], ring=None))
    for array, old in zip((a for a in vars(stack.caches[5]).values() if a is not None), before, strict=True):
        np.testing.assert_array_equal(array, old)
    step(4, metadata)
    step(5, metadata)
    again = stack.builder.build(*stack.paged.batch([(0, 20, 1)])[:1], tables, rings)
    x = [hidden[20:21] for hidden in stack.hidden[0]]
    with pytest.raises(ValueError, match="selection: got rows of layer 4 of another step, expected rows of layer 4 "):
        step(5, again)


def test_tables_and_rings_are_required():
    stack = Stack(0)
    batch, tables = stack.paged.batch([(0, 0, 20)])
    with pytest.raises(ValueError, match=r"tables\['compressed'\]: got None"):
        stack.builder.build(batch)
    with pytest.raises(ValueError, match="rings: got None, expected the ring of each request"):
        stack.builder.build(batch, tables)
    blocks = dict.fromkeys(("window", "compressed", "rings"), 4)
    with pytest.raises(ValueError, match="owner: got None, expected the caches of layer 1"):
        LayerCaches.allocate(stack.config.spec(2), stack.serving, blocks)
    with pytest.raises(ValueError, match="owner: got caches, expected None"):
        LayerCaches.allocate(stack.config.spec(1), stack.serving, blocks, owner=stack.caches[1])


def test_a_request_without_a_ring_completes_nothing():
    """Ring -1: a padding request, whose tokens have no slots."""
    stack = Stack(0)
    batch, tables = stack.paged.batch([(0, 0, 4), (1, 0, 4)])
    metadata = stack.builder.build(batch, tables, np.array([1, -1], np.int32))
    np.testing.assert_array_equal(metadata.ring_slot_mapping, [8, 9, 10, 11, -1, -1, -1, -1])
    np.testing.assert_array_equal(metadata.rows[2].row_positions, [0, 0, 2, 2, 0, 0, 2, 2])
    np.testing.assert_array_equal(metadata.rows[1].row_positions, [0, 1, 2, 3, 0, 1, 2, 3])


def test_fp8_weights_have_scales_of_32_by_32():
    """A checkpoint's e4m3 matrices: the layer equals a layer with the dequantised weights."""
    record = GOLDEN["cases"][2]
    config = DeepseekV41Config.from_dict(record["config"])
    weights = seeded_weights(record["parameters"], record["seed"])
    quantized, plain = {}, {}
    for name, weight in weights.items():
        quantized[name] = plain[name] = weight
        its = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_b.weight", "indexer.wq_b.weight")
        if name.rpartition(".attn.")[2] in its:
            rows, columns = weight.shape
            tiles = weight.reshape(rows // 32, 32, columns // 32, 32)
            scale = 2.0 ** np.ceil(np.log2(np.abs(tiles).max(axis=(1, 3)) / 448)).astype(np.float32)
            values = (tiles / scale[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
            plain[name] = (values.astype(np.float32) * scale[:, None, :, None]).reshape(rows, columns)
            quantized[name] = values.reshape(rows, columns)
            quantized[name.removesuffix("weight") + "scale"] = scale
    options = {"activations": "float32", "cache_format": "float32", "max_position": 64, "weight_format": "bfloat16"}
    first, second = (DeepseekV41Attention(config, 0, tensors, **options) for tensors in (quantized, plain))
    for name in ("low_rank", "queries.q_b", "output.o_b", "queries.index_q_b"):
        get = operator.attrgetter(name)
        np.testing.assert_array_equal(get(first), get(second))
    options["weight_format"] = "fp8"
    kept = DeepseekV41Attention(config, 0, quantized, **options)
    q_b = kept.queries.q_b
    assert q_b.codes.base is not None  # the file's bytes
    assert (q_b.block_rows, q_b.block_columns) == (32, 32)
    np.testing.assert_array_equal(q_b.dequantized(np.float32), second.queries.q_b)
    np.testing.assert_array_equal(kept.low_rank.dequantized(np.float32), second.low_rank)
    assert BlockQuantizedWeight(None, None).block == (128, 128)


@pytest.mark.parametrize("layer", [1, 2, 3, 5])
def test_epsilon_of_the_window_s_rows(layer):
    """rms_norm_eps applies to owners of rows, which normalise rows on insert, and to the other layers."""
    stack, epsilon = Stack(0), 0.5
    config = dataclasses.replace(stack.config, rms_norm_eps=epsilon)
    weights = seeded_weights(stack.record["parameters"], stack.record["seed"])
    made = DeepseekV41Attention(
        config, layer, weights, activations="float32", cache_format="float32", max_position=64, backend="cpu"
    )
    stack.layers[layer] = made
    stack.step([(0, 0, 20)])
    prefix = f"layers.{layer}.attn."
    kv = stack.hidden[0][layer, :20].astype(np.float64) @ weights[f"{prefix}wkv.weight"].astype(np.float64).T
    kv *= weights[f"{prefix}kv_norm.weight"] / np.sqrt((kv**2).mean(axis=1, keepdims=True) + epsilon)
    rows = stack.caches[layer].window[stack.paged.tables["window"][0, 0], :20]
    np.testing.assert_allclose(rows[:, :448], kv[:, :448], rtol=1e-4, atol=1e-5)  # the rest is rotated
