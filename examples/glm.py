"""Toys of GLM-5.2 and of GLM-5.3-Flash, of its sparse layers alone, generate tokens.

python examples/glm.py [--batch-invariant]

GLM-5.2 has layers that select rows with an indexer, and layers that take their selection. GLM-5.3-Flash selects pools
of tokens, and mixes residual streams by hyper-connections.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import deepseek_v4
import deepseek_v32
import numpy as np
import tiny_checkpoint
from seeded_weights import seeded_weights
from serving import product, rms_norm

from cumla.metadata import CommonAttentionMetadata
from cumla.models import (
    Glm5NextAttention,
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
SIZES = {
    "hidden_size": 128, "num_attention_heads": 4, "q_lora_rank": 96, "vocab_size": 512, "index_n_heads": 8,
    "index_topk": 32, "first_k_dense_replace": 1, "intermediate_size": 128, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
TOY = {
    **SIZES, "model_type": "glm_moe_dsa", "num_hidden_layers": 5, "index_topk_freq": 4, "index_skip_topk_offset": 2,
}  # fmt: skip
FLASH = {
    **SIZES, "model_type": "glm5_next_text", "num_hidden_layers": 4, "qk_rope_head_dim": 0, "qk_nope_head_dim": 128,
    "v_head_dim": 64, "index_kpool": 4, "indexer_types": ["full", "shared", "full", "full"], "hc_mult": 2,
}  # fmt: skip
SITES = {"input_layernorm": "attn_hc", "post_attention_layernorm": "ffn_hc"}  # hyper-connections, by the norm behind


class Model:
    """A model of GLM-5.x, with weights by transformers' names, float32. One request of up to `longest` tokens."""

    attention: Any = GlmMoeDsaAttention
    xp, mlp, limit = np, deepseek_v32.Model.mlp, None

    def __init__(
        self, config: dict[str, Any], weights: dict[str, Any], longest: int = 256, cache_format: Any = "fp8",
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.weights = {"n_group": 1, "topk_group": 1, **config}, weights
        attention = config_from(config)
        specs, scratch = attention.specs(), Scratch()
        serving = serving_of(
            attention, block_size=PAGE, max_num_batched_tokens=longest, max_num_seqs=1, max_model_len=longest,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        self.builder, self.selection = StepBuilder(specs, serving), SharedSelection(specs, serving)
        self.pages = np.arange(-(-longest // PAGE), dtype=np.int32)[None]
        self.layers, self.caches = [], []
        for spec in specs:
            self.layers.append(
                self.attention(
                    attention, spec.layer, weights, activations="float32", cache_format=cache_format,
                    max_position=longest, scratch=scratch, batch_invariant=batch_invariant,
                )
            )  # fmt: skip
            owner = None if spec.owns_rows else self.caches[spec.row_source]
            blocks = {"rows": self.pages.size, "rings": 1}
            self.caches.append(LayerCaches.allocate(spec, serving, blocks, owner=owner, cache_format=cache_format))
        self.kinds = tiny_checkpoint.mlp_types(without_streams(self.config))

    def logits(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Of these tokens, which follow `first` others."""
        batch = CommonAttentionMetadata.from_lengths([len(tokens)], [first + len(tokens)], self.pages, PAGE)
        metadata = self.builder.build(batch, rings=np.zeros(1, np.int32) if self.builder.has_rings else None)
        h = self.spread(self.weights["model.embed_tokens.weight"][tokens])
        for layer, (attention, caches) in enumerate(zip(self.layers, self.caches, strict=True)):
            prefix = f"model.layers.{layer}."
            step = functools.partial(
                attention.step, layer_caches=caches, metadata=metadata, selection=self.selection
            )  # fmt: skip
            h = self.with_block(h, prefix, "input_layernorm", step)
            mlp = functools.partial(self.mlp, prefix=f"{prefix}mlp.", kind=self.kinds[layer])
            h = self.with_block(h, prefix, "post_attention_layernorm", mlp)
        return self.head(self.norm(self.collapse(h), "model.norm"))

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"], np)

    def spread(self, embedded: np.ndarray) -> np.ndarray:
        """The residual stream, or streams [T, streams, hidden]."""
        return embedded

    def with_block(self, h: np.ndarray, prefix: str, norm: str, block: Callable[[Any], Any]) -> np.ndarray:
        """The residual stream with the output of a block of its norm added."""
        return h + block(self.norm(h, prefix + norm))

    def collapse(self, h: np.ndarray) -> np.ndarray:
        return h

    def head(self, x: np.ndarray) -> np.ndarray:
        return product(x, self.weights["lm_head.weight"], self.xp)


class Flash(Model):
    """A model of GLM-5.3-Flash, of sparse layers alone; published ones have layers of linear attention between them."""

    attention, limit = Glm5NextAttention, 10.0
    hyper_connection = deepseek_v4.Model.hyper_connection

    def spread(self, embedded: np.ndarray) -> np.ndarray:
        return np.repeat(embedded[:, None], self.config["hc_mult"], axis=1)

    def with_block(self, h: np.ndarray, prefix: str, norm: str, block: Callable[[Any], Any]) -> np.ndarray:
        post, mix, x = self.hyper_connection(h, f"{prefix}{SITES[norm]}.")
        made = block(self.norm(x, prefix + norm))
        return post[:, :, None] * made[:, None] + mix.transpose(0, 2, 1) @ h

    def collapse(self, h: np.ndarray) -> np.ndarray:
        return h.mean(axis=1)


def without_streams(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without hyper-connections, by which tiny_checkpoint.py knows V4's."""
    return {name: value for name, value in config.items() if name != "hc_mult"}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes, attention = tiny_checkpoint.common_shapes(without_streams(config)), config_from(config)
    streams, hidden = config.get("hc_mult", 0), config["hidden_size"]
    mixes = (2 + streams) * streams
    for spec in attention.specs():
        shapes |= {weight.tensor: weight.shape for weight in expected_weights(attention, spec.layer).values()}
        for site in SITES.values() if streams else ():
            within = {"fn": (mixes, streams * hidden), "base": (mixes,), "scale": (3,)}
            shapes |= {f"model.layers.{spec.layer}.{site}.{name}": shape for name, shape in within.items()}
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy generation with toys of GLM-5.2 and GLM-5.3-Flash.")
    parser.add_argument("--batch-invariant", action="store_true", help="tokens that do not depend on the schedule")
    options = parser.parse_args()
    for name, config, kind in (("GLM-5.2", TOY, Model), ("GLM-5.3-Flash", FLASH, Flash)):
        model = kind(config, seeded_weights(shapes_of(config), 0), batch_invariant=options.batch_invariant)
        tokens, first = np.random.default_rng(0).integers(2, config["vocab_size"], 100).tolist(), 0
        for _ in range(16):
            new = model.logits(np.array(tokens[first:]), first)[-1].argmax()
            first = len(tokens)
            tokens.append(int(new))
        print(f"{name}: modes of layers {[layer.mode for layer in model.layers]}")
        print(f"16 tokens after a prompt of 100: {tokens[100:]}")


if __name__ == "__main__":
    main()
