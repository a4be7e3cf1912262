"""The indexer's top-k of rows by their scores on every backend, against the reference."""

import contextlib
import ctypes
import platform
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cumla
import emulation
from cumla.kernels.cpu import indexer_topk as cpu_kernels
from cumla.kernels.reference import indexer_topk as reference_kernels
from cumla.kernels.types.indexer import Rows
from support.lab import Lab


def hard_rows(rng, rows, width):
    """Rows with few distinct values, NaN, infinities, both zeros, increasing values, decreasing values."""
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
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("width") not in (33, 6000))  # one width of each kind
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


def few(*size):
    from cumla.kernels.cuda import indexer_topk as launcher

    return launcher.BoundSize(*size)


def held(*size):
    from cumla.kernels.cuda import indexer_topk as launcher

    return launcher.RegistersSize(*size)


def force(monkeypatch, size):
    """Select with the kernel of this size."""
    from cumla.kernels.cuda import indexer_topk as launcher

    is_held = isinstance(size, launcher.RegistersSize)
    monkeypatch.setattr(launcher, "registers_size", lambda *unused: size if is_held else None)
    monkeypatch.setattr(launcher, "bound_size", lambda *unused: size)


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize("threads", [256, 512])
@pytest.mark.parametrize("kind", ["random", "rising", "equal", "two values", "few"])
def test_choice_where_a_sample_is_representative_or_not(lab, rng, monkeypatch, threads, kind):
    """The sample's bound is reached by more columns than a buffer holds, by fewer than k, or by a fitting number."""
    from cumla.kernels.cuda import indexer_topk as launcher

    monkeypatch.setattr(launcher, "stream_threads", lambda *unused: threads)
    width, topk = 82 * threads, threads // 2 + 3
    normal = rng.normal(size=(5, width))
    sampled = np.arange(width) % (21 * 32) < 32  # all lanes read these columns first
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
        ((512, 1, 4, 1, 1), 8192, 512), ((256, 1, 8, 1, 2), 8000, 400), ((1024, 1, 8, 1, 1), 32_000, 2048),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["random", "odd", "in places"])
def test_choice_of_few_rows(lab, rng, monkeypatch, size, width, topk, kind):
    """Threads, blocks of a cluster, reads and rounds of a thread; rows of equal, missing or close values."""
    from cumla.kernels.cuda import indexer_topk as launcher

    size = few(*size)
    assert size.finds(topk)
    assert width <= size.columns
    force(monkeypatch, size)
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
@pytest.mark.parametrize(
    ("size", "width", "topk"),
    [
        ((512, 4), 8192, 512),
        ((128, 8), 4093, 100),
        ((128, 8), 4096, 4000),
        ((128, 2), 1024, 200),
        ((256, 4), 4001, 1),
        ((512, 4, 8), 50_000, 2048),
        ((512, 2, 4), 9000, 700),
        ((512, 2, 2), 5001, 3),
    ],
)
@pytest.mark.parametrize("kind", ["random", "odd", "in places", "far", "near"])
def test_choice_of_held_rows(lab, rng, monkeypatch, size, width, topk, kind):
    """A digit occurs in few, many, or all values, also beyond float16's range and in adjacent values."""
    from cumla.kernels.cuda import indexer_topk as launcher

    size = held(*size)
    force(monkeypatch, size)
    x = rng.normal(size=(5, width)).astype(np.float32)
    if kind == "odd":
        x[0], x[1], x[2], x[3, ::3] = -0.0, np.round(x[1], 1), np.sort(x[2]), np.nan
        x[4] = np.where(np.arange(width) % 2, np.float32(0), np.float32(-0.0))
    if kind == "in places":
        x[0, 5], x[0, 9 : width // 2], x[2, 300:600] = np.inf, -np.inf, x[2, 300:600] + 100
        x[1], x[1, 7], x[3] = -np.inf, 1, np.maximum(x[3], 0) * (rng.uniform(size=width) < 0.03)
        x[4, : width // 3] = np.nan
    if kind == "far":
        x *= np.array([[1e30], [1e-30], [1e-42], [60_000], [1e-6]], np.float32)
        x[0, ::7] = np.inf
    if kind == "near":
        x = (1 + x * np.array([[1e-3], [1e-6], [1e-7], [0], [1e-4]], np.float32)).astype(np.float32)
    starts = np.array([0, 1, 3, width // 2, 0], np.int32)
    ends = np.array([width, width - 1, width - 3, width, topk // 2], np.int32)
    expected = cumla.top_k_per_row(x, topk, starts, ends, backend="reference")
    for rows in (x, np.pad(x, ((0, 0), (0, 1)))[:, :width]):  # at multiples of 16 bytes, or not
        indices = lab.put(np.zeros((len(x), topk), np.int32))
        launcher.top_k_per_row(lab.put(rows), Rows(lab.put(starts), lab.put(ends)), indices)
        np.testing.assert_array_equal(lab.get(indices), expected)


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        (few, (1024, 1, 2)), (few, (128, 4, 2)), (few, (128, 2, 8, 2)), (few, (256, 1, 8, 1, 1)),
        (few, (256, 1, 8, 1, 2)), (held, (128, 4)), (held, (512, 2, 2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["signed", "positive", "equal", "subnormal"])
def test_choice_of_few_rows_of_any_length(lab, rng, monkeypatch, kernel, size, kind):
    """Lengths that leave groups of lanes without columns, or for which most columns are selected."""
    from cumla.kernels.cuda import indexer_topk as launcher

    size, topk = kernel(*size), 100
    force(monkeypatch, size)
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


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize(("threads", "guessed"), [(256, 1), (512, 1)])
@pytest.mark.parametrize("kind", ["falling", "rising", "in the middle", "few", "missing", "equal"])
def test_choice_of_few_rows_where_a_guess_is_wrong(lab, rng, monkeypatch, threads, guessed, kind):
    """Fewer than k columns reach it, or more than the buffer holds."""
    from cumla.kernels.cuda import indexer_topk as launcher

    size, topk = launcher.BoundSize(threads, 1, 8, 1, guessed), 300
    force(monkeypatch, size)
    lens = np.array([1023, 1024, 2 * topk + 1, 2500, 128 * 40 + 1, size.columns - 2, size.columns], np.int32)
    x = rng.normal(size=(len(lens), size.columns)).astype(np.float32)
    column = np.arange(size.columns)
    if kind in ("falling", "rising"):
        x = np.sort(x)[:, :: 1 if kind == "rising" else -1]
    if kind == "in the middle":
        x += np.where(column % 1024 < 200, 10, 0)
    if kind == "few":  # few columns in the warps' samples
        x += np.where(column % 4 == 0, 10, 0)
    if kind == "missing":
        x[:, 100:] = np.nan
    if kind == "equal":
        x = np.where(column % 4 == 0, 2, 1) + 0 * x
    x = np.ascontiguousarray(x, np.float32)
    indices = lab.put(np.zeros((len(lens), topk), np.int32))
    launcher.top_k_per_row(lab.put(x), Rows(lens=lab.put(lens)), indices)
    expected = cumla.top_k_per_row(x, topk, seq_lens=lens, backend="reference")
    np.testing.assert_array_equal(lab.get(indices), expected)


@contextlib.contextmanager
def flushing():
    """Comparisons take subnormal numbers for zeros, as on devices: by bits of x86's MXCSR, which glibc saves last."""
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
@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        (few, (1024, 1, 2)), (few, (128, 4, 2)), (few, (128, 2, 8, 2)), (few, (256, 1, 8, 1, 1)),
        (few, (256, 1, 8, 1, 2)), (held, (256, 8)), (held, (512, 2, 4)),
    ],
)  # fmt: skip
def test_choice_of_few_rows_where_comparisons_flush(emulated, rng, monkeypatch, kernel, size):
    from cumla.kernels.cuda import indexer_topk as launcher

    lab, size, topk = Lab("cuda", on_device=True, emulated=True), kernel(*size), 100
    force(monkeypatch, size)
    x = np.zeros((3, size.columns), np.float32)
    x[0, x.shape[1] // 2], x[1] = 1e-40, rng.normal(size=x.shape[1]) * 1e-40
    x[2, ::3], x[2, 1::3], x[2, 5] = 1, -1e-40, 1e-39
    expected = cumla.top_k_per_row(x, topk, backend="reference")
    logits, indices = lab.put(x), lab.put(np.zeros((3, topk), np.int32))
    with flushing():
        launcher.top_k_per_row(logits, Rows(), indices)
    np.testing.assert_array_equal(lab.get(indices), expected)


@pytest.mark.parametrize("schedule", ["late", "random 1", "random 2"])
@pytest.mark.parametrize(
    ("kernel", "size"),
    [(few, (128, 4, 2)), (few, (128, 2, 8, 2)), (few, (128, 1, 8, 1, 2)), (held, (128, 8)), (held, (512, 2, 4))],
)
def test_choice_of_few_rows_on_any_schedule(emulated, rng, monkeypatch, kernel, size, schedule):
    from cumla.kernels.cuda import indexer_topk as launcher

    lab, size = Lab("cuda", on_device=True, emulated=True), kernel(*size)
    force(monkeypatch, size)
    x, indices = rng.normal(size=(3, 4000)).astype(np.float32), lab.put(np.zeros((3, 128), np.int32))
    x[2] = 0
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        launcher.top_k_per_row(lab.put(x), Rows(), indices)
        np.testing.assert_array_equal(lab.get(indices), cumla.top_k_per_row(x, 128, backend="reference"))


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        (few, (128, 1, 2)), (few, (128, 4, 2)), (few, (128, 4, 8, 2)), (few, (128, 1, 8, 1, 2)), (held, (128, 2)),
        (held, (512, 2, 4)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("next_n", [1, 3])
def test_choice_among_as_many_columns_as_the_launch_ahead_says(lab, rng, monkeypatch, kernel, size, next_n):
    """The preceding kernel writes the rows' lengths; they are different before it runs."""
    from cumla.kernels.cuda import indexer_topk as launcher

    size, topk, requests = kernel(*size), 20, 4
    force(monkeypatch, size)
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
    """Any lengths, starts and k, and rows of few or many distinct values."""
    from cumla.kernels.cuda import indexer_topk as launcher

    lab = Lab("cuda", on_device=True, emulated=True)
    sizes = [few(128, blocks, *x) for blocks in (1, 2, 4) for x in ((2,), (8, 2))]
    sizes += [few(128, 1, 8, 1, 1), held(128, 2), held(128, 8), held(256, 4), held(512, 2, 2), held(512, 2, 4)]
    size = data.draw(st.sampled_from(sizes))
    width, topk = data.draw(st.integers(1, size.columns)), data.draw(st.integers(1, 128))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=5))
    x = np.where(
        rng.uniform(size=(2, width)) < data.draw(st.floats(0, 1)),
        rng.choice(np.array(values, np.float32), (2, width)),
        rng.normal(size=(2, width)),
    ).astype(np.float32)
    starts, ends = (rng.integers(0, width + 1, 2).astype(np.int32) for _ in range(2))
    rows = data.draw(st.sampled_from([Rows(), Rows(starts, ends), Rows(lens=ends), Rows(starts, ends, num_keys=width)]))
    indices, expected = lab.put(np.zeros((2, topk), np.int32)), np.zeros((2, topk), np.int32)
    reference_kernels.top_k_per_row(x, rows, expected)
    arrays = {name: getattr(rows, name) for name in ("starts", "ends", "lens")}
    on_device = rows._replace(**{name: None if array is None else lab.put(array) for name, array in arrays.items()})
    with pytest.MonkeyPatch.context() as patch:
        force(patch, size)
        launcher.top_k_per_row(lab.put(x), on_device, indices)
        np.testing.assert_array_equal(lab.get(indices), expected)


@pytest.mark.parametrize(
    ("rows", "width", "topk", "aligned", "expected"),
    [
        (4, 8_192, 512, True, (1024, 1, 2, 1)),
        (4, 32_768, 512, True, (512, 8, 2, 1)),
        (32, 32_768, 2048, True, (1024, 1, 8, 1)),
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
    """A cluster reads a million columns, for one row or for sixteen; shared memory suffices."""
    from cumla.kernels.cuda.indexer_topk import bound_size

    size = bound_size(rows, width, topk, 132, 8, aligned)
    assert (size and size[:4]) == expected
    assert size is None or (width <= size.columns and size.shared_bytes <= 227 * 1024)


@pytest.mark.parametrize(
    ("rows", "width", "aligned", "expected"),
    [
        (132, 4_096, True, (512, 2, 1)),
        (132, 8_192, False, (1024, 2, 1)),
        (1, 16_384, True, (1024, 4, 1)),
        (4, 32_768, True, (512, 2, 8)),
        (28, 32_768, True, (512, 4, 4)),
        (32, 32_768, True, (1024, 4, 2)),
        (4, 65_536, True, (1024, 2, 8)),
        (14, 2**17, True, (1024, 4, 8)),
        (14, 2**17, False, None),
        (15, 2**17, True, None),
        (1, 2**17 + 1, True, None),
        (58, 32_768, True, None),
        (528, 8_192, True, (512, 4, 1)),
        (528, 8_192, False, None),
        (133, 8_193, True, None),
        (133, 4_096, True, None),
        (4_000, 2_048, True, (256, 2, 1)),
        (133, 2_048, False, None),
        (529, 8_192, True, None),
    ],
)
def test_thread_blocks_of_held_rows(rows, width, aligned, expected):
    """Clusters of all rows run at the same time; shared memory suffices for a thread block and the next launch's."""
    from cumla.kernels.cuda.indexer_topk import registers_size

    size = registers_size(rows, width, 132, 8, aligned)
    assert size == expected
    assert size is None or (width <= size.columns and size.shared_bytes <= 113 * 1024)
    assert size is None or size.blocks == 1 or registers_size(rows, width, 132, 1, aligned) is None


def test_choice_of_more_than_fits_in_a_thread_block(lab, rng):
    x = hard_rows(rng, 3, 20 if lab.tiny else 9_000)
    topk = 15 if lab.tiny else 8_500
    expected = cumla.top_k_per_row(x, topk, backend="reference")
    np.testing.assert_array_equal(lab.get(cumla.top_k_per_row(lab.put(x), topk, backend=lab.backend)), expected)


def test_choice_is_what_sorting_gives(rng):
    x = hard_rows(rng, 7, 200)
    found = cumla.top_k_per_row(x, 20, backend="reference")
    for row, indices in zip(x, found, strict=True):
        order = sorted((i for i in range(200) if row[i] == row[i]), key=lambda i: (-row[i], i))[:20]
        assert indices.tolist() == sorted(order) + [-1] * (20 - len(order))


@pytest.mark.parametrize("num_keys", [None, 7, 40])
@pytest.mark.parametrize("lengths", [False, True])
def test_columns_to_choose_from_are_within_the_logits(rng, num_keys, lengths):
    """For any starts, ends and lengths, also with more keys than columns."""
    width, wild = 13, np.append(rng.integers(-20, 60, 500), [-(2**31), 2**31 - 1] * 2).astype(np.int32)
    rows = Rows(lens=wild) if lengths else Rows(wild, rng.permutation(wild), num_keys=num_keys)
    first, count = cpu_kernels.columns_of(rows, len(wild), width)
    assert (first >= 0).all()
    assert (count >= 0).all()
    assert (first + count <= width).all()
    assert (first + count).max() == (width if num_keys is None or lengths else min(width, num_keys))
