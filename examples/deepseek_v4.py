"""A whole DeepSeek V4 model around cumla's attention layers: from a checkpoint folder to greedily generated tokens.

    python examples/deepseek_v4.py [FOLDER] [--device cupy] [--cache-format bfloat16] [--plot parts.png]

Residual streams are mixed by hyper-connections; the first layers select experts by a table, the others by score.
"""

import json
import pathlib
from typing import Any

import checkpoint
import numpy as np
import tiny_checkpoint
from serving import Stopwatch, experts, gated_mlp, largest, main, product, rms_norm

from cumla.models import (
    STATE_BLOCK_SIZES,
    Checkpoint,
    DeepseekV4Attention,
    DeepseekV4Config,
    LayerCaches,
    Scratch,
    StepBuilder,
    serving_of,
)
from cumla.pages import describe

PAGE, COMPRESSED_PAGE = 64, 256  # positions
SCORES = ("sqrtsoftplus", "sigmoid")  # of experts, from the router's logits


class Model:
    """Weights are float32, or bfloat16 for attention on a device; residual streams are float32."""

    def __init__(
        self, folder: pathlib.Path, *, xp: Any = np, cache_format: str = "fp8", activations: str | None = None,
        longest: int = 1024, requests: int = 8, batch_tokens: int = 256, backend: str | None = None,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.xp, self.stopwatch = xp, Stopwatch(xp)
        self.config = config = json.loads((pathlib.Path(folder) / "config.json").read_text())
        checkpoint.check_served(config, scoring_func=SCORES)
        tensors = Checkpoint(folder)
        attention = DeepseekV4Config.from_dict(config)
        specs = attention.specs()
        # A row reads the states of its own positions, at ratio 4 also of the previous row's.
        states = {f"states{r}": (STATE_BLOCK_SIZES[r], 2 * r) for r in (4, 128)}
        self.groups = {"window": (PAGE, attention.sliding_window), "compressed": (COMPRESSED_PAGE, None), **states}
        self.num_pages = {name: requests * -(-longest // size) + 1 for name, (size, _) in self.groups.items()}
        serving = serving_of(
            attention, block_size=PAGE, compressed_block_size=COMPRESSED_PAGE, max_num_batched_tokens=batch_tokens,
            max_num_seqs=requests, max_model_len=longest, batch_invariant=batch_invariant,
        )  # fmt: skip
        self.builder = StepBuilder(specs, serving, backend)
        self.activations = activations or ("float32" if xp is np else "bfloat16")
        scratch = Scratch()
        self.layers, self.caches = [], []
        for layer, spec in enumerate(specs):
            self.layers.append(
                DeepseekV4Attention(
                    attention,
                    layer,
                    tensors,
                    activations=self.activations,
                    cache_format=cache_format,
                    max_position=longest,
                    scratch=scratch,
                    batch_invariant=batch_invariant,
                    xp=xp,
                    backend=backend,
                )
            )
            self.caches.append(LayerCaches.allocate(spec, serving, self.num_pages, cache_format=cache_format, xp=xp))
        self.description = describe(
            attention, cache_format=cache_format, block_size=PAGE, compressed_block_size=COMPRESSED_PAGE
        )
        self.weights = checkpoint.load(tensors, config, xp)
        self.mlp_types = tiny_checkpoint.mlp_types(config)

    def build(self, batch: Any, tables: dict[str, Any]) -> Any:
        with self.stopwatch("metadata"):
            return self.builder.build(batch, tables)

    def forward(self, tokens: np.ndarray, metadata: Any, last: np.ndarray, selected: Any = None) -> np.ndarray:
        """Logits of the tokens at `last`, float32 on the host. selected: {layer: rows that tokens attend to}."""
        xp, weights, observe, eps = self.xp, self.weights, self.stopwatch, self.config.get("rms_norm_eps", 1e-6)
        tokens = xp.asarray(tokens)
        with observe("embedding"):
            embedded = weights["model.embed_tokens.weight"][tokens]
            streams = xp.repeat(embedded[:, None], self.config["hc_mult"], axis=1)
        for layer, attention in enumerate(self.layers):
            prefix = f"model.layers.{layer}."
            with observe("hyper-connections"):
                post, mix, x = self.hyper_connection(streams, prefix + "attn_hc.")
                x = rms_norm(x, weights[prefix + "input_layernorm.weight"], eps, xp).astype(attention.activations)
            given = None if selected is None else selected.get(layer)
            attended = attention.step(x, self.caches[layer], metadata, topk_indices=given, observe=observe)
            with observe("hyper-connections"):
                streams = post[:, :, None] * attended.astype(np.float32)[:, None] + mix.transpose(0, 2, 1) @ streams
                post, mix, x = self.hyper_connection(streams, prefix + "ffn_hc.")
                x = rms_norm(x, weights[prefix + "post_attention_layernorm.weight"], eps, xp)
            with observe("experts"):
                made = self.mlp(x, tokens, prefix + "mlp.", self.mlp_types[layer])
            with observe("hyper-connections"):
                streams = post[:, :, None] * made[:, None] + mix.transpose(0, 2, 1) @ streams
        with observe("head"):
            x = self.collapse(streams[xp.asarray(last)])
            x = rms_norm(x, weights["model.norm.weight"], eps, xp)
            logits = product(x, weights["lm_head.weight"], xp)
        return logits if xp is np else logits.get()

    def hyper_connection(self, streams: Any, prefix: str) -> tuple[Any, Any, Any]:
        """The weights of a block's output for each stream, the mix of the streams, and the block's input.

        Alternate normalisation of rows and columns makes the mix doubly stochastic.
        """
        xp, count, eps = self.xp, streams.shape[1], self.config.get("hc_eps", 1e-6)
        base, scale = self.weights[prefix + "base"], self.weights[prefix + "scale"]
        flat = streams.reshape(len(streams), -1)
        normed = rms_norm(flat, 1, self.config.get("rms_norm_eps", 1e-6), xp)
        logits = product(normed, self.weights[prefix + "fn"], xp)
        pre = sigmoid(logits[:, :count] * scale[0] + base[:count], xp) + eps
        post = 2 * sigmoid(logits[:, count : 2 * count] * scale[1] + base[count : 2 * count], xp)
        mix = (logits[:, 2 * count :] * scale[2] + base[2 * count :]).reshape(-1, count, count)
        mix = xp.exp(mix - mix.max(axis=2, keepdims=True))
        mix = mix / mix.sum(axis=2, keepdims=True) + eps
        mix = mix / (mix.sum(axis=1, keepdims=True) + eps)
        for _ in range(self.config.get("hc_sinkhorn_iters", 20) - 1):
            mix = mix / (mix.sum(axis=2, keepdims=True) + eps)
            mix = mix / (mix.sum(axis=1, keepdims=True) + eps)
        return post, mix, (pre[:, :, None] * streams).sum(axis=1)

    def collapse(self, streams: Any) -> Any:
        xp, prefix, config = self.xp, "model.hc_head.hc_", self.config
        flat = rms_norm(streams.reshape(len(streams), -1), 1, config.get("rms_norm_eps", 1e-6), xp)
        logits = product(flat, self.weights[prefix + "fn"], xp)
        logits = logits * self.weights[prefix + "scale"] + self.weights[prefix + "base"]
        return ((sigmoid(logits, xp) + config.get("hc_eps", 1e-6))[:, :, None] * streams).sum(axis=1)

    def mlp(self, x: Any, tokens: Any, prefix: str, kind: str) -> Any:
        xp, weights, config = self.xp, self.weights, self.config
        logits = product(x, weights[prefix + "gate.weight"], xp)
        if config.get("scoring_func", SCORES[0]) == "sigmoid":
            scores = sigmoid(logits, xp)
        else:
            scores = xp.sqrt(xp.maximum(logits, 0) + xp.log1p(xp.exp(-xp.abs(logits))))
        if kind == "hash_moe":
            chosen = weights[prefix + "gate.tid2eid"][tokens]
        else:
            bias = weights.get(prefix + "gate.e_score_correction_bias", 0)
            chosen = largest(scores + bias, config["num_experts_per_tok"], xp)
        share = xp.take_along_axis(scores, chosen, axis=1)
        share = share / (share.sum(axis=1, keepdims=True) + 1e-20) * config.get("routed_scaling_factor", 1.5)
        limit, expert, shared = config.get("swiglu_limit", 10.0), prefix + "experts.", prefix + "shared_experts."
        routed = experts(x, chosen, share, weights[expert + "gate_up_proj"], weights[expert + "down_proj"], limit, xp)
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        return routed + gated_mlp(x, *(weights[shared + name] for name in names), limit, xp)


def sigmoid(x: Any, xp: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


if __name__ == "__main__":
    main("DeepSeek V4", Model, tiny_checkpoint.V4)
