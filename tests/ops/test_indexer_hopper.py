"""Hopper's scores where rings of tiles turn, pages are of any size, and groups of queries are as large as they get."""

import ctypes

import numpy as np
import pytest
from ops.test_indexer import check_logits, paged, ragged

import cumla
import emulation
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda import indexer as launcher
from emulation import launches
from support.lab import Lab


@pytest.fixture
def device(emulated):
    return Lab("cuda", on_device=True, emulated=True)


@pytest.mark.parametrize("schedule", list(emulation.SCHEDULES))
@pytest.mark.parametrize(
    ("block_size", "next_n", "columns"), [(64, 1, 45), (8, 2, 170), (24, 1, 130), (16, 4, 60), (128, 5, 5)]
)
def test_rings_of_pages(device, rng, monkeypatch, schedule, block_size, next_n, columns):
    monkeypatch.setattr(launcher, "device_sms", lambda device: 3)
    q, cache, weights, table = paged(rng, cumla.INDEXER_FP8, block_size, 3, next_n, 64, columns)
    table[1, ::7] = -1
    lens = np.array([columns * block_size, 0, columns * block_size * 2 // 3 + 1], np.int32)
    if schedule != "in order" and block_size == 64:
        q.reshape(-1)[::997] = 0x7F  # NaN
    arguments = [device.put(x) for x in (q, cache, weights, lens, table)]
    reference = cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, clean_logits=True, backend="reference")
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        found = device.get(cumla.fp8_paged_mqa_logits(*arguments, clean_logits=True, backend="cuda"))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(reference))
    check_logits(np.nan_to_num(found, neginf=-np.inf), np.nan_to_num(reference, neginf=-np.inf))


@pytest.mark.parametrize("schedule", list(emulation.SCHEDULES))
@pytest.mark.parametrize("width", [0, 90])
@pytest.mark.parametrize("queries", [1, 13])
def test_groups_of_eight_queries(device, rng, monkeypatch, schedule, width, queries):
    monkeypatch.setattr(launcher, "MANY_QUERIES", 1)
    monkeypatch.setattr(launcher, "device_sms", lambda device: 2)
    q, kv, weights, starts, ends = ragged(rng, queries, 64, 700)
    arguments = [device.put(q), tuple(map(device.put, kv)), *map(device.put, (weights, starts, ends))]
    reference = cumla.fp8_mqa_logits(q, kv, weights, starts, ends, True, width, backend="reference")
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        found = device.get(cumla.fp8_mqa_logits(*arguments, True, width, backend="cuda"))
    check_logits(found, reference)


SHARES = """
extern "C" __global__ void shares(long long* out, const int* starts, const int* ends, long long* sizes) {
    Problem problem{};
    problem.starts = starts, problem.ends = ends, problem.queries = int(sizes[0]), problem.keys = int(sizes[1]);
    problem.room = 1;
    Share share = share_of(problem);
    long long found[5] = {share.group, share.tile, share.tiles, share.first_key, share.count};
    if (threadIdx.x == 0)
        for (int i = 0; i < 5; ++i) out[5 * blockIdx.x + i] = found[i];
}
"""


@pytest.mark.parametrize(("queries", "keys"), [(1 << 16, 1 << 24), (1 << 17, 1 << 24), (9000, 1 << 30), (640 * 8, 1 << 30), (40, 300)])
def test_shares_of_more_tiles_than_an_int32_counts(device, queries, keys):
    """Compressed rows of one logit each: the first query of a group sees the first key, the last one the last."""
    of_group, of_tile, blocks = 8, 64, 7
    starts = np.zeros(queries, np.int32)
    starts[of_group - 1 :: of_group] = keys - 1
    arrays = [np.full((blocks, 5), -1, np.int64), starts, starts + 1, np.array([queries, keys], np.int64)]
    placed = [device.put(x) for x in arrays]
    text = "".join(f"#define {name} {x}\n" for name, x in {"PAGED": 0, "PASS": 2, "QUERY_GROUPS": 4}.items())
    kernel = launches.Kernel(f"{text}{compiler.source('sm90/indexer/logits.cu')}{SHARES}", "shares", 90)
    packed = (ctypes.c_void_p * len(placed))(*[x.data.ptr for x in placed])
    kernel.launch((blocks, 1, 1), (launcher.HOPPER_THREADS, 1, 1), 4096, ctypes.addressof(packed))
    groups, whole = -(-queries // of_group), -(-keys // of_tile)
    sizes = np.where(np.arange(groups) * of_group + of_group <= queries, whole, 1)  # of one query: one key
    ends = np.cumsum(sizes)
    total, first = int(ends[-1]), 0
    for block, (group, tile, tiles, first_key, count) in enumerate(device.get(placed[0]).tolist()):
        assert count == total // blocks + (block < total % blocks)
        assert (group, first_key, tiles) == (np.searchsorted(ends, first, side="right"), 0, sizes[group])
        assert tile == first - (ends[group] - sizes[group])
        first += count
    assert first == total
