"""A whole DeepSeek V3.2 model around cumla's attention layers: from a checkpoint folder to greedily generated tokens.

python examples/deepseek_v32.py [FOLDER] [--device cupy] [--cache-format bfloat16] [--plot parts.png]
"""

import json
import pathlib
from typing import Any

import checkpoint
import numpy as np
import tiny_checkpoint
from serving import Stopwatch, experts, gated_mlp, largest, main, product, rms_norm

from cumla.models import (
    Checkpoint,
    DeepseekV32Attention,
    DeepseekV32Config,
    LayerCaches,
    Scratch,
    StepBuilder,
    serving_of,
)
from cumla.pages import describe

PAGE = 64  # positions
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


class Model:
    """Weights are float32, or bfloat16 for attention on a device; the residual is float32."""

    limit: float | None = None  # of the values of SwiGLU

    def __init__(
        self, folder: pathlib.Path, *, xp: Any = np, cache_format: str = "fp8", activations: str | None = None,
        longest: int = 1024, requests: int = 8, batch_tokens: int = 256, backend: str | None = None,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.xp, self.stopwatch = xp, Stopwatch(xp)
        self.config = config = json.loads((pathlib.Path(folder) / "config.json").read_text())
        checkpoint.check_served(config, scoring_func="sigmoid")
        tensors = Checkpoint(folder)
        attention = DeepseekV32Config.from_dict(config)
        self.groups = {"window": (PAGE, None)}
        self.num_pages = {"window": requests * -(-longest // PAGE) + 1}
        serving = serving_of(
            attention, block_size=PAGE, max_num_batched_tokens=batch_tokens, max_num_seqs=requests,
            max_model_len=longest, batch_invariant=batch_invariant,
        )  # fmt: skip
        self.builder = StepBuilder(attention.specs(), serving, backend)
        self.activations = activations or ("float32" if xp is np else "bfloat16")
        scratch = Scratch()
        layers = range(config["num_hidden_layers"])
        self.layers = [
            DeepseekV32Attention(
                attention, layer, tensors, activations=self.activations, cache_format=cache_format,
                max_position=longest, scratch=scratch, xp=xp, backend=backend, batch_invariant=batch_invariant,
            )
            for layer in layers
        ]  # fmt: skip
        pages = {"rows": self.num_pages["window"]}
        self.caches = [
            LayerCaches.allocate(attention.spec(layer), serving, pages, cache_format=cache_format, xp=xp)
            for layer in layers
        ]
        self.description = describe(attention, layers=len(layers), cache_format=cache_format, block_size=PAGE)
        self.weights = checkpoint.load(tensors, config, xp)
        self.mlp_types = tiny_checkpoint.mlp_types(config)

    def build(self, batch: Any, tables: dict[str, Any]) -> Any:
        with self.stopwatch("metadata"):
            return self.builder.build(batch)

    def forward(self, tokens: np.ndarray, metadata: Any, last: np.ndarray, selected: Any = None) -> np.ndarray:
        """Logits of the tokens at `last`, float32 on the host. selected: {layer: positions that tokens attend to}."""
        xp, weights, observe, eps = self.xp, self.weights, self.stopwatch, self.config.get("rms_norm_eps", 1e-6)
        with observe("embedding"):
            h = weights["model.embed_tokens.weight"][xp.asarray(tokens)]
        for layer, attention in enumerate(self.layers):
            prefix = f"model.layers.{layer}."
            with observe("residual"):
                x = rms_norm(h, weights[prefix + "input_layernorm.weight"], eps, xp).astype(attention.activations)
            given = None if selected is None else selected.get(layer)
            attended = attention.step(x, self.caches[layer], metadata, topk_indices=given, observe=observe)
            with observe("residual"):
                h = h + attended.astype(np.float32)
                x = rms_norm(h, weights[prefix + "post_attention_layernorm.weight"], eps, xp)
            with observe("experts"):
                h = h + self.mlp(x, prefix + "mlp.", self.mlp_types[layer])
        with observe("head"):
            x = rms_norm(h[xp.asarray(last)], weights["model.norm.weight"], eps, xp)
            logits = product(x, weights["lm_head.weight"], xp)
        return logits if xp is np else logits.get()

    def mlp(self, x: Any, prefix: str, kind: str) -> Any:
        xp, weights, config = self.xp, self.weights, self.config
        if kind == "dense":
            return gated_mlp(x, *(weights[prefix + name] for name in MLP), self.limit, xp)
        scores = 1 / (1 + xp.exp(-product(x, weights[prefix + "gate.weight"], xp)))
        choice = scores + weights.get(prefix + "gate.e_score_correction_bias", 0)
        # Experts are in groups: only experts of the groups with the highest top-2 scores are selected.
        groups = choice.reshape(len(x), config["n_group"], -1)
        best_two = xp.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        kept = xp.zeros_like(best_two)
        xp.put_along_axis(kept, largest(best_two, config["topk_group"], xp), 1, axis=1)
        choice = xp.where(kept[:, :, None] > 0, groups, -xp.inf).reshape(scores.shape)
        chosen = largest(choice, config["num_experts_per_tok"], xp)
        share = xp.take_along_axis(scores, chosen, axis=1)
        if config.get("norm_topk_prob", True):
            share = share / (share.sum(axis=1, keepdims=True) + 1e-20)
        share = share * config.get("routed_scaling_factor", 2.5)
        expert, shared = prefix + "experts.", prefix + "shared_experts."
        routed = experts(
            x, chosen, share, weights[expert + "gate_up_proj"], weights[expert + "down_proj"], self.limit, xp
        )
        return routed + gated_mlp(x, *(weights[shared + name] for name in MLP), self.limit, xp)


if __name__ == "__main__":
    main("DeepSeek V3.2", Model, tiny_checkpoint.V32)
