"""Rows in host memory, the hot ones in device memory: against a least-recent-use cache in plain Python."""

from collections import OrderedDict

import numpy as np
import pytest

import cumla
from cumla.pages import Residency, host_pool
from support.graphs import graph_of
from support.lab import BF16

REQUESTS, LANES, ROWS, HOT, TOPK, RATIO = 3, 4, 40, 12, 4, 2


def row_of(layout, pages, page, row):
    """The bytes of a row, the bytes at its page's end included."""
    raw, data, tail = pages[page].reshape(-1), layout.row_bytes, layout.token_bytes - layout.row_bytes
    start = pages.shape[1] * data
    return np.concatenate([raw[row * data :][:data], raw[start + row * tail :][:tail]])


class Model:
    """One lane: row -> slot, the least recently used first; within a step by slot."""

    def __init__(self):
        self.slots, self.uses, self.step = {}, np.zeros(HOT, int), 0

    def select(self, written, selected):
        """The slots of rows in order, and for each the row if it misses here first, else -1."""
        self.step += 1
        for row in written:
            if row in self.slots:
                self.uses[self.slots.pop(row)] = 0
        distinct = list(OrderedDict.fromkeys(row for row in selected if 0 <= row < ROWS))
        for row in distinct:
            if row in self.slots:
                self.uses[self.slots[row]] = self.step
        missing = [row for row in distinct if row not in self.slots]
        idle = sorted((slot for slot in range(HOT) if self.uses[slot] != self.step), key=lambda x: (self.uses[x], x))
        victims = sorted(idle[: len(missing)])
        self.slots = {row: slot for row, slot in self.slots.items() if slot not in victims}
        for row, slot in zip(missing, victims, strict=False):
            self.slots[row], self.uses[slot] = slot, self.step
        fetched = missing[: len(victims)]
        firsts = {row: selected.index(row) for row in fetched}
        return (
            [self.slots.get(row, -1) for row in selected],
            [row if firsts.get(row) == i else -1 for i, row in enumerate(selected)],
        )


def steps(rng, count):
    """Random steps: lanes, query lengths, sequence lengths, selected rows; some padding, drafts that are rejected."""
    lengths = rng.integers(4, 2 * ROWS - 12, LANES)
    for _ in range(count):
        lanes = rng.permutation(LANES)[:REQUESTS]
        queries = rng.integers(0, 4, REQUESTS)
        seq_lens = lengths[lanes] + queries
        padding = int(rng.integers(0, 3))
        rows = np.full((int(queries.sum()) + padding, TOPK), 7)
        for t, r in enumerate(np.repeat(np.arange(REQUESTS), queries)):
            newest = seq_lens[r] // RATIO
            near = newest - rng.integers(-1, 7, TOPK) if rng.random() < 0.8 else rng.integers(-2, newest + 1, TOPK)
            rows[t] = np.where(near < newest, near, -1)
        yield lanes, queries, seq_lens, rows
        lengths[lanes] += rng.integers(0, queries + 1) * (seq_lens < 2 * ROWS - 6)


@pytest.mark.parametrize("hot_pages", [(6, 8), (12, 4)])
def test_a_sequence_of_steps(lab, rng, hot_pages):
    """Slots, misses and bytes of the rows, for steps that use, replace and write rows again."""
    layout = cumla.DSV4_FP8
    host = rng.integers(0, 256, (LANES * ROWS // 5, 5, layout.token_bytes), np.uint8)
    table = rng.permutation(len(host)).reshape(LANES, ROWS // 5).astype(np.int32)
    source, cache = lab.put(host), lab.put(np.zeros((*hot_pages, layout.token_bytes), np.uint8))
    state = Residency.allocate(LANES, ROWS, HOT, lab.xp)
    models = [Model() for _ in range(LANES)]
    data = layout.row_bytes
    hits = 0
    for lanes, queries, seq_lens, rows in steps(rng, 5 if lab.tiny else 40):
        if rng.random() < 0.1:
            state.clear(int(lanes[0]))
            models[lanes[0]] = Model()
        starts = np.cumsum([0, *queries])
        new = [range(int(n - q) // RATIO, int(n) // RATIO) for n, q in zip(seq_lens, queries, strict=True)]
        for lane, written in zip(lanes, new, strict=True):
            for row in written:
                page = source[int(table[lane, row // 5])].reshape(-1)
                page[row % 5 * data : row % 5 * data + 9] += 1
        there = [lab.put(x.astype(np.int32)) for x in (rows, starts, seq_lens, lanes, table[lanes])]
        slots, misses = cumla.resolve_resident(*there[:4], *state, compress_ratio=RATIO, backend=lab.backend)
        cumla.fetch_resident(misses, slots, there[1], there[4], source, cache, backend=lab.backend)
        slots, misses, host, resident = (lab.get(x) for x in (slots, misses, source, cache))
        assert (slots[starts[-1] :] == -1).all()
        assert (misses[starts[-1] :] == -1).all()
        for r, lane in enumerate(lanes):
            mine = rows[starts[r] : starts[r + 1]].ravel().tolist()
            want, fetched = models[lane].select(new[r], mine)
            got = slots[starts[r] : starts[r + 1]].ravel()
            np.testing.assert_array_equal(got, [lane * HOT + slot if slot >= 0 else -1 for slot in want])
            np.testing.assert_array_equal(misses[starts[r] : starts[r + 1]].ravel(), fetched)
            hits += len({x for x in mine if 0 <= x < ROWS}) - sum(row >= 0 for row in fetched)
            for row, slot in zip(mine, got.tolist(), strict=True):
                if slot >= 0:
                    want_row = row_of(layout, host, table[lane, row // 5], row % 5)
                    np.testing.assert_array_equal(row_of(layout, resident, *divmod(slot, hot_pages[1])), want_row)
    assert hits > 0


def test_rows_beyond_the_slots_are_absent(lab):
    """First come, first served; the next step finds what was placed."""
    state = Residency.allocate(1, 30, 5, lab.xp)
    rows = lab.put(np.arange(8, dtype=np.int32)[None])
    arguments = [lab.put(np.array(x, np.int32)) for x in ([0, 1], [1], [0])]
    for misses in ([0, 1, 2, 3, 4, -1, -1, -1], [-1] * 8):
        slots, missed = cumla.resolve_resident(rows, *arguments, *state, compress_ratio=4, backend=lab.backend)
        np.testing.assert_array_equal(lab.get(slots), [[0, 1, 2, 3, 4, -1, -1, -1]])
        np.testing.assert_array_equal(lab.get(missed), [misses])
    np.testing.assert_array_equal(lab.get(state.slot_of_row)[0], [*range(5), *[-1] * 25])


@pytest.mark.parametrize(
    ("hot", "tokens", "topk", "uses"),
    [
        (40, 1, 12, 9), (600, 2, 300, 2), (1200, 2, 1100, 1000), (900, 1, 2050, 40), (20, 3, 12, 9),
        pytest.param(16384, 1, 512, 300, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_slots_of_least_recent_use(lab, rng, hot, tokens, topk, uses):
    """One step from a random state: several slots and entries of a thread, equal last uses, rows selected twice, too
    few slots. State and results are the reference's."""
    rows, lane = 2 * hot + topk, 1
    known, places = rng.permutation(rows)[: hot - hot // 8], rng.permutation(hot)[: hot - hot // 8]
    state = Residency.allocate(2, rows, hot)
    state.slot_of_row[lane, known], state.row_of_slot[lane, places] = places, known
    state.last_use[lane, places] = rng.integers(1, uses + 1, len(places))
    state.clock[lane] = uses
    selected = np.where(rng.random((tokens, topk)) < 0.5, rng.choice(known, (tokens, topk)), 0)
    selected = np.where(selected == 0, rng.integers(-1, rows + 1, (tokens, topk)), selected).astype(np.int32)
    others = [np.array(x, np.int32) for x in ([0, tokens], [4 * rows - 2], [lane])]
    results = []
    for backend, put in ((lab.backend, lab.put), ("reference", np.asarray)):
        arrays = [put(x.copy()) for x in (selected, *others, *state)]
        found = cumla.resolve_resident(*arrays, compress_ratio=4, backend=backend)
        results.append([np.array(lab.get(x)) if backend == lab.backend else x for x in (*found, *arrays[4:])])
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)
    missed = (results[1][1] >= 0).sum()
    assert 0 < missed < len(np.unique(selected))


@pytest.mark.parametrize(
    ("window", "resident"),
    [(None, cumla.V32_FP8), (cumla.DSV4_FP8, cumla.DSV4_FP8), (cumla.DSV41_FP8, cumla.DSV41_FP4)],
    ids=["V3.2", "V4", "V4.1"],
)
def test_decode_has_the_bits_of_decode_with_all_rows_resident(lab, rng, window, resident):
    heads, topk, ratio, rows, width = 2, 8, 4, 60, resident.head_dim
    host = np.zeros((15, 8, resident.token_bytes), np.uint8)
    k = rng.standard_normal((120, width)).astype(BF16)
    cumla.quantize_and_insert_k_cache(k, host, np.arange(120), 8, layout=resident, backend="reference")
    table = rng.permutation(15)[:14].reshape(2, 7).astype(np.int32)
    source, cache = lab.put(host), lab.put(np.zeros((4, 8, resident.token_bytes), np.uint8))
    state = Residency.allocate(2, rows, 16, lab.xp)
    starts, lanes = (lab.put(np.array(x, np.int32)) for x in ([0, 1, 2], [1, 0]))
    on_device = lab.put(table)
    options = {"softmax_scale": 0.04, "backend": lab.backend}
    if window is not None:
        newest = np.zeros((2, 8, window.token_bytes), np.uint8)
        cumla.quantize_and_insert_k_cache(k[:16], newest, np.arange(16), 8, layout=window, backend="reference")
        newest, its_rows = lab.put(newest), lab.put(np.arange(16, dtype=np.int32).reshape(2, 1, 8))

    def attend(q, pages, slots):
        if window is None:
            return cumla.sparse_mla_decode(q, pages, slots, layout=resident, **options)
        return cumla.sparse_mla_decode(
            q, newest, its_rows, layout=window, extra_k_cache=pages, extra_indices=slots, extra_layout=resident,
            **options,
        )  # fmt: skip

    for step in range(2 if lab.tiny else 4):
        q = lab.put(rng.standard_normal((2, 1, heads, width)).astype(BF16))
        local = np.sort(rng.permutation(50)[: 2 * topk].reshape(2, topk) % (20 + step), axis=1).astype(np.int32)
        seq_lens = lab.put(np.array([210 + step, 205 + step], np.int32))
        slots, misses = cumla.resolve_resident(
            lab.put(local), starts, seq_lens, lanes, *state, compress_ratio=ratio, backend=lab.backend
        )
        cumla.fetch_resident(misses, slots, starts, on_device, source, cache, layout=resident, backend=lab.backend)
        everywhere = lab.put(np.take_along_axis(table, local // 8, 1) * 8 + local % 8)
        for x, y in zip(attend(q, cache, slots[:, None]), attend(q, source, everywhere[:, None]), strict=True):
            np.testing.assert_array_equal(lab.get(x).view(np.uint8), lab.get(y).view(np.uint8))


def test_steps_in_a_graph_write_and_fetch_rows_in_host_memory(lab, rng):
    """Captured once, replayed with other rows: an insert into host memory, slots, and a copy of what misses."""
    if not lab.on_device or lab.backend != "cuda":
        pytest.skip("there are no graphs")
    layout, topk, size = cumla.DSV4_FP8, 4, 5 * 4
    pool = host_pool(5 * 4 * layout.token_bytes, pinned=True)
    host = pool.memory.reshape(5, 4, layout.token_bytes)
    written, cache = pool.device_array(host), layout.allocate(2, 4, lab.xp)
    k, slot, selected = (lab.put(x) for x in (
        np.zeros((1, 512), BF16), np.zeros(1, np.int64), np.zeros((1, topk), np.int32)
    ))  # fmt: skip
    starts, lens, lanes, table = (lab.put(np.array(x, np.int32)) for x in ([0, 1], [1], [0], [[4, 2, 0, 1, 3]]))
    state, out = Residency.allocate(1, size, 8, lab.xp), [lab.put(np.zeros((1, topk), np.int32)) for _ in range(2)]

    def step():
        cumla.quantize_and_insert_k_cache(k, written, slot, 4, backend="cuda")
        cumla.resolve_resident(selected, starts, lens, lanes, *state, out=tuple(out), backend="cuda")
        cumla.fetch_resident(out[1], out[0], starts, table, host, cache, backend="cuda")

    step()
    graph = graph_of(step)
    state.clear(0)
    rows, pages = {}, lab.get(table)[0]
    for position in range(size):
        k[:] = lab.put(rng.standard_normal((1, 512)).astype(BF16))
        slot[:] = int(pages[position // 4]) * 4 + position % 4
        lens[:] = position + 1
        chosen = np.resize(np.append(rng.permutation(position)[: topk - 1], position), topk).astype(np.int32)[None]
        selected[:] = lab.put(chosen)
        lab.xp.cuda.Device().synchronize()
        graph.launch(lab.xp.cuda.get_current_stream())
        lab.xp.cuda.Device().synchronize()
        rows[position] = row_of(layout, host, pages[position // 4], position % 4).copy()
        found, resident = lab.get(out[0])[0], lab.get(cache)
        for row, place in zip(chosen[0].tolist(), found.tolist(), strict=True):
            np.testing.assert_array_equal(row_of(layout, resident, *divmod(place, 4)), rows[row])
    assert len({x.tobytes() for x in rows.values()}) == len(rows)


def test_a_host_pools_memory_as_a_device_array():
    pool = host_pool(100, pinned=False)
    part = pool.take(80)[16:]
    assert pool.device_array(part) is part
    for other in (np.zeros(8, np.uint8), part[::-1]):
        with pytest.raises(ValueError, match=r"array: got memory at 0x.*, expected 100 bytes at 0x"):
            pool.device_array(other)
    with pytest.raises(TypeError, match="array: got 3 of type int"):
        pool.device_array(3)


@pytest.mark.parametrize(
    "name", ["DSV4_FP8", "V32_FP8", "DSV41_FP8_SPLIT", "DSV41_FP4", "DSV41_FP4_SPLIT", "INDEXER_FP8", "DSV4_F32"]
)
@pytest.mark.parametrize("sizes", [(64, 16), (5, 7)])
def test_rows_of_every_format(lab, rng, name, sizes):
    """Bytes at pages' ends, and rows that are not aligned to 16 bytes; other slots keep their bytes."""
    layout = cumla.layout.LAYOUTS[name]
    source, before = (rng.integers(0, 256, (9, size, layout.token_bytes), np.uint8) for size in sizes)
    table = np.array([[3, 8, 1], [-1, 0, 5]], np.int32)
    slots = rng.permutation(9 * sizes[1])[:24].reshape(4, 6).astype(np.int32)
    misses = rng.integers(-1, 3 * sizes[0] + 1, slots.shape).astype(np.int32)
    misses[2, 1:] = -1
    misses[0] = abs(misses[0])  # of all entries of a warp
    starts = np.array([0, 2, 3], np.int32)
    cache = lab.put(before.copy())
    arrays = [lab.put(x) for x in (misses, slots, starts, table, source)]
    cumla.fetch_resident(*arrays, cache, layout=name, backend=lab.backend)
    got, want = lab.get(cache), {}
    for t, r in enumerate((0, 0, 1)):
        for row, slot in zip(misses[t].tolist(), slots[t].tolist(), strict=True):
            page = table[r, row // sizes[0]] if 0 <= row < 3 * sizes[0] else -1
            if page >= 0:
                want[slot] = row_of(layout, source, page, row % sizes[0])
    for slot in range(9 * sizes[1]):
        place = divmod(slot, sizes[1])
        expected = want[slot] if slot in want else row_of(layout, before, *place)
        np.testing.assert_array_equal(row_of(layout, got, *place), expected)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_rows_in_host_memory(lab, rng, pinned):
    """Pinned memory is read by the kernel; other memory, which a device does not read, is an error."""
    if not lab.on_device:
        pytest.skip("there is no device memory")
    size = 3 * 4 * 584
    memory = host_pool(size, pinned=True).take(size) if pinned else np.zeros(size, np.uint8)
    memory[:] = rng.integers(0, 256, size, np.uint8)
    pages = memory.reshape(3, 4, 584)
    cache = cumla.DSV4_FP8.allocate(1, 4, lab.xp)
    selected = [[-1, 5, -1, 0]], [[-1, 1, 2, 3]], [0, 1], [[2, 0]]  # misses, slots, starts, pages
    arguments = [lab.put(np.array(x, np.int32)) for x in selected]
    if not pinned:
        with pytest.raises(ValueError, match="host_cache: got host memory that is not pinned"):
            cumla.fetch_resident(*arguments, pages, cache, backend=lab.backend)
        return
    cumla.fetch_resident(*arguments, pages, cache, backend=lab.backend)
    got = lab.get(cache).reshape(-1)
    for slot, page, row in ((1, 0, 1), (3, 2, 0)):
        raw = pages[page].reshape(-1)
        np.testing.assert_array_equal(got[slot * 576 :][:576], raw[row * 576 :][:576])
        np.testing.assert_array_equal(got[2304 + slot * 8 :][:8], raw[2304 + row * 8 :][:8])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"topk_indices": np.arange(8, dtype=np.int32)[None]}, "request 0 selects 8 rows, expected at most 5"),
        ({"lanes": np.array([3], np.int32)}, "lanes: request 0 has lane 3, expected -1 or 0 to 1"),
    ],
)  # fmt: skip
def test_debug_names_the_request(changed, text):
    arguments = {
        "topk_indices": np.zeros((1, 8), np.int32), "query_start_loc": np.array([0, 1], np.int32),
        "seq_lens": np.array([9], np.int32), "lanes": np.array([0], np.int32),
    }  # fmt: skip
    state = Residency.allocate(2, 30, 5)
    with cumla.debug(), pytest.raises(ValueError, match=text):
        cumla.resolve_resident(**{**arguments, **changed}, **state._asdict())


@pytest.mark.parametrize(
    ("slot", "text"),
    [
        (3, "block_table: request 0 has page -1 for row 5, expected 0 to 2"),
        (12, "slots: token 0 has slot 12 for row 5, expected 0 to 11"),
    ],
)
def test_debug_names_what_is_absent(slot, text):
    arrays = [np.array(x, np.int32) for x in ([[-1, 5]], [[0, slot]], [0, 1], [[0, -1]])]
    pages = np.zeros((3, 4, 584), np.uint8)
    with cumla.debug(), pytest.raises(ValueError, match=text):
        cumla.fetch_resident(*arrays, pages, pages.copy())
