"""The JAX part of parallel.py, in its own process: prints its rows as JSON, one per line.

parallel_jax.py RANKS
"""

import functools
import json
import os
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cumla.interop.jax as ops
import cumla.interop.jax_parallel as parallel

SIZE = int(sys.argv[1])
BLOCK, HEADS, SCALE, CALLS = 64, 128, 192**-0.5, 30
DENSE = {"b4 h128 ctx 262144": (4, 262144, 1.6), "b64 h128 ctx 16384": (64, 16384, None)}


def us(call):
    """Time of one of several consecutive calls."""
    for _ in range(3):
        jax.block_until_ready(call())
    times = []
    for _ in range(7):
        start = time.perf_counter()
        results = [call() for _ in range(CALLS)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) * 1e6 / CALLS)
    return statistics.median(times)


def row(config, impl, time_us, **more):
    print(json.dumps({"op": "dense_mla_decode (jit)", "config": config, "impl": impl, "us_graph": time_us, **more}),
          flush=True)  # fmt: skip


def dense(config, batch, context, bar):
    mesh = Mesh(np.array(jax.devices()[:SIZE]), ("cp",))
    cp, everywhere = PartitionSpec("cp"), PartitionSpec()
    columns = context // BLOCK
    first = jax.devices()[0]
    with jax.default_device(first):
        keys = jax.random.split(jax.random.key(0), 2)
        page = jax.random.normal(keys[0], (1 << 14, 576), jnp.bfloat16)
        cache = jnp.tile(page, (batch * context // len(page), 1)).reshape(-1, BLOCK, 576)
        q = (0.3 * jax.random.normal(keys[1], (batch, HEADS, 576))).astype(jnp.bfloat16)
        table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
        lens = jnp.full(batch, context, jnp.int32)
    whole = jax.jit(
        lambda q, *rest: ops.dense_mla_decode(q[:, None], *rest, softmax_scale=SCALE, max_seqlen=context)[0][:, 0]
    )
    want = np.asarray(whole(q, cache, table, lens)).astype(np.float32)
    flop = 2 * batch * HEADS * context * (576 + 512)
    us_of_one = us(functools.partial(whole, q, cache, table, lens))
    row(config, "one GPU", us_of_one, flop=flop)

    # Pages sharded: rank r has columns r, r + size, ... of each request, packed.
    by_rank = cache.reshape(batch, columns // SIZE, SIZE, BLOCK, 576).transpose(2, 0, 1, 3, 4)
    by_rank = jax.device_put(by_rank.reshape(-1, BLOCK, 576), NamedSharding(mesh, cp))
    del cache
    own = jnp.arange(batch * columns // SIZE, dtype=jnp.int32).reshape(batch, -1)
    tables = jax.device_put(jnp.tile(own, (SIZE, 1)), NamedSharding(mesh, cp))
    q, lens = jax.device_put((q, lens), NamedSharding(mesh, everywhere))

    def on(q, cache, table, lens):
        mine = parallel.local_seq_lens("cp", lens, interleave=BLOCK)
        return parallel.dense_decode("cp", q, cache, table, mine, softmax_scale=SCALE, max_seqlen=context // SIZE)[0]

    attend = jax.jit(
        jax.shard_map(on, mesh=mesh, in_specs=(everywhere, cp, cp, everywhere), out_specs=everywhere, check_vma=False)
    )
    got = np.asarray(attend(q, by_rank, tables, lens)).astype(np.float32)
    error = float(np.abs(got - want).max())
    assert error < 4e-3, error
    us_of_all = us(functools.partial(attend, q, by_rank, tables, lens))
    row(config, f"jax x{SIZE}", us_of_all, flop=flop, max_abs_err=error)
    print(f"  {us_of_one / us_of_all:.2f} times as fast as one GPU; bar {bar}", flush=True)

    if batch > 4:
        return

    def eight(q, *rest):
        for _ in range(8):
            q = q.at[..., :512].set(on(q, *rest))
        return q

    def eight_on_one(q, *rest):
        for _ in range(8):
            out = ops.dense_mla_decode(q[:, None], *rest, softmax_scale=SCALE, max_seqlen=context)[0][:, 0]
            q = q.at[..., :512].set(out)
        return q

    layers = jax.jit(
        jax.shard_map(
            eight, mesh=mesh, in_specs=(everywhere, cp, cp, everywhere), out_specs=everywhere, check_vma=False
        )
    )
    layers(q, by_rank, tables, lens)
    us_of_layers = us(functools.partial(layers, q, by_rank, tables, lens)) / 8
    row(config, f"jax x{SIZE}, 8 in a function", us_of_layers, flop=flop)
    del by_rank
    with jax.default_device(first):
        cache = jnp.tile(page, (batch * context // len(page), 1)).reshape(-1, BLOCK, 576)
        q, lens = jax.device_put((q, lens), first)
        us_of_layers_on_one = us(functools.partial(jax.jit(eight_on_one), q, cache, table, lens)) / 8
    row(config, "one GPU, 8 in a function", us_of_layers_on_one, flop=flop)
    print(f"  eight in a function: {us_of_layers_on_one / us_of_layers:.2f} times as fast", flush=True)


if __name__ == "__main__":
    for name, numbers in DENSE.items():
        dense(name, *numbers)
