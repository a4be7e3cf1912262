"""A toy DeepSeek V4.1 around cumla's attention layers, with drafts: from a checkpoint folder to generated tokens.

    python examples/deepseek_v41.py [FOLDER] [--device cupy] [--cache-format fp8] [--plot parts.png]

Attention is V4.1's, with layers of every kind: window only, owners of rows of ratio 2 and 1, layers that select again
among candidate blocks, and layers that use another layer's selection. The rest is simple: plain residuals instead of
hyper-connections and engrams, dense MLPs instead of experts.

Draft layers guess several tokens at once (DSpark): they attend to the last layers' hidden states of earlier tokens,
and within the block of guesses. The next step verifies the guesses together with the token before them.
"""

import dataclasses
import json
import pathlib
from typing import Any

import checkpoint
import numpy as np
import tiny_checkpoint
from serving import Request, Server, Stopwatch, gated_mlp, main, product, rms_norm

from cumla.models import (
    Checkpoint,
    DeepseekV41Attention,
    DeepseekV41Config,
    LayerCaches,
    Scratch,
    SharedSelection,
    StepBuilder,
    serving_of,
)
from cumla.pages import describe

PAGE, COMPRESSED_PAGE = 64, 256  # positions
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
FORMATS = ("fp4", "fp8", "fp4_split", "fp8_split", "bfloat16", "float32")


class Model:
    """Weights are float32, or bfloat16 for attention on a device; residuals are float32."""

    def __init__(
        self, folder: pathlib.Path, *, xp: Any = np, cache_format: str = "fp4", activations: str | None = None,
        longest: int = 1024, requests: int = 8, batch_tokens: int = 256, backend: str | None = None,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.xp, self.stopwatch = xp, Stopwatch(xp)
        config = json.loads((pathlib.Path(folder) / "config.json").read_text())
        config = config.get("text_config", config)
        self.config = config
        checkpoint.check_served(config)
        tensors = Checkpoint(folder)
        attention = DeepseekV41Config.from_dict(config)
        layers, drafts = attention.num_hidden_layers, config.get("num_nextn_predict_layers", 0)
        self.block = config["dspark_block_size"] if drafts else 0
        longest += self.block
        # The block's first token sees the whole window before it. A request's ring does not change until it ends.
        self.groups = {
            "window": (PAGE, attention.sliding_window), "compressed": (COMPRESSED_PAGE, None), "rings": (longest, None)
        }  # fmt: skip
        self.num_pages = {name: requests * -(-longest // size) + 1 for name, (size, _) in self.groups.items()}
        serving = serving_of(
            attention, num_speculative_tokens=self.block, block_size=PAGE, compressed_block_size=COMPRESSED_PAGE,
            max_num_batched_tokens=batch_tokens, max_num_seqs=requests, max_model_len=longest,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        self.builder = StepBuilder(attention.specs(), serving, backend)
        of_drafts = dataclasses.replace(
            serving, compress_ratios=(0,), num_speculative_tokens=max(self.block - 1, 0), noncausal_decodes=True,
            max_num_batched_tokens=requests * max(self.block, 1),
        )  # fmt: skip
        self.draft_builder = StepBuilder([attention.spec(layers)], of_drafts, backend)
        self.selection = SharedSelection(attention.specs(), serving, xp)
        self.activations = activations or ("float32" if xp is np else "bfloat16")
        scratch, self.layers, self.caches = Scratch(), [], []
        for layer in range(layers + drafts):
            self.layers.append(
                DeepseekV41Attention(
                    attention, layer, tensors, activations=self.activations, cache_format=cache_format,
                    max_position=longest, scratch=scratch, xp=xp, backend=backend, batch_invariant=batch_invariant,
                )
            )  # fmt: skip
            owner = attention.kv_source(layer)
            self.caches.append(
                LayerCaches.allocate(
                    attention.spec(layer), serving, self.num_pages, cache_format=cache_format, xp=xp,
                    owner=None if owner in (None, layer) else self.caches[owner],
                )
            )  # fmt: skip
        self.description = describe(
            attention, drafts=drafts, cache_format=cache_format, block_size=PAGE,
            compressed_block_size=COMPRESSED_PAGE, num_speculative_tokens=self.block,
        )  # fmt: skip
        self.layers, self.drafts = self.layers[:layers], self.layers[layers:]
        self.weights = checkpoint.load(tensors, config, xp)
        if drafts:
            self.weights |= {
                name: xp.asarray(tensors[name], np.float32) for name in tiny_checkpoint.draft_shapes(config)
            }

    def build(self, batch: Any, tables: dict[str, Any]) -> Any:
        with self.stopwatch("metadata"):
            return self.builder.build(batch, tables, tables["rings"][:, 0])

    def forward(self, tokens: np.ndarray, metadata: Any, last: np.ndarray) -> np.ndarray:
        """Logits of the tokens at `last`, float32 on the host. Stores the hidden states for draft layers."""
        xp, weights, observe, targets = self.xp, self.weights, self.stopwatch, []
        with observe("embedding"):
            h = weights["model.embed_tokens.weight"][xp.asarray(tokens)]
        for layer, attention in enumerate(self.layers):
            prefix = f"model.layers.{layer}."
            if self.drafts and layer in self.config["dspark_target_layer_ids"]:
                targets.append(h)
            with observe("residual"):
                x = self.norm(h, prefix + "input_layernorm.weight").astype(attention.activations)
            attended = attention.step(x, self.caches[layer], metadata, self.selection, observe=observe)
            with observe("residual"):
                h = h + attended.astype(np.float32)
                x = self.norm(h, prefix + "post_attention_layernorm.weight")
            with observe("mlp"):
                h = h + gated_mlp(x, *(weights[f"{prefix}mlp.{name}"] for name in MLP), None, xp)
        with observe("draft"):
            if self.drafts:
                x = xp.concatenate(targets, axis=1) @ weights["mtp.0.main_proj.weight"].T
                x = self.norm(x, "mtp.0.main_norm.weight").astype(self.drafts[0].activations)
            for draft, caches in zip(self.drafts, self.caches[len(self.layers) :], strict=True):
                draft.insert(x, caches, metadata)
        with observe("head"):
            return self.logits(h[xp.asarray(last)], "model.norm.weight")

    def draft(self, tokens: list[int], batch: Any) -> np.ndarray:
        """Guesses [requests, block] of the tokens after each of `tokens`; `batch` has the requests' blocks."""
        xp, weights, observe = self.xp, self.weights, self.stopwatch
        with observe("draft"):
            blocks = np.full((len(tokens), self.block), self.config["dspark_noise_token_id"])
            blocks[:, 0] = tokens
            h, metadata = (
                weights["model.embed_tokens.weight"][xp.asarray(blocks.ravel())],
                self.draft_builder.build(batch),
            )
            for layer, (attention, caches) in enumerate(zip(self.drafts, self.caches[len(self.layers) :], strict=True)):
                x = self.norm(h, f"mtp.{layer}.attn_norm.weight").astype(attention.activations)
                h = h + attention.step(x, caches, metadata).astype(np.float32)
                x = self.norm(h, f"mtp.{layer}.ffn_norm.weight")
                mlp = (weights[f"mtp.{layer}.ffn.{name}.weight"] for name in ("w1", "w3", "w2"))
                h = h + gated_mlp(x, *mlp, None, xp)
            return self.logits(h, "mtp.0.norm.weight").argmax(axis=1).reshape(blocks.shape)

    def norm(self, x: Any, name: str) -> Any:
        return rms_norm(x, self.weights[name], self.config["rms_norm_eps"], self.xp)

    def logits(self, h: Any, norm: str) -> np.ndarray:
        logits = product(self.norm(h, norm), self.weights["lm_head.weight"], self.xp)
        return logits if self.xp is np else logits.get()


class DraftingServer(Server):
    """Greedy generation in which a decode verifies guesses: the same tokens in fewer steps.

    Attributes:
        proposed, accepted: number of guesses
    """

    def __init__(self, model: Model, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self.decode_tokens = 1 + model.block
        self.proposed = self.accepted = 0

    def step(self) -> None:
        if self.model.block:
            self.propose()
        super().step()

    def propose(self) -> None:
        """Append guesses to the tokens of decoding requests, as far as free pages suffice."""
        block = self.model.block
        decoding = [
            request for request in self.running
            if not request.drafts and request.computed == len(request.tokens) - 1 and request.new_tokens > 1
            and request.computed and self.pages.reserve(request, request.computed + block)
        ]  # fmt: skip
        if not decoding:
            return
        batch, _ = self.batch([(request, block) for request in decoding])
        guesses = self.model.draft([request.tokens[-1] for request in decoding], batch)
        for request, its in zip(decoding, guesses.tolist(), strict=True):
            request.drafts = min(block, request.new_tokens - 1)
            request.tokens += its[: request.drafts]
            self.proposed += request.drafts

    def take(self, request: Request, count: int, logits: np.ndarray) -> None:
        """Accept guesses up to the first wrong one, which the correct token replaces; later ones are dropped.

        Rows of dropped tokens stay in caches and rings until the next step writes their positions again.
        """
        if not request.drafts:
            super().take(request, count, logits)
            return
        for row in logits:
            request.computed += 1
            token, guess = int(row.argmax()), request.tokens[request.computed :][:1]
            request.logits.append(row)
            request.new_tokens -= 1
            if guess != [token]:
                break
            self.accepted += 1
        request.tokens[request.computed :] = [token]
        request.drafts = 0

    def preempt(self, request: Request) -> None:
        if request.drafts:
            del request.tokens[-request.drafts :]
            request.drafts = 0
        super().preempt(request)


if __name__ == "__main__":
    server = main("DeepSeek V4.1", Model, tiny_checkpoint.V41, FORMATS, DraftingServer)
    print(f"{server.accepted} of {server.proposed} guesses accepted")
