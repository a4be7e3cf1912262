"""The indexer's scores and choices on every backend, against the reference."""

import contextlib
import ctypes
import platform
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cumla
import emulation
from cumla.kernels.cpu import indexer as cpu_kernels
from cumla.kernels.reference import indexer as reference_kernels
from cumla.kernels.types.indexer import Rows
from support.lab import BF16, Lab

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
    """The bounds of scores: of all together, and of each against the largest of its row."""
    there = np.isfinite(reference)
    np.testing.assert_array_equal(found[~there], reference[~there])
    found, reference = np.where(there, found, 0), np.where(there, reference, 0)
    assert difference(found, reference) < 5e-6
    largest = np.abs(reference).max(axis=1, keepdims=True)
    assert (np.abs(found - reference) <= 1e-3 * largest).all()


def ragged(rng, queries, heads, keys, kind="fp8"):
    """q, kv, weights and ranges, some of which reach beyond the keys or are empty."""
    q, k = rng.normal(size=(queries, heads, HEAD_DIM)), rng.normal(size=(keys, HEAD_DIM))
    starts = rng.integers(-3, keys, queries).astype(np.int32)
    ends = (starts + rng.integers(-5, keys + 5, queries)).astype(np.int32)
    weights = rng.normal(size=(queries, heads)).astype(np.float32)
    if kind == "fp8":
        return e4m3(q), (e4m3(k), rng.uniform(0.1, 2, keys).astype(np.float32)), weights, starts, ends
    return q.astype(PLAIN[kind]), k.astype(PLAIN[kind]), weights, starts, ends


def put_keys(lab, kv):
    return tuple(map(lab.put, kv)) if isinstance(kv, tuple) else lab.put(kv)


@pytest.mark.parametrize("kind", ["fp8", "bfloat16", "float32"])
@pytest.mark.parametrize("heads", [64, 5])
@pytest.mark.parametrize("width", [0, 40])
def test_scores_of_ranges(lab, rng, kind, heads, width):
    if lab.tiny:
        heads = 1
    q, kv, weights, starts, ends = ragged(rng, 2 if lab.tiny else 7, heads, 12 if lab.tiny else 70, kind)
    reference = cumla.fp8_mqa_logits(q, kv, weights, starts, ends, True, width, backend="reference")
    arguments = [lab.put(q), put_keys(lab, kv), *map(lab.put, (weights, starts, ends))]
    found = lab.get(cumla.fp8_mqa_logits(*arguments, True, width, backend=lab.backend))
    check_logits(found, reference)
    # What a query does not see stays as it is, unless it is to be cleaned.
    out = lab.put(np.full_like(reference, 7))
    cumla.fp8_mqa_logits(*arguments, False, width, out=out, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(out), np.where(np.isinf(reference), np.float32(7), found))


def paged(rng, layout, block_size, batch, next_n, heads, columns, gap=16):
    """q, cache, weights and a table with absent pages, of which there are `gap` bytes between."""
    blocks = batch * columns + 3
    cache = layout.allocate(blocks, block_size, page_stride=layout.page_bytes(block_size) + gap)
    keys = rng.normal(size=(blocks * block_size, HEAD_DIM)).astype(np.float32)
    cumla.indexer_k_quant_and_cache(keys, cache, np.arange(len(keys)), backend="reference")
    table = rng.permutation(blocks)[: batch * columns].reshape(batch, columns).astype(np.int32)
    table[0, columns // 2], table[-1, -1] = -1, blocks
    q = rng.normal(size=(batch, next_n, heads, HEAD_DIM))
    q = e4m3(q) if layout.num_scales else q.astype(PLAIN[layout.value_type])
    return q, cache, rng.normal(size=(batch * next_n, heads)).astype(np.float32), table


SIMULATED_PAGES = [(2, 1, cumla.INDEXER_FP8), (3, 2, cumla.INDEXER_BF16)]


@pytest.mark.parametrize("layout", [cumla.INDEXER_FP8, cumla.INDEXER_BF16, cumla.INDEXER_F32], ids=lambda x: x.name)
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


def test_a_schedule_of_the_longest_pages(lab):
    """A split of four of them is more than int32 counts."""
    lens = lab.put(np.array([2**31 - 1, 0, 5], np.int32))
    found = cumla.get_paged_mqa_logits_metadata(lens, 2**31 - 1, 2, backend=lab.backend)
    assert lab.get(found).tolist() == [[0, 0], [2, 0], [3, 0]]


def hard_rows(rng, rows, width):
    """Few different values, NaN, infinities, both zeros, a row that grows and one that falls."""
    x = rng.normal(size=(rows, width)).astype(np.float32)
    x[0] = rng.integers(-2, 3, width)
    x[1, :: max(width // 7, 1)] = np.nan
    x[1, 1::5], x[1, 2::7] = np.inf, -np.inf
    x[2] = np.where(np.arange(width) % 2, np.float32(0), np.float32(-0.0))
    if rows > 5:
        x[3], x[4], x[5] = np.sort(x[3]), np.sort(x[4])[::-1], np.nan
    return x


@pytest.mark.parametrize(
    ("width", "topk"),
    [
        (1, 1), (33, 5), (300, 7), (300, 300), (300, 512), (5000, 64), (6000, 512), (9000, 1024), (5000, 2048),
        (40_000, 700),
    ],
)  # fmt: skip
@pytest.mark.nowhere(when=lambda x: x.backend == "reference")
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("width") not in (33, 6000))  # as wide as it can be
def test_choice_is_the_references(lab, rng, width, topk):
    rows = 7
    if lab.tiny:
        width, rows = min(width, 16), 3
    if lab.emulated:
        width = min(width, 20_000)
    x = hard_rows(rng, rows, width + 3)[:, :width]  # rows of any alignment
    expected = cumla.top_k_per_row(x, topk, backend="reference")
    np.testing.assert_array_equal(lab.get(cumla.top_k_per_row(lab.put(x), topk, backend=lab.backend)), expected)
    starts = rng.integers(-2, width + 2, len(x)).astype(np.int32)
    ends = (starts + rng.integers(-2, width + 5, len(x))).astype(np.int32)
    expected = cumla.top_k_per_row(x, topk, starts, ends, backend="reference")
    found = cumla.top_k_per_row(lab.put(x), topk, lab.put(starts), lab.put(ends), backend=lab.backend)
    np.testing.assert_array_equal(lab.get(found), expected)
    lens = rng.integers(-1, width + 2, 1).astype(np.int32)
    expected = cumla.top_k_per_row(x, topk, seq_lens=lens, next_n=rows, backend="reference")
    found = cumla.top_k_per_row(lab.put(x), topk, seq_lens=lab.put(lens), next_n=rows, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(found), expected)


def is_elsewhere(combination):
    return combination.backend != "cuda"


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize("threads", [256, 512])
@pytest.mark.parametrize("kind", ["random", "rising", "equal", "two values", "few"])
def test_choice_where_a_sample_tells_much_or_little(lab, rng, monkeypatch, threads, kind):
    """The bound that it gives is reached by more than a buffer holds, by fewer than are to be chosen, or well."""
    from cumla.kernels.cuda import indexer as launcher

    monkeypatch.setattr(launcher, "choice_threads", lambda *unused: threads)
    width, topk = 82 * threads, threads // 2 + 3
    normal = rng.normal(size=(5, width))
    sampled = np.arange(width) % (21 * 32) < 32  # what all lanes read first, and nobody later
    few = np.where(sampled, 1, -1) * rng.uniform(1, 2, width)
    rows = {
        "random": normal[0], "rising": np.sort(normal[0]), "equal": np.full(width, 3.0),
        "two values": rng.integers(0, 2, width), "few": few,
    }  # fmt: skip
    x = np.stack([rows[kind], *normal, rows[kind], *normal[:2]]).astype(np.float32)
    starts = np.array([0, 7, 0, width, 3, 0, 9, 4, 2], np.int32)
    ends = np.array([width, width - 6, 3, width, width // 2, width - 1, width, topk, topk + 9], np.int32)
    indices = lab.put(np.zeros((len(x), topk), np.int32))
    launcher.top_k_per_row(lab.put(x), Rows(lab.put(starts), lab.put(ends)), indices)
    expected = cumla.top_k_per_row(x, topk, starts, ends, backend="reference")
    np.testing.assert_array_equal(lab.get(indices), expected)


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize(
    ("size", "width", "topk"),
    [
        ((1024, 1, 2), 8192, 512), ((128, 1, 8), 4093, 100), ((128, 2, 4), 4090, 70), ((128, 4, 2), 4096, 200),
        ((256, 8, 2), 16_300, 300), ((256, 8, 1), 700, 512),
        ((128, 1, 8, 4), 16_300, 120), ((128, 2, 8, 2), 15_001, 128), ((128, 4, 8, 2), 20_003, 70),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["random", "odd", "in places"])
def test_choice_of_few_rows(lab, rng, monkeypatch, size, width, topk, kind):
    """Threads, blocks of a cluster, reads and rounds of a thread; rows of numbers that are alike, missing or close."""
    from cumla.kernels.cuda import indexer as launcher

    size = launcher.FewRowsSize(*size)
    assert size.finds(topk)
    assert width <= size.columns
    monkeypatch.setattr(launcher, "few_rows_size", lambda *unused: size)
    x = rng.normal(size=(4, width)).astype(np.float32)
    if kind == "odd":
        x[0], x[1], x[2], x[3, ::3] = -0.0, np.round(x[1], 1), np.sort(x[2]), np.nan
    if kind == "in places":
        x[0, 5], x[0, 9 : width // 2], x[2, 300:600] = np.inf, -np.inf, x[2, 300:600] + 100
        x[1], x[1, 7], x[3] = -np.inf, 1, np.maximum(x[3], 0) * (rng.uniform(size=width) < 0.03)
    starts = np.array([0, 1, 3, width // 2], np.int32)
    ends = np.array([width, width - 1, width - 3, width], np.int32)
    expected = cumla.top_k_per_row(x, topk, starts, ends, backend="reference")
    for rows in (x, np.pad(x, ((0, 0), (0, 1)))[:, :width]):  # at multiples of 16 bytes, or not
        indices = lab.put(np.zeros((4, topk), np.int32))
        launcher.top_k_per_row(lab.put(rows), Rows(lab.put(starts), lab.put(ends)), indices)
        np.testing.assert_array_equal(lab.get(indices), expected)


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize("size", [(1024, 1, 2), (128, 4, 2), (128, 2, 8, 2)])
@pytest.mark.parametrize("kind", ["signed", "positive", "equal", "subnormal"])
def test_choice_of_few_rows_of_any_length(lab, rng, monkeypatch, size, kind):
    """Of lengths that leave groups of lanes without columns, or in which most columns are chosen."""
    from cumla.kernels.cuda import indexer as launcher

    size, topk = launcher.FewRowsSize(*size), 100
    monkeypatch.setattr(launcher, "few_rows_size", lambda *unused: size)
    width = size.columns
    lens = {0, 1, 31, 33, topk - 1, topk, topk + 1, 2 * topk + 3, 511, 1500, 2049, width // 2 - 3, width - 1, width}
    lens = np.array(sorted(lens), np.int32)
    x = rng.normal(0, 1, (len(lens), width)).astype(np.float32)
    if kind == "subnormal":
        x = (np.maximum(x, 0) * 1e-39).astype(np.float32)
    elif kind != "signed":
        x = x * (kind == "positive") + 6
    x[:, 7::50], x[:, 13::90] = np.nan, -np.inf
    indices = lab.put(np.zeros((len(lens), topk), np.int32))
    launcher.top_k_per_row(lab.put(x), Rows(lens=lab.put(lens)), indices)
    expected = cumla.top_k_per_row(x, topk, seq_lens=lens, backend="reference")
    np.testing.assert_array_equal(lab.get(indices), expected)


@contextlib.contextmanager
def flushing():
    """Comparisons take subnormal numbers for zeros, as on devices: by bits of x86's MXCSR, which glibc keeps last."""
    glibc, environment = ctypes.CDLL(None), (ctypes.c_uint32 * 8)()
    glibc.fegetenv(environment)
    before = environment[7]
    environment[7] |= 0x8040
    glibc.fesetenv(environment)
    try:
        yield
    finally:
        environment[7] = before
        glibc.fesetenv(environment)


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="sets a register of x86")
@pytest.mark.parametrize("size", [(1024, 1, 2), (128, 4, 2), (128, 2, 8, 2)])
def test_choice_of_few_rows_where_comparisons_flush(emulated, rng, monkeypatch, size):
    from cumla.kernels.cuda import indexer as launcher

    lab, size, topk = Lab("cuda", on_device=True, emulated=True), launcher.FewRowsSize(*size), 100
    monkeypatch.setattr(launcher, "few_rows_size", lambda *unused: size)
    x = np.zeros((3, size.columns), np.float32)
    x[0, x.shape[1] // 2], x[1] = 1e-40, rng.normal(size=x.shape[1]) * 1e-40
    x[2, ::3], x[2, 1::3], x[2, 5] = 1, -1e-40, 1e-39
    expected = cumla.top_k_per_row(x, topk, backend="reference")
    logits, indices = lab.put(x), lab.put(np.zeros((3, topk), np.int32))
    with flushing():
        launcher.top_k_per_row(logits, Rows(), indices)
    np.testing.assert_array_equal(lab.get(indices), expected)


@pytest.mark.parametrize("schedule", ["late", "random 1", "random 2"])
@pytest.mark.parametrize("size", [(128, 4, 2), (128, 2, 8, 2)])
def test_choice_of_few_rows_on_any_schedule(emulated, rng, monkeypatch, size, schedule):
    from cumla.kernels.cuda import indexer as launcher

    lab, size = Lab("cuda", on_device=True, emulated=True), launcher.FewRowsSize(*size)
    monkeypatch.setattr(launcher, "few_rows_size", lambda *unused: size)
    x, indices = rng.normal(size=(3, 4000)).astype(np.float32), lab.put(np.zeros((3, 128), np.int32))
    x[2] = 0
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        launcher.top_k_per_row(lab.put(x), Rows(), indices)
        np.testing.assert_array_equal(lab.get(indices), cumla.top_k_per_row(x, 128, backend="reference"))


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize("size", [(128, 1, 2), (128, 4, 2), (128, 4, 8, 2)])
@pytest.mark.parametrize("next_n", [1, 3])
def test_choice_among_as_many_columns_as_the_launch_ahead_says(lab, rng, monkeypatch, size, next_n):
    """What the choice ahead has chosen is how long the rows are; before it was something else."""
    from cumla.kernels.cuda import indexer as launcher

    size, topk, requests = launcher.FewRowsSize(*size), 20, 4
    monkeypatch.setattr(launcher, "few_rows_size", lambda *unused: size)
    lens = np.sort(rng.choice(np.arange(next_n, 800), requests, False)).astype(np.int32)
    said = np.full((1, 800), -1, np.float32)
    said[0, lens] = 1
    x = rng.normal(size=(requests * next_n, 800)).astype(np.float32)
    expected = cumla.top_k_per_row(x, topk, seq_lens=lens, next_n=next_n, backend="reference")
    said, x = lab.put(said), lab.put(x)
    for before in (0, 800, -(2**31), 2**31 - 1):
        chosen, indices = lab.put(np.full((1, requests), before, np.int32)), lab.put(np.zeros(expected.shape, np.int32))
        launcher.top_k_per_row(said, Rows(), chosen)
        launcher.top_k_per_row(x, Rows(lens=chosen[0], next_n=next_n), indices)
        np.testing.assert_array_equal(lab.get(indices), expected)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_choice_of_few_rows_of_any_numbers(emulated, data):
    """Lengths, starts and k, and rows of a few numbers that repeat or of many."""
    from cumla.kernels.cuda import indexer as launcher

    lab = Lab("cuda", on_device=True, emulated=True)
    size = launcher.FewRowsSize(128, data.draw(st.sampled_from([1, 2, 4])), *data.draw(st.sampled_from([(2,), (8, 2)])))
    width, topk = data.draw(st.integers(1, size.columns)), data.draw(st.integers(1, 128))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    few = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=5))
    x = np.where(
        rng.uniform(size=(2, width)) < data.draw(st.floats(0, 1)),
        rng.choice(np.array(few, np.float32), (2, width)),
        rng.normal(size=(2, width)),
    ).astype(np.float32)
    starts, ends = (rng.integers(0, width + 1, 2).astype(np.int32) for _ in range(2))
    rows = data.draw(st.sampled_from([Rows(), Rows(starts, ends), Rows(lens=ends), Rows(starts, ends, num_keys=width)]))
    indices, expected = lab.put(np.zeros((2, topk), np.int32)), np.zeros((2, topk), np.int32)
    reference_kernels.top_k_per_row(x, rows, expected)
    arrays = {name: getattr(rows, name) for name in ("starts", "ends", "lens")}
    on_device = rows._replace(**{name: None if array is None else lab.put(array) for name, array in arrays.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "few_rows_size", lambda *unused: size)
        launcher.top_k_per_row(lab.put(x), on_device, indices)
        np.testing.assert_array_equal(lab.get(indices), expected)


@pytest.mark.parametrize(
    ("rows", "width", "topk", "aligned", "expected"),
    [
        (4, 8_192, 512, True, (1024, 1, 2, 1)),
        (4, 32_768, 512, True, (512, 8, 2, 1)),
        (4, 2**18, 2048, True, (1024, 8, 8, 1)),
        (4, 2**18, 2048, False, (1024, 8, 8, 2)),
        (4, 2**18 + 1, 512, True, (1024, 8, 8, 2)),
        (4, 2**20, 2048, True, (1024, 8, 8, 4)),
        (16, 2**20, 2048, True, (1024, 4, 8, 8)),
        (4, 2**21, 512, False, (1024, 8, 8, 8)),
        (4, 2**21 + 1, 512, True, None),
        (16, 2**20 + 1, 512, True, None),
        (57, 2**17, 512, True, (1024, 2, 8, 2)),
        (128, 2**16, 512, True, None),
    ],
)  # fmt: skip
def test_thread_blocks_of_few_rows(rows, width, topk, aligned, expected):
    """A million columns are read by a cluster, of one row or of sixteen; shared memory suffices."""
    from cumla.kernels.cuda.indexer import few_rows_size

    size = few_rows_size(rows, width, topk, 132, 8, aligned)
    assert size == expected
    assert size is None or (width <= size.columns and size.shared_bytes <= 227 * 1024)


def test_choice_of_more_than_fits_in_a_thread_block(lab, rng):
    x = hard_rows(rng, 3, 20 if lab.tiny else 9_000)
    topk = 15 if lab.tiny else 8_500
    expected = cumla.top_k_per_row(x, topk, backend="reference")
    np.testing.assert_array_equal(lab.get(cumla.top_k_per_row(lab.put(x), topk, backend=lab.backend)), expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_sizes_beyond_32_bits_are_refused(backend):
    """Before an address is made of them."""
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


def test_choice_is_what_sorting_gives(rng):
    x = hard_rows(rng, 7, 200)
    found = cumla.top_k_per_row(x, 20, backend="reference")
    for row, indices in zip(x, found, strict=True):
        order = sorted((i for i in range(200) if row[i] == row[i]), key=lambda i: (-row[i], i))[:20]
        assert indices.tolist() == sorted(order) + [-1] * (20 - len(order))


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
    """Columns behind a request's last are in the workspace, and whatever was there before."""
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
            # A value may fall on either side of a rounding boundary of bfloat16: products may be fused with sums.
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
    """The scale is that of the finite numbers: an infinity is e4m3's largest, the others keep their digits."""
    q = rng.normal(size=(4, 1, HEAD_DIM)).astype(BF16)
    q[0, 0, 5], q[1, 0, 6], q[2, 0, 7], q[3] = np.inf, -np.inf, np.nan, np.inf
    arguments = np.full(4, -1), q, np.zeros((1, 64), np.float32), np.ones((4, 1), np.float32)
    want, weights = cumla.fused_indexer_q_rope_quant(*arguments, backend="reference")
    values, found = cumla.fused_indexer_q_rope_quant(*map(lab.put, arguments), backend=lab.backend)
    np.testing.assert_array_equal(lab.get(values).view(np.uint8), want.view(np.uint8))
    np.testing.assert_allclose(lab.get(found), weights, rtol=1e-6)
    finite = np.where(np.isfinite(q[:3]), q[:3], 0).astype(np.float32)
    assert (weights[:3, 0] <= np.abs(finite).max(axis=(1, 2)) / 448 * 2).all()


@pytest.mark.parametrize("num_keys", [None, 7, 40])
@pytest.mark.parametrize("lengths", [False, True])
def test_columns_to_choose_from_are_within_the_logits(rng, num_keys, lengths):
    """Whatever starts, ends and lengths are, and where there are more keys than columns."""
    width, wild = 13, np.append(rng.integers(-20, 60, 500), [-(2**31), 2**31 - 1] * 2).astype(np.int32)
    rows = Rows(lens=wild) if lengths else Rows(wild, rng.permutation(wild), num_keys=num_keys)
    first, count = cpu_kernels._columns(rows, len(wild), width)
    assert (first >= 0).all()
    assert (count >= 0).all()
    assert (first + count <= width).all()
    assert (first + count).max() == (width if num_keys is None or lengths else min(width, num_keys))


def test_rope_pairs(rng):
    """A quarter turn of one pair, by both ways to pair."""
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
    """The keys are right: what has to change are the queries."""
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
