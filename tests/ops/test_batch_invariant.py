"""batch_invariant=True: a token's bits do not depend on the other tokens of the call, nor on their number."""

import numpy as np
import pytest

import cumla
from support.attention import make_cache, make_indices, make_q
from support.lab import BF16
from support.operations import assert_same_bits


def dense_arrays(rng, requests, queries, heads, columns=12, block=64):
    q = rng.standard_normal((requests, queries, heads, 576)).astype(BF16)
    cache = (0.1 * rng.standard_normal((columns, block, 576))).astype(BF16)
    table = rng.integers(-1, columns + 1, (requests, columns)).astype(np.int32)
    lens = rng.integers(queries, columns * block, requests).astype(np.int32)
    return q, cache, table, lens


@pytest.mark.attention
@pytest.mark.parametrize("queries", [1, 3, 6])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("queries") == 3)
def test_dense_decode_of_a_token_and_of_a_batch(lab, rng, queries):
    """Each query alone, as a request of one token, and with draft tokens of its own and other requests."""
    requests, columns, block = (2, 2, 16) if lab.tiny else (3, 12, 64)
    q, cache, table, lens = dense_arrays(rng, requests, queries, 2 if lab.tiny else 5, columns, block)
    lens[0] = columns * block

    def call(q, table, lens):
        found = cumla.dense_mla_decode(
            lab.put(q), lab.put(cache), lab.put(table), lab.put(lens), batch_invariant=True, backend=lab.backend
        )
        return [lab.get(x) for x in found]

    out, lse = call(q, table, lens)
    for request in range(requests):
        for i in range(queries):
            seen = lens[request : request + 1] - (queries - 1 - i)
            alone, its = call(q[request : request + 1, i : i + 1], table[request : request + 1], seen)
            assert_same_bits(alone[0, 0], out[request, i])
            assert_same_bits(its[0, :, 0], lse[request, :, i])


def sparse_arguments(rng):
    layout = cumla.DSV4_FP8
    return make_q(rng, 2, 1, 8, layout), make_cache(rng, layout, 3, 64), make_indices(rng, 2, 1, 20, 192)


@pytest.mark.parametrize("in_plan", [False, True])
def test_a_plan_of_the_other_kind_is_refused(rng, in_plan):
    q, cache, indices = sparse_arguments(rng)
    message = f"created with batch_invariant={in_plan}, expected {not in_plan}, as in the call"
    plan = cumla.DecodePlan(batch_invariant=in_plan)
    out = np.full(q.shape, 7, BF16)
    with pytest.raises(ValueError, match=f"plan: got a DecodePlan {message}"):
        cumla.sparse_mla_decode(q, cache, indices, plan=plan, batch_invariant=not in_plan, out=out)
    assert (out == 7).all()
    q, cache, table, lens = dense_arrays(rng, 2, 1, 3)
    dense_plan = cumla.DenseDecodePlan(batch_invariant=in_plan)
    with pytest.raises(ValueError, match=f"plan: got a DenseDecodePlan {message}"):
        cumla.dense_mla_decode(q, cache, table, lens, plan=dense_plan, batch_invariant=not in_plan)


def test_supports_knows_of_a_plan_of_the_other_kind():
    arrays = {
        "q": ((2, 1, 64, 512), "bfloat16"),
        "k_cache": ((16, 64, 584), "uint8"),
        "indices": ((2, 1, 128), "int32"),
    }
    asked = {"op": "sparse_mla_decode", "capability": "9.0", "batch_invariant": True, **arrays}
    assert cumla.supports(**asked, plan=cumla.DecodePlan(batch_invariant=True))
    refused = cumla.supports(**asked, plan=cumla.DecodePlan())
    assert not refused
    assert "batch_invariant=False" in refused.reason


@pytest.mark.parametrize("groups", [(), (2,)])
@pytest.mark.parametrize("is_ue8m0", [False, True])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("groups") and x.get("is_ue8m0"))
def test_products_of_any_number_of_tokens(lab, rng, groups, is_ue8m0):
    """On the host 1 to 300 tokens; elsewhere numbers around the sizes of tiles."""
    rows, columns = (3, 64) if lab.tiny else (200, 576)
    most, counts = 300, [1, 2, 8, 9, 33, 64, 127, 128, 129, 200]
    if lab.backend == "cpu":
        counts = range(1, 300)
    elif lab.tiny:
        most, counts = 20, [1, 8, 9]
    x = rng.standard_normal((most, *groups, columns)).astype(BF16)
    weight = rng.integers(0, 0x70, (*groups, rows, columns)).astype(np.uint8)
    exponents = rng.uniform(-9, -7, (*groups, -(-rows // 128), -(-columns // 128)))
    scale = np.exp2(np.round(exponents) if is_ue8m0 else exponents).astype(np.float32)
    given = {"is_ue8m0": is_ue8m0, "finite_weights": is_ue8m0, "batch_invariant": True, "backend": lab.backend}

    def call(some):
        return lab.get(cumla.fp8_block_linear(lab.put(x[some]), lab.put(weight), lab.put(scale), **given))

    everything = call(np.arange(most))
    for count in counts:
        some = rng.permutation(most)[:count]
        assert_same_bits(call(some), everything[some])


def test_products_beside_values_that_are_not_finite(lab, rng):
    tokens, rows, columns = (9, 3, 64) if lab.tiny else (40, 100, 256)
    x = rng.standard_normal((tokens, columns)).astype(BF16)
    weight = rng.integers(0, 0x70, (rows, columns)).astype(np.uint8)
    scale = np.full((-(-rows // 128), -(-columns // 128)), 0.01, np.float32)

    def call(x):
        result = cumla.fp8_block_linear(
            lab.put(x), lab.put(weight), lab.put(scale), batch_invariant=True, backend=lab.backend
        )
        return lab.get(result)

    want = call(x)
    poisoned = x.copy()
    poisoned[1::2] = np.array([np.nan, 1e6, np.inf, -np.inf], BF16)[np.arange(columns) % 4]
    assert_same_bits(call(poisoned)[::2], want[::2])
