"""Arguments of cumla.interop.jax_parallel: errors name the caller's argument, not its conversion."""

import functools

import numpy as np
import pytest

import cumla
from support import operations

jax = pytest.importorskip("jax")
jnp = jax.numpy
parallel = pytest.importorskip("cumla.interop.jax_parallel")

P = jax.sharding.PartitionSpec
SPARSE = {"layout": "DSV4_FP8", "block_size": 64}


def trace(function, **arrays):
    """Trace a function of a rank's arrays, the same on two ranks. Other arguments are not changed."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("cp",))
    given = {name: x for name, x in arrays.items() if isinstance(x, (np.ndarray, jax.Array))}
    rest = {name: x for name, x in arrays.items() if name not in given}

    def on(given):
        return function("cp", **given, **rest)

    return jax.eval_shape(jax.shard_map(on, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), given)


def dense_arguments():
    return {
        "q": jnp.zeros((4, 8, 576), jnp.bfloat16), "k_cache": jnp.zeros((6, 64, 576), jnp.bfloat16),
        "block_table": jnp.zeros((4, 2), jnp.int32), "cache_seqlens": jnp.ones(4, jnp.int32),
        "attn_sink": jnp.zeros(8),
    }  # fmt: skip


def sparse_arguments():
    return {
        "q": jnp.zeros((4, 8, 512), jnp.bfloat16), "indices": jnp.zeros((4, 16), jnp.int32),
        "k_cache": jnp.zeros((6, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8), "topk_length": jnp.ones(4, jnp.int32),
        "extra_indices": jnp.zeros((4, 3), jnp.int32), "attn_sink": jnp.zeros(8),
        "extra_k_cache": jnp.zeros((6, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8), "extra_block_size": 64, **SPARSE,
    }  # fmt: skip


@pytest.mark.parametrize("split_heads", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results(split_heads, dtype):
    """Results are for the rank's heads, here all heads of q."""
    dense, sparse = dense_arguments(), sparse_arguments()
    dense |= {"q": dense["q"].astype(dtype), "k_cache": dense["k_cache"].astype(dtype)}
    if dtype == jnp.float16:
        sparse["q"] = sparse["q"].astype(jnp.float32)
    for function, arguments in ((parallel.dense_decode, dense), (parallel.sparse_decode, sparse)):
        out, lse = trace(function, **arguments, split_heads=split_heads)
        assert (out.shape, out.dtype) == ((4, 8, 512), arguments["q"].dtype)
        assert (lse.shape, lse.dtype) == ((4, 8), jnp.float32)


@pytest.mark.parametrize(
    ("function", "name", "shape", "message"),
    [
        ("dense", "q", (4, 1, 8, 576), r"q: got shape \(4, 1, 8, 576\), expected \[T, h, d\]"),
        ("dense", "q", (8, 576), r"q: got shape \(8, 576\), expected \[T, h, d\]"),
        ("dense", "attn_sink", (7,), r"attn_sink: got shape \(7,\), expected \[h\] with h = 8"),
        ("dense", "attn_sink", (8, 1), r"attn_sink: got shape \(8, 1\), expected \[h\] with h = 8"),
        ("sparse", "q", (4, 1, 8, 512), r"q: got shape \(4, 1, 8, 512\), expected \[T, h, d\]"),
        ("sparse", "indices", (4, 1, 16), r"indices: got shape \(4, 1, 16\), expected \[T, topk\]"),
        ("sparse", "indices", (4,), r"indices: got shape \(4,\), expected \[T, topk\]"),
        ("sparse", "extra_indices", (4, 1, 3), r"extra_indices: got shape \(4, 1, 3\), expected \[T, extra_topk\]"),
        ("sparse", "attn_sink", (16,), r"attn_sink: got shape \(16,\), expected \[h\] with h = 8"),
    ],
)
def test_shapes_are_those_that_were_passed(function, name, shape, message):
    arguments = dense_arguments() if function == "dense" else sparse_arguments()
    given = {**arguments, name: jnp.zeros(shape, arguments[name].dtype)}
    for split_heads in (False, True):
        with pytest.raises(ValueError, match=f"^{message}"):
            trace(getattr(parallel, f"{function}_decode"), **given, split_heads=split_heads)


def test_lengths():
    lens = functools.partial(trace, parallel.local_seq_lens)
    assert lens(seq_lens=jnp.zeros(5, jnp.int32), s_q=3, interleave=4).shape == (15,)
    for changes, error, message in (
        ({"seq_lens": jnp.zeros((5, 1), jnp.int32)}, ValueError, r"seq_lens: got shape \(5, 1\), expected \[R\]"),
        ({"seq_lens": jnp.zeros(5)}, TypeError, "seq_lens: got dtype float32, expected int32"),
        ({"interleave": 0}, ValueError, "interleave: got 0, expected at least 1"),
        ({"s_q": 0}, ValueError, "s_q: got 0, expected at least 1"),
        ({"seq_lens": [2**40]}, OverflowError, f"seq_lens: got {2**40}, which int32 does not have"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            lens(**{"seq_lens": jnp.zeros(5, jnp.int32), **changes})


def test_localised_indices():
    arguments = {
        "indices": jnp.zeros((4, 16), jnp.int32), "token_to_req_indices": jnp.zeros(4, jnp.int32),
        "block_table": jnp.zeros((2, 3), jnp.int32), "block_size": 64, "is_valid_token": jnp.ones(4, bool),
    }  # fmt: skip
    slots, lens = trace(parallel.localise_indices, **arguments)
    assert (slots.shape, lens.shape) == ((4, 16), (4,))
    for changes, message in (
        ({"indices": jnp.zeros((4, 1, 16), jnp.int32)}, r"indices: got shape \(4, 1, 16\), expected \[T, K\]"),
        ({"block_table": jnp.zeros(2, jnp.int32)}, r"block_table: got shape \(2,\), expected \[R, B\]"),
        ({"interleave": 0}, "shard.interleave: got 0, expected at least 1"),
        ({"block_size": 0}, "block_size: got 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            trace(parallel.localise_indices, **{**arguments, **changes})


def test_merged_partials_have_shapes(rng):
    parts, lses = operations.rows(rng, 3, 2, 1, 4, 512), np.zeros((3, 2, 4, 1), np.float32)
    out, lse = parallel.merge_partials(parts, lses)
    assert (out.shape, lse.shape) == ((2, 1, 4, 512), (2, 4, 1))
    with pytest.raises(ValueError, match=r"^parts: got shape \(2, 1, 4, 512\), expected \[n, b, s_q, h, d\]"):
        parallel.merge_partials(parts[0], lses)
