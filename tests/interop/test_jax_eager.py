"""Calls of cumla.interop.jax outside of jax.jit: a program for each kind of call, traced once."""

import functools
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import cumla

jax = pytest.importorskip("jax")
jnp = jax.numpy
ops = pytest.importorskip("cumla.interop.jax")

TRACED = "/jax/core/compile/jaxpr_trace_duration"
_traces = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *rest, **more: _traces.append(event))


@pytest.fixture(autouse=True)
def no_programs():
    ops._program_of.cache_clear()
    yield
    ops._program_of.cache_clear()


def traces(call):
    """What JAX traces in a call."""
    jax.block_until_ready(call())
    before = len(_traces)
    jax.block_until_ready(call())
    return _traces[before:].count(TRACED)


def decode(batch=2, topk=64, **static):
    q, cache = jnp.ones((batch, 1, 3, 512), jnp.bfloat16), jnp.zeros((1, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8)
    static = {"layout": cumla.DSV4_FP8, "block_size": 64, **static}
    return ops.sparse_mla_decode(q, cache, jnp.zeros((batch, 1, topk), jnp.int32), **static)


def insert(cache, rows=4):
    return ops.quantize_and_insert_k_cache(
        jnp.ones((rows, 512), jnp.bfloat16), cache, jnp.arange(rows, dtype=jnp.int32), block_size=64
    )


def test_a_second_call_of_a_kind_traces_nothing():
    cache = jnp.zeros((1, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8)
    for call in (decode, functools.partial(decode, softmax_scale=0.5), functools.partial(insert, cache)):
        assert traces(call) == 0
    assert ops._program_of.cache_info().currsize == 3


def test_each_kind_of_call_has_a_program_of_its_own():
    for call in (decode, lambda: decode(batch=3), lambda: decode(topk=128), lambda: decode(softmax_scale=1.0)):
        call()
    assert ops._program_of.cache_info().currsize == 4
    with pytest.raises(TypeError, match=r"block_size: got 64\.0"):
        decode(block_size=64.0)  # equals 64, and is none


def test_the_cache_that_is_given_stays_as_it_is():
    """As JAX's arrays do: the result is another array."""
    cache = jnp.zeros((1, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8)
    first, second = insert(cache), insert(cache)
    assert not np.asarray(cache).any()
    assert np.array_equal(first, second)
    assert np.asarray(first).any()


def test_calls_inside_a_users_program_keep_none_of_their_own():
    jax.block_until_ready(jax.jit(decode)())
    jax.block_until_ready(jax.jit(insert)(jnp.zeros((1, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8)))
    assert ops._program_of.cache_info().currsize == 0


def test_the_programs_kept_are_bounded(monkeypatch):
    assert ops._program_of.cache_info().maxsize == ops.MOST_PROGRAMS
    assert ops._function_of.cache_info().maxsize == ops.MOST_CHECKED  # values such as a scale may differ in each call
    made, program_of = [], ops._program_of.__wrapped__

    @functools.lru_cache(maxsize=2)
    def few(*key):
        program = program_of(*key)
        made.append(weakref.ref(program))
        return program

    monkeypatch.setattr(ops, "_program_of", few)
    for batch in (1, 2, 3):
        jax.block_until_ready(decode(batch=batch))
    gc.collect()
    assert [x() is None for x in made] == [True, False, False]


def test_no_array_of_a_call_is_kept():
    k = jnp.asarray(np.ones((4, 512), ml_dtypes.bfloat16))
    cache = jnp.zeros((1, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8)
    updated = ops.quantize_and_insert_k_cache(k, cache, jnp.arange(4, dtype=jnp.int32), block_size=64)
    jax.block_until_ready(updated)
    alive = [weakref.ref(x) for x in (k, cache, updated)]
    del k, cache, updated
    gc.collect()
    assert [x() for x in alive] == [None] * 3


def test_errors_come_in_every_call():
    """Also when a program for such arrays is known."""
    cache = jnp.zeros((1, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8)
    insert(cache)
    for _ in range(2):
        with pytest.raises(ValueError, match="slot_mapping: got shape"):
            ops.quantize_and_insert_k_cache(
                jnp.ones((4, 512), jnp.bfloat16), cache, jnp.zeros((3, 2), jnp.int32), block_size=64
            )
    cache.delete()
    with pytest.raises(ValueError, match="k_cache: got a JAX array that was deleted"):
        insert(cache)
    for _ in range(2):
        with pytest.raises(TypeError, match="unknown"):
            decode(unknown=1)
