"""Programs of several devices of the CPU: arguments and results that are sharded, and the devices of results."""

import functools

import numpy as np
import pytest

import cumla
from cumla.interop.ops import OPS
from support import operations

jax = pytest.importorskip("jax")
jnp = jax.numpy
ops = pytest.importorskip("cumla.interop.jax")

P = jax.sharding.PartitionSpec
SINGLE = jax.sharding.SingleDeviceSharding


@pytest.fixture(scope="module")
def two():
    devices = jax.devices("cpu")
    assert len(devices) == 2  # set in tests/conftest.py
    return devices


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request, two):
    kind = getattr(jax.sharding.AxisType, request.param)
    return jax.sharding.Mesh(np.array(two), ("x",), axis_types=(kind,))


def attend(q, kv, indices):
    return ops.sparse_mla_prefill(q, kv, indices)[0]


@pytest.fixture
def prefill(rng):
    """q, kv, indices and their result."""
    arrays = operations.rows(rng, 4, 8, 512), operations.rows(rng, 100, 512), operations.ints(rng, 100, 4, 16)
    return arrays, cumla.sparse_mla_prefill(*arrays)[0]


def check(got, want):
    assert operations.same_bits(np.asarray(got), want)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_sharded_arguments(wrap, mesh, prefill):
    (q, kv, indices), want = prefill
    sharded = jax.sharding.NamedSharding(mesh, P("x"))
    check(wrap(attend)(jax.device_put(q, sharded), kv, jax.device_put(indices, sharded)), want)


def test_an_argument_that_the_operation_never_gets_is_sharded(mesh, prefill):
    arrays, want = prefill
    other = jax.device_put(np.ones(8, np.float32), jax.sharding.NamedSharding(mesh, P("x")))
    got, total = jax.jit(lambda arrays, other: (attend(*arrays), other.sum()))(arrays, other)
    check(got, want)
    assert total == 8


def test_sharded_results(mesh, prefill):
    arrays, want = prefill
    sharded = jax.sharding.NamedSharding(mesh, P("x"))
    got = jax.jit(attend, out_shardings=sharded)(*arrays)
    assert got.sharding == sharded
    check(got, want)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this JAX has no jax.set_mesh")
def test_a_program_under_a_mesh(mesh, prefill):
    arrays, want = prefill
    with jax.set_mesh(mesh):
        check(attend(*arrays), want)
        check(jax.jit(attend)(*arrays), want)


def test_a_sharded_cache_that_is_donated(mesh, rng):
    cache, k = operations.fp8_cache(rng, cumla.DSV4_FP8), operations.rows(rng, 2, 512)
    slots = np.array([3, 20], np.int32)
    sharded = jax.device_put(cache, jax.sharding.NamedSharding(mesh, P("x")))
    insert = jax.jit(lambda cache: ops.quantize_and_insert_k_cache(k, cache, slots), donate_argnums=0)
    updated = insert(sharded)
    cumla.quantize_and_insert_k_cache(k, cache, slots)
    check(updated, cache)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_devices_part_inside_shard_map(wrap, check_vma, two, prefill):
    arrays, want = prefill
    mesh = jax.sharding.Mesh(np.array(two), ("x",))
    specs = P("x"), P(), P("x")
    on = functools.partial(jax.shard_map, attend, mesh=mesh, in_specs=specs, check_vma=check_vma)
    check(wrap(on(out_specs=P("x")))(*arrays), want)


def test_results_that_vary_are_not_taken_for_equal_ones(two, prefill):
    """JAX would return the first device's part as the whole result."""
    arrays, _ = prefill
    mesh = jax.sharding.Mesh(np.array(two), ("x",))
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(mapped, *arrays)


def test_pmap(two, prefill):
    (q, kv, indices), want = prefill
    got = jax.pmap(lambda q, indices: attend(q, kv, indices))(q.reshape(2, 2, 8, 512), indices.reshape(2, 2, 16))
    check(got.reshape(want.shape), want)


def test_loops_checkpoints_and_custom_derivatives(prefill):
    """The exit hook's effect must be one that JAX allows there."""
    (q, kv, indices), want = prefill
    total = float(want.astype(np.float32).sum())

    def scaled(x):
        return x * attend(jax.lax.stop_gradient(jnp.asarray(q)), kv, indices).astype(jnp.float32).sum()

    def looped(x):
        return jax.lax.scan(lambda x, _: (scaled(x), None), x, length=1)[0]

    def chosen(x):
        return jax.lax.cond(x > 0, scaled, lambda x: x, x)

    @jax.custom_vjp
    def with_gradient(x):
        return scaled(x)

    with_gradient.defvjp(lambda x: (scaled(x), None), lambda _, g: (2 * g,))
    for function, expected in (
        (jax.checkpoint(scaled), total), (looped, total), (chosen, total), (jax.checkpoint(looped), total),
        (with_gradient, 2),
    ):  # fmt: skip
        np.testing.assert_allclose(jax.jit(jax.grad(function))(1.0), expected, rtol=1e-5)


@pytest.mark.parametrize("case", operations.CASES)
def test_results_are_on_the_device_of_the_arguments(case, two, rng):
    """Also results of cumla's functions, for any default device."""
    arguments = operations.CASES[case](rng)
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    name = operations.operation(case)
    for device, default in ((two[1], two[0]), (two[0], two[1])):
        with jax.default_device(default):
            given = jax.device_put(arrays, device)
            results = [getattr(ops, name)(**given, **static)]
            if not OPS[name].writes:
                results.append(getattr(cumla, name)(**given, **static))
        for result in jax.tree.leaves(results):
            assert isinstance(result, jax.Array)
            assert result.devices() == {device}, name
            assert result.committed


def test_results_of_arrays_that_jax_may_move_may_be_moved(two, prefill):
    (q, kv, indices), _ = prefill
    with jax.default_device(two[1]):
        arrays = [jnp.asarray(x) for x in (q, kv, indices)]
    result = cumla.sparse_mla_prefill(*arrays)[0]
    assert (result.devices(), result.committed) == ({two[1]}, False)
    assert (result + jax.device_put(np.asarray(q), two[0])).devices() == {two[0]}


def test_layers_and_metadata_stay_on_the_device(two):
    from cumla.metadata import CommonAttentionMetadata

    table = jax.device_put(np.arange(4, dtype=np.int32).reshape(2, 2), two[1])
    batch = CommonAttentionMetadata.from_lengths([1, 5], [9, 5], table, 8)
    for array in (batch.query_start_loc, batch.seq_lens, batch.slot_mapping):
        assert array.devices() == {two[1]}


def test_arrays_of_several_devices_name_the_argument(two, prefill):
    q, kv, indices = (jax.device_put(x, two[0]) for x in prefill[0])
    elsewhere = jax.device_put(kv, two[1])
    first, second = map(str, two)
    with pytest.raises(ValueError, match=f"^kv: got an array on {second}, expected it on {first} as q"):
        ops.sparse_mla_prefill(q, elsewhere, indices)
    mesh = jax.sharding.Mesh(np.array(two), ("x",))
    everywhere = jax.device_put(kv, jax.sharding.NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match=r"^kv: got a JAX array sharded over 2 devices, expected one device"):
        cumla.sparse_mla_prefill(q, everywhere, indices)


def test_programs_cannot_be_exported():
    """docs/jax.md says so."""
    insert = jax.jit(functools.partial(ops.quantize_and_insert_k_cache, block_size=operations.BLOCK))
    shapes = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((2, 512), jnp.bfloat16), ((3, operations.BLOCK, 584), jnp.uint8), ((2,), jnp.int32))
    )
    export = pytest.importorskip("jax.export")
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        export.export(insert)(*shapes)
