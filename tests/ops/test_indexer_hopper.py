"""Hopper's scores where tile rings wrap, pages have any size, and groups of queries are as large as possible."""

import numpy as np
import pytest
from ops.test_indexer import check_logits, paged, ragged

import cumla
import emulation
from cumla.kernels.cuda import indexer as launcher

# All other tests run in order.
SCHEDULES = pytest.mark.parametrize("schedule", [name for name in emulation.SCHEDULES if name != "in order"])


@SCHEDULES
@pytest.mark.parametrize(
    ("heads", "block_size", "next_n", "columns"),
    [
        (64, 64, 1, 45), (64, 8, 2, 170), (64, 24, 1, 130), (64, 16, 4, 60), (64, 128, 5, 5), (32, 64, 1, 45),
        (16, 64, 1, 45), (16, 64, 2, 45), (16, 16, 3, 60), (16, 64, 5, 21),
        (32, 64, 2, 45), (32, 16, 3, 60), (32, 64, 4, 20), (32, 64, 6, 21), (32, 32, 8, 30),
    ],
)  # fmt: skip
@pytest.mark.thorough(when=lambda x: x.get("schedule") not in ("late", "random 1"))
@pytest.mark.thorough(when=lambda x: x.get("columns") in (130, 60, 30) or (x.get("heads"), x.get("next_n")) == (32, 2))
@pytest.mark.parametrize("layout", [cumla.INDEXER_FP8, cumla.INDEXER_MXFP4], ids=lambda x: x.name)
def test_rings_of_pages(here, rng, monkeypatch, schedule, heads, block_size, next_n, columns, layout):
    monkeypatch.setattr(launcher, "device_sms", lambda device: 3)
    q, cache, weights, table = paged(rng, layout, block_size, 3, next_n, heads, columns)
    table[1, ::7] = -1
    lens = np.array([columns * block_size, 0, columns * block_size * 2 // 3 + 1], np.int32)
    if schedule != "random 2" and block_size == 64:
        q.reshape(-1)[::997] = 0x7F  # NaN
    arguments = [here.put(x) for x in (q, cache, weights, lens, table)]
    reference = cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, clean_logits=True, backend="reference")
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        found = here.get(cumla.fp8_paged_mqa_logits(*arguments, clean_logits=True, backend="cuda"))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(reference))
    check_logits(np.nan_to_num(found, neginf=-np.inf), np.nan_to_num(reference, neginf=-np.inf))


@pytest.mark.parametrize(
    ("requests", "next_n", "empty"), [(2, 1, True), (32, 1, False), (32, 2, False), (33, 1, False), (70, 2, False)]
)
def test_work_ranges_of_pages(here, rng, monkeypatch, requests, next_n, empty):
    """As many requests as lanes, so that one warp finds the range, or more requests; some without a key."""
    monkeypatch.setattr(launcher, "device_sms", lambda device: 5)
    q, cache, weights, table = paged(rng, cumla.INDEXER_FP8, 32, requests, next_n, 64, 20)
    lens = np.where(rng.random(requests) < 0.3, 0, rng.integers(1, 640, requests)).astype(np.int32) * (not empty)
    table[np.arange(20) * 32 >= lens[:, None]] = -7  # not read
    arguments = q, cache, weights, lens, table
    want = cumla.fp8_paged_mqa_logits(*arguments, clean_logits=True, backend="reference")
    found = here.get(cumla.fp8_paged_mqa_logits(*map(here.put, arguments), clean_logits=True, backend="cuda"))
    check_logits(found, want)


@SCHEDULES
@pytest.mark.parametrize(
    ("heads", "block_size", "next_n", "blocks"), [(32, 64, 1, 500), (32, 8, 2, 37), (64, 24, 3, 70), (64, 128, 1, 1)]
)
@pytest.mark.parametrize("layout", [cumla.INDEXER_FP8, cumla.INDEXER_MXFP4], ids=lambda x: x.name)
@pytest.mark.thorough(when=lambda x: x.get("schedule") != "random 1")
def test_rings_of_candidate_blocks(here, rng, monkeypatch, schedule, heads, block_size, next_n, blocks, layout):
    """Blocks in any order, absent, without pages, visible in part or not at all; NaN in keys and queries."""
    monkeypatch.setattr(launcher, "device_sms", lambda device: 3)
    requests, columns = 3, -(-(blocks + 9) * 8 // block_size)
    q, cache, weights, table = paged(rng, layout, block_size, requests, next_n, heads, columns)
    table[1, ::7] = -1
    if block_size == 64:
        q.reshape(-1)[::997], cache.reshape(len(cache), -1)[2, 70:80] = 0x7F, 0x7F
    lens = np.array([columns * block_size + 5, 8 * blocks // 2 + 3, 3], np.int32)
    candidates = np.stack([rng.permutation(blocks + 12)[:blocks] for _ in weights]).astype(np.int32)
    candidates[:, ::5] = -1
    candidates[0, blocks // 2] = 2**31 - 1
    candidates[-1, 0] = 0  # partly visible
    arguments = q, cache, weights, candidates, lens, table
    reference = cumla.candidate_logits(*arguments, layout=layout, backend="reference")
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        found = here.get(cumla.candidate_logits(*map(here.put, arguments), layout=layout, backend="cuda"))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(reference))
    check_logits(np.nan_to_num(found, neginf=-np.inf), np.nan_to_num(reference, neginf=-np.inf))


@SCHEDULES
@pytest.mark.parametrize("width", [0, 90])
@pytest.mark.parametrize("queries", [1, 13])
@pytest.mark.parametrize("heads", [64, 32, 16])
@pytest.mark.thorough(when=lambda x: x.get("heads") != 64 and x.get("queries") == 1)
def test_groups_of_many_queries(here, rng, monkeypatch, schedule, width, queries, heads):
    monkeypatch.setattr(launcher, "MANY_QUERIES", 1)
    monkeypatch.setattr(launcher, "device_sms", lambda device: 2)
    q, kv, weights, starts, ends = ragged(rng, queries, heads, 700)
    arguments = [here.put(q), tuple(map(here.put, kv)), *map(here.put, (weights, starts, ends))]
    reference = cumla.fp8_mqa_logits(q, kv, weights, starts, ends, True, width, backend="reference")
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        found = here.get(cumla.fp8_mqa_logits(*arguments, True, width, backend="cuda"))
    check_logits(found, reference)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.thorough(when=lambda x: x.get("heads") == 64 and x.get("next_n") != 1)
def test_weights_of_any_magnitude(here, rng, heads, next_n):
    """MXFP4 keys: infinite, NaN, large and subnormal weights of a query change no other query's scores."""
    weights = rng.normal(size=(6, heads)).astype(np.float32)
    weights[0, 3], weights[1, 5], weights[2, 7] = np.inf, np.nan, -np.inf
    weights[3] *= np.float32(2.0**100)
    weights[4, 1:] *= np.float32(2.0**-100)
    weights[5] = 2.0**-127  # subnormal: counts as 0
    q, cache, _, table = paged(rng, cumla.INDEXER_MXFP4, 64, 6 // next_n, next_n, heads, 2)
    lens = np.array([128, 70, 64, 128, 90, 128], np.int32)[: 6 // next_n]
    arguments = q, cache, weights, lens, table
    want = cumla.fp8_paged_mqa_logits(*arguments, clean_logits=True, backend="reference")
    found = here.get(cumla.fp8_paged_mqa_logits(*map(here.put, arguments), clean_logits=True, backend="cuda"))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    for row, reference in zip(found, want, strict=True):  # their magnitudes differ
        check_logits(np.nan_to_num(row, neginf=-np.inf)[None], np.nan_to_num(reference, neginf=-np.inf)[None])


@pytest.mark.parametrize("scales", [(121, 132), (118, 129), (60, 68), (244, 255), (1, 12), (0, 180)], ids=str)
def test_scales_of_keys(here, rng, scales):
    """Products use some scales directly; others are scaled into range, or are further apart than e5m2's range."""
    q, cache, weights, table = paged(rng, cumla.INDEXER_MXFP4, 64, 2, 3, 32, 3)
    _, of_keys, _ = cumla.INDEXER_MXFP4.parts(cache)
    of_keys[...] = rng.integers(*scales, of_keys.shape)
    of_keys[table[0, 1], 40:] = 125  # some of one warp's keys are special
    arguments = (
        q,
        cache,
        weights * np.float32(2.0**-100 if scales[1] > 150 else 1),
        np.array([192, 130], np.int32),
        table,
    )
    want = cumla.fp8_paged_mqa_logits(*arguments, clean_logits=True, backend="reference")
    found = here.get(cumla.fp8_paged_mqa_logits(*map(here.put, arguments), clean_logits=True, backend="cuda"))
    for row, reference in zip(found, want, strict=True):  # their squares exceed float32
        check_logits(row[None].astype(np.float64), reference[None].astype(np.float64))
