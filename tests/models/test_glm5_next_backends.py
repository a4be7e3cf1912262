"""Layers of GLM-5.3-Flash on every backend; FP8 rows and keys against float64 with the same roundings."""

import ml_dtypes
import numpy as np
import pytest

from cumla.models import output_projection, products, queries
from oracles.basics import rms_norm
from oracles.key_pools import hadamard, pooled_keys
from support.backends import only
from support.family_stack import GOLDEN, FamilyStack, weights_of_module
from support.lab import BF16

POOLS_OF_4, POOLS_OF_16 = 2, 4  # golden cases
LONG = {POOLS_OF_4: 3, POOLS_OF_16: 0}  # their longest requests


@pytest.mark.parametrize("cache_format", ["float32", "fp8"])
@pytest.mark.parametrize("case", LONG)
def test_every_operation_is_on_the_layers_backend(case, cache_format):
    """Prompts and decodes, of layers that select and of one that takes their selection."""
    stack = FamilyStack(case, cache_format, "reference")
    with only("reference"):
        for first, count in ((0, 41), (41, 1), (42, 3)):
            stack.step([(LONG[case], first, count)])


def test_outputs_and_selections_of_the_reference_are_transformers():
    stack = FamilyStack(POOLS_OF_4, backend="reference")
    for request in (1, 2):
        stack.check(request, stack.run(request, GOLDEN["stacks"][POOLS_OF_4]["requests"][request]))


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["bfloat16", "fp8"])
def test_portable_kernels(lab, monkeypatch, cache_format):
    """One layer, on the device and on the host. Products are NumPy's: the simulated device has none.

    Tensor cores take weights times scales in bfloat16; the simulator does not round them. CUDA's own kernels, emulated,
    are off by 1.3% (FP8) and 0.6% (bfloat16) for this.
    """

    def product(x, weight, out, backend):
        x, weight = (np.asarray(lab.get(each)).astype(np.float32) for each in (x, weight))
        result = (x @ weight.transpose(0, 2, 1)).astype(lab.get(out).dtype)
        out[...] = result if isinstance(out, np.ndarray) else lab.put(result)

    if lab.backend != "numba_cuda":
        pytest.skip("other backends have products")
    for module in (products, queries, output_projection):
        monkeypatch.setattr(module, "multiply_groups", product)
    outputs, picks = [], []
    for stack in (
        FamilyStack(POOLS_OF_4, cache_format, "numba_cuda", "bfloat16", lab=lab),
        FamilyStack(POOLS_OF_4, cache_format, "cpu", "bfloat16"),
    ):
        stack.layers, stack.numbers = stack.layers[:1], stack.numbers[:1]
        outputs.append(stack.run(LONG[POOLS_OF_4], [38, 1]).astype(np.float64))
        picks.append(stack.picks[stack.numbers[0]][LONG[POOLS_OF_4]])
    for t in range(39):
        np.testing.assert_array_equal(*(chosen[t] for chosen in picks))
    got, want = outputs
    bound = 0.03 if lab.on_device else 0.01
    assert np.sqrt(np.square(got - want).mean() / np.square(want).mean()) < bound


def in_fp8(x, least=0.0):
    """Rows of 128 values in e4m3 with a scale, a power of two."""
    tiles = x.reshape(-1, 128)
    scale = 2 ** np.ceil(np.log2(np.maximum(np.abs(tiles).max(axis=1, keepdims=True), max(least, 1e-30)) / 448))
    return ((tiles / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(
        x.shape
    )


def rotated(x):
    """As indexers do before FP8: rounded to bfloat16 before and after."""
    return hadamard(x.astype(BF16).astype(np.float64)).astype(BF16).astype(np.float64)


def float64_layer(config, weights, x):
    """Outputs, and the pools that each token selects, with FP8 rows, keys and index queries."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    pool, heads, nope, eps = config["index_kpool"], config["num_attention_heads"], config["qk_nope_head_dim"], 1e-5
    rows = in_fp8(rms_norm(x @ w["kv_a_proj_with_mqa.weight"].T, eps, w["kv_a_layernorm.weight"]))
    latent = rms_norm(x @ w["q_a_proj.weight"].T, eps, w["q_a_layernorm.weight"])
    keys = pooled_keys(
        x @ w["indexer.wk.weight"].T, x @ w["indexer.index_kpool_compress_gate"].T, w["indexer.k_norm.weight"],
        w["indexer.k_norm.bias"], w["indexer.index_kpool_compress_ape"], 1e-6, BF16,
    )  # fmt: skip
    keys = in_fp8(rotated(keys), 1e-4)
    index_q = in_fp8(rotated((latent @ w["indexer.wq_b.weight"].T).reshape(len(x), -1, 128)), 1e-4)
    share = x @ w["indexer.weights_proj.weight"].T
    scores = np.einsum("thk,th->tk", np.maximum(np.einsum("thd,kd->thk", index_q, keys), 0), share)
    up = w["kv_b_proj.weight"].reshape(heads, -1, 512)
    q = np.einsum("thn,hnl->thl", (latent @ w["q_b_proj.weight"].T).reshape(len(x), heads, nope), up[:, :nope])
    outputs, picks = [], []
    for t in range(len(x)):
        complete = (t + 1) // pool
        best = np.argsort(-scores[t, :complete], kind="stable")[: config["index_topk"] // pool]
        picks.append(np.sort(best))
        tokens = [*(best[:, None] * pool + np.arange(pool)).reshape(-1), *range(complete * pool, t + 1)]
        logits = q[t] @ rows[tokens].T * nope**-0.5
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        o = p / p.sum(axis=1, keepdims=True) @ rows[tokens]
        outputs.append(np.einsum("hl,hvl->hv", o, up[:, nope:]).reshape(-1) @ w["o_proj.weight"].T)
    return np.stack(outputs), picks


def test_fp8_caches_are_float64_s_with_their_roundings():
    """A number next to a border may round to the other side: few rows select otherwise."""
    stack, request, tokens = FamilyStack(POOLS_OF_4, "fp8"), LONG[POOLS_OF_4], 150
    got = stack.run(request, [97, 1, 52])
    config = GOLDEN["stacks"][POOLS_OF_4]["config"]
    for index, number in enumerate(stack.numbers):
        weights = weights_of_module(POOLS_OF_4, number)
        want, picks = float64_layer(config, weights, stack.hidden[request][index, :tokens].astype(np.float64))
        chosen = stack.picks[number][request]
        same = np.array([np.array_equal(chosen[t][chosen[t] >= 0], picks[t]) for t in range(tokens)])
        assert same.mean() > 0.97
        error = got[index][same] - want[same]
        assert np.sqrt(np.square(error).mean() / np.square(want[same]).mean()) < 2e-3
