"""A tiny whole model of Mistral Large 4: transformers' logits and greedy tokens."""

import numpy as np
from seeded_weights import seeded_weights
from serving import experts, gated_mlp, largest, rms_norm

from cumla.metadata import CommonAttentionMetadata
from cumla.models import (
    LayerCaches,
    MistralLarge4Attention,
    Scratch,
    SharedSelection,
    StepBuilder,
    config_from,
    serving_of,
)
from support.family_stack import GOLDEN, check_tiny_model, golden_arrays

CASE = 2
PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
NO_LIMIT, CAP = np.inf, 30.0  # of SwiGLU, and of logits


class Model:
    """A residual stream and experts, in float32; layers share rows and selections."""

    def __init__(self, tokens):
        record = GOLDEN["models"][CASE]
        self.config, self.weights = record["config"], seeded_weights(record["parameters"], record["seed"])
        config, scratch = config_from(self.config), Scratch()
        specs = config.specs()
        serving = serving_of(config, max_num_batched_tokens=256, max_num_seqs=2, max_model_len=256)
        self.layers = [
            MistralLarge4Attention(
                config, spec.layer, self.weights, activations="float32", cache_format="float32", max_position=tokens,
                scratch=scratch,
            )
            for spec in specs
        ]  # fmt: skip
        self.caches = []
        for spec in specs:
            owner = None if spec.owns_rows else self.caches[spec.row_source]
            self.caches.append(
                LayerCaches.allocate(spec, serving, {"rows": 4}, owner=owner, cache_format="float32")
            )  # fmt: skip
        self.builder, self.table = StepBuilder(specs, serving), np.array([[2, 0, 3, 1]], np.int32)
        self.selection, self.eps = SharedSelection(specs, serving), self.config["rms_norm_eps"]

    def logits(self, tokens, first):
        """Of these tokens, which follow `first` others."""
        batch = CommonAttentionMetadata.from_lengths([len(tokens)], [first + len(tokens)], self.table, 64)
        metadata, hidden = self.builder.build(batch), self.weights["model.embed_tokens.weight"][tokens]
        for layer, (attention, caches) in enumerate(zip(self.layers, self.caches, strict=True)):
            prefix = f"model.layers.{layer}."
            x = rms_norm(hidden, self.weights[f"{prefix}input_layernorm.weight"], self.eps, np)
            hidden = hidden + attention.step(x, caches, metadata, self.selection)
            x = rms_norm(hidden, self.weights[f"{prefix}post_attention_layernorm.weight"], self.eps, np)
            hidden = hidden + self.mlp(x, f"{prefix}mlp.")
        x = rms_norm(hidden, self.weights["model.norm.weight"], self.eps, np)
        return CAP * np.tanh(x @ self.weights["lm_head.weight"].T / CAP)

    def mlp(self, x, prefix):
        weights = self.weights
        if f"{prefix}gate.weight" not in weights:
            return gated_mlp(x, *(weights[prefix + name] for name in PARTS), NO_LIMIT, np)
        scores = np.exp(x @ weights[f"{prefix}gate.weight"].T)
        chosen = largest(scores, self.config["num_experts_per_tok"], np)
        share = np.take_along_axis(scores, chosen, axis=1)
        share = share / share.sum(axis=1, keepdims=True)
        routed = (weights[f"{prefix}experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        shared = (weights[f"{prefix}shared_experts.{name}"] for name in PARTS)
        return experts(x, chosen, share, *routed, NO_LIMIT, np) + gated_mlp(x, *shared, NO_LIMIT, np)


def test_logits_and_greedy_tokens_are_transformers():
    check_tiny_model(CASE, Model(len(golden_arrays()[f"m{CASE}/tokens"])))
