"""A tiny whole model of GLM-5.3-Flash, of sparse layers alone: transformers' logits and greedy tokens."""

import deepseek_v4
import numpy as np
from seeded_weights import seeded_weights
from serving import experts, gated_mlp, largest, rms_norm

from cumla.metadata import CommonAttentionMetadata
from cumla.models import Glm5NextAttention, LayerCaches, Scratch, StepBuilder, config_from, serving_of
from support.family_stack import GOLDEN, check_tiny_model, golden_arrays

CASE = 1
PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
LIMIT, SCALE = 10.0, 2.5  # of SwiGLU, and of the routed experts


class Model:
    """Residual streams mixed by hyper-connections as V4's, and experts, in float32."""

    xp, hyper_connection = np, deepseek_v4.Model.hyper_connection

    def __init__(self, tokens):
        record = GOLDEN["models"][CASE]
        self.config, self.weights = record["config"], seeded_weights(record["parameters"], record["seed"])
        config, scratch = config_from(self.config), Scratch()
        serving = serving_of(config, max_num_batched_tokens=256, max_num_seqs=2, max_model_len=256)
        self.layers = [
            Glm5NextAttention(
                config, number, self.weights, activations="float32", cache_format="float32", max_position=tokens,
                scratch=scratch,
            )
            for number in config.sparse
        ]  # fmt: skip
        self.caches = [
            LayerCaches.allocate(spec, serving, {"rows": 4, "rings": 1}, cache_format="float32")
            for spec in config.specs()
        ]
        self.builder, self.table = StepBuilder(config.specs(), serving), np.array([[2, 0, 3, 1]], np.int32)
        self.eps = self.config["rms_norm_eps"]

    def logits(self, tokens, first):
        """Of these tokens, which follow `first` others."""
        batch = CommonAttentionMetadata.from_lengths([len(tokens)], [first + len(tokens)], self.table, 64)
        metadata = self.builder.build(batch, rings=np.zeros(1, np.int32))
        streams = np.repeat(self.weights["model.embed_tokens.weight"][tokens][:, None], self.config["hc_mult"], axis=1)
        for layer, (attention, caches) in enumerate(zip(self.layers, self.caches, strict=True)):
            prefix = f"model.layers.{layer}."
            post, mix, x = self.hyper_connection(streams, f"{prefix}attn_hc.")
            x = rms_norm(x, self.weights[f"{prefix}input_layernorm.weight"], self.eps, np)
            streams = self.mixed(streams, post, mix, attention.step(x, caches, metadata))
            post, mix, x = self.hyper_connection(streams, f"{prefix}ffn_hc.")
            x = rms_norm(x, self.weights[f"{prefix}post_attention_layernorm.weight"], self.eps, np)
            streams = self.mixed(streams, post, mix, self.mlp(x, f"{prefix}mlp."))
        x = rms_norm(streams.mean(axis=1), self.weights["model.norm.weight"], self.eps, np)
        return x @ self.weights["lm_head.weight"].T

    def mixed(self, streams, post, mix, made):
        return post[:, :, None] * made[:, None] + mix.transpose(0, 2, 1) @ streams

    def mlp(self, x, prefix):
        weights = self.weights
        if f"{prefix}gate.weight" not in weights:
            return gated_mlp(x, *(weights[prefix + name] for name in PARTS), LIMIT, np)
        scores = deepseek_v4.sigmoid(x @ weights[f"{prefix}gate.weight"].T, np)
        chosen = largest(scores, self.config["num_experts_per_tok"], np)
        share = np.take_along_axis(scores, chosen, axis=1)
        share = share / (share.sum(axis=1, keepdims=True) + 1e-20) * SCALE
        routed = (weights[f"{prefix}experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        shared = (weights[f"{prefix}shared_experts.{name}"] for name in PARTS)
        return experts(x, chosen, share, *routed, LIMIT, np) + gated_mlp(x, *shared, LIMIT, np)


def test_logits_and_greedy_tokens_are_transformers():
    check_tiny_model(CASE, Model(len(golden_arrays()[f"m{CASE}/tokens"])))
