"""Any invalid argument of any operation is an error that names it, and nothing has been written by then.

test_errors.py has the arguments whose messages say more.
"""

import inspect
import re

import numpy as np
import pytest

import cumla
from support.calls import NAMES, OTHERS, arrays, call, function_of, int32, is_attention, ones, put
from support.guarded import Guarded
from support.lab import BF16
from support.operations import EXAMPLES
from support.refused import EITHER, refused

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("name", [x for x in NAMES if not is_attention(x)])
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("name") in EXAMPLES)  # test_safety_examples.py calls them
def test_the_unchanged_calls_work(lab, name):
    check_unchanged_calls(lab, call(name))


@pytest.mark.attention
@pytest.mark.parametrize("name", [x for x in NAMES if is_attention(x)])
def test_the_unchanged_calls_of_attention_work(lab, name):
    check_unchanged_calls(lab, call(name))


def check_unchanged_calls(lab, right):
    for kind in (np.int64,) if lab.tiny else (int, np.int64, np.uint8):
        arguments = {key: put(lab, value, kind) for key, value in right.arguments.items()}
        right.function(**{"backend": lab.backend, **arguments})


NONSENSE = {
    "a string": "a format", "no string": b"x", "True": True, "a fraction": 0.5, "NaN": float("nan"), "complex": 1j,
    "huge": 10**400, "of 5,000 digits": 10**5000, "a list": [], "an object": object(), "a type": int,
    "0-d": np.zeros((), np.float32), "0-d integer": np.zeros((), np.int32), "0-d bytes": np.zeros((), np.uint8),
    "objects": np.array([None]), "strings": np.array(["x"]), "masked": np.ma.masked_all((3, 512), BF16),
    "long": "x" * 5_000_000,
}  # fmt: skip
RIGHT = {  # which looks invalid but is valid, or is not checked
    "softmax_scale": ("a fraction",), "scale": NONSENSE, "is_ue8m0": ("True",), "causal": ("True",),
    "accumulate": ("True",), "compact": ("True",), "decode_compressed_indices_are_local": ("True",),
    "eps": ("a fraction",), "inverse": ("True",), "batch_invariant": ("True",),
    "rope_first": ("True",), "is_neox": ("True",), "quantize": ("True",),
    "clean_logits": ("True",), "with_nan": ("True",), "round_pooled": ("True",), "round_rows": ("True",),
    "hadamard": ("True",),
    "early_release": ("True",), "float32_output": ("True",), "prefetch_weights": ("True",), "finite_weights": ("True",),
    "index_weights_softmax_scale": ("a fraction",),
    "index_weights_head_scale": ("a fraction",), "kv_caches": ("a list",),
    "copy_spans.src": ("a list",), "copy_spans.dst": ("a list",),
}  # fmt: skip


@pytest.mark.parametrize("name", {**{function_of(x): x for x in reversed(NAMES)}, **{x: x for x in OTHERS}}.values())
def test_nonsense(name):
    """Any invalid argument is an error that names it, in a short message."""
    right = call(name)
    parameters = [x for x in inspect.signature(right.function).parameters if x != "stream"]
    for argument in parameters:
        for what, nonsense in NONSENSE.items():
            if what in RIGHT.get(argument, ()) or what in RIGHT.get(f"{name}.{argument}", ()):
                continue
            arguments = {**right.arguments, argument: nonsense}
            try:
                with refused(EITHER, None, [arguments]) as caught:
                    right.function(**{"backend": "reference", **arguments})
            except pytest.fail.Exception:
                pytest.fail(f"{argument}: {what} was taken")
            message = str(caught.value)
            assert re.search(rf"\b{argument}\b", message), f"{argument}, {what}: {message}"


@pytest.mark.parametrize("name", [name for name in NAMES if "eps" in inspect.signature(function_of(name)).parameters])
def test_an_epsilon_that_a_row_of_zeros_needs(host_or_device, name):
    """Every operation with one: none that float32 has no positive number for, and no trouble with the least."""
    right = call(name)
    for eps in (0, 0.0, -1e-6, 1e-46, float("inf")):
        arguments = {key: put(host_or_device, value) for key, value in right.arguments.items()} | {"eps": eps}
        with refused(ValueError, "^eps: got", [arguments], get=host_or_device.get):
            right.function(**{"backend": host_or_device.backend, **arguments})
    zeros = {
        key: np.zeros_like(value) if getattr(value, "dtype", None) in (BF16, np.float32) else value
        for key, value in right.arguments.items()
    }
    arguments = {key: put(host_or_device, value) for key, value in zeros.items()} | {"eps": 2.0**-126}
    right.function(**{"backend": host_or_device.backend, **arguments})
    for array in (x for value in arguments.values() for x in arrays(value)):
        host = np.asarray(host_or_device.get(array))
        assert host.dtype.kind in "iub" or np.isfinite(host.astype(np.float32)).all()


@pytest.mark.parametrize("name", NAMES)
def test_elements_off_their_size(host_or_device, name):
    """Kernels load whole elements: an array one byte off is refused, for any of the arguments."""
    right = call(name)
    for argument, value in right.arguments.items():
        if not isinstance(value, np.ndarray) or value.itemsize == 1 or argument.startswith(("src_to_dst", "spans")):
            continue
        arguments = {key: put(host_or_device, x) for key, x in right.arguments.items()}
        arguments[argument] = Guarded(host_or_device, value, offset=1).array
        with pytest.raises(ValueError, match=f"{argument}: got elements that are not {value.itemsize} bytes aligned"):
            right.function(**{"backend": host_or_device.backend, **arguments})


@pytest.mark.parametrize("shape", [(0, 4, 584), (2, 0, 584)])
def test_a_cache_without_tokens_is_a_cache(shape):
    empty = np.empty(shape, np.uint8)[:, :, :584]  # NumPy's strides are then 0
    out, lse = cumla.sparse_mla_decode(ones(BF16, 1, 1, 2, 512), empty, int32(1, 1, 3))
    assert not out.any()
    assert np.isposinf(lse).all()


@pytest.mark.parametrize(
    "name", ["fp8_paged_mqa_logits-scheduled", "candidate_topk", "cp_gather_indexer_k_quant_cache"]
)
def test_index_keys_of_pages_without_tokens(lab, name):
    right = call(name)
    given = {**right.arguments, "kv_cache": np.zeros((3, 0, 132), np.uint8)}
    right.function(**{key: put(lab, value) for key, value in given.items()}, backend=lab.backend)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("quantize_and_insert_k_cache-DSV4_FP8", "k_cache"), ("compress_and_insert-DSV4_FP8", "state_cache")],
)
def test_caches_without_pages_are_caches(lab, name, argument):
    """Also raw pages and states: nothing is written, and nothing is wrong."""
    right = call(name)
    arguments = {key: put(lab, value) for key, value in right.arguments.items()}
    empty = np.empty((0, *right.arguments[argument].shape[1:]), right.arguments[argument].dtype)
    right.function(**{**arguments, argument: lab.put(empty), "backend": lab.backend})


@pytest.mark.gpu
def test_arrays_on_both_sides():
    import cupy

    cache = cupy.zeros((2, 4, 584), np.uint8)
    with pytest.raises(ValueError, match="k_cache: got an array on CUDA device 0, expected it in host memory"):
        cumla.quantize_and_insert_k_cache(ones(BF16, 1, 512), cache, np.arange(1), 4)
    with pytest.raises(ValueError, match="src_to_dst: got an array in CUDA memory"):
        cumla.swap_blocks(ones(np.uint8, 2, 8), cache.reshape(2, -1)[:, :8], cupy.zeros((1, 2), np.int64))
