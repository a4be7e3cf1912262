"""Mistral Large 4: its configuration, weights, caches and page groups, requests that share steps and prefixes."""

import dataclasses

import numpy as np
import pytest
from models.test_fp8_weights import one, values

from cumla.models import LayerCaches, MistralLarge4Config, StepBuilder, config_from, expected_weights
from cumla.pages import describe
from support.family_stack import FamilyStack, weights_of

SOURCES = [35 if layer > 35 and layer % 4 == 3 else layer for layer in range(72)]
PUBLISHED = {
    "model_type": "mistral_large4", "hidden_size": 6144, "num_attention_heads": 64, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "num_hidden_layers": 72, "rms_norm_eps": 1e-5, "head_dim": 64,
    "max_position_embeddings": 1048576, "attention_bias": False, "kv_source_layers": SOURCES,
    "indexer_types": ["full", "shared"] * 36, "no_rope_layers": [1, 1, 1, 0] * 18,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "original_max_position_embeddings": 512,
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
    },
}  # fmt: skip


def test_the_published_configuration():
    config = config_from(
        {"model_type": "mistral_large4", "text_config": PUBLISHED | {"model_type": "mistral_large4_text"}}
    )
    assert config == config_from(PUBLISHED)
    with_rope, owner, reader = (config.spec(layer) for layer in (34, 35, 39))
    assert (with_rope.row_dim, with_rope.nope_dim, with_rope.rope_pairs, with_rope.learned_rope) == (
        576, 64, "neighbours", True,
    )  # fmt: skip
    assert (owner.row_dim, owner.nope_dim, owner.rope_pairs, owner.index_pairs, owner.learned_rope) == (
        512, 128, "none", "none", False,
    )  # fmt: skip
    assert (reader.row_source, reader.selection_source, reader.selects, reader.mode) == (35, 38, False, "reuse")
    assert {spec.softmax_scale for spec in config.specs()} == {128**-0.5}
    assert sum(spec.owns_rows and not spec.rope_dim for spec in config.specs()) == 9
    assert all(spec.position_scale and not spec.q_rank for spec in config.specs())


def test_entries_that_a_configuration_may_lack():
    names = ("indexer_types", "no_rope_layers", "kv_source_layers", "rope_parameters")
    config = config_from({name: value for name, value in PUBLISHED.items() if name not in names})
    assert config.no_rope_layers == (1, 1, 1, 0) * 18
    assert config.selecting == config.kv_source_layers == tuple(range(72))
    assert config.rope_scaling == PUBLISHED["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"q_lora_rank": 1536}, "q_lora_rank: got 1536, expected none"),
        ({"kv_source_layers": SOURCES[:9]}, "kv_source_layers: got 9 entries, expected one for each of 72 layers"),
        ({"kv_source_layers": [*SOURCES[:71], 39]}, r"kv_source_layers\[71\]: got 39, which has no rows"),
        ({"kv_source_layers": [*SOURCES[:71], 70]}, r"kv_source_layers\[71\]: got 70, expected a layer that has RoPE"),
        ({"kv_source_layers": [1, *SOURCES[1:]]}, r"kv_source_layers\[0\]: got 1, expected at most 0"),
        ({"no_rope_layers": [2] * 72}, r"no_rope_layers\[0\]: got 2, expected 0 or 1"),
        ({"indexer_types": ["shared"] * 72}, "selecting: got .*, expected layer 0 first"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"attention_factor": 1.5}}, "attention_factor: got 1.5"),
        ({"sliding_window": 128}, "sliding_window: got 128, expected none: it changes attention"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim: got 32, expected 64"),
        ({"model_type": "mistral"}, "model_type: got 'mistral'"),
    ],
)
def test_a_rule_that_is_not_served_is_named(changes, match):
    with pytest.raises((TypeError, ValueError), match=match):
        MistralLarge4Config.from_dict(PUBLISHED | changes)


def test_the_dense_draft_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layer: got 72, expected at most 71: .* \(mtp_dspark\) is dense"):
        config_from(PUBLISHED).spec(72)
    with pytest.raises(ValueError, match="mtp_dspark"):
        describe(PUBLISHED, drafts=1)


def test_expected_weights():
    config = config_from(PUBLISHED)
    rope, reader = expected_weights(config, 34), expected_weights(config, 39)
    assert rope["wq.weight"].shape == (64 * 128, 6144)
    assert rope["wkv_a_with_mqa.weight"].shape == (576, 6144)
    assert rope["indexer.wq_b.weight"].shape == (32 * 128, 6144)
    assert (rope["indexer.q_input_norm.bias"].shape, rope["indexer.ssmax_scaling.b"].shape) == ((6144,), (32,))
    assert rope["lerope.alpha"].tensor == "lerope.alpha"
    assert rope["ssmax_scaling.s"].tensor == "layers.34.attention.ssmax_scaling.s"
    assert set(reader) == {"wq.weight", "wkv_b.weight", "wo.weight", "ssmax_scaling.s", "ssmax_scaling.b"}
    assert reader["wkv_b.weight"].shape == (64 * 256, 512)
    part = expected_weights(config, 34, rank=3, ranks=8)
    assert part["ssmax_scaling.s"].part == (slice(24, 32),)
    assert part["indexer.ssmax_scaling.s"].part is None


def test_published_names_are_read():
    """The same layer from transformers' names and from a checkpoint's."""
    by_transformers = FamilyStack(6)
    names = {}
    for layer in by_transformers.numbers:
        for weight in expected_weights(by_transformers.config, layer).values():
            prefix = "model." if "rotary_emb" in weight.transformers else f"model.layers.{layer}.self_attn."
            names[weight.tensor] = weights_of(6)[prefix + weight.transformers]
    kind = type(by_transformers.layers[0])
    for layer, own in enumerate(by_transformers.layers):
        read = kind(by_transformers.config, layer, names, activations="float32", max_position=64, xp=np)
        np.testing.assert_array_equal(read.cos_sin, own.cos_sin[:64])
        np.testing.assert_array_equal(read.low_rank, own.low_rank)
    with pytest.raises(KeyError, match=r"rotary_emb.alpha: the weights lack it"):
        kind(by_transformers.config, 0, {x: y for x, y in names.items() if "lerope" not in x}, xp=np)


def layers_of(stack, config, weights):
    options = {"activations": "float32", "cache_format": "float32", "max_position": 300, "backend": "cpu"}
    return [type(layer)(config, layer.layer, weights, **options) for layer in stack.layers]


def test_fp8_and_bfloat16_matrices():
    """FP8 matrices of a multimodal checkpoint, the indexer's queries among them, give what their values give."""
    in_fp8, outputs = ("q_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight", "indexer.wq_b.weight"), []
    for change in (lambda weight: weight, values):
        stack = FamilyStack(6)
        weights = {
            name.replace("model.", "model.language_model.", 1): change(one(w)) if name.endswith(in_fp8) else w
            for name, w in weights_of(6).items()
        }
        stack.layers = layers_of(stack, stack.config, weights)
        outputs.append(stack.run(1, [61, 1, 3]))
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-5 * np.abs(outputs[0]).max())


def test_heads_on_ranks():
    """The sum of two ranks' outputs is the layer's; every rank selects the same rows."""
    whole, parts = FamilyStack(6), []
    want = whole.run(1, [40, 1, 24])
    config = dataclasses.replace(whole.config, num_attention_heads=whole.config.num_attention_heads // 2)
    for rank in range(2):
        stack, weights = FamilyStack(6), dict(weights_of(6))
        for layer in stack.numbers:
            for weight in expected_weights(stack.config, layer, rank=rank, ranks=2).values():
                if weight.part is not None:
                    name = f"model.layers.{layer}.self_attn.{weight.transformers}"
                    weights[name] = weights[name][weight.part]
        stack.layers = layers_of(stack, config, weights)
        parts.append(stack.run(1, [40, 1, 24]))
        for layer, picks in whole.picks.items():
            for token, chosen in picks[1].items():
                np.testing.assert_array_equal(stack.picks[layer][1][token], chosen)
    np.testing.assert_allclose(sum(parts), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_requests_in_one_step():
    """Decodes, drafts that are rejected and computed again, and a prompt's chunks, of two requests."""
    stack, parts = FamilyStack(6), {0: [], 1: []}
    stack.step([(0, 0, 40)])
    steps = ([(0, 30, 1), (1, 0, 20)], [(1, 20, 1), (0, 31, 69)], [(0, 100, 3), (1, 21, 45)], [(0, 100, 159)])
    for scheduled in steps:
        for (request, first, _), out in zip(scheduled, stack.step(scheduled), strict=True):
            parts[request].append((first, out))
    for request, start in ((0, 30), (1, 0)):
        whole = np.zeros((6, stack.hidden[request].shape[1], 128), np.float32)
        whole[:, :start] = FamilyStack(6).run(request, [start]) if start else 0
        for first, out in parts[request]:
            whole[:, first : first + out.shape[1]] = out
        stack.picks = {}
        stack.check(request, whole)


@pytest.mark.parametrize("name", ["softmax_scaling.scale", "indexer.softmax_scaling.scale", "rotary_emb.alpha"])
def test_factors_of_positions_count(name):
    """Without SSMax of attention or of the indexer, or without LeRoPE, outputs are others."""
    want = FamilyStack(6).run(0, [200])
    got = FamilyStack(6, change={name: lambda x: 0 * x}).run(0, [200])
    assert np.abs(got - want).max() > 0.01 * np.abs(want).max()


def test_caches_and_page_groups():
    """A reader has no rows of its own, and index keys if it selects; two row formats are in one group."""
    stack = FamilyStack(6, "fp8", activations="bfloat16")
    shapes = {number: caches.rows.shape[2] for number, caches in stack.caches.items()}
    assert shapes == {0: 656, 1: 528, 2: 656, 3: 528, 4: 656, 5: 528}
    assert stack.caches[4].rows is stack.caches[0].rows
    assert stack.caches[3].indexer is None
    assert stack.caches[4].indexer is not stack.caches[0].indexer
    (group,) = describe(stack.config).groups
    assert {(cache.cache, cache.layout): cache.layers for cache in group.caches} == {
        ("rows", "V32_FP8"): (0, 2), ("rows", "V32_NOPE_FP8"): (1,), ("indexer", "INDEXER_FP8"): (0, 1, 4, 5),
    }  # fmt: skip


def test_a_reader_needs_its_owner():
    stack = FamilyStack(6)
    batch, _ = stack.paged.batch([(0, 0, 5)])
    x = stack.hidden[0][4, :5]
    metadata = StepBuilder([layer.spec for layer in stack.layers], stack.serving, "cpu").build(batch)
    with pytest.raises(ValueError, match="selection: layer 0, which owns the rows, has not run in this step"):
        stack.layers[4].step(x, stack.caches[4], metadata, stack.selection)
    stack.layers[0].step(stack.hidden[0][0, :5], stack.caches[0], metadata, stack.selection)
    other = dataclasses.replace(stack.caches[4], rows=stack.caches[0].rows.copy())
    with pytest.raises(ValueError, match=r"layer_caches\.rows: got another array"):
        stack.layers[4].step(x, other, metadata, stack.selection)
    with pytest.raises(ValueError, match=r"blocks\['rows'\]: got 0"):
        LayerCaches.allocate(stack.layers[4].spec, stack.serving, {}, owner=stack.caches[0])
