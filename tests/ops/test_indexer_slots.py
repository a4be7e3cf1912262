"""Slots that the top-k writes in addition to columns: bit-identical to a map of the columns."""

import importlib
from typing import NamedTuple

import numpy as np
import pytest

import cumla
import emulation
from cumla.kernels.reference import indexer_topk as reference
from cumla.kernels.types.indexer import Rows, Slots
from support.lab import Lab


class Cache(NamedTuple):
    """The places of the rows in a paged cache, as host arrays."""

    table: np.ndarray
    block_size: int
    is_valid: np.ndarray | None
    pool: int = 1
    positions: np.ndarray | None = None

    def of_pools(self, rng, rows, pool, width):
        """The same pages, of `pool` rows for each column, and queries at any of the positions that see the columns."""
        from cumla.kernels.reference.indexer import row_lens

        complete = np.clip(row_lens(rows.lens, rows.next_n), 0, width).reshape(-1).astype(np.int64)
        positions = (complete * pool + rng.integers(0, pool, len(complete)) - 1).astype(np.int32)
        table = np.where(self.table < 2**31 // self.block_size // pool, self.table, self.table // pool)
        return self._replace(table=table, block_size=self.block_size * pool, pool=pool, positions=positions)

    @classmethod
    def random(cls, rng, requests, next_n, width, block_size, absent=0.0, columns=None):
        """Randomly placed pages, some absent: negative, or with slots beyond int32."""
        columns = -(-width // block_size) if columns is None else columns
        most = 2**31 // block_size
        table = rng.integers(0, most - 1, (requests, columns), dtype=np.int32)
        odd = np.array([-1, -(2**31), 2**31 - 1, min(most, 2**31 - 1)], np.int32)
        table = np.where(rng.uniform(size=table.shape) < absent, rng.choice(odd, table.shape), table)
        return cls(table, block_size, rng.uniform(size=requests * next_n) < 0.7)

    def mapped(self, chosen, next_n):
        """The map of the columns."""
        is_valid = np.ones(len(chosen), bool) if self.is_valid is None else self.is_valid
        requests = (np.arange(len(chosen)) // next_n).astype(np.int32)
        return cumla.compute_global_topk_indices_and_lens(
            chosen,
            requests,
            self.table,
            self.block_size,
            is_valid,
            compact=True,
            backend="reference",
            pool=self.pool,
            positions=self.positions,
        )

    def slots(self, lab, rows, topk):
        """Calls the kernels' interface, with arrays to write."""
        is_valid = None if self.is_valid is None else lab.put(self.is_valid)
        shape = rows, topk * self.pool + self.pool - 1
        written = lab.put(np.full(shape, 7, np.int32)), lab.put(np.full(rows, 7, np.int32))
        return Slots(*written, lab.put(self.table), self.block_size, is_valid, self.pool, lab.put(self.positions))


def odd_rows(rng, rows, width):
    """Random rows; one has few distinct values, one NaN and infinities, one increasing values, one NaN only."""
    x = rng.normal(size=(rows, width)).astype(np.float32)
    x[0] = rng.integers(-2, 3, width)
    if rows > 3:
        x[1, ::3], x[1, 1::5], x[1, 2::7] = np.nan, np.inf, -np.inf
        x[2], x[3] = np.sort(x[2]), np.nan
    return x


def check(lab, x, rows, topk, cache):
    kernels = importlib.import_module(f"cumla.kernels.{lab.backend}.indexer_topk")
    expected = np.zeros((len(x), topk), np.int32)
    reference.top_k_per_row(x, rows, expected)
    given = {name: getattr(rows, name) for name in ("starts", "ends", "lens")}
    on_device = rows._replace(**{name: lab.put(array) for name, array in given.items() if array is not None})
    indices, slots = lab.put(np.full(expected.shape, 7, np.int32)), cache.slots(lab, len(x), topk)
    kernels.top_k_per_row(lab.put(x), on_device, indices, slots)
    np.testing.assert_array_equal(lab.get(indices), expected)
    for got, want in zip((slots.indices, slots.lens), cache.mapped(expected, rows.next_n), strict=True):
        np.testing.assert_array_equal(lab.get(got), want)


@pytest.mark.parametrize("absent", [0, 0.3], ids=["pages", "absent-pages"])
@pytest.mark.parametrize(("next_n", "width", "topk"), [(1, 300, 33), (2, 300, 512), (3, 700, 40), (4, 40, 1)])
@pytest.mark.thorough(when=lambda x: x.simulated and x.get("width") == 700)
def test_slots_are_what_a_map_makes_of_the_choice(lab, rng, next_n, width, topk, absent):
    requests = 2 if lab.tiny else 5
    if lab.tiny:
        width, topk = min(width, 24), min(topk, 9)
    x = odd_rows(rng, requests * next_n, width)
    for block_size, columns in ((64, None), (7, None), (1, None), (8, 2), (8, 0)):
        cache = Cache.random(rng, requests, next_n, width, block_size, absent, columns)
        lens = rng.integers(-1, width + 3, requests).astype(np.int32)
        check(lab, x, Rows(lens=lens, next_n=next_n), topk, cache)
    lens = rng.integers(-1, width + 3, (requests, next_n)).astype(np.int32)
    check(lab, x, Rows(lens=lens, next_n=next_n), topk, cache._replace(is_valid=None))
    partly = Cache.random(rng, requests, next_n, width, 7)
    partly.table[:] = 2**31 // 7  # only the first rows have slots within int32
    check(lab, x, Rows(lens=lens, next_n=next_n), topk, partly)


def is_elsewhere(combination):
    return combination.backend != "cuda"


def few(monkeypatch, threads, blocks, reads):
    from cumla.kernels.cuda import indexer_topk as launcher

    size = launcher.BoundSize(threads, blocks, reads)
    monkeypatch.setattr(launcher, "registers_size", lambda *unused: None)
    monkeypatch.setattr(launcher, "bound_size", lambda *unused: size)
    return size.columns


def held(monkeypatch, threads, blocks, reads):
    from cumla.kernels.cuda import indexer_topk as launcher

    size = launcher.RegistersSize(threads, reads, blocks)
    monkeypatch.setattr(launcher, "registers_size", lambda *unused: size)
    return size.columns


def many(monkeypatch, threads):
    from cumla.kernels.cuda import indexer_topk as launcher

    for name in ("registers_size", "bound_size"):
        monkeypatch.setattr(launcher, name, lambda *unused: None)
    monkeypatch.setattr(launcher, "stream_threads", lambda *unused: threads)


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize(
    ("size", "width", "topk"),
    [
        ((1024, 1, 2), 8192, 512), ((128, 1, 8), 4093, 100), ((128, 2, 4), 4090, 70), ((256, 8, 2), 16_300, 300),
        ((256, 8, 1), 700, 512),
    ],
)  # fmt: skip
@pytest.mark.parametrize("absent", [0, 0.01], ids=["pages", "absent-pages"])
@pytest.mark.parametrize("kernel", [few, held])
def test_slots_of_few_rows(lab, rng, monkeypatch, kernel, size, width, topk, absent):
    """Rows of single thread blocks, and of clusters, whose blocks each write a part of a row."""
    if kernel is held:
        size = (max(size[0], 512 if size[1] > 1 else 0), size[1], max(size[2], 2))
    assert width <= kernel(monkeypatch, *size)
    x = odd_rows(rng, 4, width)
    for block_size in (64, 100):
        lens = np.array([width, width - 3], np.int32)
        check(lab, x, Rows(lens=lens, next_n=2), topk, Cache.random(rng, 2, 2, width, block_size, absent))
    starts, ends = np.array([0, 1, 3, width // 2], np.int32), np.array([width, width - 1, 2, width], np.int32)
    check(lab, x[:, :width], Rows(starts, ends), topk, Cache.random(rng, 4, 1, width, 64, absent))


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize("threads", [256, 512])
@pytest.mark.parametrize("absent", [0, 0.01], ids=["pages", "absent-pages"])
def test_slots_of_many_rows(lab, rng, monkeypatch, threads, absent):
    """Includes more rows than thread blocks; rows with and without absent pages follow each other."""
    many(monkeypatch, threads)
    for width, topk in ((82 * threads, threads // 2 + 3), (900, 512), (700, 1)):
        x = odd_rows(rng, 6, width)
        lens = np.array([width, width // 3, 5], np.int32)
        check(lab, x, Rows(lens=lens, next_n=2), topk, Cache.random(rng, 3, 2, width, 64, absent))


@pytest.mark.nowhere(when=is_elsewhere)
def test_slots_of_more_than_fits_in_a_thread_block(lab, rng, monkeypatch):
    many(monkeypatch, 512)
    x = odd_rows(rng, 4, 9_000)
    lens = np.array([9_000, 8_400], np.int32)
    for absent in (0, 0.1):
        check(lab, x, Rows(lens=lens, next_n=2), 8_500, Cache.random(rng, 2, 2, 9_000, 64, absent))


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize(
    ("kernel", "size", "width", "topk"),
    [
        (few, (1024, 1, 2), 8192, 512), (few, (128, 2, 4), 900, 70), (few, (256, 8, 1), 700, 512),
        (held, (512, 1, 2), 900, 512), (held, (512, 4, 2), 3000, 64), (many, (256,), 900, 100),
        (many, (512,), 9000, 8500),
    ],
)  # fmt: skip
@pytest.mark.parametrize("absent", [0, 0.05], ids=["pages", "absent-pages"])
def test_slots_of_pools_on_every_kernel(lab, rng, monkeypatch, kernel, size, width, topk, absent):
    kernel(monkeypatch, *size)
    x = odd_rows(rng, 4, width)
    for pool, lens in ((4, [[width, width - 3], [5, 0]]), (3, [[width // 2, 1], [width, 70]])):
        rows = Rows(lens=np.array(lens, np.int32), next_n=2)
        check(lab, x, rows, topk, Cache.random(rng, 2, 2, width + 1, 16, absent).of_pools(rng, rows, pool, width))


@pytest.mark.parametrize("pool", [2, 4, 16])
@pytest.mark.parametrize("absent", [0, 0.3], ids=["pages", "absent-pages"])
def test_slots_of_pools(lab, rng, pool, absent):
    """Around topk pools, no pool, more pools than topk; the open pool with and without a page; next_n 1 and 3."""
    width, topk = (20, 5) if lab.tiny else (300, 33)
    for next_n, lens in ((1, [topk - 1, topk, topk + 1, 0, width]), (3, [topk + 1, 2, width])):
        rows = Rows(lens=np.array(lens, np.int32), next_n=next_n)
        x = odd_rows(rng, len(lens) * next_n, width)
        for columns in (None, 2):
            cache = Cache.random(rng, len(lens), next_n, width + 1, 8, absent, columns)
            check(lab, x, rows, topk, cache.of_pools(rng, rows, pool, width))


def test_the_open_pool_is_always_selected(lab):
    """Lengths 1 to 2 P + 1 of a request: P 4, topk 1. The last token of a pool that is not chosen is not attended."""
    tokens = 9
    x = np.tile(np.array([[3, 1, 2]], np.float32), (tokens, 1))  # pool 0 is the best one
    positions = np.arange(tokens, dtype=np.int32)
    written = lab.put(np.full((tokens, 7), 9, np.int32)), lab.put(np.zeros(tokens, np.int32))
    table = np.tile(np.array([[5]], np.int32), (tokens, 1))
    kernels = importlib.import_module(f"cumla.kernels.{lab.backend}.indexer_topk")
    slots = Slots(*written, lab.put(table), 16, None, 4, lab.put(positions))
    kernels.top_k_per_row(
        lab.put(x), Rows(lens=lab.put((positions + 1) // 4)), lab.put(np.zeros((tokens, 1), np.int32)), slots
    )
    for token, (row, length) in enumerate(zip(*map(lab.get, written), strict=True)):
        want = ([0, 1, 2, 3] if token >= 3 else []) + [*range((token + 1) // 4 * 4, token + 1)]
        assert row.tolist() == [80 + i for i in want] + [-1] * (7 - len(want))
        assert length == len(want)


def test_pools_over_a_cache_with_pages_of_their_own(lab, rng):
    """Pages of 8 keys, and smaller and larger pages of rows; the same slots as of two calls."""
    pool, columns, topk, next_n = 4, 2 if lab.tiny else 9, 5, 2
    given = paged_call(lab, rng, 3, next_n, columns)
    positions = np.array([columns * 32 - 3, columns * 32 - 1, 40, 41, -1, 1], np.int32)
    given["context_lens"] = ((positions + 1) // pool).reshape(3, 2).astype(np.int32)
    arguments = {name: lab.put(array) for name, array in given.items()}
    arguments |= {"topk": topk, "layout": cumla.INDEXER_F32, "backend": lab.backend}
    want = lab.get(cumla.indexer_topk(**arguments))
    for block_size in (None, 8, 64):
        table = given["block_table"]
        if block_size is not None:
            table = rng.permutation(3 * 5 * columns).reshape(3, -1).astype(np.int32)
        mapped = cumla.compute_global_topk_indices_and_lens(
            want, np.repeat(np.arange(3), next_n).astype(np.int32), table, block_size or 32, np.ones(6, bool),
            compact=True, pool=pool, positions=positions, backend="reference",
        )  # fmt: skip
        on = {} if block_size is None else {"slot_block_table": lab.put(table), "slot_block_size": block_size}
        slots, lens = lab.put(np.full((6, topk * pool + pool - 1), 7, np.int32)), lab.put(np.full(6, 7, np.int32))
        got = cumla.indexer_topk(**arguments, slots=(slots, lens), pool=pool, positions=lab.put(positions), **on)
        np.testing.assert_array_equal(lab.get(got), want)
        for found, expected in zip((slots, lens), mapped, strict=True):
            np.testing.assert_array_equal(lab.get(found), expected)


def test_wrong_pools_are_refused(rng):
    given = paged_call(Lab("cpu", False), rng, 3, 1, 2) | {"topk": 4, "layout": cumla.INDEXER_F32}
    slots, at = (np.full((3, 19), 7, np.int32), np.full(3, 7, np.int32)), np.zeros(3, np.int32)
    right = {"slots": slots, "pool": 4, "positions": at}
    for wrong, message in (
        ({"positions": None}, "positions: got None with pool 4"),
        ({"positions": at[1:]}, "positions: got shape"),
        ({"pool": 1, "slots": (slots[0][:, :4], slots[1])}, "positions: got an array without pool"),
        ({"pool": 0}, "pool: got 0"),
        ({"slot_block_size": 6}, "slot_block_size: got 6, expected a multiple of pool = 4"),
        ({"slot_block_table": np.zeros((2, 3), np.int32)}, "slot_block_table: got 2 rows, expected at least 3"),
        ({"slots": (slots[0][:, :16], slots[1])}, r"slots\[0\] \(slots\): got shape"),
        ({"slots": None}, "positions: got an array without slots"),
        ({"topk": 0, "slots": (slots[0][:, :3], slots[1])}, "topk: got 0 with pool 4"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            cumla.indexer_topk(**(given | right | wrong))
    assert (slots[0] == 7).all()
    cumla.indexer_topk(**given, **right)
    mapped = (np.zeros((2, 3), np.int32), at[:2], np.zeros((1, 2), np.int32))
    for options, message in (
        ({"positions": at}, "compact: got False with pool 4"),
        ({"compact": True}, "positions: got None with pool 4"),
        ({"compact": True, "positions": at, "compress_ratio": 4}, "compress_ratio: got 4 with pool 4"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            cumla.compute_global_topk_indices_and_lens(*mapped, 8, np.ones(2, bool), pool=4, **options)
    with pytest.raises(ValueError, match=r"^block_size: got 6, expected a multiple of pool = 4"):
        cumla.compute_global_topk_indices_and_lens(*mapped, 6, np.ones(2, bool), pool=4, compact=True, positions=at)


@pytest.mark.parametrize("schedule", ["late", "random 1", "random 2"])
@pytest.mark.parametrize("absent", [0, 0.02], ids=["pages", "absent-pages"])
@pytest.mark.parametrize(("kernel", "threads"), [(few, 128), (held, 512)])
def test_slots_on_any_schedule(emulated, rng, monkeypatch, kernel, threads, schedule, absent):
    lab = Lab("cuda", on_device=True, emulated=True)
    kernel(monkeypatch, threads, 4, 2)
    x, lens = odd_rows(rng, 4, 4000), np.array([4000, 3001, 130, 64], np.int32)
    with emulation.scheduled(emulation.SCHEDULES[schedule]):
        check(lab, x, Rows(lens=lens), 128, Cache.random(rng, 4, 1, 4000, 64, absent))


@pytest.mark.nowhere(when=is_elsewhere)
@pytest.mark.parametrize(
    ("kernel", "size"), [(few, (128, 1, 2)), (few, (128, 4, 2)), (held, (256, 1, 2)), (held, (512, 4, 2))]
)
def test_slots_among_as_many_columns_as_the_launch_ahead_says(lab, rng, monkeypatch, kernel, size):
    """Pages are absent where the table extends past the earlier lengths, or past those of the call."""
    from cumla.kernels.cuda import indexer_topk as launcher

    kernel(monkeypatch, *size)
    requests, topk = 4, 20
    lens = np.sort(rng.choice(np.arange(1, 800), requests, False)).astype(np.int32)
    said = np.full((1, 800), -1, np.float32)
    said[0, lens] = 1
    x = rng.normal(size=(requests, 800)).astype(np.float32)
    expected = cumla.top_k_per_row(x, topk, seq_lens=lens, backend="reference")
    for columns in (13, 6):
        cache = Cache.random(rng, requests, 1, 800, 64, columns=columns)
        for before in (0, 800, -(2**31), 2**31 - 1):
            chosen, slots = lab.put(np.full((1, requests), before, np.int32)), cache.slots(lab, requests, topk)
            indices, scores, choice = lab.put(np.zeros(expected.shape, np.int32)), lab.put(x), lab.put(said)
            launcher.top_k_per_row(choice, Rows(), chosen)
            launcher.top_k_per_row(scores, Rows(lens=chosen[0]), indices, slots)
            for got, want in zip((slots.indices, slots.lens), cache.mapped(expected, 1), strict=True):
                np.testing.assert_array_equal(lab.get(got), want)


def paged_call(lab, rng, requests, next_n, columns, block_size=8):
    """Host arguments of indexer_topk over a cache, by name."""
    q = rng.normal(size=(requests, next_n, 1 if lab.tiny else 64, 128)).astype(np.float32)
    pages = rng.normal(size=(requests * columns + 2, block_size, 128)).astype(np.float32)
    table = rng.permutation(len(pages))[: requests * columns].reshape(requests, columns).astype(np.int32)
    table[1, -1] = -1
    return {
        "q": q, "kv": pages.view(np.uint8).reshape(*pages.shape[:2], -1), "block_table": table,
        "weights": rng.normal(size=(requests * next_n, q.shape[2])).astype(np.float32),
        "context_lens": np.array([columns * block_size, columns * block_size - 1, 3], np.int32)[:requests],
    }  # fmt: skip


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("workspace_rows", [2, 100])
def test_the_choice_over_a_cache_writes_slots(lab, rng, next_n, workspace_rows):
    """Some requests at a time or all at once; results, allocated or given, do not depend on slots."""
    columns, topk = (2, 5) if lab.tiny else (9, 30)
    given = paged_call(lab, rng, 3, next_n, columns)
    arguments = {name: lab.put(array) for name, array in given.items()}
    arguments |= {"topk": topk, "layout": cumla.INDEXER_F32, "backend": lab.backend}
    arguments["max_workspace_bytes"] = workspace_rows * columns * 8 * 4 * next_n
    want, tokens = cumla.indexer_topk(**arguments), 3 * next_n
    is_valid = np.arange(tokens) != 1
    cache = Cache(given["block_table"], 8, is_valid)
    for valid in (is_valid, None):
        slots, lens = lab.put(np.full((tokens, topk + 2), 7, np.int32)), lab.put(np.full(tokens, 7, np.int32))
        got = cumla.indexer_topk(
            **arguments, slots=(slots[:, :topk], lens), is_valid_token=None if valid is None else lab.put(valid)
        )
        assert lab.get(got).tobytes() == lab.get(want).tobytes()
        want_slots, want_lens = cache._replace(is_valid=valid).mapped(lab.get(want), next_n)
        np.testing.assert_array_equal(lab.get(slots), np.pad(want_slots, ((0, 0), (0, 2)), constant_values=7))
        np.testing.assert_array_equal(lab.get(lens), want_lens)
    arguments["topk"] = 0
    cumla.indexer_topk(**arguments, slots=(slots[:, :0], lens))
    assert not lab.get(lens).any()


def test_wrong_slots_are_refused(lab, rng):
    given = {name: lab.put(array) for name, array in paged_call(lab, rng, 3, 1, 2).items()}
    given |= {"topk": 4, "layout": cumla.INDEXER_F32, "backend": lab.backend}
    slots, lens = (lab.put(np.full(shape, 7, np.int32)) for shape in ((3, 4), (3,)))
    valid = lab.put(np.ones(3, bool))
    for wrong, message in (
        ({"slots": slots}, "slots: got .*, expected a pair of arrays"),
        ({"slots": (slots[:, 1:], lens)}, r"slots\[0\] \(slots\): got shape"),
        ({"slots": (slots, lens[1:])}, r"slots\[1\] \(lens\): got shape"),
        ({"slots": (slots, valid)}, r"slots\[1\] \(lens\): got dtype bool"),
        ({"slots": (slots, lens), "is_valid_token": valid[1:]}, "is_valid_token: got shape"),
        ({"slots": (slots, lens), "is_valid_token": lens}, "is_valid_token: got dtype int32"),
        ({"is_valid_token": valid}, "is_valid_token: got an array without slots"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            cumla.indexer_topk(**given, **wrong)
    keys = lab.put(np.zeros((5, 128), np.float32))
    ends = lab.put(np.ones(3, np.int32))
    with pytest.raises(ValueError, match="slots: got a value without block_table"):
        cumla.indexer_topk(
            given["q"][:, 0], keys, given["weights"], 4, cu_seqlen_ks=ends, cu_seqlen_ke=ends, slots=(slots, lens),
            backend=lab.backend,
        )  # fmt: skip
    assert (lab.get(slots) == 7).all()
    assert (lab.get(lens) == 7).all()
