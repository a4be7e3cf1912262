"""Arguments of operations under jax.jit: 64-bit integers, host arrays that change, and values that are not arrays."""

import functools
import inspect
import re
import types

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.interop.ops import OPS
from cumla.metadata import (
    CommonAttentionMetadata,
    MLACommonMetadataBuilder,
    MLAConfig,
    SequenceGroup,
    compute_positions,
    compute_slot_mapping,
)
from cumla.parallel import ContextAttention
from support import operations

jax = pytest.importorskip("jax")
jnp = jax.numpy
ops = pytest.importorskip("cumla.interop.jax")

ONE_OF_EACH = [next(x for x in operations.CASES if operations.operation(x) == name) for name in OPS]
BEYOND = 2**32 + 1  # its low 32 bits are a valid index
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"])
def x64(request):
    with enable_x64(request.param):
        yield request.param


def split(arguments):
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in arguments.items() if name not in arrays}


def own(case, arguments):
    """Results of cumla's function on copies, and the arrays that it writes."""
    return operations.expected(case, arguments, OPS[operations.operation(case)].writes)


def assert_same(got, want):
    got = got if isinstance(got, tuple) else (got,)
    for ours, theirs in zip(got, want, strict=True):
        operations.assert_same_bits(np.asarray(ours), theirs)


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_integers_of_64_bits(case, x64, rng):
    """Values that fit are accepted, also if JAX has 32 bits and cumla's function takes 64."""
    arguments = operations.CASES[case](rng)
    want, function = own(case, arguments), getattr(ops, operations.operation(case))
    wide = {name: x.astype(np.int64) for name, x in arguments.items() if getattr(x, "dtype", None) == np.int32}
    written = OPS[operations.operation(case)].writes
    for name, array in wide.items():
        if name in written:
            continue
        given = {**arguments, name: array}
        try:
            own(case, given)
            taken = True
        except TypeError:
            taken = not x64
        if taken:
            assert_same(function(**given), want)
            continue
        with pytest.raises(TypeError, match=f"^{name}: got dtype int64, expected int32"):
            function(**given)


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_no_integer_is_cut_to_32_bits(case, rng):
    arguments = operations.CASES[case](rng)
    for name, x in arguments.items():
        if getattr(x, "dtype", None) == np.int32 and x.size:
            given = x.astype(np.int64)
            given.flat[-1] = BEYOND
            for value in (given, given.tolist()):
                with pytest.raises(OverflowError, match=f"^{name}: got {BEYOND}, which int32 does not have"):
                    getattr(ops, operations.operation(case))(**{**arguments, name: value})


def test_slots_beyond_32_bits_skip_their_row_where_jax_has_64(rng):
    cache, k = cumla.DSV4_FP8.allocate(4, 64), operations.rows(rng, 1, 512)
    with enable_x64(True):
        assert not np.asarray(ops.quantize_and_insert_k_cache(k, np.asarray(cache), np.array([BEYOND]))).any()


def test_floats_are_rounded_and_never_become_infinite(rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    sink = np.array([0.1, 1e30, -np.inf])
    got = ops.sparse_mla_decode(**{**arguments, "attn_sink": sink})
    assert_same(got, own("sparse_mla_decode-V32_FP8", {**arguments, "attn_sink": sink.astype(np.float32)}))
    with pytest.raises(OverflowError, match=r"^attn_sink: got 1e\+300, which float32 does not have"):
        ops.sparse_mla_decode(**{**arguments, "attn_sink": np.array([0.1, 1e300, 1])})


@pytest.mark.parametrize(("pages", "want"), [([3, 2**26], [192, 2**32]), ([-1, 2**25], [-1, 2**31])])
def test_slots_that_cumla_computes_for_jax(pages, want, x64):
    """Slots beyond 32 bits become the largest number, which no cache has, not another row's slot."""
    with jax.default_device(jax.devices("cpu")[1]):
        starts, lens, table = jnp.array([0, 1, 2]), jnp.array([1, 1]), jnp.array(pages)[:, None]
        starts, lens, table = (x.astype(jnp.int32) for x in (starts, lens, table))
    slots = compute_slot_mapping(2, starts, lens, table, 64)
    batch = CommonAttentionMetadata.from_lengths([1, 1], [1, 1], table, 64)
    for got in (slots, batch.slot_mapping):
        assert got.dtype == (np.int64 if x64 else np.int32)
        assert got.tolist() == [slot if x64 else min(slot, 2**31 - 1) for slot in want]
    assert compute_positions(2, starts, lens).tolist() == [0, 0]


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_host_arrays_that_are_changed_afterwards(case, rng):
    """A call on the CPU may run after it has returned."""
    arguments = operations.CASES[case](rng)
    want = own(case, arguments)
    arrays, static = split(arguments)
    for _ in range(4):
        given = {name: np.array(x) for name, x in arrays.items()}
        results = getattr(ops, operations.operation(case))(**given, **static)
        for array in given.values():
            array.view(np.uint8)[...] = 0x7F
        assert_same(results, want)


def test_batches_of_jax_arrays_do_not_change_with_their_host_arrays():
    """XLA shares aligned host memory, so some of many arrays would be shared."""
    for requests in range(1, 40, 3):
        table = jnp.zeros((requests, 2), jnp.int32)
        batch = CommonAttentionMetadata.from_lengths([1] * requests, [9] * requests, table, 8)
        batch.seq_lens_cpu[:] = 77
        batch.query_start_loc_cpu[:] = 77
        assert batch.seq_lens.tolist() == [9] * requests
        assert batch.query_start_loc.tolist() == list(range(requests + 1))


def test_metadata_of_sequence_groups_does_not_change_with_its_host_arrays():
    for groups in range(1, 40, 3):
        builder = MLACommonMetadataBuilder(MLAConfig(block_size=8, max_num_seqs=64), "reference")
        for i in range(groups):
            builder.add_seq_group(SequenceGroup(False, [i], [9], [1], [8], {i: [0, 1]}))
        metadata, grouped = builder.build_groups(jnp.zeros(1))
        for host in (grouped.seq_lens, grouped.block_table, grouped.slot_mapping):
            host[:] = 77
        assert metadata.seq_lens_tensor.tolist() == [9] * groups
        assert metadata.block_tables.tolist() == [[0, 1]] * groups
        assert metadata.slot_mapping.tolist() == [8] * groups


def test_a_ranks_buffer_for_queries_is_copied(rng):
    """Its memory is written again by the next call."""
    attention, like = ContextAttention(types.SimpleNamespace(memory=None)), jnp.zeros(1, jnp.float32)
    before = attention.queries(1, 1, 512, like)
    want = np.array(before)
    attention._array("q", (1, 1, 512), np.dtype(np.float32), np.zeros(1, np.float32))[:] = 77
    np.testing.assert_array_equal(np.asarray(before), want)


def deleted(x):
    array = jnp.array(x)
    array.delete()
    return array


WRONG = {
    "a deleted array": (deleted, ValueError, "got a JAX array that was deleted"),
    "keys": (lambda x: jax.random.split(jax.random.key(0), 3), TypeError, r"got dtype key<.*>, expected numbers"),
    "text": (lambda x: "abc", TypeError, "got str, expected an array"),
    "a dict": (lambda x: {1: 2}, TypeError, "got dict, expected an array"),
    "a shape": (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), TypeError, "got ShapeDtypeStruct, expected an array"),
    "objects": (lambda x: np.array([None]), (TypeError, ValueError), "got"),
    "dates": (lambda x: np.zeros(3, "M8[D]"), TypeError, "got dtype datetime64"),
    "a mask": (lambda x: np.ma.masked_equal(np.arange(3), 1), TypeError, "got a masked array"),
    "a 0-d array": (lambda x: np.array(3, np.int32), (TypeError, ValueError), "got"),
    "half bytes": (lambda x: jnp.zeros((3,), jnp.int4), (TypeError, ValueError), "got"),
}
ONLY_HERE = {  # cumla's functions accept neither lists nor mutable arrays
    "a ragged list": (lambda x: [[1], [1, 2]], ValueError, "setting an array element with a sequence"),
    "a list of text": (lambda x: ["a"], TypeError, "got dtype <U1"),
    "a large integer": (lambda x: [2**70], TypeError, "got dtype object"),
    **(
        {"a mutable array": (lambda x: jax.new_ref(jnp.array(x)), TypeError, "got a Ref, expected an array")}
        if hasattr(jax, "new_ref")
        else {}
    ),
    "float0": (lambda x: np.zeros(3, jax.dtypes.float0), TypeError, "got dtype"),
}


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_what_is_no_array_of_numbers_names_the_argument(case, rng):
    arguments = operations.CASES[case](rng)
    name = operations.operation(case)
    functions = getattr(ops, name), getattr(cumla, name)
    for argument in OPS[name].arrays:
        if not isinstance(arguments.get(argument), np.ndarray):
            continue
        if argument == "scale" and arguments.get("kv_cache_dtype") == "auto":
            continue  # ignored
        for function, wrong in ((functions[0], {**WRONG, **ONLY_HERE}), (functions[1], WRONG)):
            for kind, (make, error, message) in wrong.items():
                if kind == "a 0-d array" and argument == "scale":
                    continue  # one of a whole cache
                with pytest.raises(error, match=rf"^({argument}|kv\[\d\] \(\w+\)): {message}"):
                    function(**{**arguments, argument: make(arguments[argument])})


@pytest.mark.parametrize("wrong", [np.float32(2), np.int64(2), np.bool_(True), 1j, 2.5, 3, True])
def test_numbers_are_no_arrays(wrong, rng):
    arguments = operations.CASES["sparse_mla_decode-V32_FP8"](rng)
    for function in (ops.sparse_mla_decode, cumla.sparse_mla_decode):
        kind = "int(64)?" if isinstance(wrong, np.int64) else type(wrong).__name__
        with pytest.raises(TypeError, match=f"^indices: got {kind}, expected an array"):
            function(**{**arguments, "indices": wrong})


@pytest.mark.parametrize("wrap", [float, np.float32, np.float64])
def test_a_scale_is_a_number_of_any_kind(wrap, rng):
    case = "concat_and_cache_mla-e4m3-one-scale"
    arguments = operations.CASES[case](rng)
    arguments["scale"] = 0.5
    want = own(case, arguments)
    assert_same(ops.concat_and_cache_mla(**{**arguments, "scale": wrap(0.5)}), want)


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_statics_that_cannot_be_hashed_name_the_argument(case, rng):
    arguments, op = operations.CASES[case](rng), OPS[operations.operation(case)]
    for argument, parameter in op.signature.parameters.items():
        if argument in op.arrays or argument == "backend":
            continue
        plain = parameter.annotation.removesuffix(" | None")
        for value in (np.array([3]), jnp.array([3]), jax.random.key(0), [3], {}):
            if plain == "CacheLayout | str":
                continue
            with pytest.raises((TypeError, ValueError), match=f"^{argument}: got "):
                getattr(ops, op.name)(**{**arguments, argument: value})


def test_equal_statics_of_another_type_are_checked_for_themselves(rng):
    """64 == 64.0, and True == 1: a check of one value does not cover the other."""
    arguments = operations.CASES["quantize_and_insert_k_cache-DSV4_FP8"](rng)
    insert = functools.partial(ops.quantize_and_insert_k_cache, **arguments)
    insert(block_size=operations.BLOCK, is_ue8m0=True)
    with pytest.raises(TypeError, match=r"^block_size: got 4.0 of type float, expected an integer"):
        insert(block_size=float(operations.BLOCK))
    with pytest.raises(TypeError, match=r"^is_ue8m0: got 1 of type int, expected True or False"):
        insert(is_ue8m0=1)
    insert(block_size=np.int32(operations.BLOCK), is_ue8m0=np.True_)


def test_arrays_of_other_frameworks(rng):
    torch = pytest.importorskip("torch")
    case = "sparse_mla_decode-V32_FP8"
    arguments = operations.CASES[case](rng)
    want = own(case, arguments)
    bits = {np.dtype(ml_dtypes.bfloat16): np.int16}
    tensors = {name: torch.from_numpy(x.view(bits.get(x.dtype, x.dtype))) for name, x in split(arguments)[0].items()}
    tensors["q"] = tensors["q"].view(torch.bfloat16)
    static = split(arguments)[1]
    assert_same(ops.sparse_mla_decode(**tensors, **static), want)
    tensors["k_cache"] = tensors["k_cache"].view(torch.float8_e4m3fn)
    assert_same(ops.sparse_mla_decode(**tensors, **static), want)
    tensors["k_cache"] = tensors["k_cache"].view(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"^k_cache: got dtype float8_e5m2, expected float8_e4m3fn or bytes"):
        ops.sparse_mla_decode(**tensors, **static)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_values_of_other_types(case, dtype, rng):
    """Results have the types of cumla's function, if it accepts the values."""
    arguments = operations.CASES[case](rng)
    arguments = {
        n: x.astype(dtype) if getattr(x, "dtype", None) == operations.BF16 else x for n, x in arguments.items()
    }
    try:
        want = own(case, arguments)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            getattr(ops, operations.operation(case))(**arguments)
        return
    assert_same(getattr(ops, operations.operation(case))(**arguments), want)


def test_results_come_before_written_arrays():
    """Their order is the same as in cumla's functions."""
    for name, op in OPS.items():
        parameters = list(op.signature.parameters)
        assert list(op.writes) == sorted(op.writes, key=parameters.index), name
        optional = [x for x in op.writes if op.signature.parameters[x].default is None]
        assert [x for group in op.optional_writes for x in group] == optional, name
    returns = {name: inspect.signature(getattr(ops, name)).return_annotation for name in OPS}
    pair = "tuple[jax.Array, jax.Array]"
    assert returns["compress_and_insert"] == f"{pair} | tuple[jax.Array, jax.Array, jax.Array, jax.Array]"
    assert returns["compress_latents"] == f"jax.Array | {pair} | tuple[jax.Array, jax.Array, jax.Array, jax.Array]"
    assert ops.compress_and_insert.__doc__.splitlines()[0].endswith(
        "Returns state_cache and k_cache updated; with index_state_cache and index_k_cache given, these too."
    )
    assert ops.compress_latents.__doc__.splitlines()[0].endswith(
        "Returns latents updated; with state_cache given, this too; with restart_rows and restart_positions given, "
        "these too."
    )
    assert ops.qnorm_rope_and_insert.__doc__.splitlines()[0].endswith("Returns its results, then k_cache updated.")
