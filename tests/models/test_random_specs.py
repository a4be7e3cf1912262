"""Layers described by hand: a description is refused by the name of a field, or its layer is right."""

import dataclasses
import re

import numpy as np
import pytest
import tiny_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.test_layer_specs import V4

import oracles
from cumla.metadata import CommonAttentionMetadata, ServingConfig
from cumla.models import (
    Glm5NextConfig,
    HyV4Config,
    LayerCaches,
    LayerSpec,
    MistralLarge4Config,
    SharedSelection,
    SparseAttention,
    StepBuilder,
    config_from,
    expected_weights,
    serving_of,
)
from cumla.models.config import AttentionConfig
from cumla.models.layer_spec import CHOICES

BASE = LayerSpec(
    layer=0, hidden_size=64, heads=2, nope_dim=24, rope_dim=64, v_dim=32, softmax_scale=0.1, rows="latent",
    row_source=0, selection="own", selection_source=0, q_rank=48, keys="tokens", index_heads=4, topk=8,
)  # fmt: skip
# Values of fields besides their choices; a number of small sizes, where any is possible.
VALUES = {
    "hidden_size": (64, 96), "heads": (1, 3, 8), "nope_dim": (1, 24, 448), "v_dim": (8, 512), "softmax_scale": (0.1, 1),
    "q_rank": (0, 48), "window": (0, 16), "pool": (1, 2, 4), "index_heads": (0, 1, 4), "topk": (0, 8, 12),
    "candidate_blocks": (0, 2), "o_groups": (0, 1, 2), "o_rank": (0, 16), "q_eps": (1e-6, 1e-3),
    "row_eps": (1e-6, 1e-3), "key_eps": (1e-6, 1e-2), "row_source": (None, 0),
    "selection_source": (None, 0), "candidate_source": (None, 0),
    "rope_theta": (1e4, 1e6), **CHOICES,
}  # fmt: skip
FLAGS = [field.name for field in dataclasses.fields(LayerSpec) if field.type == "bool"]
VALUES |= dict.fromkeys(FLAGS, (False, True))
# From changes of this many fields at a time, some are accepted.
CHANGES = st.lists(st.sampled_from(sorted(VALUES)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(VALUES[name]) for name in names})
)
# Combinations that changes of single fields seldom meet.
TOGETHER = st.sampled_from([
    {}, {"q_rank": 0, "index_queries": "hidden"}, {"rope_dim": 0, "rope_pairs": "none", "index_pairs": "none"},
    {"rope_dim": 0, "rope_pairs": "none", "index_pairs": "none", "keys": "pools", "pool": 4},
    {"q_eps": 1e-3, "row_eps": 1e-3}, {"keys": "pools", "pool": 2, "index_pairs": "none"},
])  # fmt: skip
OF_WINDOWS = [spec for given in (V4, tiny_checkpoint.V41) for spec in config_from(given).specs()]
SERVING = ServingConfig(compress_ratios=(1, 1, 1, 1), index_topk=8, max_model_len=64)
TOKENS, SPLITS = 23, (11, 1, 7, 4)
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclasses.dataclass(frozen=True)
class ByHand(AttentionConfig):
    """A configuration of one described layer."""

    described: LayerSpec
    names = MistralLarge4Config.names | HyV4Config.names | Glm5NextConfig.names
    model_names = MistralLarge4Config.model_names
    published = HyV4Config.published
    max_position_embeddings, rope_scaling = 64, None

    def spec(self, layer):
        return self.described

    def specs(self):
        return (self.described,)

    @property
    def num_attention_heads(self):
        return self.described.heads

    @property
    def index_n_heads(self):
        return self.described.index_heads


class Layer(SparseAttention):
    config_type = ByHand


def described(spec, changes):
    """The description with these changes; None if it is refused, by the name of a field."""
    try:
        return dataclasses.replace(spec, **changes)
    except (TypeError, ValueError) as error:
        refusal = str(error)
    field = re.match(r"(\w+): got .*, expected ", refusal)
    assert field, refusal
    assert field[1] in VALUES
    return None


def check(spec):
    """The layer's outputs in several steps are the oracle's."""
    config, rng = ByHand(spec), np.random.default_rng(0)
    weights = {
        name: (1 + 0.1 * n if n.ndim == 1 else n / n.shape[-1] ** 0.5).astype(np.float32)
        for name, n in ((x, rng.standard_normal(w.shape)) for x, w in expected_weights(config, 0).items())
    }
    layer = Layer(config, 0, weights, activations="float32", cache_format="float32")
    serving = serving_of(config, max_num_batched_tokens=32, max_num_seqs=1, max_model_len=64)
    caches = LayerCaches.allocate(spec, serving, {"rows": 1, "rings": 1}, cache_format="float32")
    builder, x = StepBuilder([spec], serving), rng.standard_normal((TOKENS, spec.hidden_size)).astype(np.float32)
    selection, end, got = SharedSelection([spec], serving), 0, []
    for count in SPLITS:
        end += count
        batch = CommonAttentionMetadata.from_lengths([count], [end], np.zeros((1, 1), np.int32), 64)
        rings = np.zeros(1, np.int32) if builder.has_rings else None
        got.append(layer.step(x[end - count : end], caches, builder.build(batch, rings=rings), selection))
    oracle = oracles.layer_of(config, 0, weights, TOKENS)
    want, got = oracle(x.astype(np.float64)), np.concatenate(got)
    error = np.abs(got - want).max(axis=1) / np.abs(want).max()
    assert np.median(error) < 1e-4, (spec, error)
    assert (error < 1e-4).mean() > 0.8, (spec, error)  # few selections are unclear in float32


@settings(QUIET, max_examples=40)  # a layer of each
@given(CHANGES, TOGETHER)
def test_a_layer_of_latent_rows_is_refused_or_right(changes, together):
    spec = described(BASE, {**together, **changes})
    if spec is not None and spec.rows == "latent" and spec.selects:
        check(spec)


@QUIET
@given(st.sampled_from(OF_WINDOWS), CHANGES)
def test_a_layer_with_a_window_is_refused_or_of_a_model(spec, changes):
    """What is accepted has the parts of a layer of V4 or V4.1; sizes and RoPE's parameters are its own."""
    found = described(spec, {name: value for name, value in changes.items() if "source" not in name})
    if found is not None and found.rows == "window":
        assert parts(found) in set(map(parts, OF_WINDOWS))


def parts(spec):
    """The choices of a description that decide which parts a layer has."""
    names = ("rows", "ratio", "states", "selection", "keys", "norm_heads", "overlap", "sink", "gate", "cache_formats")
    return tuple(getattr(spec, name) for name in names)


LAYERS = {
    spec.layer: spec
    for spec in config_from({
        "model_type": "mistral_large4_text", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4,
        "index_topk": 8, "indexer_types": ["full", "shared", "shared", "full"], "no_rope_layers": [1, 1, 0, 0],
        "kv_source_layers": [0, 1, 2, 2],
    }).specs()
}  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "changes", "match"),
    [
        (1, {"topk": 16}, "got topk 16 in layer 1, expected 8, as in layer 0, its selection_source"),
        (3, {"row_source": 1}, "got rope_dim 0 in layer 3, expected 64, as in layer 1, its row_source"),
        (2, {"selection_source": 1}, "got selection_source 1 in layer 2, expected 0, as in layer 1"),
        (2, {"row_source": 0}, "got rope_dim 0 in layer 2, expected 64, as in layer 0, its row_source"),
    ],
)
def test_layers_that_do_not_fit_together_are_named(layer, changes, match):
    specs = [*(LAYERS | {layer: dataclasses.replace(LAYERS[layer], **changes)}).values()]
    for make in (StepBuilder, SharedSelection):
        with pytest.raises(ValueError, match=f"specs: {match}"):
            make(specs, SERVING)
