"""The toy of DeepSeek V4.1 (examples/deepseek_v41.py) in float64: one request at once, without caches or steps."""

import numpy as np

from cumla.models.rope import cos_sin_table

from .v41 import norm, pooled_rows


def rotate(x, positions, table, inverse=False):
    """RoPE of neighbouring pairs of the last 64 values of x [T, ..., D] at positions [T]."""
    angles = table[positions].astype(np.float64).reshape(len(x), *[1] * (x.ndim - 2), 64)
    cos, sin = angles[..., :32], angles[..., 32:] * (-1 if inverse else 1)
    out = x.copy()
    even, odd = x[..., -64::2], x[..., -63::2]
    out[..., -64::2], out[..., -63::2] = even * cos - odd * sin, odd * cos + even * sin
    return out


class Toy:
    """config: of config.json; tensors: float arrays by name."""

    def __init__(self, config, tensors, longest=1024):
        self.config = config
        self.tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
        scaling = config["rope_scaling"] | {"attention_factor": 1.0}
        self.plain = cos_sin_table(64, config["rope_theta"], longest)
        self.yarn = cos_sin_table(64, config["compress_rope_theta"], longest, scaling)
        self.rows, self.keys, self.picks, self.candidates = None, None, None, None
        self.gap = np.inf  # the smallest difference of scores on which a choice depended

    def norm(self, x, name):
        return norm(x, self.tensors[name], self.config["rms_norm_eps"])

    def logits(self, tokens):
        """[T, vocabulary]. Keeps the targets of the draft layers."""
        h, self.targets = self.tensors["model.embed_tokens.weight"][tokens], []
        for layer in range(self.config["num_hidden_layers"]):
            if layer in self.config["dspark_target_layer_ids"]:
                self.targets.append(h)
            prefix = f"model.layers.{layer}."
            h = h + self.attention(self.norm(h, prefix + "input_layernorm.weight"), layer)
            x = self.norm(h, prefix + "post_attention_layernorm.weight")
            h = h + self.mlp(x, *(f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down")))
        return self.norm(h, "model.norm.weight") @ self.tensors["lm_head.weight"].T

    def guesses(self, token):
        """Logits of the block [5, vocabulary] that begins with `token`, after the tokens that `logits` had."""
        config, tensors = self.config, self.tensors
        main = np.concatenate(self.targets, axis=1) @ tensors["mtp.0.main_proj.weight"].T
        main = self.norm(main, "mtp.0.main_norm.weight")
        tokens = [token] + [config["dspark_noise_token_id"]] * (config["dspark_block_size"] - 1)
        h = tensors["model.embed_tokens.weight"][tokens]
        for draft in range(config["num_nextn_predict_layers"]):
            x = self.norm(h, f"mtp.{draft}.attn_norm.weight")
            h = h + self.draft_attention(x, main, f"mtp.{draft}.attn.")
            x = self.norm(h, f"mtp.{draft}.ffn_norm.weight")
            h = h + self.mlp(x, *(f"mtp.{draft}.ffn.{name}.weight" for name in ("w1", "w3", "w2")))
        return self.norm(h, "mtp.0.norm.weight") @ tensors["lm_head.weight"].T

    def mlp(self, x, gate, up, down):
        gate, up = x @ self.tensors[gate].T, x @ self.tensors[up].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.tensors[down].T

    def queries(self, x, prefix, positions, table):
        qr = self.norm(x @ self.tensors[prefix + "wq_a.weight"].T, prefix + "q_norm.weight")
        q = (qr @ self.tensors[prefix + "wq_b.weight"].T).reshape(len(x), -1, 512)
        return qr, rotate(q, positions, table)

    def window_rows(self, x, prefix, positions, table):
        kv = self.norm(x @ self.tensors[prefix + "wkv.weight"].T, prefix + "kv_norm.weight")
        return rotate(kv, positions, table)

    def attended(self, q, keys, prefix):
        """One token's q [H, 512] over its keys [n, 512]."""
        scores = q @ keys.T * 512**-0.5
        sinks = self.tensors[prefix + "attn_sink"]
        top = np.maximum(scores.max(axis=1), sinks)
        weights = np.exp(scores - top[:, None])
        return weights @ keys / (weights.sum(axis=1) + np.exp(sinks - top))[:, None]

    def projected(self, o, prefix, positions, table):
        groups = self.config["o_groups"]
        o = rotate(o, positions, table, inverse=True).reshape(len(o), groups, -1)
        w = self.tensors[prefix + "wo_a.weight"].reshape(groups, self.config["o_lora_rank"], -1)
        return np.einsum("tgd,grd->tgr", o, w).reshape(len(o), -1) @ self.tensors[prefix + "wo_b.weight"].T

    def attention(self, x, layer):
        config, prefix, positions = self.config, f"layers.{layer}.attn.", np.arange(len(x))
        ratio = config["compress_ratios"][layer]
        table = self.yarn if ratio else self.plain
        qr, q = self.queries(x, prefix, positions, table)
        kv = self.window_rows(x, prefix, positions, table)
        if layer in config["kv_source_layer_ids"]:
            self.compress(x, prefix, ratio)
        if layer in config["index_source_layer_ids"]:
            self.select(x, qr, layer, ratio)
        out = []
        for t in range(len(x)):
            keys = kv[max(0, t - config["sliding_window"] + 1) : t + 1]
            if ratio:
                keys = np.concatenate([keys, self.rows[self.picks[t]]])
            out.append(self.attended(q[t], keys, prefix))
        return self.projected(np.stack(out), prefix, positions, table)

    def draft_attention(self, x, main, prefix):
        """All tokens of the block see the window before it and the whole block."""
        first = len(main)
        positions = first + np.arange(len(x))
        _, q = self.queries(x, prefix, positions, self.plain)
        before = self.window_rows(main, prefix, np.arange(first), self.plain)[-self.config["sliding_window"] :]
        keys = np.concatenate([before, self.window_rows(x, prefix, positions, self.plain)])
        out = np.stack([self.attended(its, keys, prefix) for its in q])
        return self.projected(out, prefix, positions, self.plain)

    def compress(self, x, prefix, ratio):
        names = ("wkv", "wgate")[:ratio]
        given = [x @ self.tensors[f"{prefix}compressor.{name}.weight"].T for name in names]
        latents = self.norm(pooled_rows(np.concatenate(given, axis=1), ratio), prefix + "compressor.norm.weight")
        first = np.arange(len(latents)) * ratio
        self.rows = rotate(latents, first, self.yarn)
        keys = latents @ self.tensors[prefix + "indexer.wk.weight"].T
        self.keys = rotate(self.norm(keys, prefix + "indexer.k_norm.weight"), first, self.yarn)

    def select(self, x, qr, layer, ratio):
        config, prefix = self.config, f"layers.{layer}.attn.indexer."
        q = (qr @ self.tensors[prefix + "wq_b.weight"].T).reshape(len(x), config["index_n_heads"], -1)
        q = rotate(q, np.arange(len(x)), self.yarn)
        weights = x @ self.tensors[prefix + "weights_proj.weight"].T
        scores = np.einsum("th,thn->tn", weights, np.maximum(np.einsum("thd,nd->thn", q, self.keys), 0))
        source, size = config["candidate_source_layer_id"], config["candidate_block_size"]
        if layer == source:
            self.candidates = []
        self.picks = []
        for t, row in enumerate(scores):
            allowed, visible = np.arange((t + 1) // ratio), (t + 1) // ratio
            if layer == source:
                best = [row[first : min(first + size, visible)].max() for first in range(0, visible, size)]
                best[-1] = np.inf
                self.candidates.append(self.best(np.array(best), config["candidate_topk_blocks"]))
            elif layer > source:
                allowed = allowed[np.isin(allowed // size, self.candidates[t])]
            self.picks.append(allowed[self.best(row[allowed], config["index_topk"])])

    def best(self, scores, count):
        """Places of the largest scores; of equal ones the first."""
        order = np.argsort(-scores, kind="stable")
        if len(order) > count:
            self.gap = min(self.gap, scores[order[count - 1]] - scores[order[count]])
        return order[:count]
