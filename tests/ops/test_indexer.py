"""The indexer's scores, queries and keys on every backend, against the reference."""

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.kernels.cuda import launch
from cumla.kernels.cuda.device import assumed
from support.lab import BF16

FP8 = ml_dtypes.float8_e4m3fn
HEAD_DIM = 128
PLAIN = {"bfloat16": BF16, "float32": np.float32}


def e4m3(x):
    return x.astype(FP8).view(np.uint8)


def difference(x, y):
    """1 - 2<x, y> / (<x, x> + <y, y>), DeepGEMM's measure."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    squares = (x * x).sum() + (y * y).sum()
    return 1 - 2 * (x * y).sum() / squares if squares else 0.0


def check_logits(found, reference):
    """The bounds of scores: of all scores together, and of each relative to the largest in its row."""
    there = np.isfinite(reference)
    np.testing.assert_array_equal(found[~there], reference[~there])
    found, reference = np.where(there, found, 0), np.where(there, reference, 0)
    assert difference(found, reference) < 5e-6
    largest = np.abs(reference).max(axis=1, keepdims=True)
    assert (np.abs(found - reference) <= 1e-3 * largest).all()


def ragged(rng, queries, heads, keys, kind="fp8"):
    """q, kv, weights and ranges, some of which extend past the keys or are empty."""
    q, k = rng.normal(size=(queries, heads, HEAD_DIM)), rng.normal(size=(keys, HEAD_DIM))
    starts = rng.integers(-3, keys, queries).astype(np.int32)
    ends = (starts + rng.integers(-5, keys + 5, queries)).astype(np.int32)
    weights = rng.normal(size=(queries, heads)).astype(np.float32)
    if kind == "fp8":
        return e4m3(q), (e4m3(k), rng.uniform(0.1, 2, keys).astype(np.float32)), weights, starts, ends
    if kind.startswith("mxfp4"):
        kv = rng.integers(0, 256, (keys, HEAD_DIM // 2), np.uint8), rng.integers(115, 128, (keys, 4), np.uint8)
        kv[1][keys // 2, 2], kv[1][keys // 3, 0] = 0, 90
        q = e4m3(q) if kind == "mxfp4" else q.astype(PLAIN[kind.removeprefix("mxfp4 ")])
        return q, kv, weights, starts, ends
    return q.astype(PLAIN[kind]), k.astype(PLAIN[kind]), weights, starts, ends


def put_keys(lab, kv):
    return tuple(map(lab.put, kv)) if isinstance(kv, tuple) else lab.put(kv)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "mxfp4 bfloat16", "mxfp4 float32", "bfloat16", "float32"])
@pytest.mark.parametrize("heads", [64, 32, 5])
@pytest.mark.parametrize("width", [0, 40])
@pytest.mark.thorough(when=lambda x: x.simulated and (x.get("heads") != 5 or x.get("width")))
def test_scores_of_ranges(lab, rng, kind, heads, width):
    if lab.tiny:
        heads = 1
    q, kv, weights, starts, ends = ragged(rng, 2 if lab.tiny else 7, heads, 12 if lab.tiny else 70, kind)
    reference = cumla.fp8_mqa_logits(q, kv, weights, starts, ends, True, width, backend="reference")
    arguments = [lab.put(q), put_keys(lab, kv), *map(lab.put, (weights, starts, ends))]
    found = lab.get(cumla.fp8_mqa_logits(*arguments, True, width, backend=lab.backend))
    check_logits(found, reference)
    # Columns that a query does not see stay unchanged, unless they are to be cleaned.
    out = lab.put(np.full_like(reference, 7))
    cumla.fp8_mqa_logits(*arguments, False, width, out=out, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(out), np.where(np.isinf(reference), np.float32(7), found))


def paged(rng, layout, block_size, batch, next_n, heads, columns, gap=16):
    """q, cache, weights and a table with absent pages, with `gap` bytes between pages."""
    blocks = batch * columns + 3
    cache = layout.allocate(blocks, block_size, page_stride=layout.page_bytes(block_size) + gap)
    keys = rng.normal(size=(blocks * block_size, HEAD_DIM)).astype(np.float32)
    if layout is cumla.INDEXER_MXFP4:
        keys[::7, 32:64] *= 2.0**-10  # scales as far apart as Hopper's kernel allows for e4m3 keys, and further
        keys[5::29, 64:96] *= 2.0**-18
        keys[9::31, :32] *= 2.0**15
        slots = np.arange(len(keys))
        cumla.quantize_and_insert_k_cache(
            keys.astype(ml_dtypes.bfloat16), cache, slots, block_size, layout=layout, backend="reference"
        )
    else:
        cumla.indexer_k_quant_and_cache(keys, cache, np.arange(len(keys)), backend="reference")
    table = rng.permutation(blocks)[: batch * columns].reshape(batch, columns).astype(np.int32)
    table[0, columns // 2], table[-1, -1] = -1, blocks
    q = rng.normal(size=(batch, next_n, heads, HEAD_DIM))
    q = e4m3(q) if layout.num_scales else q.astype(PLAIN[layout.value_type])
    return q, cache, rng.normal(size=(batch * next_n, heads)).astype(np.float32), table


SIMULATED_PAGES = [(2, 1, cumla.INDEXER_FP8), (3, 2, cumla.INDEXER_BF16)]


@pytest.mark.parametrize(
    "layout",
    [cumla.INDEXER_FP8, cumla.INDEXER_MXFP4, cumla.INDEXER_BF16, cumla.INDEXER_F32],
    ids=lambda x: x.name,
)
@pytest.mark.parametrize(("block_size", "next_n", "heads"), [(64, 1, 64), (16, 2, 64), (5, 3, 4)])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.thorough(
    when=lambda x: x.simulated and (x.get("next_n"), x.get("axes"), x.get("layout")) not in SIMULATED_PAGES
)
def test_scores_of_pages(lab, rng, layout, block_size, next_n, heads, axes):
    block_size, heads = (block_size % 3 + 1, 1) if lab.tiny else (block_size, heads)
    columns = 3 if lab.tiny or block_size == 64 else 5
    gap = 5 if lab.backend == "cuda" and heads < 64 else 16  # pages at odd addresses
    q, cache, weights, table = paged(rng, layout, block_size, 2, next_n, heads, columns, gap)
    lens = rng.integers(-2, columns * block_size + 4, (2, next_n)[:axes]).astype(np.int32)
    lens.flat[0] = columns * block_size - 1
    arguments = [lab.put(x) for x in (q, cache, weights, lens, table)]
    options = {"max_context_len": columns * block_size - 2, "layout": layout}
    reference = cumla.fp8_paged_mqa_logits(
        q, cache, weights, lens, table, clean_logits=True, backend="reference", **options
    )
    found = lab.get(cumla.fp8_paged_mqa_logits(*arguments, clean_logits=True, backend=lab.backend, **options))
    check_logits(found, reference)
    topk = cumla.top_k_per_row(found, 9, seq_lens=lens, next_n=next_n, backend="reference")
    chosen = cumla.indexer_topk(
        *arguments[:3], 9, context_lens=arguments[3], block_table=arguments[4], backend=lab.backend, **options
    )
    np.testing.assert_array_equal(lab.get(chosen), topk)


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("heads", [64, 32, 16])
@pytest.mark.parametrize("layout", [cumla.INDEXER_FP8, cumla.INDEXER_MXFP4, cumla.INDEXER_BF16], ids=lambda x: x.name)
@pytest.mark.thorough(when=lambda x: x.get("heads") != 64 or x.get("layout") is cumla.INDEXER_BF16)
def test_scores_by_kernels_of_other_devices(device, rng, capability, heads, layout):
    """Kernels without and with the instruction that converts e4m3; some FP8 keys and queries are NaN."""
    lab = device
    q, cache, weights, table = paged(rng, layout, 64, 2, 2, heads, 4)
    kinds = {cumla.INDEXER_FP8: "fp8", cumla.INDEXER_MXFP4: "mxfp4", cumla.INDEXER_BF16: "bfloat16"}
    packed_q, kv, *ranges = ragged(rng, 37, heads, 300, kinds[layout])
    ranges[1][5:25], ranges[2][5:25] = 20, np.arange(250, 270)  # a prompt
    if layout is cumla.INDEXER_FP8:
        layout.parts(cache)[0][table[0, 0], 9, 3] = 0x7F
        q[1, 1, 2, 70], kv[0][30, 100], packed_q[9, 3, 90], packed_q[20, -1, 2] = 0xFF, 0xFF, 0x7F, 0x01
    lens = np.array([250, 130], np.int32)
    of_pages = {"max_context_len": 256, "layout": layout, "clean_logits": True}
    want = cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, backend="reference", **of_pages)
    want_packed = cumla.fp8_mqa_logits(packed_q, kv, *ranges, True, backend="reference")
    given = [lab.put(x) for x in (q, cache, weights, lens, table)]
    given_packed = [lab.put(packed_q), put_keys(lab, kv), *map(lab.put, ranges)]
    with assumed(capability), launch.recorded_launches():
        found = lab.get(cumla.fp8_paged_mqa_logits(*given, backend="cuda", **of_pages))
        found_packed = lab.get(cumla.fp8_mqa_logits(*given_packed, True, backend="cuda"))
    check_logits(found, want)
    check_logits(found_packed, want_packed)
    assert np.isnan(want).any() == np.isnan(want_packed).any() == (layout is cumla.INDEXER_FP8)


@pytest.mark.parametrize(
    ("lens", "num_sms", "expected"),
    [
        ([1000, 500], 4, [[0, 0], [0, 2], [1, 0], [1, 1], [2, 0]]),
        ([64, 0, 300], 5, [[0, 0], [2, 0], [2, 1], [3, 0], [3, 0], [3, 0]]),
        ([], 2, [[0, 0]] * 3),
    ],
)
def test_schedule_counts_splits_of_four_pages(lab, lens, num_sms, expected):
    lens = np.array(lens, np.int32)
    found = cumla.get_paged_mqa_logits_metadata(lab.put(lens), 64, num_sms, backend=lab.backend)
    assert lab.get(found).tolist() == expected
    several = np.stack([lens // 2, lens], axis=1)
    found = cumla.get_paged_mqa_logits_metadata(lab.put(several), 64, num_sms, backend=lab.backend)
    assert lab.get(found).tolist() == expected


def test_a_schedule_of_one_multiprocessor(lab):
    """Two rows, its start and its end; fewer are no schedule of any device."""
    lens, table = np.array([9, 30], np.int32), np.zeros((2, 4), np.int32)
    q, weights = np.zeros((2, 1, 2, HEAD_DIM), np.uint8), np.zeros((2, 2), np.float32)
    given = [lab.put(x) for x in (q, np.zeros((1, 8, 132), np.uint8), weights, lens, table)]
    schedule = cumla.get_paged_mqa_logits_metadata(given[3], 8, 1, backend=lab.backend)
    found = cumla.fp8_paged_mqa_logits(*given, schedule, backend=lab.backend)
    assert lab.get(found)[0, :9].tolist() == [0] * 9
    with pytest.raises(ValueError, match="schedule_metadata: got 1 rows, expected one more than"):
        cumla.fp8_paged_mqa_logits(*given, schedule[:1], backend=lab.backend)


def test_a_schedule_of_the_longest_pages(lab):
    """Four such pages in a split overflow int32."""
    lens = lab.put(np.array([2**31 - 1, 0, 5], np.int32))
    found = cumla.get_paged_mqa_logits_metadata(lens, 2**31 - 1, 2, backend=lab.backend)
    assert lab.get(found).tolist() == [[0, 0], [2, 0], [3, 0]]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_sizes_beyond_32_bits_are_refused(backend):
    """Sizes are checked before an address is computed."""
    one, wide = np.zeros(1, np.float32), np.lib.stride_tricks.as_strided
    with pytest.raises(ValueError, match=r"logits: got 2147483648 columns, expected at most 2147483647"):
        cumla.top_k_per_row(wide(one, (1, 2**31), (0, 4)), 5, backend=backend)
    q, k, weights = (
        np.zeros((1, 2, HEAD_DIM), np.uint8),
        np.zeros((3, HEAD_DIM), np.uint8),
        np.zeros((1, 2), np.float32),
    )
    ends, scales = np.ones(1, np.int32), np.ones(3, np.float32)
    for call in (
        lambda width: cumla.fp8_mqa_logits(q, (k, scales), weights, ends, ends, True, width, backend=backend),
        lambda width: cumla.indexer_topk(
            q, (k, scales), weights, 5, cu_seqlen_ks=ends, cu_seqlen_ke=ends, max_seqlen_k=width, backend=backend
        ),
    ):
        with pytest.raises(ValueError, match="max_seqlen_k: got 2147483648, expected at most 2147483647"):
            call(2**31)
    cache, table = cumla.INDEXER_FP8.allocate(1, 4), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="max_context_len: got 2147483648, expected at most 2147483647"):
        cumla.fp8_paged_mqa_logits(q[None], cache, weights, ends, table, None, 2**31, backend=backend)


@pytest.mark.parametrize("width", [0, 30])
@pytest.mark.parametrize("workspace_rows", [2, 100])
@pytest.mark.thorough(when=lambda x: x.simulated and (x.get("width") > 0) != (x.get("workspace_rows") == 2))
def test_scoring_and_choosing_at_once_gives_what_the_steps_give(lab, rng, width, workspace_rows):
    keys = 12 if lab.tiny else 70
    q, kv, weights, starts, ends = ragged(rng, 3 if lab.tiny else 9, 1 if lab.tiny else 64, keys)
    arguments = [lab.put(q), put_keys(lab, kv), lab.put(weights)]
    ranges = [lab.put(starts), lab.put(ends)]
    logits = cumla.fp8_mqa_logits(*arguments, *ranges, backend=lab.backend)
    if width:
        ends = np.minimum(ends, np.clip(starts, 0, keys) + width).astype(np.int32)
    expected = cumla.top_k_per_row(lab.get(logits), 11, starts, ends, backend="reference")
    found = cumla.indexer_topk(
        *arguments, 11, cu_seqlen_ks=ranges[0], cu_seqlen_ke=ranges[1], max_seqlen_k=width,
        max_workspace_bytes=4 * 72 * workspace_rows, backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(found), expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38, -np.inf])
def test_nothing_is_chosen_of_what_scores_left_unwritten(lab, rng, poison):
    """Columns after a request's last are in the workspace, with the previous contents."""
    columns, topk = (2, 5) if lab.tiny else (12, 30)
    q, cache, weights, table = paged(rng, cumla.INDEXER_FP8, 8, 3, 1, 1 if lab.tiny else 64, columns)
    lens = np.array([columns * 8, 3, 0], np.int32)
    logits = cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, clean_logits=True, backend="reference")
    expected = cumla.top_k_per_row(logits, topk, seq_lens=lens, backend="reference")
    workspace = lab.put(np.full(3 * columns * 8, poison, np.float32).view(np.uint8))
    found = cumla.indexer_topk(
        *map(lab.put, (q, cache, weights)), topk, context_lens=lab.put(lens), block_table=lab.put(table),
        workspace=workspace, backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(found), expected)


@pytest.mark.parametrize("rope_first", [False, True])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_queries(lab, rng, rope_first, is_neox, dtype):
    tokens, heads = (2, 2) if lab.tiny else (5, 64)
    angles = rng.uniform(0, 7, (20, 32))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = rng.integers(-1, 22, tokens)
    q = (rng.normal(size=(tokens, heads, HEAD_DIM)) * 10.0 ** rng.integers(-14, 3, (tokens, heads, 1))).astype(dtype)
    w = rng.normal(size=(tokens, heads)).astype(np.float32)
    options = {"rope_first": rope_first, "is_neox": is_neox}
    arguments = [lab.put(x) for x in (positions, q, table, w)]
    for quantize in (True, False):
        expected = cumla.fused_indexer_q_rope_quant(
            positions, q, table, w, quantize=quantize, backend="reference", **options
        )
        found = cumla.fused_indexer_q_rope_quant(*arguments, quantize=quantize, backend=lab.backend, **options)
        found = [lab.get(x) for x in found]
        if quantize:
            # A value may be on either side of a rounding boundary of bfloat16: products may be fused with sums.
            assert (found[0] != expected[0]).mean() < 1e-2
            values, wanted = (x.view(FP8).astype(np.float32) for x in (found[0], expected[0]))
            np.testing.assert_allclose(values, wanted, rtol=0.126, atol=2**-9)
            np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
        else:
            largest = np.abs(expected[0]).max(axis=2, keepdims=True)
            assert (np.abs(found[0] - expected[0]) <= 1e-6 * largest).all()
            np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_positions_outside_of_the_table_rotate_nothing(lab, rng, dtype):
    table = rng.uniform(-1, 1, (5, 64)).astype(np.float32)
    wide = (2**32, -(2**32) + 1, -(2**63)) if dtype == np.int64 else ()
    for outside in ((-1, -5, 5, 6), (-6, -(2**31), 2**31 - 1, *wide)):
        positions = np.array([*outside, 0, 4], dtype)
        q = rng.normal(size=(len(positions), 1, HEAD_DIM)).astype(BF16)
        arguments = [lab.put(x) for x in (positions, q, table, np.ones((len(q), 1), np.float32))]
        found, _ = cumla.fused_indexer_q_rope_quant(*arguments, quantize=False, backend=lab.backend)
        np.testing.assert_array_equal(lab.get(found)[:-2], q[:-2])
        assert (lab.get(found)[-2:] != q[-2:]).any(axis=(1, 2)).all()


def test_scales_of_queries_with_infinities(lab, rng):
    """The scale is that of the finite values: an infinity becomes e4m3's largest, the others keep their digits."""
    q = rng.normal(size=(4, 1, HEAD_DIM)).astype(BF16)
    q[0, 0, 5], q[1, 0, 6], q[2, 0, 7], q[3] = np.inf, -np.inf, np.nan, np.inf
    arguments = np.full(4, -1), q, np.zeros((1, 64), np.float32), np.ones((4, 1), np.float32)
    want, weights = cumla.fused_indexer_q_rope_quant(*arguments, backend="reference")
    values, found = cumla.fused_indexer_q_rope_quant(*map(lab.put, arguments), backend=lab.backend)
    np.testing.assert_array_equal(lab.get(values).view(np.uint8), want.view(np.uint8))
    np.testing.assert_allclose(lab.get(found), weights, rtol=1e-6)
    finite = np.where(np.isfinite(q[:3]), q[:3], 0).astype(np.float32)
    assert (weights[:3, 0] <= np.abs(finite).max(axis=(1, 2)) / 448 * 2).all()


def test_rope_pairs(rng):
    """A rotation of one pair by 90 degrees, for both ways to pair."""
    table = np.concatenate([np.ones(32), np.zeros(32)])[None].astype(np.float32)
    table[0, 3], table[0, 32 + 3] = 0, 1
    q = rng.normal(size=(1, 1, HEAD_DIM)).astype(np.float32)
    for rope_first, is_neox, low, high in (
        (False, False, 64 + 6, 64 + 7), (False, True, 64 + 3, 64 + 35), (True, False, 6, 7), (True, True, 3, 35),
    ):  # fmt: skip
        found, _ = cumla.fused_indexer_q_rope_quant(
            np.zeros(1, np.int64), q, table, np.ones((1, 1), np.float32), quantize=False,
            rope_first=rope_first, is_neox=is_neox, backend="reference",
        )  # fmt: skip
        expected = q[0, 0].copy()
        expected[low], expected[high] = -q[0, 0, high], q[0, 0, low]
        np.testing.assert_array_equal(found[0, 0], expected)


@pytest.mark.parametrize("layout", [cumla.INDEXER_BF16, cumla.INDEXER_F32], ids=lambda x: x.name)
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.nowhere(when=lambda combination: combination.get("gap") and combination.backend != "cuda")
def test_keys_without_scales_come_back_as_they_were(lab, rng, layout, gap):
    dtype = PLAIN[layout.value_type]
    k = rng.normal(size=(9, HEAD_DIM)).astype(dtype)
    pages = lab.put(np.full((4, 3 * layout.token_bytes + gap), 165, np.uint8))
    cache = layout.view(pages, 3)
    slots = np.array([0, 11, -1, 4, 12, 5, 6, 1], np.int64)
    cumla.indexer_k_quant_and_cache(lab.put(k), cache, lab.put(slots), backend=lab.backend)
    expected = np.full((12, layout.token_bytes), 165, np.uint8)
    for token, slot in enumerate(slots):
        if 0 <= slot < 12:
            expected[slot] = k[token].view(np.uint8)
    np.testing.assert_array_equal(lab.get(cache).reshape(12, -1), expected)
    table, starts = np.array([[1, 0], [3, -1]], np.int32), np.array([0, 5, 9], np.int32)
    out = lab.put(np.ones((10, HEAD_DIM), dtype))
    cumla.cp_gather_indexer_k_quant_cache(cache, out, None, lab.put(table), lab.put(starts), backend=lab.backend)
    expected = expected.view(dtype)
    expected = np.concatenate([expected[[3, 4, 5, 0, 1, 9, 10, 11]], np.zeros((1, HEAD_DIM)), np.ones((1, HEAD_DIM))])
    np.testing.assert_array_equal(lab.get(out), expected.astype(dtype))


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_queries_without_quantisation_over_e4m3_keys_are_named(dtype):
    """The error names the queries: the keys are valid."""
    q, weights, bounds = np.zeros((2, 3, 128), dtype), np.zeros((2, 3), np.float32), np.zeros(2, np.int32)
    keys, scales = np.zeros((5, 128), np.uint8), np.ones(5, np.float32)
    cache, table = cumla.INDEXER_FP8.allocate(2, 8), np.zeros((2, 1), np.int32)
    packed = {"cu_seqlen_ks": bounds, "cu_seqlen_ke": bounds}
    for kv in (keys, (keys, scales)):
        with pytest.raises(TypeError, match=f"^q: got dtype {np.dtype(dtype).name}"):
            cumla.indexer_topk(q, kv, weights, 4, **packed)
        with pytest.raises(TypeError, match=f"^q: got dtype {np.dtype(dtype).name}"):
            cumla.fp8_mqa_logits(q, kv, weights, bounds, bounds)
    with pytest.raises(TypeError, match=f"^q: got dtype {np.dtype(dtype).name} for a cache of keys in e4m3"):
        cumla.indexer_topk(q[:, None], cache, weights, 4, context_lens=bounds, block_table=table)
    with pytest.raises(TypeError, match=f"^q: got dtype {np.dtype(dtype).name} for a cache of keys in e4m3"):
        cumla.fp8_paged_mqa_logits(q[:, None], cache, weights, bounds, table)
    with pytest.raises(ValueError, match=r"^kv_scales: got None for e4m3 keys"):
        cumla.indexer_topk(q.astype(np.uint8), keys, weights, 4, **packed)
