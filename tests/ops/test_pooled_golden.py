"""GLM-5.3-Flash's sparse layers out of operations, in float32: selections and outputs as transformers computes them."""

import json

import numpy as np
import pytest

import cumla
from oracles.basics import rms_norm
from support.golden import DATA

STACKS = json.loads((DATA / "family.json").read_text())["stacks"]
FLASH = [i for i, x in enumerate(STACKS) if x["config"]["model_type"] == "glm5_next_text"]
BLOCK, DIM, LATENT = 64, 128, 512


def weights_of(stack):
    rng, found = np.random.Generator(np.random.PCG64(stack["seed"])), {}
    for name, shape in sorted(stack["parameters"].items()):
        n = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("compress_ape"):
            n *= np.float32(0.5)
        elif "norm" in name and name.endswith("weight"):
            n = 1 + np.float32(0.1) * n
        elif name.endswith("bias"):
            n *= np.float32(0.1)
        elif n.ndim > 1:
            n /= np.float32(np.sqrt(shape[-1]))
        found[name] = n.astype(np.float64)
    return found


class Layer:
    """A layer that owns a selection: caches of all requests, a ring each."""

    def __init__(self, stack, number, requests, tokens):
        self.config, self.pool = stack["config"], stack["config"]["index_kpool"]
        prefix = f"model.layers.{number}.self_attn."
        self.w = {x.removeprefix(prefix): w for x, w in weights_of(stack).items() if x.startswith(prefix)}
        pages = -(-tokens // (BLOCK * self.pool))
        self.table = np.arange(requests * pages, dtype=np.int32).reshape(requests, pages)[:, ::-1].copy()
        self.keys = np.zeros((self.table.size, BLOCK, DIM), np.float32)
        self.rows = np.zeros((self.table.size, BLOCK * self.pool, LATENT), np.float32)
        self.state = np.full((requests, cumla.metadata.ring_capacity(3, self.pool), 2 * DIM), np.nan, np.float32)

    def step(self, x, owner, positions, starts):
        """x float64 [T, hidden] -> pools [T, topk / P], slots, lengths, outputs [T, hidden]."""
        w, heads, pool, eps = self.w, self.config["num_attention_heads"], self.pool, self.config["rms_norm_eps"]
        page = BLOCK * pool
        slots = self.table[owner, positions // page].astype(np.int64) * page + positions % page
        c = rms_norm(x @ w["kv_a_proj_with_mqa.weight"].T, eps, w["kv_a_layernorm.weight"])
        self.rows.reshape(-1, LATENT)[slots] = c
        k, gate = x @ w["indexer.wk.weight"].T, x @ w["indexer.index_kpool_compress_gate"].T
        f32 = [a.astype(np.float32) for a in (
            k, gate, w["indexer.k_norm.weight"], w["indexer.k_norm.bias"], w["indexer.index_kpool_compress_ape"]
        )]  # fmt: skip
        capacity = self.state.shape[1]
        cumla.indexer_kpool_and_insert(
            *f32, self.state, owner * capacity + positions % capacity, self.keys,
            np.where((positions + 1) % pool == 0, slots // pool, -1), positions, starts, layout="INDEXER_F32",
        )  # fmt: skip
        latent = rms_norm(x @ w["q_a_proj.weight"].T, eps, w["q_a_layernorm.weight"])
        index_heads = self.config["index_n_heads"]
        q = (latent @ w["indexer.wq_b.weight"].T).reshape(-1, index_heads, DIM).astype(np.float32)
        head_weights = (x @ w["indexer.weights_proj.weight"].T).astype(np.float32)
        q, head_weights = cumla.fused_indexer_q_rope_quant(
            positions, q, None, head_weights, quantize=False, hadamard=True
        )
        topk, tokens = self.config["index_topk"] // pool, len(x)
        chosen = np.zeros((tokens, topk * pool + pool - 1), np.int32), np.zeros(tokens, np.int32)
        pools = cumla.indexer_topk(
            q[:, None], self.keys, head_weights, topk, context_lens=((positions + 1) // pool).astype(np.int32),
            block_table=self.table[owner], slots=chosen, pool=pool, positions=positions.astype(np.int32),
            layout="INDEXER_F32",
        )  # fmt: skip
        nope, width = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        up = w["kv_b_proj.weight"].reshape(heads, nope + width, LATENT)
        own_q = (latent @ w["q_b_proj.weight"].T).reshape(-1, heads, nope)
        absorbed = np.einsum("thn,hnl->thl", own_q, up[:, :nope]).astype(np.float32)
        out, _ = cumla.sparse_mla_decode(
            absorbed[:, None], self.rows, chosen[0][:, None], topk_length=chosen[1][:, None], layout="DSV4_F32",
            softmax_scale=nope**-0.5,
        )  # fmt: skip
        values = np.einsum("thl,hvl->thv", out[:, 0].astype(np.float64), up[:, nope:])
        return pools, *chosen, values.reshape(tokens, -1) @ w["o_proj.weight"].T


def schedules(lens):
    """Each request's steps: as in the golden data, as one, and other chunks (a border at every offset in a pool)."""
    yield "golden", lens
    yield "one shot", [[sum(x)] for x in lens]
    yield "chunks", [np.diff([0, *range(5 + i, sum(x), 37 + i), sum(x)]).tolist() for i, x in enumerate(lens)]


@pytest.mark.parametrize("case", FLASH)
@pytest.mark.parametrize("schedule", ["golden", "one shot", "chunks"])
def test_layers(case, schedule):
    stack, golden = STACKS[case], np.load(DATA / "family.npz")
    lens = dict(schedules(stack["requests"]))[schedule]
    totals = [sum(x) for x in lens]
    layers = stack["attention_layers"]
    inputs = [
        np.random.Generator(np.random.PCG64(stack["seed"] + 7 + q)).standard_normal(
            (len(layers), n, stack["config"]["hidden_size"]), dtype=np.float32
        ).astype(np.float64)
        for q, n in enumerate(totals)
    ]  # fmt: skip
    for at, number in enumerate(layers):
        if f"{case}/0/picks{number}" not in golden:
            continue  # another layer's selection
        layer = Layer(stack, number, len(lens), max(totals))
        found = [[] for _ in lens]
        done = [0] * len(lens)
        for turn in range(max(map(len, lens))):  # requests of one step, last ones first
            parts = [(q, done[q], lens[q][turn]) for q in reversed(range(len(lens))) if turn < len(lens[q])]
            owner = np.concatenate([np.full(n, q) for q, _, n in parts])
            positions = np.concatenate([np.arange(first, first + n) for _, first, n in parts])
            x = np.concatenate([inputs[q][at, first : first + n] for q, first, n in parts])
            starts = np.cumsum([0] + [n for _, _, n in parts]).astype(np.int32)
            results = layer.step(x, owner, positions, starts)
            for (q, _, n), start in zip(parts, starts, strict=False):
                found[q].append([y[start : start + n] for y in results])
                done[q] += n
        for q in range(len(lens)):
            pools, slots, lengths, out = (np.concatenate(x) for x in zip(*found[q], strict=True))
            clear = golden[f"{case}/{q}/gap{number}"] > 1e-5
            rows = golden[f"{case}/{q}/pick_rows"]
            kept = clear[rows]
            np.testing.assert_array_equal(pools[rows][kept], golden[f"{case}/{q}/picks{number}"][kept])
            page = BLOCK * layer.pool
            for token in rows[kept]:
                own = pools[token][pools[token] >= 0]
                tail = np.arange((token + 1) // layer.pool * layer.pool, token + 1)
                tokens = np.concatenate([(own[:, None] * layer.pool + np.arange(layer.pool)).reshape(-1), tail])
                want = layer.table[q, tokens // page] * page + tokens % page
                np.testing.assert_array_equal(slots[token, : lengths[token]], want)
            rows = golden[f"{case}/{q}/rows"]
            want = golden[f"{case}/{q}/out"][at]
            kept = clear[rows]
            largest = abs(want).max()
            assert abs(out[rows][kept] - want[kept]).max() < 1e-4 * largest
