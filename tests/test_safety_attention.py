"""Attention: wrong arguments are errors before anything is written, and no array value leads to an access outside."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.bounds import assert_decode, assert_prefill, largest_values
from support.caches import GuardedCache
from support.guarded import Guarded
from support.indexing import anything
from support.lab import BF16, Lab, to_float
from support.properties import for_all, seeds

pytestmark = [pytest.mark.attention, pytest.mark.filterwarnings("error")]

REFERENCE = Lab("reference", on_device=False)
V, T = ValueError, TypeError


def zeros(dtype, *shape):
    return np.zeros(shape, dtype)


def bf16(*shape):
    return np.ones(shape, BF16)


def int32(*shape):
    return np.zeros(shape, np.int32)


def float32(*shape):
    return np.ones(shape, np.float32)


def decode_arguments():
    return {
        "q": bf16(2, 3, 4, 512), "k_cache": zeros(np.uint8, 2, 4, 584), "indices": int32(2, 3, 5),
        "topk_length": int32(2), "extra_k_cache": zeros(np.uint8, 3, 2, 584), "extra_indices": int32(2, 3, 7),
        "extra_topk_length": int32(2, 3), "attn_sink": float32(4), "softmax_scale": 0.5,
        "out": bf16(2, 3, 4, 512), "lse": float32(2, 4, 3),
    }  # fmt: skip


def prefill_arguments():
    return {
        "q": bf16(3, 4, 576), "kv": bf16(9, 576), "indices": int32(3, 5), "topk_length": int32(3),
        "attn_sink": float32(4), "softmax_scale": 0.5, "d_v": 512,
        "out": (bf16(3, 4, 512), float32(3, 4), float32(3, 4)),
    }  # fmt: skip


def merge_arguments():
    return {
        "output": bf16(3, 4, 8), "prefix_output": bf16(3, 4, 8), "prefix_lse": float32(4, 3),
        "suffix_output": bf16(3, 4, 8), "suffix_lse": float32(4, 3), "output_lse": float32(4, 3),
    }  # fmt: skip


OPERATIONS = {
    "decode": (cumla.sparse_mla_decode, decode_arguments, ("out", "lse")),
    "prefill": (cumla.sparse_mla_prefill, prefill_arguments, ("out",)),
    "merge": (cumla.merge_attn_states, merge_arguments, ("output", "output_lse")),
}
CASES = [
    # operation, argument, wrong value, error, message
    ("decode", "q", bf16(2, 3, 4), V, r"q: got shape \(2, 3, 4\), expected \[b, s_q, h, any\]"),
    ("decode", "q", zeros(np.float16, 2, 3, 4, 512), T, "q: got dtype float16, expected bfloat16"),
    ("decode", "q", bf16(2, 3, 129, 512), V, "q: got 129 heads, expected 1 to 128"),
    ("decode", "q", bf16(2, 3, 0, 512), V, "q: got 0 heads"),
    ("decode", "q", bf16(2, 3, 4, 576), V, "q: got 576 values a head, expected 512 for a DSV4_FP8 cache"),
    ("decode", "q", [1.0], T, "q: got list"),
    ("decode", "k_cache", zeros(np.uint8, 2, 4, 583), V, r"k_cache: got uint8 of shape \(2, 4, 583\)"),
    ("decode", "k_cache", zeros(np.float32, 2, 4, 584), V, "k_cache: got float32 of shape"),
    ("decode", "k_cache", zeros(np.uint8, 2, 4, 656), V, "q: got 512 values a head, expected 576 for a V32_FP8 cache"),
    ("decode", "k_cache", zeros(np.uint8, 8, 584), V, "k_cache: got uint8 of shape"),
    ("decode", "indices", zeros(np.int64, 2, 3, 5), T, "indices: got dtype int64, expected int32"),
    ("decode", "indices", int32(2, 5), V, r"indices: got shape \(2, 5\), expected \[b, s_q, any\]"),
    ("decode", "topk_length", int32(3), V, r"topk_length: got shape \(3,\), expected \[b\] with b = 2"),
    ("decode", "topk_length", int32(2, 3, 1), V, "topk_length: got shape"),
    ("decode", "topk_length", zeros(np.int64, 2), T, "topk_length: got dtype int64"),
    ("decode", "extra_k_cache", None, V, "extra_k_cache and extra_indices must be given together"),
    ("decode", "extra_indices", None, V, "extra_k_cache and extra_indices must be given together"),
    ("decode", "extra_k_cache", zeros(np.uint8, 2, 4, 656), V, "extra_k_cache: got shape"),
    ("decode", "extra_indices", int32(2, 2, 7), V, "extra_indices: got shape"),
    ("decode", "extra_topk_length", int32(2, 2), V, "extra_topk_length: got shape"),
    ("decode", "attn_sink", float32(3), V, r"attn_sink: got shape \(3,\), expected \[h\] with h = 4"),
    ("decode", "attn_sink", zeros(np.float64, 4), T, "attn_sink: got dtype float64"),
    ("decode", "softmax_scale", float("nan"), V, "softmax_scale: got nan, expected a finite number"),
    ("decode", "out", bf16(2, 3, 4, 511), V, "out: got shape"),
    ("decode", "out", float32(2, 3, 4, 512), T, "out: got dtype float32"),
    ("decode", "lse", float32(2, 3, 4), V, "lse: got shape"),
    ("prefill", "q", bf16(3, 4, 500), V, "q: got 500 values a head, expected 512 or 576"),
    ("prefill", "q", bf16(3, 200, 576), V, "q: got 200 heads"),
    ("prefill", "kv", bf16(9, 512), V, r"kv: got shape \(9, 512\), expected \[any, d\] with d = 576"),
    ("prefill", "kv", zeros(np.uint8, 9, 576), T, "kv: got dtype uint8"),
    ("prefill", "indices", int32(2, 5), V, "indices: got shape"),
    ("prefill", "topk_length", int32(4), V, "topk_length: got shape"),
    ("prefill", "d_v", 576, V, "d_v: got 576, expected 512"),
    ("prefill", "softmax_scale", float("inf"), V, "softmax_scale: got inf"),
    ("prefill", "out", (bf16(3, 4, 512),), T, r"out: got (?s:.*), expected \(out, max_logits, lse\)"),
    ("prefill", "out", (bf16(3, 4, 512), float32(3, 4), bf16(3, 4)), T, r"out\[2\] \(lse\): got dtype bfloat16"),
    ("merge", "prefix_output", float32(3, 4, 8), T, "prefix_output: got dtype float32, expected bfloat16"),
    ("merge", "suffix_output", bf16(3, 4, 9), V, "suffix_output: got shape"),
    ("merge", "prefix_lse", float32(3, 4), V, "prefix_lse: got shape"),
    ("merge", "output_lse", zeros(np.float64, 4, 3), T, "output_lse: got dtype float64"),
]


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """Host and device: what the backend is does not matter before it is called."""
    return Lab(request.param, on_device=request.param == "cuda")


def put(lab, value):
    if isinstance(value, tuple):
        return tuple(put(lab, x) for x in value)
    return lab.put(value.copy()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_unchanged_calls_work(lab, name):
    function, arguments, _ = OPERATIONS[name]
    function(**{key: put(lab, x) for key, x in arguments().items()}, backend=lab.backend)


@pytest.mark.parametrize(
    ("name", "argument", "wrong", "kind", "text"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_wrong_argument(place, name, argument, wrong, kind, text):
    function, arguments, written = OPERATIONS[name]
    given = {key: put(place, x) for key, x in {**arguments(), argument: wrong}.items()}
    with pytest.raises(kind, match=text):
        function(**given, backend=place.backend)
    for key in written:
        for output in given[key] if isinstance(given[key], tuple) else (given[key],):
            if key != argument:
                assert (place.get(output) == 1).all(), key


@pytest.mark.parametrize("name", OPERATIONS)
def test_read_only_outputs(name):
    function, arguments, written = OPERATIONS[name]
    for key in written:
        given = arguments()
        outputs = given[key] if isinstance(given[key], tuple) else (given[key],)
        outputs[-1].flags.writeable = False
        with pytest.raises(ValueError, match=rf"{key}.*: got a read-only"):
            function(**given, backend="reference")


@pytest.mark.parametrize("layout", [cumla.DSV4_FP8, cumla.V32_FP8, cumla.MLA_BF16, cumla.DSV4_BF16])
def test_any_index_and_length(lab, layout):
    """Indices and lengths of any value over caches of any bytes that rows may have, between guards."""

    @for_all(
        lab,
        examples=12,
        blocks=st.integers(1, 3),
        block_size=st.sampled_from((1, 2, 53)),
        gap=st.sampled_from((0, 16, 576)),
        heads=st.sampled_from((1, 5, 64)),
        topk=st.sampled_from((0, 1, 70)),
        lengths=st.sampled_from((None, "b", "b s_q")),
        extra=st.booleans(),
        seed=seeds,
    )
    def check(blocks, block_size, gap, heads, topk, lengths, extra, seed):
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((blocks * block_size, layout.head_dim)).astype(BF16)
        content = np.lib.stride_tricks.as_strided(
            cache_of(layout, blocks, block_size, rows), (blocks, block_size * layout.token_bytes),
            (layout.page_bytes(block_size), 1),
        )  # fmt: skip
        q = rng.standard_normal((2, 3, heads, layout.head_dim)).astype(BF16)
        indices, extra_indices = anything(rng, (2, 3, topk)), anything(rng, (2, 3, 9))
        sizes = {None: None, "b": (2,), "b s_q": (2, 3)}[lengths]
        lens = None if sizes is None else anything(rng, sizes)
        results = []
        for place in (lab, REFERENCE):
            cache = GuardedCache(place, layout, blocks, block_size, content, gap)
            out = Guarded(place, bf16(2, 3, heads, 512), (0, 64))
            lse = Guarded(place, float32(2, heads, 3), (8,))
            options = {"extra_k_cache": cache.array, "extra_indices": place.put(extra_indices)} if extra else {}
            if extra:
                options["extra_block_size"] = block_size
            cumla.sparse_mla_decode(
                place.put(q), cache.array, place.put(indices), layout=layout, block_size=block_size,
                topk_length=place.put(lens), **options, out=out.array, lse=lse.array, backend=place.backend,
            )  # fmt: skip
            out.assert_margins()
            lse.assert_margins()
            results.append((out.get(), lse.get()))
        (out, lse), (want_out, want_lse) = results
        assert_decode(to_float(out), lse, to_float(want_out), want_lse)


def cache_of(layout, blocks, block_size, rows):
    cache = layout.allocate(blocks, block_size)
    if layout.num_scales:
        cumla.quantize_and_insert_k_cache(
            rows, cache, np.arange(len(rows)), block_size, layout=layout, backend="reference"
        )
    else:
        cache[...] = rows.view(np.uint8).reshape(cache.shape)
    return cache


@pytest.mark.parametrize("head_dim", [512, 576])
def test_any_row_and_length(lab, head_dim):
    @for_all(
        lab, examples=12, rows=st.sampled_from((0, 1, 40)), heads=st.sampled_from((1, 5, 64)),
        topk=st.sampled_from((0, 1, 70, 128)), lengths=st.booleans(), seed=seeds,
    )  # fmt: skip
    def check(rows, heads, topk, lengths, seed):
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((5, heads, head_dim)).astype(BF16)
        kv = rng.standard_normal((rows, head_dim)).astype(BF16)
        indices, lens = anything(rng, (5, topk)), anything(rng, 5) if lengths else None
        results = []
        for place in (lab, REFERENCE):
            outputs = [
                Guarded(place, bf16(5, heads, 512), (0, 64)),
                *(Guarded(place, float32(5, heads), (8,)) for _ in range(2)),
            ]
            cumla.sparse_mla_prefill(
                place.put(q), Guarded(place, kv, (16,)).array, place.put(indices), topk_length=place.put(lens),
                out=tuple(x.array for x in outputs), backend=place.backend,
            )  # fmt: skip
            for output in outputs:
                output.assert_margins()
            results.append([to_float(x.get()) for x in outputs])
        largest = largest_values(to_float(kv), indices) if lab.backend == "cuda" and rows and topk else 1.0
        assert_prefill(*results[0], *results[1], largest=largest)
