"""A toy of GLM-5.2 generates tokens: layers that select rows with an indexer, and layers that take their selection.

python examples/glm.py
"""

from typing import Any

import deepseek_v32
import numpy as np
import tiny_checkpoint
from seeded_weights import seeded_weights
from serving import rms_norm

from cumla.metadata import CommonAttentionMetadata
from cumla.models import (
    GlmMoeDsaAttention,
    LayerCaches,
    Scratch,
    SharedSelection,
    StepBuilder,
    config_from,
    expected_weights,
    serving_of,
)

PAGE = 64  # positions
TOY = {
    "model_type": "glm_moe_dsa", "hidden_size": 128, "num_attention_heads": 4, "q_lora_rank": 96, "vocab_size": 512,
    "num_hidden_layers": 5, "index_topk_freq": 4, "index_skip_topk_offset": 2, "index_n_heads": 8, "index_topk": 32,
    "first_k_dense_replace": 1, "intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip


class Model:
    """Weights by transformers' names, float32. One request of up to `longest` tokens."""

    xp, mlp = np, deepseek_v32.Model.mlp

    def __init__(
        self, config: dict[str, Any], weights: dict[str, Any], longest: int = 256, cache_format: Any = "fp8"
    ) -> None:
        self.config, self.weights = {"n_group": 1, "topk_group": 1, **config}, weights
        attention = config_from(config)
        specs, scratch = attention.specs(), Scratch()
        serving = serving_of(
            attention, block_size=PAGE, max_num_batched_tokens=longest, max_num_seqs=1, max_model_len=longest
        )
        self.builder, self.selection = StepBuilder(specs, serving), SharedSelection(specs, serving)
        self.pages = np.arange(-(-longest // PAGE), dtype=np.int32)[None]
        self.layers = [
            GlmMoeDsaAttention(
                attention, spec.layer, weights, activations="float32", cache_format=cache_format, max_position=longest,
                scratch=scratch,
            )
            for spec in specs
        ]  # fmt: skip
        pages = {"rows": self.pages.size}
        self.caches = [LayerCaches.allocate(spec, serving, pages, cache_format=cache_format) for spec in specs]
        self.kinds = tiny_checkpoint.mlp_types(self.config)

    def logits(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Of these tokens, which follow `first` others."""
        batch = CommonAttentionMetadata.from_lengths([len(tokens)], [first + len(tokens)], self.pages, PAGE)
        metadata, weights, eps = self.builder.build(batch), self.weights, self.config["rms_norm_eps"]
        h = weights["model.embed_tokens.weight"][tokens]
        for layer, (attention, caches) in enumerate(zip(self.layers, self.caches, strict=True)):
            prefix = f"model.layers.{layer}."
            x = rms_norm(h, weights[f"{prefix}input_layernorm.weight"], eps, np)
            h = h + attention.step(x, caches, metadata, self.selection)
            x = rms_norm(h, weights[f"{prefix}post_attention_layernorm.weight"], eps, np)
            h = h + self.mlp(x, f"{prefix}mlp.", self.kinds[layer])
        return rms_norm(h, weights["model.norm.weight"], eps, np) @ weights["lm_head.weight"].T


def main() -> None:
    shapes = tiny_checkpoint.common_shapes(TOY)
    attention = config_from(TOY)
    for layer in range(TOY["num_hidden_layers"]):
        shapes |= {weight.tensor: weight.shape for weight in expected_weights(attention, layer).values()}
    model = Model(TOY, seeded_weights(shapes, 0))
    tokens = np.random.default_rng(0).integers(2, TOY["vocab_size"], 100).tolist()
    first = 0
    for _ in range(16):
        new = model.logits(np.array(tokens[first:]), first)[-1].argmax()
        first = len(tokens)
        tokens.append(int(new))
    print(f"layers that select: {attention.selecting}, modes {[layer.mode for layer in model.layers]}")
    print(f"16 tokens after a prompt of 100: {tokens[100:]}")


if __name__ == "__main__":
    main()
