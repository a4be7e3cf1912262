"""`supports` predicts a call, and the call agrees."""

import inspect

import ml_dtypes
import numpy as np
import pytest

import cumla
import cumla.parallel
import emulation
from cumla.dispatch import backends
from cumla.kernels.cuda.compile import programs_asked_for
from support.calls import put
from support.lab import Lab
from support.operations import CASES, EXAMPLES, NO_OPERATIONS, arguments_of, operation

LAB = Lab("cuda", on_device=True)
Q, CACHE, INDICES = ((2, 1, 64, 512), "bfloat16"), ((16, 64, 584), "uint8"), ((2, 1, 128), "int32")


def types_of(arguments):
    return {name: (x.shape, x.dtype) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


@pytest.mark.parametrize("case", CASES)
def test_what_can_be_called_is_supported(case, rng):
    found = cumla.supports(operation(case), device=-1, **types_of(CASES[case](rng)))
    assert found
    assert found.backend == "cpu"
    assert all("." in kernel for kernel in found.kernels)
    assert found.kernels


def test_nothing_is_written_or_allocated():
    big = (2**25, 64, 584)  # 1.2 TB
    assert cumla.supports(cumla.sparse_mla_decode, q=Q, k_cache=(big, "uint8"), indices=INDICES, device=-1)
    cache = np.ones((2, 4, 584), np.uint8)
    assert cumla.supports(
        "quantize_and_insert_k_cache", k=((3, 512), "float32"), k_cache=cache, slot_mapping=((3,), np.int64), device=-1
    )
    assert (cache == 1).all()


@pytest.mark.parametrize("of", [lambda t: t.__name__, lambda t: t, np.dtype], ids=["name", "type", "dtype"])
def test_of_the_8_bit_floats_e4m3_is_served(of):
    """As in a call, however a framework writes them: JAX has types, NumPy dtypes."""

    def found(dtype):
        types = {"x": ((2, 128), "bfloat16"), "weight": ((128, 128), of(dtype)), "weight_scale": ((1, 1), "float32")}
        return cumla.supports("fp8_block_linear", **types, device=-1)

    assert found(ml_dtypes.float8_e4m3fn)
    for other in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu):
        assert found(other).reason == f"weight: got dtype {other.__name__}, expected float8_e4m3fn or bytes (uint8)"


def test_why_not():
    def reason(**changed):
        return cumla.supports("sparse_mla_decode", **{"q": Q, "k_cache": CACHE, "indices": INDICES, **changed}).reason

    assert reason(device=-1) is None
    assert reason(q=((2, 1, 129, 512), "bfloat16"), device=-1) == "q: got 129 heads, expected 1 to 128"
    assert reason(indices=((2, 1, 128), "int64"), device=-1) == "indices: got dtype int64, expected int32"
    assert "takes CUDA arrays, got host arrays" in reason(backend="cuda", device=-1) or backends.unavailable("cuda")
    if backends.unavailable("cuda"):
        assert backends.unavailable("cuda") in reason(backend="cuda")
        assert reason(device=0) == reason(backend="cuda", device=0)


def test_the_reason_is_the_error_of_the_call():
    arguments = {"q": np.zeros((2, 1, 4, 500), np.float16), "k_cache": np.zeros((2, 4, 584), np.uint8)}
    arguments["indices"] = np.zeros((2, 1, 3), np.int32)
    with pytest.raises(TypeError) as caught:
        cumla.sparse_mla_decode(**arguments)
    assert cumla.supports("sparse_mla_decode", device=-1, **arguments).reason == str(caught.value)


def test_operations_of_several_ranks():
    shard = cumla.parallel.Shard(0, 2, 1)
    found = cumla.supports("local_seq_lens", seq_lens=((3,), "int32"), shard=shard, device=-1)
    assert str(found) == "cpu: shards.local_seq_lens"


@pytest.mark.parametrize(("capability", "kernel"), [("8.6", "portable"), ("9.0", "hopper"), ("12.0", "portable")])
def test_a_device_that_is_not_here(capability, kernel):
    found = cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE, indices=INDICES, capability=capability)
    assert str(found) == f"cuda: sparse_attention.sparse_mla_decode ({kernel})"
    with pytest.raises(ValueError, match=r"capability: got '7\.5', expected one of 8\.0, 8\.6"):
        cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE, indices=INDICES, capability="7.5")
    for same in (
        capability.replace(".", ""),
        float(capability),
        f"sm_{capability.replace('.', '')}a",
        (int(capability[:-2]), int(capability[-1])),
    ):
        assert cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE, indices=INDICES, capability=same) == found
    for wrong in ("abc", "", "sm_", "8.", 8.65, (8, 6, 0)):
        with pytest.raises(ValueError, match=r"capability: got .*, expected one of 8\.0, 8\.6"):
            cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE, indices=INDICES, capability=wrong)
    with pytest.raises(ValueError, match="backend: got 'cpu', expected 'cuda' for a capability"):
        cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE, indices=INDICES, capability="8.6", backend="cpu")


def test_what_is_no_question():
    with pytest.raises(TypeError, match="op: got 'sparse_mla', expected an operation"):
        cumla.supports("sparse_mla")
    with pytest.raises(TypeError, match="indices: missing, required by sparse_mla_decode"):
        cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv'"):
        cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE, indices=INDICES, kv=1)
    with pytest.raises(ValueError, match="backend: got 'gpu'"):
        cumla.supports("sparse_mla_decode", q=Q, k_cache=CACHE, indices=INDICES, backend="gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_device_does_what_is_said(example):
    example = EXAMPLES[example]
    if example.kernels == "blocks" or example.op not in cumla.__all__:
        return
    function = getattr(cumla, example.op)
    asked = {name: x for name, x in arguments_of(example, 0).items() if name in inspect.signature(function).parameters}
    found = cumla.supports(function, device=0, **types_of(asked))
    assert found, found
    assert found.backend == "cuda"
    assert all(kernel.endswith((" (hopper)", " (portable)", " (exact)")) for kernel in found.kernels)


def scored(heads):
    """Arguments of index scores, for packed keys and for pages."""
    packed = {
        "q": ((9, heads, 128), "uint8"), "kv": ((70, 128), "uint8"), "kv_scales": ((70,), "float32"),
        "weights": ((9, heads), "float32"), "cu_seqlen_ks": ((9,), "int32"), "cu_seqlen_ke": ((9,), "int32"),
    }  # fmt: skip
    of_pages = {
        "q": ((2, 1, heads, 128), "uint8"), "kv_cache": ((4, 64, 132), "uint8"), "weights": ((2, heads), "float32"),
        "context_lens": ((2,), "int32"), "block_table": ((2, 3), "int32"),
    }  # fmt: skip
    return packed, of_pages


@pytest.mark.skipif(bool(emulation.unavailable()), reason=str(emulation.unavailable()))
def test_which_kernel_on_a_device():
    """On an emulated Hopper, also without memory for the arrays."""
    mha = {
        "q": ((8, 4, 192), "bfloat16"), "k": ((9, 4, 128), "bfloat16"), "v": ((9, 4, 128), "bfloat16"),
        "k_pe": ((9, 64), "bfloat16"), "cu_seqlens_q": ((3,), "int32"), "cu_seqlens_k": ((3,), "int32"),
    }  # fmt: skip
    with emulation.devices():

        def asked(op, **arguments):
            return cumla.supports(op, device=0, **arguments)

        decode = {"q": Q, "k_cache": CACHE, "indices": INDICES}
        assert asked("sparse_mla_decode", **decode).kernels == ("sparse_attention.sparse_mla_decode (hopper)",)
        for heads, kernel in ((32, "portable"), (33, "hopper")):
            plain = {**decode, "q": ((*Q[0][:2], heads, Q[0][3]), Q[1]), "k_cache": ((16, 64, 512), "bfloat16")}
            assert asked("sparse_mla_decode", **plain).kernels == (f"sparse_attention.sparse_mla_decode ({kernel})",)
        float32 = {**decode, "q": (Q[0], "float32")}
        assert asked("sparse_mla_decode", **float32).reason.startswith("q: got float32 for a device's kernels")
        assert asked("mha_varlen", **mha).kernels == ("dense_attention.mha_varlen (hopper)",)
        for heads, kernel in ((8, "portable"), (16, "hopper"), (32, "hopper"), (64, "hopper")):
            packed, of_pages = scored(heads)
            assert asked("fp8_mqa_logits", **packed).kernels == (f"indexer.mqa_logits ({kernel})",)
            for width in (132, 68):  # INDEXER_FP8, INDEXER_MXFP4
                of_width = {**of_pages, "kv_cache": ((4, 64, width), "uint8")}
                its = "portable" if (heads, width) == (16, 68) else kernel
                assert asked("fp8_paged_mqa_logits", **of_width).kernels == (f"indexer.paged_mqa_logits ({its})",)
        odd = {**mha, "q": ((8, 4, 200), "bfloat16"), "k": ((9, 4, 136), "bfloat16")}
        assert "expected multiples of 16 up to" in asked("mha_varlen", **odd).reason
        assert "device: got 7, expected one of the" in cumla.supports("sparse_mla_decode", device=7, **decode).reason


@pytest.mark.skipif(bool(emulation.unavailable()), reason=str(emulation.unavailable()))
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_call_takes_the_kernel_that_supports_names(example):
    """On an emulated Hopper: the programs that launchers need are in csrc/sm90 or not."""
    example = EXAMPLES[example]
    if example.op not in cumla.__all__ or example.kernels == "blocks":
        pytest.skip("not an operation of one kernel")
    given = arguments_of(example, 0)
    with emulation.devices():
        found = cumla.supports(example.op, device=0, **types_of(given))
        with programs_asked_for() as programs:
            getattr(cumla, example.op)(**{name: put(LAB, value) for name, value in given.items()})
    assert any(kernel.endswith(" (hopper)") for kernel in found.kernels) == any("sm90/" in x[0] for x in programs)


@pytest.mark.parametrize(
    "name", [n for n in cumla.__all__ if inspect.isfunction(getattr(cumla, n)) and n not in NO_OPERATIONS]
)
def test_every_operation_can_be_asked_for(name):
    with pytest.raises(TypeError, match=f"missing, required by {name}"):
        cumla.supports(name)


def test_copies_of_pages_can_be_asked_for():
    cache, other, pairs = ((4, 64, 584), "uint8"), ((4, 64, 656), "uint8"), ((2, 2), "int64")
    assert cumla.supports("copy_blocks", kv_caches=[cache, cache], src_to_dsts=pairs, device=-1).kernels == (
        "blocks.copy_blocks",
    )
    assert cumla.supports("swap_blocks", src=cache, dst=cache, src_to_dst=pairs, device=-1)
    refused = cumla.supports("swap_blocks", src=cache, dst=other, src_to_dst=pairs, device=-1)
    assert refused.reason == "dst: got pages of shape (64, 656), expected (64, 584) as src has"


def test_the_calls_of_v41():
    """A step's calls with the sizes of V4.1-Flash, and pairs of formats that do not exist."""
    floats, ints, rows = "float32", "int32", ((4,), "int64")
    q, window, compressed = ((4, 1, 64, 512), "bfloat16"), ((16, 64, 528), "uint8"), ((16, 128, 288), "uint8")
    decode = {
        "q": q, "k_cache": window, "indices": ((4, 1, 128), ints), "layout": "DSV41_FP8", "extra_k_cache": compressed,
        "extra_indices": ((4, 1, 512), ints), "extra_layout": "DSV41_FP4",
    }  # fmt: skip
    of_ring = {"positions": ((4,), ints), "query_start_loc": ((3,), ints), "state_cache": ((2, 8, 1024), floats)}
    scored = {
        "q": ((4, 1, 32, 128), "uint8"), "weights": ((4, 32), floats), "context_lens": ((4,), ints),
        "block_table": ((4, 9), ints), "topk": 512,
    }  # fmt: skip
    calls = {
        "sparse_mla_decode": decode,
        "compress_latents": of_ring | {
            "kv_score": ((4, 1024), floats), "norm_weight": ((512,), floats), "slot_mapping": rows,
            "latents": ((4, 512), "bfloat16"), "compress_ratio": 2,
        },
        "norm_rope_and_insert": {
            "kv": ((4, 512), "bfloat16"), "k_cache": compressed, "slot_mapping": rows, "positions": ((4,), ints),
            "cos_sin_cache": ((99, 64), floats), "layout": "DSV41_FP4",
        },
        "candidate_topk": scored | {"kv_cache": ((16, 128, 68), "uint8"), "candidate_blocks": ((4, 2048), ints)},
        "indexer_topk": scored | {"kv": ((16, 128, 68), "uint8"), "candidate_blocks": ((4, 2048), ints)},
        "select_candidate_blocks": {"logits": ((4, 1 << 20), floats), "seq_lens": ((4,), ints)},
    }  # fmt: skip
    for name, arguments in calls.items():
        found = cumla.supports(name, device=-1, **arguments)
        assert found, (name, found)
    mixed = cumla.supports("sparse_mla_decode", device=-1, **(decode | {"extra_layout": "DSV41_FP4_SPLIT"}))
    assert "extra_layout: got DSV41_FP4_SPLIT, expected" in mixed.reason
    unnamed = cumla.supports("sparse_mla_decode", device=-1, **(decode | {"layout": None}))
    assert "layout" in unnamed.reason
