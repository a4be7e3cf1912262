"""The toy DeepSeek V4.1 (examples/deepseek_v41.py) in float64: one request at once."""

import numpy as np

from cumla.models import DeepseekV41Config

from . import layer_of
from .basics import rms_norm
from .v41 import Shared


class Toy:
    """config: the contents of config.json; tensors: float arrays by name."""

    def __init__(self, config, tensors, longest=1024):
        self.config, attention = config, DeepseekV41Config.from_dict(config)
        self.tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
        count, drafts = config["num_hidden_layers"], config["num_nextn_predict_layers"]
        prefixes = [f"layers.{layer}.attn." for layer in range(count)] + [f"mtp.{i}.attn." for i in range(drafts)]
        self.attention = [
            layer_of(attention, number, self.within(prefix), longest) for number, prefix in enumerate(prefixes)
        ]
        self.margin = np.inf  # the smallest margin of a selection

    def within(self, prefix):
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}

    def norm(self, x, name):
        return rms_norm(x, self.config["rms_norm_eps"], self.tensors[name])

    def logits(self, tokens):
        """Logits [T, vocabulary]. Stores the inputs of the draft layers."""
        h, self.targets, shared = self.tensors["model.embed_tokens.weight"][tokens], [], Shared()
        for layer in range(self.config["num_hidden_layers"]):
            if layer in self.config["dspark_target_layer_ids"]:
                self.targets.append(h)
            prefix = f"model.layers.{layer}."
            h = h + self.attention[layer](self.norm(h, prefix + "input_layernorm.weight"), shared)
            x = self.norm(h, prefix + "post_attention_layernorm.weight")
            h = h + self.mlp(x, *(f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down")))
        self.margin = min(self.margin, shared.margin)
        return self.norm(h, "model.norm.weight") @ self.tensors["lm_head.weight"].T

    def guesses(self, token):
        """Logits of the block [5, vocabulary] that begins with `token`, after the tokens of `logits`."""
        config = self.config
        main = np.concatenate(self.targets, axis=1) @ self.tensors["mtp.0.main_proj.weight"].T
        main = self.norm(main, "mtp.0.main_norm.weight")
        tokens = [token] + [config["dspark_noise_token_id"]] * (config["dspark_block_size"] - 1)
        h = self.tensors["model.embed_tokens.weight"][tokens]
        for draft in range(config["num_nextn_predict_layers"]):
            attention = self.attention[config["num_hidden_layers"] + draft]
            h = h + attention.block(self.norm(h, f"mtp.{draft}.attn_norm.weight"), main)
            x = self.norm(h, f"mtp.{draft}.ffn_norm.weight")
            h = h + self.mlp(x, *(f"mtp.{draft}.ffn.{name}.weight" for name in ("w1", "w3", "w2")))
        return self.norm(h, "mtp.0.norm.weight") @ self.tensors["lm_head.weight"].T

    def mlp(self, x, gate, up, down):
        gate, up = x @ self.tensors[gate].T, x @ self.tensors[up].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.tensors[down].T
