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


@pytest.mark.attention
@pytest.mark.parametrize(("heads", "next_n"), [(1, 1), (5, 6), (16, 2), (64, 3)])
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("heads") > 5)  # slow
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") in (16, 64))
def test_sparse_decode_beside_values_that_are_not_finite(lab, rng, heads, next_n):
    """Requests 0 and 2 have NaN, infinities and 1e6 in their queries and rows; requests 1 and 3 have their bits."""
    layout, topk, pages = cumla.DSV4_FP8, 20 if lab.tiny else 150, 4
    q = make_q(rng, 4, next_n, heads, layout)
    cache = make_cache(rng, layout, pages * 4, 64, spread=0)
    indices = rng.integers(0, 64 * pages, (4, next_n, topk)) + 64 * pages * np.arange(4)[:, None, None]
    indices = np.where(rng.random(indices.shape) < 0.1, -1, indices).astype(np.int32)
    lengths = rng.integers(1, topk + 1, (4, next_n)).astype(np.int32)

    def call(q, cache):
        found = cumla.sparse_mla_decode(
            lab.put(q), lab.put(cache), lab.put(indices), topk_length=lab.put(lengths), layout=layout,
            batch_invariant=True, backend=lab.backend,
        )  # fmt: skip
        return [lab.get(x)[1::2] for x in found]

    want, bad = call(q, cache), np.array([np.nan, np.inf, 1e6, -np.inf], BF16)
    q, cache = q.copy(), np.array(cache)
    q[::2] = bad[np.arange(512) % 4]
    for request in (0, 2):
        cache[pages * request : pages * (request + 1), :, :448] = 0x7F  # e4m3's NaN
    for got, expected in zip(call(q, cache), want, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("heads", [8, 70])
def test_decodes_on_any_number_of_multiprocessors(here, rng, monkeypatch, heads):
    """A kernel's thread blocks take one tile or several, by the device's SMs; no token's bits depend on it."""
    from cumla.kernels.cuda import dense_attention
    from cumla.kernels.cuda.launch import recorded_launches
    from cumla.kernels.cuda.sparse import kernels, work

    layout, found = cumla.DSV4_FP8, []
    q, cache = make_q(rng, 7, 1, heads, layout), make_cache(rng, layout, 6, 64)
    indices, lengths = make_indices(rng, 7, 1, 300, 384), rng.integers(0, 301, (7, 1)).astype(np.int32)
    dense_q, rows, table, lens = dense_arrays(rng, 3, 2, heads)
    for sms in (4, 78, 114, 132):
        for module in (kernels, work, dense_attention):
            monkeypatch.setattr(module, "device_sms", lambda device, sms=sms: sms)
        for cached in (kernels._hopper, kernels._portable_within):
            cached.cache_clear()
        with recorded_launches():  # no call is replayed from the launch cache
            sparse = cumla.sparse_mla_decode(
                here.put(q), here.put(cache), here.put(indices), topk_length=here.put(lengths), layout=layout,
                batch_invariant=True,
            )  # fmt: skip
            dense = cumla.dense_mla_decode(*map(here.put, (dense_q, rows, table, lens)), batch_invariant=True)
        found.append([here.get(x) for x in (*sparse, *dense)])
    for cached in (kernels._hopper, kernels._portable_within):
        cached.cache_clear()
    for results in found[1:]:
        for got, want in zip(results, found[0], strict=True):
            assert_same_bits(got, want)
