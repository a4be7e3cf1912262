"""cumla's operations inside jax.jit: the same bits as eager calls, caches in place, errors with a remedy."""

import functools
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.arrays import dlpack
from cumla.interop.ops import OPS
from support import operations
from support.lab import BF16

jax = pytest.importorskip("jax")
jnp = jax.numpy
ops = pytest.importorskip("cumla.interop.jax")

PLATFORMS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLATFORMS)
def device(request):
    return jax.devices(request.param)[0]


def split(arguments):
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in arguments.items() if name not in arrays}


def eager(case, arguments, device):
    """The public call on NumPy or CuPy arrays, results on the host."""
    writes = OPS[operations.operation(case)].writes
    if device.platform == "cpu":
        return operations.expected(case, arguments, writes)
    import cupy

    return [array.get() for array in operations.expected(case, arguments, writes, cupy.asarray)]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", operations.CASES)
def test_every_operation_gives_the_bits_of_an_eager_call(case, jitted, device, rng):
    arguments = operations.CASES[case](rng)
    arrays, static = split(arguments)
    function = functools.partial(getattr(ops, operations.operation(case)), **static)
    with jax.default_device(device):
        results = (jax.jit(function) if jitted else function)(**jax.device_put(arrays, device))
    results = results if isinstance(results, tuple) else (results,)
    want = eager(case, arguments, device)
    assert len(results) == len(want)
    for got, expected in zip(results, want, strict=True):
        assert got.devices() == {device}
        assert operations.same_bits(np.asarray(got), expected)


@pytest.mark.parametrize("case", operations.CASES)
def test_shapes_and_dtypes_are_known_without_running(case, rng):
    arguments = operations.CASES[case](rng)
    arrays, static = split(arguments)
    function = functools.partial(getattr(ops, operations.operation(case)), **static)
    types = jax.eval_shape(function, **jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays))
    want = operations.expected(case, arguments, OPS[operations.operation(case)].writes)
    types = types if isinstance(types, tuple) else (types,)
    assert [(x.shape, x.dtype) for x in types] == [(x.shape, x.dtype) for x in want]


def insert(cache, k, slots):
    return ops.quantize_and_insert_k_cache(k, cache, slots, operations.BLOCK)


def insert_arguments(rng, device):
    arguments = {
        "k": operations.rows(rng, 5, 512), "k_cache": operations.fp8_cache(rng, cumla.DSV4_FP8),
        "slot_mapping": np.array([3, -1, 20, 7, 8], np.int32), "block_size": operations.BLOCK,
    }  # fmt: skip
    arrays = [arguments[name] for name in ("k_cache", "k", "slot_mapping")]
    return [jnp.copy(jax.device_put(array, device)) for array in arrays], arguments


def test_a_donated_cache_is_updated_where_it_is(device, rng):
    (cache, k, slots), arguments = insert_arguments(rng, device)
    where = cache.unsafe_buffer_pointer()
    updated = jax.jit(insert, donate_argnums=0)(cache, k, slots)
    assert updated.unsafe_buffer_pointer() == where
    assert cache.is_deleted()
    (want,) = eager("quantize_and_insert_k_cache-DSV4_FP8", arguments, device)
    assert operations.same_bits(np.asarray(updated), want)


def test_a_cache_that_is_not_donated_stays_as_it_was(device, rng):
    (cache, k, slots), arguments = insert_arguments(rng, device)
    updated = jax.jit(insert)(cache, k, slots)
    assert operations.same_bits(np.asarray(cache), arguments["k_cache"])
    assert not operations.same_bits(np.asarray(updated), arguments["k_cache"])


def test_an_old_version_of_a_donated_cache_that_is_still_needed_is_kept(device, rng):
    """XLA must copy: the test reads the first insert's rows after a second insert to the same slots."""
    (cache, k, slots), _ = insert_arguments(rng, device)
    q = jax.device_put(rng.standard_normal((1, 1, 2, 512)).astype(BF16), device)
    indices = jax.device_put(np.array([[[3, 20]]], np.int32), device)

    def two_versions(cache, k, slots, q, indices):
        first = insert(cache, k, slots)
        second = insert(first, -k, slots)
        return second, ops.sparse_mla_decode(q, first, indices)[1], ops.sparse_mla_decode(q, second, indices)[1]

    with jax.default_device(device):
        _, lse_of_first, lse_of_second = jax.jit(two_versions, donate_argnums=0)(cache, k, slots, q, indices)
        alone = ops.sparse_mla_decode(q, insert(jnp.copy(insert_again(rng, device)), k, slots), indices)[1]
    assert float(lse_of_first[0, 0, 0]) == float(alone[0, 0, 0])
    assert float(lse_of_second[0, 0, 0]) != float(lse_of_first[0, 0, 0])


def insert_again(rng, device):
    """A cache for slots that the test reads: both are written first."""
    return jax.device_put(np.zeros((operations.BLOCKS, operations.BLOCK, 584), np.uint8), device)


def test_fp8_caches_keep_their_dtype(device, rng):
    (cache, k, slots), arguments = insert_arguments(rng, device)
    as_float8 = jax.lax.bitcast_convert_type(cache, jnp.float8_e4m3fn)
    updated = jax.jit(insert)(as_float8, k, slots)
    assert updated.dtype == jnp.float8_e4m3fn
    (want,) = eager("quantize_and_insert_k_cache-DSV4_FP8", arguments, device)
    assert operations.same_bits(np.asarray(updated).view(np.uint8), want)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"])
def test_other_8_bit_floats_are_refused_while_tracing(dtype, rng):
    """Their bytes would be read as e4m3."""
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    arguments["k_cache"] = arguments["k_cache"].view(getattr(ml_dtypes, dtype))
    arrays, static = split(arguments)
    with pytest.raises(TypeError, match=f"k_cache: got dtype {dtype}, expected float8_e4m3fn or bytes"):
        jax.eval_shape(functools.partial(ops.sparse_mla_decode, **static), **arrays)


@pytest.mark.parametrize("by_name", [False, True])
def test_keys_and_scales_may_be_a_pair(by_name, rng):
    """DeepGEMM takes a pair, and so does cumla's function."""
    arguments = operations.CASES["fp8_mqa_logits"](rng)
    kv = arguments["kv"], arguments["kv_scales"]
    q, *rest = (arguments[name] for name in ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke"))
    pair = tuple(map(jnp.asarray, kv))

    def logits(q, pair, weights, starts, ends):
        if by_name:
            return ops.fp8_mqa_logits(q=q, kv=pair, weights=weights, cu_seqlen_ks=starts, cu_seqlen_ke=ends)
        return ops.fp8_mqa_logits(q, pair, weights, starts, ends)

    want = cumla.fp8_mqa_logits(q, kv, *rest)
    assert operations.same_bits(np.asarray(jax.jit(logits)(q, pair, *rest)), want)
    with pytest.raises(ValueError, match="kv: got 3 arrays, expected"):
        logits(q, (*pair, q), *rest)


def decode_step(cache, k, q, selected, table, slots, seq_lens, sink):
    """A C4A layer's step for a batch of decodes: insert, map window and selected rows, attend."""
    requests = len(seq_lens)
    starts, token_to_req = jnp.arange(requests + 1, dtype=jnp.int32), jnp.arange(requests, dtype=jnp.int32)
    valid = slots >= 0
    cache = ops.quantize_and_insert_k_cache(k, cache, slots, operations.BLOCK)
    window, window_lens = ops.compute_swa_indices_and_lens(
        starts, seq_lens, token_to_req, valid, table, operations.BLOCK, 3, requests
    )
    rows, row_lens = ops.compute_global_topk_indices_and_lens(selected, token_to_req, table, operations.BLOCK, valid)
    out, lse = ops.sparse_mla_decode(
        q[:, None], cache, window[:, None], topk_length=window_lens, extra_k_cache=cache,
        extra_indices=rows[:, None], extra_topk_length=row_lens, attn_sink=sink,
    )  # fmt: skip
    return cache, out[:, 0] * 1, lse


def decode_step_eagerly(cache, k, q, selected, table, slots, seq_lens, sink):
    requests = len(seq_lens)
    xp = dlpack.namespace_of(q)
    starts, token_to_req = xp.arange(requests + 1, dtype=np.int32), xp.arange(requests, dtype=np.int32)
    valid = slots >= 0
    cumla.quantize_and_insert_k_cache(k, cache, slots, operations.BLOCK)
    window, window_lens = cumla.compute_swa_indices_and_lens(
        starts, seq_lens, token_to_req, valid, table, operations.BLOCK, 3, requests
    )
    rows, row_lens = cumla.compute_global_topk_indices_and_lens(selected, token_to_req, table, operations.BLOCK, valid)
    out, lse = cumla.sparse_mla_decode(
        q[:, None], cache, window[:, None], topk_length=window_lens, extra_k_cache=cache,
        extra_indices=rows[:, None], extra_topk_length=row_lens, attn_sink=sink,
    )  # fmt: skip
    return cache, out[:, 0], lse


def test_a_layers_decode_step_in_one_jitted_function(device, rng):
    """Several steps through one compiled function, with changing lengths and slots, against eager calls."""
    cache = operations.fp8_cache(rng, cumla.DSV4_FP8)
    jitted = jax.jit(decode_step, donate_argnums=0)
    table = operations.page_table(rng)
    sink = rng.standard_normal(2).astype(np.float32)
    ours, seq_lens = jnp.copy(jax.device_put(cache, device)), np.array([2, 5, 1], np.int32)
    for _ in range(4):
        slots = table[np.arange(3), (seq_lens - 1) // operations.BLOCK] * operations.BLOCK
        slots = (slots + (seq_lens - 1) % operations.BLOCK).astype(np.int32)
        step = (
            operations.rows(rng, 3, 512), operations.rows(rng, 3, 2, 512), operations.ints(rng, 2, 3, 4) - 1, table,
            slots, seq_lens, sink,
        )  # fmt: skip
        ours, out, lse = jitted(ours, *jax.device_put(step, device))
        if device.platform == "cpu":
            cache, want_out, want_lse = decode_step_eagerly(cache, *step)
        else:
            import cupy

            results = decode_step_eagerly(cupy.asarray(cache), *(cupy.asarray(x) for x in step))
            cache, want_out, want_lse = (x.get() for x in results)
        assert operations.same_bits(np.asarray(ours), cache)
        assert operations.same_bits(np.asarray(out), want_out)
        assert operations.same_bits(np.asarray(lse), want_lse)
        seq_lens = seq_lens + 1


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_vmap_is_an_error(wrap, rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    cache, indices = arguments["k_cache"], arguments["indices"]
    decode = wrap(lambda q: ops.sparse_mla_decode(q, cache, indices))
    with pytest.raises(ValueError, match=r"sparse_mla_decode: got arrays of jax.vmap, expected whole ones"):
        jax.vmap(decode)(arguments["q"][None])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, jax.jacfwd])
def test_differentiation_is_an_error(transform, wrap, rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    cache, indices, q = arguments["k_cache"], arguments["indices"], jnp.asarray(arguments["q"])
    lse = wrap(lambda q: ops.sparse_mla_decode(q, cache, indices)[1].sum())
    with pytest.raises(ValueError, match=r"^sparse_mla_decode: got arrays of jax.grad.*expected .*stop_gradient"):
        transform(lse)(q)
    scaled = wrap(lambda q, x: x * lse(jax.lax.stop_gradient(q)))
    assert jax.grad(scaled, argnums=1)(q, 2.0) == lse(q)


def test_early_release_is_a_static_argument():
    choose = jax.jit(lambda x: ops.top_k_per_row(x, 2, early_release=False))
    assert choose(jnp.array([[1.0, 3.0, 2.0]])).tolist() == [[1, 2]]
    assert "early_release: False:" in ops.top_k_per_row.__doc__


def test_signatures_and_documentation_are_those_of_calls_under_jit():
    decode = inspect.signature(ops.sparse_mla_decode)
    assert not {"out", "lse", "plan", "stream"} & set(decode.parameters)
    assert decode.parameters["q"].annotation == "jax.Array"
    assert decode.parameters["attn_sink"].annotation == "jax.Array | None"
    assert decode.return_annotation == "tuple[jax.Array, jax.Array]"
    assert inspect.signature(ops.quantize_and_insert_k_cache).return_annotation == "jax.Array"
    assert inspect.signature(ops.qnorm_rope_and_insert).return_annotation == "tuple[jax.Array, jax.Array]"
    for name, op in OPS.items():
        function = getattr(ops, name)
        assert (function.__name__, function.__module__) == (name, "cumla.interop.jax")
        absent = set(inspect.signature(op.function).parameters) - set(inspect.signature(function).parameters)
        described = set(re.findall(r"^ {4}(\w+):", function.__doc__, re.MULTILINE))
        assert described, name
        assert not absent & described, name
        assert all(written in function.__doc__.splitlines()[0] for written in op.writes)
        if absent & {"out", "plan", "stream"}:
            assert "Source" in function.__doc__ or "Source" not in op.function.__doc__, name


@pytest.mark.parametrize("name", sorted(OPS))
def test_arguments_that_do_not_fit_name_the_operation(name):
    parameters = inspect.signature(getattr(ops, name)).parameters
    given = {key: None for key, parameter in parameters.items() if parameter.default is parameter.empty}
    with pytest.raises(TypeError, match=f"^{name}: got an unexpected keyword argument 'head', expected {name}\\("):
        getattr(ops, name)(**given, head=3)
    with pytest.raises(TypeError, match=f"^{name}: missing a required argument"):
        getattr(ops, name)()


def test_the_documentation_s_example_runs(rng):
    """On V4's raw pages."""
    blocks = [part for part in ops.__doc__.split("\n\n") if part.startswith("    ")]
    names = {
        "functools": functools, "jax": jax, "jnp": jnp, "num_blocks": 3, "slots": jnp.array([3, 70], jnp.int32),
        "k": jnp.asarray(operations.rows(rng, 2, 512)), "q": jnp.asarray(operations.rows(rng, 2, 1, 4, 512)),
        "indices": jnp.array([[[3, 70]]] * 2, jnp.int32),
    }  # fmt: skip
    exec(textwrap.dedent("\n\n".join(blocks)), names)
    assert names["out"].shape == (2, 1, 4, 512)
    assert float(jnp.abs(names["out"]).max()) > 0


@pytest.mark.parametrize("attempt", range(2))
def test_a_program_that_exits_while_calls_are_under_way(attempt):
    """XLA's threads cannot enter Python after that: without the exit hook four of five such processes abort."""
    example = Path(__file__).parents[2] / "examples" / "with_jax.py"
    lines = [line for line in example.read_text().splitlines() if "block_until_ready" not in line]
    assert len(lines) == len(example.read_text().splitlines()) - 1
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_arrays_of_other_kinds_are_taken_as_jax_takes_them(rng):
    """Also lists of numbers, which are not arrays yet."""
    arguments = operations.CASES["compute_global_topk_indices_and_lens"](rng)
    want = ops.compute_global_topk_indices_and_lens(**arguments)
    lists = {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    for got, expected in zip(ops.compute_global_topk_indices_and_lens(**lists), want, strict=True):
        assert operations.same_bits(np.asarray(got), np.asarray(expected))


def test_wrong_ranks_are_found_while_tracing(rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    with pytest.raises(ValueError, match=r"q: got shape \(2, 3, 576\), expected \[b, s_q, h, any\]"):
        jax.eval_shape(ops.sparse_mla_decode, arguments["q"][0], arguments["k_cache"], arguments["indices"])


def test_wrong_types_are_found_while_tracing(rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)

    def trace(**changed):
        arrays = {**arguments, **changed}
        jax.eval_shape(ops.sparse_mla_decode, *(arrays[name] for name in ("q", "k_cache", "indices")))

    trace()
    with pytest.raises(TypeError, match="indices: got dtype uint16, expected int32"):
        trace(indices=arguments["indices"].astype(np.uint16))
    with pytest.raises(TypeError, match="q: got dtype float16, expected bfloat16 or float32"):
        trace(q=arguments["q"].astype(np.float16))
    with pytest.raises(ValueError, match=r"indices: got shape \(1, 2, 8\), expected \[b, s_q, any\]"):
        trace(indices=arguments["indices"][:1])


def test_errors_of_values_are_raised_at_run_time_and_name_the_argument(rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    arguments["attn_sink"] = np.full(3, np.nan, np.float32)
    arrays, static = split(arguments)
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="attn_sink: got NaN for head 0, expected numbers"):
        jax.block_until_ready(jax.jit(functools.partial(ops.sparse_mla_decode, **static))(**arrays))


def test_what_an_eager_call_cannot_write_points_here(rng):
    cache = jax.numpy.asarray(operations.fp8_cache(rng, cumla.DSV4_FP8))
    with pytest.raises(ValueError, match=r"k_cache: got a read-only jax array, .* cumla\.interop\.jax returns"):
        cumla.quantize_and_insert_k_cache(operations.rows(rng, 3, 512), cache, np.arange(3))


def test_traced_numbers_are_an_error(rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    decode = jax.jit(lambda scale: ops.sparse_mla_decode(**arguments, softmax_scale=scale))
    with pytest.raises(TypeError, match="softmax_scale: got a traced value, expected a static one"):
        decode(0.5)


def test_results_cannot_be_given(rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lse'"):
        ops.sparse_mla_decode(**arguments, lse=np.zeros((2, 3, 1), np.float32))


def test_nothing_is_compiled_twice(rng):
    arguments = operations.CASES["quantize_and_insert_k_cache-DSV4_FP8"](rng)
    arrays, static = split(arguments)
    jitted = jax.jit(lambda **arrays: ops.quantize_and_insert_k_cache(**arrays, **static))
    for _ in range(3):
        jitted(**arrays)
    assert jitted._cache_size() == 1
    assert ops._function_of.cache_info().misses <= len(operations.CASES) * 4


@pytest.mark.gpu
def test_a_step_is_captured_in_a_command_buffer(calls, rng):
    """XLA replays the launches of the operations instead of calling Python again."""
    device = jax.devices("cuda")[0]
    jitted = jax.jit(decode_step, donate_argnums=0)
    cache = jax.device_put(operations.fp8_cache(rng, cumla.DSV4_FP8), device)
    table, seq_lens = operations.page_table(rng), np.array([2, 5, 1], np.int32)
    step = jax.device_put(
        (operations.rows(rng, 3, 512), operations.rows(rng, 3, 2, 512), operations.ints(rng, 2, 3, 4) - 1, table,
         np.array([4, 9, 13], np.int32), seq_lens, rng.standard_normal(2).astype(np.float32)), device
    )  # fmt: skip
    counts = []
    for _ in range(12):
        cache, out, _ = jitted(cache, *step)
        out.block_until_ready()
        counts.append(len(calls))
    assert counts[-1] == counts[-2] == counts[-3], counts


@pytest.mark.gpu
def test_prefills_are_captured_in_a_command_buffer(calls, monkeypatch, rng):
    """Enough prefills for XLA to build a graph; all memory is XLA's, and each replay has its own rows."""

    def refuse(*arguments):
        raise AssertionError(f"allocated: {arguments}")

    monkeypatch.setattr(dlpack, "empty", refuse)
    device = jax.devices("cuda")[0]

    @jax.jit
    def chain(q, kv, indices, length):
        for _ in range(6):
            q, most, lse = ops.sparse_mla_prefill(q, kv, indices, topk_length=length)
        return q, most, lse

    import cupy

    indices, length = operations.ints(rng, 300, 5, 200), np.array([200, 0, 64, 1, 130], np.int32)
    given = tuple(cupy.empty((5, 64, *rest), dtype) for rest, dtype in (((512,), BF16), ((), "f4"), ((), "f4")))
    counts = []
    for _ in range(12):
        q, kv = operations.rows(rng, 5, 64, 512), operations.rows(rng, 300, 512)
        results = jax.block_until_ready(chain(*jax.device_put((q, kv, indices, length), device)))
        counts.append(len(calls))
        arrays = [cupy.asarray(x) for x in (q, kv, indices)]
        for _ in range(6):
            cumla.sparse_mla_prefill(*arrays, topk_length=cupy.asarray(length), out=given)
            arrays[0] = given[0].copy()
        for got, wanted in zip(results, given, strict=True):
            assert operations.same_bits(np.asarray(got), wanted.get())
    assert counts[-1] == counts[-2] == counts[-3], counts
