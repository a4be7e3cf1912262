"""An argument that does not fit is an error that names it, and nothing has been written by then."""

import inspect
import re

import numpy as np
import pytest

import cumla
from cumla.layout import plain_rows
from support.calls import ATTENTION, ReadOnly, apart, holds_read_only, int32, ones, operations, put
from support.guarded import Guarded
from support.lab import BF16, Lab

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """Host and device: what the backend is does not matter before it is called."""
    return Lab(request.param, on_device=request.param == "cuda")


HOST = Lab("reference", on_device=False)
V = ValueError
T = TypeError
CASES = [
    # operation, argument, wrong value, error, what it says
    ("insert", "k", ones(BF16, 3, 511), V, "k: got rows of 511 values, expected 512 for a DSV4_FP8 cache"),
    ("insert", "k", ones(np.float64, 3, 512), T, "k: got dtype float64"),
    ("insert", "k", ones(BF16, 512), V, "k: got shape"),
    ("insert", "k", ones(BF16, 3, 1024)[:, ::2], V, "k: got strides"),
    ("insert", "k", [[1.0]], T, "k: got list"),
    ("insert", "k_cache", ones(np.uint8, 2, 4, 583), V, "k_cache: got shape"),
    ("insert", "k_cache", ones(np.uint8, 2, 5, 584), V, "k_cache: got shape"),
    ("insert", "k_cache", ones(np.uint8, 2, 4 * 584 - 1), V, "k_cache: got pages of 2335 bytes"),
    ("insert", "k_cache", ones(BF16, 2, 4, 584), T, "k_cache: got dtype bfloat16"),
    ("insert", "k_cache", ReadOnly(ones(np.uint8, 2, 4, 584)), V, "k_cache: got a read-only"),
    ("insert", "k_cache", ones(np.uint8, 2, 2 * 4 * 584)[:, ::2], V, "k_cache: got pages of 2336 bytes"),
    ("insert", "k_cache", apart(100, ones(np.uint8, 2, 4, 584)), V, "k_cache: got strides"),
    ("insert", "block_size", True, T, "block_size: got True"),
    ("insert", "slot_mapping", np.arange(4), V, "slot_mapping: got 4 slots, expected at most 3"),
    ("insert", "slot_mapping", np.zeros(3, np.float32), T, "slot_mapping: got dtype float32"),
    ("insert", "slot_mapping", np.zeros((3, 1), np.int64), V, "slot_mapping: got shape"),
    ("insert", "block_size", -4, V, "block_size: got -4"),
    ("insert", "block_size", 0, V, "block_size: got 0"),
    ("insert", "block_size", 4.0, T, "block_size: got 4.0"),
    ("insert", "is_ue8m0", False, V, "is_ue8m0: got False"),
    ("insert", "layout", cumla.MLA_BF16, V, "layout: got MLA_BF16"),
    ("insert", "layout", "DSV5_FP8", V, "layout: got 'DSV5_FP8', expected one of DSV4_FP8, V32_FP8"),
    ("insert", "layout", 584, T, "layout: got 584 of type int, expected a CacheLayout or the name of one"),
    ("insert", "layout", plain_rows(512, "e4m3"), V, "layout: got e4m3"),
    ("insert", "block_size", np.array(4), T, r"block_size: got array\(4\) of type ndarray"),
    ("insert", "block_size", np.True_, T, r"block_size: got np.True_ of type bool"),
    ("insert", "backend", "gpu", V, "backend: got 'gpu'"),
    ("gather", "out", ones(BF16, 3, 5, 512), V, "seq_lens: got shape"),
    ("gather", "out", ones(BF16, 2, 5, 576), V, "out: got rows of 576 values, expected 512"),
    ("gather", "out", ones(np.float64, 2, 5, 512), T, "out: got dtype float64"),
    ("gather", "out", ReadOnly(ones(BF16, 2, 5, 512)), V, "out: got a read-only"),
    ("gather", "k_cache", ones(np.uint8, 2, 100), V, "k_cache: got pages of 100 bytes"),
    ("gather", "seq_lens", np.zeros(2, np.int64), T, "seq_lens: got dtype int64"),
    ("gather", "seq_lens", int32(4)[::2], V, "seq_lens: got strides"),
    ("gather", "gather_lens", int32(3), V, "gather_lens: got shape"),
    ("gather", "block_table", int32(3, 1), V, "block_table: got shape"),
    ("gather", "block_size", -1, V, "block_size: got -1"),
    ("gather", "offset", -1, V, "offset: got -1"),
    ("gather", "offset", 6, V, "offset: got 6, expected at most 5"),
    ("gather", "layout", plain_rows(512, "float16"), V, "layout: got float16"),
    ("indexer_queries", "index_q", ones(BF16, 3, 2, 64), V, "index_q: got shape"),
    ("indexer_queries", "index_q_cos_sin_cache", ones(np.float32, 5, 32), V, "index_q_cos_sin_cache: got shape"),
    ("indexer_queries", "positions", np.zeros(3, np.float32), T, "positions: got dtype float32"),
    ("indexer_queries", "index_weights", ones(np.float32, 3, 3), V, "index_weights: got shape"),
    ("scores", "q", ones(BF16, 3, 2, 128), T, "q: got dtype bfloat16, expected uint8"),
    ("scores", "q", ones(np.uint8, 3, 2, 64), V, "q: got shape"),
    ("scores", "kv", ones(np.uint8, 6, 64), V, "k.*: got shape"),
    ("scores", "kv", (ones(np.uint8, 6, 128), ones(np.float32, 6)), V, "kv_scales: got them beside the pair"),
    ("scores", "weights", ones(np.float32, 3, 4), V, "weights: got shape"),
    ("scores", "cu_seqlen_ks", int32(4), V, "cu_seqlen_ks: got shape"),
    ("scores", "cu_seqlen_ke", np.zeros(3, np.int64), T, "cu_seqlen_ke: got dtype int64"),
    ("paged_scores", "q", ones(np.uint8, 3, 2, 128), V, "q: got shape"),
    ("paged_scores", "kv_cache", ones(np.uint8, 2, 4, 128), V, "kv_cache: got shape"),
    ("paged_scores", "weights", ones(np.float32, 6, 2), V, "weights: got shape"),
    ("paged_scores", "context_lens", int32(3, 2), V, "context_lens: got shape"),
    ("paged_scores", "block_table", int32(2, 1), V, "block_table: got 2 rows, expected at least 3"),
    ("paged_scores", "schedule_metadata", int32(5, 3), V, "schedule_metadata: got shape"),
    ("paged_scores", "schedule_metadata", int32(1, 2), V, "schedule_metadata: got 1 rows"),
    ("paged_scores", "max_context_len", -1, V, "max_context_len: got -1"),
    ("schedule", "context_lens", np.zeros(3, np.int64), T, "context_lens: got dtype int64"),
    ("schedule", "block_kv", 0, V, "block_kv: got 0"),
    ("schedule", "num_sms", 2.0, T, "num_sms: got 2.0"),
    ("choice", "logits", ones(BF16, 3, 7), T, "logits: got dtype bfloat16"),
    ("choice", "topk", -1, V, "topk: got -1"),
    ("choice", "row_ends", int32(2), V, "row_ends: got shape"),
    ("score_and_choose", "topk", True, T, "topk: got True"),
    ("score_and_choose", "kv", ones(np.float32, 6, 128), T, "k.*: got dtype float32"),
    ("indexer_insert", "k", ones(BF16, 3, 64), V, "k: got shape"),
    ("indexer_insert", "kv_cache", ones(np.uint8, 2, 4, 584), V, "kv_cache: got shape"),
    ("indexer_insert", "kv_cache", ReadOnly(ones(np.uint8, 2, 4, 132)), V, "kv_cache: got a read-only"),
    ("indexer_insert", "slot_mapping", np.arange(4), V, "slot_mapping: got 4 slots"),
    ("indexer_insert", "quant_block_size", 64, V, "quant_block_size: got 64, expected 128"),
    ("indexer_insert", "scale_fmt", "e8", V, "scale_fmt: got 'e8'"),
    ("indexer_gather", "kv_cache", ones(np.uint8, 2, 4, 128), V, "kv_cache: got shape"),
    ("indexer_gather", "dst_k", ones(np.uint8, 5, 132), V, "dst_k: got shape"),
    ("indexer_gather", "dst_k", ones(BF16, 5, 128), T, "dst_k: got dtype bfloat16"),
    ("indexer_gather", "dst_k", ReadOnly(ones(np.uint8, 5, 128)), V, "dst_k: got a read-only"),
    ("indexer_gather", "dst_scale", ones(np.float32, 4), V, "dst_scale: got shape"),
    ("indexer_gather", "dst_scale", ones(np.uint8, 5, 1), V, "dst_scale: got shape"),
    ("indexer_gather", "dst_scale", ones(np.float16, 5), T, "dst_scale: got dtype float16"),
    ("indexer_gather", "dst_scale", ones(np.float32, 5, 2), V, "dst_scale: got shape"),
    ("indexer_gather", "block_table", int32(1, 1), V, "block_table: got 1 rows, expected at least 2"),
    ("indexer_gather", "cu_seq_lens", int32(0), V, "cu_seq_lens: got no entries"),
    ("indexer_gather", "cu_seq_lens", np.zeros(3, np.int64), T, "cu_seq_lens: got dtype int64"),
    ("concat", "kv_c", ones(BF16, 3, 576), V, "kv_c: got shape"),
    ("concat", "kv_c", ones(np.float64, 3, 512), T, "kv_c: got dtype float64"),
    ("concat", "k_pe", ones(BF16, 2, 64), V, "k_pe: got shape"),
    ("concat", "k_pe", ones(np.float16, 3, 64), T, "k_pe: got dtype float16"),
    ("concat", "kv_cache", ones(BF16, 2, 4, 512), V, "kv_cache: got shape"),
    ("concat", "kv_cache", ones(np.float64, 2, 4, 576), T, "kv_cache: got dtype float64"),
    ("concat", "kv_cache", ones(np.uint8, 2, 4, 576), V, "kv_cache: got shape"),
    ("concat", "kv_cache", ReadOnly(ones(BF16, 2, 4, 576)), V, "kv_cache: got a read-only"),
    ("concat", "slot_mapping", np.arange(4), V, "slot_mapping: got 4 slots"),
    ("concat", "kv_cache_dtype", "fp8", T, "kv_cache: got dtype bfloat16"),
    ("concat", "kv_cache_dtype", "fp8_ds_mla", T, "kv_cache: got dtype bfloat16"),
    ("concat", "kv_cache_dtype", "fp8_e5m2", V, "kv_cache_dtype: got 'fp8_e5m2'"),
    ("gather_cache", "src_cache", ones(np.float32, 2, 4, 576), T, "src_cache: got dtype float32"),
    ("gather_cache", "src_cache", ones(BF16, 2, 576), V, "src_cache: got shape"),
    ("gather_cache", "src_cache", ones(BF16, 2, 8, 576)[:, ::2], V, "src_cache: got strides"),
    ("gather_cache", "dst", ones(BF16, 5, 512), V, "dst: got bfloat16 rows of 512"),
    ("gather_cache", "dst", ones(np.float16, 5, 576), V, "dst: got float16 rows of 576"),
    ("gather_cache", "dst", ones(np.int32, 5, 576), T, "dst: got dtype int32"),
    ("gather_cache", "dst", ReadOnly(ones(BF16, 5, 576)), V, "dst: got a read-only"),
    ("gather_cache", "block_table", int32(1, 1), V, "block_table: got 1 rows"),
    ("gather_cache", "cu_seq_lens", int32(2), V, "cu_seq_lens: got 2 entries, expected at least 3"),
    ("gather_cache", "cu_seq_lens", int32(6)[::2], V, "cu_seq_lens: got strides"),
    ("gather_cache", "batch_size", -1, V, "batch_size: got -1"),
    ("gather_cache", "batch_size", 3, V, "cu_seq_lens: got 3 entries"),
    ("gather_cache", "seq_starts", int32(1), V, "seq_starts: got shape"),
    ("gather_cache", "seq_starts", np.zeros(2, np.int64), T, "seq_starts: got dtype int64"),
    ("swa", "query_start_loc", int32(2), V, "query_start_loc: got 2 entries, expected 3"),
    ("swa", "token_to_req_indices", int32(3), V, "token_to_req_indices: got 3 entries"),
    ("swa", "is_valid_token", int32(4), T, "is_valid_token: got dtype int32"),
    ("swa", "block_size", 0, V, "block_size: got 0"),
    ("swa", "window_size", -2, V, "window_size: got -2"),
    ("swa", "num_tokens", 5, V, "token_to_req_indices: got 4 entries"),
    ("swa", "token_offset", 1, V, "token_to_req_indices: got 4 entries, expected at least 5"),
    ("swa", "out", (ones(np.int32, 4, 2), ones(np.int32, 4)), V, r"out\[0\] \(swa_indices\): got shape"),
    ("swa", "out", (ones(np.int32, 4, 3), ones(np.int64, 4)), T, r"out\[1\] \(swa_lens\): got dtype int64"),
    ("swa", "out", ones(np.int32, 4, 3), T, "out: got ndarray, expected a pair"),
    ("topk", "topk_indices", np.zeros((4, 3), np.int64), T, "topk_indices: got dtype int64"),
    ("topk", "topk_indices", int32(4), V, "topk_indices: got shape"),
    ("topk", "is_valid_token", ones(np.bool_, 3), V, "is_valid_token: got 3 entries"),
    ("topk", "block_table", int32(2), V, "block_table: got shape"),
    ("topk", "block_size", -1, V, "block_size: got -1"),
    ("topk", "block_size", 2**31, V, "block_size: got 2147483648, expected at most"),
    ("topk", "out", (ReadOnly(ones(np.int32, 4, 3)), ones(np.int32, 4)), V, r"out\[0\] \(global_topk.*got a read"),
    ("combine", "gather_lens", int32(3), V, "gather_lens: got shape"),
    ("combine", "topk", 4, V, "topk_indices: got 3 columns, expected at least topk = 4"),
    ("combine", "N", 10, V, "N: got 10, expected at most M = 9"),
    ("combine", "M", 2**31, V, "M: got 2147483648"),
    ("combine", "M", 2**30, V, "M: got 1073741824 rows for each of 2 requests, expected a workspace within int32"),
    ("combine", "compress_ratio", 0, V, "compress_ratio: got 0"),
    ("combine", "out", (ones(np.int32, 4, 127), ones(np.int32, 4)), V, r"out\[0\] \(combined_indices\): got shape"),
    ("mixed", "decode_swa_indices", int32(1, 4), V, "decode_swa_indices: got shape"),
    ("mixed", "decode_compressed_topk_lens", int32(2), V, "decode_compressed_topk_lens: got shape"),
    ("mixed", "prefill_topk_indices", int32(3, 1), V, "prefill_topk_indices: got 1 columns"),
    ("mixed", "token_to_req_indices", int32(3), V, "token_to_req_indices: got 3 entries"),
    ("mixed", "compressed_block_table", None, V, "compressed_block_table: got None, expected a table to map"),
    ("mixed", "decode_is_valid_token", ones(np.bool_, 0), V, "decode_is_valid_token: got 0 entries"),
    ("mixed", "swa_block_size", 0, V, "swa_block_size: got 0"),
    ("mixed", "swa_block_span", 0, V, "swa_block_span: got 0"),
    ("mixed", "out", (ones(np.int32, 4, 7), int32(3)), V, r"out\[1\] \(sparse_topk_lens\): got shape"),
    ("compress", "kv_score", ones(np.float32, 3, 500), V, "kv_score: got 500 columns, expected 256 or 512"),
    ("compress", "state_cache", ones(np.float64, 2, 4, 512), T, "state_cache: got dtype float64"),
    ("compress", "state_slot_mapping", np.arange(4), V, "state_slot_mapping: got 4 slots, expected at most 3"),
    ("compress", "state_block_table", int32(2), V, "state_block_table: got shape"),
    ("compress", "compress_ratio", 3, V, "position_bias: got shape"),
    ("compress", "eps", -1.0, V, "eps: got -1.0, expected a finite number of at least 0"),
    ("norms", "kv", ones(np.float32, 3, 64), T, "kv: got dtype float32"),
    ("norms", "q_weight", ones(np.float32, 95), V, "q_weight: got shape"),
    ("norms", "out", (ones(BF16, 3, 96), ones(BF16, 3, 63)), V, r"out\[1\] \(kv\): got shape"),
    ("window_rows", "q", ones(BF16, 3, 129, 512), V, "q: got 129 heads"),
    ("window_rows", "kv", ones(BF16, 2, 512), V, "kv: got shape"),
    ("window_rows", "slot_mapping", np.arange(4), V, "slot_mapping: got 4 slots, expected at most 3"),
    ("window_rows", "positions", np.zeros(3, np.float32), T, "positions: got dtype float32"),
    ("window_rows", "cos_sin_cache", ones(np.float32, 8, 63), V, "cos_sin_cache: got"),
    ("window_rows", "layout", cumla.V32_FP8, V, "layout: got V32_FP8"),
    ("index_keys", "k", ones(np.float32, 3, 127), V, "k: got shape"),
    ("index_keys", "bias", ones(BF16, 128), T, "bias: got dtype bfloat16"),
    ("index_keys", "layout", cumla.DSV4_FP8, V, "layout: got DSV4_FP8, expected that of the indexer's keys"),
    ("index_keys", "slot_mapping", np.arange(4), V, "slot_mapping: got 4 slots"),
    ("rope", "x", ones(BF16, 3, 2, 127), V, "x: got 127 values a head, expected an even number"),
    ("rope", "out", ReadOnly(ones(BF16, 3, 2, 128)), V, "out: got a read"),
    ("inverse", "num_groups", 3, V, "num_groups: got 3, expected a divisor of the 4 heads"),
    ("inverse", "out", (ones(np.uint8, 2, 3, 1024), ones(np.float32, 2, 3, 9)), V, r"out\[1\] \(scales\): got sh"),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(operations().keys() - ATTENTION))
def test_the_calls_work_as_they_stand(lab, name):
    work_as_they_stand(lab, operations()[name])


@pytest.mark.attention
@pytest.mark.parametrize("name", ATTENTION)
def test_the_calls_of_attention_work_as_they_stand(lab, name):
    work_as_they_stand(lab, operations()[name])


def work_as_they_stand(lab, operation):
    for kind in (np.int64,) if lab.tiny else (int, np.int64, np.uint8):
        given = {**operation.arguments, **operation.keywords}
        arguments = {key: with_integers(kind, put(lab, value)) for key, value in given.items()}
        operation.function(**{"backend": lab.backend, **arguments})


def with_integers(kind, value):
    """An argument; an integer as one of another kind, where that has it."""
    fits = value.__class__ is int and (kind is int or np.iinfo(kind).min <= value <= np.iinfo(kind).max)
    return kind(value) if fits else value


@pytest.mark.parametrize(
    ("name", "argument", "wrong", "kind", "text"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.nowhere(when=lambda x: x.device and holds_read_only(x.get("wrong")))  # CuPy has no read-only arrays
def test_wrong_argument(place, name, argument, wrong, kind, text):
    operation = operations()[name]
    for integer in (int, np.int64, np.int16):
        given = {**operation.arguments, **operation.keywords, argument: wrong}
        arguments = {key: with_integers(integer, put(place, value)) for key, value in given.items()}
        with pytest.raises(kind, match=text):
            operation.function(**{"backend": place.backend, **arguments})
        assert_nothing_written(place, operation, arguments, argument)


def assert_nothing_written(place, operation, arguments, wrong):
    outputs = [arguments[key] for key in operation.written if key != wrong]
    if "out" in operation.keywords and wrong != "out":
        outputs.extend(arguments["out"] if isinstance(arguments["out"], tuple) else [arguments["out"]])
    for output in outputs:
        assert (place.get(output) == 1).all()


NONSENSE = {
    "a string": "a format", "no string": b"x", "True": True, "a fraction": 0.5, "NaN": float("nan"), "complex": 1j,
    "huge": 10**400, "of 5,000 digits": 10**5000, "a list": [], "an object": object(), "a type": int,
    "0-d": np.zeros((), np.float32), "0-d integer": np.zeros((), np.int32), "0-d bytes": np.zeros((), np.uint8),
    "objects": np.array([None]), "strings": np.array(["x"]), "masked": np.ma.masked_all((3, 512), BF16),
    "long": "x" * 5_000_000,
}  # fmt: skip
RIGHT = {  # what looks like nonsense and is none, or is not looked at
    "softmax_scale": ("a fraction",), "scale": NONSENSE, "is_ue8m0": ("True",), "causal": ("True",),
    "accumulate": ("True",), "compact": ("True",), "decode_compressed_indices_are_local": ("True",),
    "eps": ("a fraction",), "inverse": ("True",), "batch_invariant": ("True",),
    "rope_first": ("True",), "is_neox": ("True",), "quantize": ("True",),
    "clean_logits": ("True",), "index_weights_softmax_scale": ("a fraction",),
    "index_weights_head_scale": ("a fraction",), "score_and_choose.context_lens": NONSENSE,
    "score_and_choose.schedule_metadata": NONSENSE,
    "score_and_choose.max_context_len": NONSENSE, "score_and_choose.layout": NONSENSE, "kv_caches": ("a list",),
}  # fmt: skip


@pytest.mark.parametrize("name", operations())
def test_nonsense(name):
    """Whatever an argument is, it is an error that names it, and not a long one."""
    operation = operations()[name]
    parameters = [x for x in inspect.signature(operation.function).parameters if x != "stream"]
    for argument in parameters:
        for what, nonsense in NONSENSE.items():
            if what in RIGHT.get(argument, ()) or what in RIGHT.get(f"{name}.{argument}", ()):
                continue
            given = {**operation.arguments, **operation.keywords, argument: nonsense}
            arguments = {key: put(HOST, value) if key != argument else value for key, value in given.items()}
            try:
                with pytest.raises((TypeError, ValueError)) as caught:
                    operation.function(**{"backend": "reference", **arguments})
            except pytest.fail.Exception:
                pytest.fail(f"{argument}: {what} was taken")
            message = str(caught.value)
            assert re.search(rf"\b{argument}\b", message) or (argument == "kv_scales" and "(scales)" in message), (
                f"{argument}, {what}: {message}"
            )
            assert len(message) < 500, f"{argument}, {what}"
            assert_nothing_written(HOST, operation, arguments, argument)


def test_scale(place):
    operation = operations()["concat"]
    arguments = {key: put(place, value) for key, value in operation.arguments.items()}
    arguments |= {"kv_cache": place.put(ones(np.uint8, 2, 4, 576)), "kv_cache_dtype": "fp8", "backend": place.backend}
    for scale, kind, text in (
        (ones(np.float32, 2), V, r"scale: got shape \(2,\), expected one value"),
        (ones(np.float64, 1), T, "scale: got dtype float64"),
        ("1", T, "scale: got str"),
        (True, T, "scale: got True of type bool"),
        (10**400, V, "scale: got an integer of 1329 bits, expected a finite number"),
        (1e300, V, r"scale: got 1e\+300, expected a number that float32 has"),
        (float("nan"), V, "scale: got nan"),
        (1j, T, "scale: got 1j of type complex"),
    ):
        with pytest.raises(kind, match=text):
            cumla.concat_and_cache_mla(**{**arguments, "scale": put(place, scale)})
    assert (place.get(arguments["kv_cache"]) == 1).all()


@pytest.mark.parametrize("name", operations())
def test_elements_off_their_size(place, name):
    """Kernels load whole elements: an array one byte off is refused, whichever of the arguments it is."""
    operation = operations()[name]
    for argument, value in operation.arguments.items():
        if not isinstance(value, np.ndarray) or value.itemsize == 1 or argument.startswith("src_to_dst"):
            continue
        arguments = {key: put(place, x) for key, x in {**operation.arguments, **operation.keywords}.items()}
        arguments[argument] = Guarded(place, value, offset=1).array
        with pytest.raises(ValueError, match=f"{argument}: got elements that are not {value.itemsize} bytes aligned"):
            operation.function(**{"backend": place.backend, **arguments})


@pytest.mark.parametrize("shape", [(0, 4, 584), (2, 0, 584)])
def test_a_cache_without_tokens_is_a_cache(shape):
    empty = np.empty(shape, np.uint8)[:, :, :584]  # NumPy's strides are then 0
    out, lse = cumla.sparse_mla_decode(ones(BF16, 1, 1, 2, 512), empty, int32(1, 1, 3))
    assert not out.any()
    assert np.isposinf(lse).all()


def test_caches_without_pages_are_caches(lab):
    """Of raw pages and of states, too: nothing is written, and nothing is wrong."""
    operation = operations()["insert"]
    arguments = {key: put(lab, value) for key, value in {**operation.arguments, **operation.keywords}.items()}
    pages = np.empty((0, 4 * 584), np.uint8)
    operation.function(**{**arguments, "k_cache": lab.put(pages.copy()), "backend": lab.backend})
    operation = operations()["compress"]
    arguments = {key: put(lab, value) for key, value in {**operation.arguments, **operation.keywords}.items()}
    states = np.empty((0, 4, 512), np.float32)
    operation.function(**{**arguments, "state_cache": lab.put(states.copy()), "backend": lab.backend})


@pytest.mark.gpu
def test_arrays_on_both_sides():
    import cupy

    cache = cupy.zeros((2, 4, 584), np.uint8)
    with pytest.raises(ValueError, match="k_cache: got an array on CUDA device 0, expected it in host memory"):
        cumla.quantize_and_insert_k_cache(ones(BF16, 1, 512), cache, np.arange(1), 4)
    with pytest.raises(ValueError, match="src_to_dst: got an array in CUDA memory"):
        cumla.swap_blocks(ones(np.uint8, 2, 8), cache.reshape(2, -1)[:, :8], cupy.zeros((1, 2), np.int64))
