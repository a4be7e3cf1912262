"""DeepSeek V4.1's index layers in float64, from the hidden states of tests/data/v41.npz (README.md there)."""

import functools
import json

import numpy as np

from cumla.models.rope import cos_sin_table
from support.golden import DATA

ROPE_DIM = 64


@functools.cache
def stacks():
    return json.loads((DATA / "v41.json").read_text())["cases"]


@functools.cache
def results():
    with np.load(DATA / "v41.npz") as archive:
        return dict(archive)


@functools.cache
def weights_of(case):
    """Parameters by name, float32."""
    stack = stacks()[case]
    rng = np.random.Generator(np.random.PCG64(stack["seed"]))
    found = {}
    for name, shape in sorted(stack["parameters"].items()):
        n = rng.standard_normal(shape, dtype=np.float32)
        is_norm = "norm" in name and name.endswith("weight")
        found[name] = 1 + np.float32(0.1) * n if is_norm else n if len(shape) == 1 else n / np.sqrt(shape[-1])
    return found


@functools.cache
def hidden_states(case, request):
    """Inputs [layers, tokens, hidden_size] of one request."""
    stack = stacks()[case]
    config, tokens = stack["config"], sum(stack["requests"][request])
    shape = (config["num_hidden_layers"], tokens, config["hidden_size"])
    return np.random.Generator(np.random.PCG64(stack["seed"] + 7 + request)).standard_normal(shape, dtype=np.float32)


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def rotated(x, positions, config):
    """RoPE of neighbouring pairs of the last 64 values of x [T, ..., D]."""
    scaling = config["rope_scaling"] | {"attention_factor": 1.0}
    table = cos_sin_table(ROPE_DIM, config["compress_rope_theta"], int(positions.max()) + 1, scaling)
    angles = table[positions].astype(np.float64).reshape(len(x), *[1] * (x.ndim - 2), ROPE_DIM)
    cosines, sines = angles[..., : ROPE_DIM // 2], angles[..., ROPE_DIM // 2 :]
    out = x.copy()
    even, odd = x[..., -ROPE_DIM::2], x[..., -ROPE_DIM + 1 :: 2]
    out[..., -ROPE_DIM::2], out[..., -ROPE_DIM + 1 :: 2] = even * cosines - odd * sines, odd * cosines + even * sines
    return out


class Layer:
    """Layer `number` of a stack and what it owns: rows of its compressor, index keys, index queries."""

    def __init__(self, case, number, request):
        self.config, self.number = stacks()[case]["config"], number
        self.x = hidden_states(case, request)[number].astype(np.float64)
        self.weights, self.ratio = weights_of(case), self.config["compress_ratios"][number]
        self.epsilon = self.config["rms_norm_eps"]

    def weight(self, name):
        return self.weights[f"layers.{self.number}.attn.{name}"].astype(np.float64)

    def kv_and_score(self):
        """The compressor's input [T, 1024] of ratio 2, [T, 512] of ratio 1."""
        kv = self.x @ self.weight("compressor.wkv.weight").T
        return kv if self.ratio == 1 else np.concatenate([kv, self.x @ self.weight("compressor.wgate.weight").T], 1)

    def latents(self):
        """Compressed rows before RoPE [T // ratio, 512]."""
        pooled = pooled_rows(self.kv_and_score(), self.ratio)
        return norm(pooled, self.weight("compressor.norm.weight"), self.epsilon)

    def index_keys(self):
        projected = self.latents() @ self.weight("indexer.wk.weight").T
        keys = norm(projected, self.weight("indexer.k_norm.weight"), self.epsilon)
        return rotated(keys, np.arange(len(keys)) * self.ratio, self.config)

    def index_queries(self):
        """q [T, H, 128] and weights [T, H]."""
        heads, dim = self.config["index_n_heads"], self.config["index_head_dim"]
        latent = norm(self.x @ self.weight("wq_a.weight").T, self.weight("q_norm.weight"), self.epsilon)
        q = (latent @ self.weight("indexer.wq_b.weight").T).reshape(-1, heads, dim)
        weights = self.x @ self.weight("indexer.weights_proj.weight").T * dim**-0.5 * heads**-0.5
        return rotated(q, np.arange(len(q)), self.config), weights


def pooled_rows(given, ratio):
    """Rows [T, 512 or 1024] pooled, [T // ratio, 512]: two neighbours weighted by the softmax of their scores."""
    if ratio == 1:
        return given
    pairs = given[: len(given) // 2 * 2].reshape(-1, 2, 2, 512)
    kv, score = pairs[:, :, 0], pairs[:, :, 1]
    e = np.exp(score - score.max(axis=1, keepdims=True))
    return (kv * e).sum(axis=1) / e.sum(axis=1)


def scores(q, weights, keys):
    """[T, rows], every row for every query."""
    return np.einsum("th,thn->tn", weights, np.maximum(np.einsum("thd,nd->thn", q, keys), 0))
