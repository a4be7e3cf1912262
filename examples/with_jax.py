"""A decode step under jax.jit, on CPU or GPU: the cache is donated and updated in place."""

import functools

import jax
import jax.numpy as jnp

import cumla
import cumla.interop.jax as ops

REQUESTS, HEADS, BLOCK_SIZE, WINDOW = 4, 16, 64, 128


@functools.partial(jax.jit, donate_argnames="cache")
def step(cache, k, q, block_table, seq_lens):
    """Insert each request's newest row and attend to its window. Returns the cache and the output."""
    requests = jnp.arange(REQUESTS + 1, dtype=jnp.int32)
    last = seq_lens - 1
    slots = jnp.take_along_axis(block_table, last[:, None] // BLOCK_SIZE, axis=1)[:, 0] * BLOCK_SIZE + last % BLOCK_SIZE
    cache = ops.quantize_and_insert_k_cache(k, cache, slots, BLOCK_SIZE)
    indices, lens = ops.compute_swa_indices_and_lens(
        requests, seq_lens, requests[:-1], slots >= 0, block_table, BLOCK_SIZE, WINDOW, REQUESTS
    )
    out, _ = ops.sparse_mla_decode(
        q[:, None], cache, indices[:, None], layout=cumla.DSV4_FP8, block_size=BLOCK_SIZE, topk_length=lens
    )
    return cache, out[:, 0]


def main() -> None:
    # JAX arrays have no strides, so the pages' padding is part of the array: [num_blocks, page_bytes].
    cache = jnp.zeros((12, cumla.DSV4_FP8.page_bytes(BLOCK_SIZE)), jnp.uint8)
    where = cache.unsafe_buffer_pointer()
    block_table = jax.random.permutation(jax.random.key(0), 12).reshape(REQUESTS, 3).astype(jnp.int32)
    seq_lens = jnp.array([1, 60, 64, 127], jnp.int32)
    for i in range(5):
        key_k, key_q = jax.random.split(jax.random.key(i))
        k = jax.random.normal(key_k, (REQUESTS, 512), jnp.bfloat16)
        q = jax.random.normal(key_q, (REQUESTS, HEADS, 512), jnp.bfloat16)
        cache, out = step(cache, k, q, block_table, seq_lens)
        seq_lens = seq_lens + 1
    jax.block_until_ready((cache, out))  # before the program exits: calls run in XLA's threads
    in_place = cache.unsafe_buffer_pointer() == where
    print(f"out {out.dtype} {out.shape} on {jax.default_backend()}, cache updated in place: {in_place}")


if __name__ == "__main__":
    main()
