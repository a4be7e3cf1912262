"""Layers of the family with FP8 rows, keys and index queries, against float64 with the same roundings."""

import ml_dtypes
import numpy as np
import pytest

import oracles
from cumla.models import config_from
from oracles.key_pools import hadamard, pooled_keys
from oracles.latent import LatentLayer
from oracles.layer import LATENT
from support.family_stack import GOLDEN, FamilyStack, weights_of_module
from support.lab import BF16

STACKS = {"glm": (0, 0), "flash": (2, 3), "mistral": (6, 0), "hy": (8, 0)}  # golden cases, and their longest requests
TOKENS, SPLITS = 150, [97, 1, 52]


def in_bf16(x):
    return x.astype(BF16).astype(np.float64)


def in_fp8(x, least=0.0):
    """Rows of which 128 values have a scale, a power of two, in e4m3."""
    tiles = x.reshape(-1, 128)
    scale = 2 ** np.ceil(np.log2(np.maximum(np.abs(tiles).max(axis=1, keepdims=True), max(least, 1e-30)) / 448))
    return ((tiles / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(
        x.shape
    )


class Rounded(LatentLayer):
    """A layer whose latents, index keys and index queries are e4m3, and whose rotated values of rows are bfloat16."""

    def rows(self, x, positions):
        rows = super().rows(x, positions)
        return np.concatenate([in_fp8(rows[:, :LATENT]), in_bf16(rows[:, LATENT:])], axis=1)

    def index_keys(self, x):
        if self.spec.pool == 1:
            return in_fp8(in_bf16(super().index_keys(x)), 1e-4)
        weight, bias, ape = (self.weights[f"indexer.{name}"] for name in ("k_norm.weight", "k_norm.bias", "kpool_ape"))
        gate = self.project(x, "indexer.kpool_gate")
        keys = pooled_keys(self.project(x, "indexer.wk"), gate, weight, bias, ape, self.spec.key_eps, BF16)
        return in_fp8(in_bf16(hadamard(in_bf16(keys))), 1e-4)

    def index_queries(self, x, positions):
        q, weights = super().index_queries(x, positions)
        q = in_bf16(q)
        return in_fp8(in_bf16(hadamard(q)) if self.spec.pool > 1 else q, 1e-4), weights


def pools_of(tokens, t, pool):
    """The pools that token t selects, of the tokens that it attends to."""
    return tokens[: len(tokens) - (t + 1) % pool : pool] // pool


@pytest.mark.parametrize("name", STACKS)
def test_fp8_caches_are_float64_s_with_their_roundings(name, monkeypatch):
    """A number next to a border may round to the other side: few rows select otherwise."""
    case, request = STACKS[name]
    stack, record, rows, chosen = FamilyStack(case, "fp8"), GOLDEN["stacks"][case], {}, {}
    got, config = stack.run(request, SPLITS), config_from(record["config"])
    monkeypatch.setattr(oracles, "LatentLayer", Rounded)
    for index, number in enumerate(record["attention_layers"]):
        spec, x = config.spec(number), stack.hidden[request][index, :TOKENS].astype(np.float64)
        layer = oracles.layer_of(config, number, weights_of_module(case, number), TOKENS)
        if spec.owns_rows:
            rows[number] = layer.rows(x, np.arange(TOKENS))
        if spec.selects:
            chosen[number] = layer.chosen(x)
        picks, source = stack.picks[spec.selection_source][request], chosen[spec.selection_source]
        same = np.array([
            np.array_equal(picks[t][picks[t] >= 0], pools_of(source[t], t, spec.pool)) for t in range(TOKENS)
        ])  # fmt: skip
        assert same.mean() > 0.97
        error = got[index] - layer(x, source, rows[spec.row_source])
        want = got[index] - error
        assert np.sqrt(np.square(error[same]).mean() / np.square(want[same]).mean()) < 2e-3, number
