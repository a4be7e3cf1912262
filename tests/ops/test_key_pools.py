"""Pooled index keys on every backend: any schedule of steps, the ring between them, rotation, padding."""

import ml_dtypes
import numpy as np
import pytest

import cumla
from oracles.key_pools import hadamard, pooled_keys
from support.lab import BF16

DIM, EPS, BLOCK = 128, 1e-6, 8
LAYOUTS = {"INDEXER_BF16": BF16, "INDEXER_F32": np.float32}


class Sequence:
    """A request whose tokens go through the operation step by step."""

    def __init__(
        self, lab, rng, tokens, pool=4, capacity=8, dtype=np.float32, ring=1, layout="INDEXER_BF16", **options
    ):
        self.lab, self.pool, self.capacity, self.ring, self.layout = lab, pool, capacity, ring, layout
        self.k, self.gate = (rng.normal(size=(tokens, DIM)).astype(BF16) for _ in range(2))
        self.norm = [rng.normal(size=DIM).astype(np.float32) for _ in range(2)]
        self.ape = rng.normal(size=(pool, DIM)).astype(np.float32)
        self.dtype, self.options = dtype, {"hadamard": False, **options}
        self.state = lab.put(np.full((ring + 2, capacity, 2 * DIM), np.nan, dtype))
        self.cache = self.new_cache(tokens)

    def new_cache(self, tokens):
        pages = tokens // self.pool // BLOCK + 1
        if self.layout in LAYOUTS:
            return self.lab.put(np.full((pages, BLOCK, DIM), 7, LAYOUTS[self.layout]))
        return self.lab.put(np.full((pages, BLOCK, 132), 7, np.uint8))

    def with_restart(self):
        """Arrays with which steps of any length can be run again."""
        rings = len(self.lab.get(self.state))
        self.options |= {
            "restart_rows": self.lab.put(np.zeros((rings, self.pool - 1, 2 * DIM), self.dtype)),
            "restart_positions": self.lab.put(np.zeros(rings, np.int32)),
        }
        return self

    def step(self, first, end, padding=0):
        """Tokens [first, end), then padding tokens at positions that would complete keys."""
        lab, count = self.lab, end - first
        positions = np.concatenate([np.arange(first, end), np.arange(padding) * self.pool + self.pool - 1])
        rings = self.ring * self.capacity + positions % self.capacity
        slots = np.where((positions + 1) % self.pool == 0, positions // self.pool, -1)
        rings[count:], slots[count:] = -1, -1
        given = [np.concatenate([x[first:end], np.full((padding, DIM), np.nan, BF16)]) for x in (self.k, self.gate)]
        starts = np.array([0, 0, count, count], np.int32)
        cumla.indexer_kpool_and_insert(
            *(lab.put(x) for x in (*given, *self.norm, self.ape)), self.state, lab.put(rings), self.cache,
            lab.put(slots), lab.put(positions), lab.put(starts), backend=lab.backend, layout=self.layout, eps=EPS,
            **self.options,
        )  # fmt: skip

    @property
    def keys(self):
        rows = self.lab.get(self.cache)
        return rows.reshape(-1, rows.shape[2])

    def wanted(self):
        return pooled_keys(self.k, self.gate, *self.norm, self.ape, EPS, self.dtype)


def same_bytes(got, want):
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("pool", [2, 4, 5, 12, 16])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("pool") in (2, 16))
def test_keys(lab, rng, pool, dtype):
    tokens = 2 * pool + 1
    for layout in ("INDEXER_BF16", "INDEXER_F32"):
        if layout == "INDEXER_F32" and lab.backend not in ("reference", "cpu"):
            continue
        sequence = Sequence(lab, rng, tokens, pool, 32, dtype, layout=layout)
        sequence.step(0, tokens, padding=2)
        want, bound = sequence.wanted(), 0.01 if layout == "INDEXER_BF16" else 1e-5
        np.testing.assert_allclose(sequence.keys[:2].astype(np.float64), want, rtol=bound, atol=bound / 5)
        np.testing.assert_array_equal(sequence.keys[2:].astype(np.float64), 7)
        state = lab.get(sequence.state)[1].astype(np.float64)
        last = np.arange(tokens)[-32:]
        np.testing.assert_array_equal(state[last % 32, DIM:], sequence.gate[last].astype(np.float64))


@pytest.mark.parametrize("layout", ["INDEXER_BF16", "INDEXER_FP8"])
def test_rotated_keys(lab, rng, layout):
    """The rotation of the rounded key; twice the rotation is the key."""
    plain, turned = (Sequence(lab, np.random.default_rng(5), 8, layout=layout, hadamard=x) for x in (False, True))
    for sequence in (plain, turned):
        sequence.step(0, 8)
    keys, rotated = (_values(x.keys, layout)[:2] for x in (plain, turned))
    assert abs(rotated - keys).max() > 0.1
    bound = 0.02 if layout == "INDEXER_BF16" else 0.2
    np.testing.assert_allclose(rotated, hadamard(plain.wanted()), atol=bound)
    np.testing.assert_allclose(hadamard(rotated), plain.wanted(), atol=bound)


def _values(rows, layout):
    if layout != "INDEXER_FP8":
        return rows.astype(np.float64)
    page = np.ascontiguousarray(rows).reshape(-1)
    values = page[: BLOCK * DIM].view(ml_dtypes.float8_e4m3fn).reshape(BLOCK, DIM)
    return values.astype(np.float64) * page[BLOCK * DIM :].view(np.float32)[:, None]


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
def test_any_steps_give_the_same_bytes(lab, rng, dtype):
    """A border at every offset within a pool, token by token, steps longer than the ring."""
    tokens = 18
    seed = int(rng.integers(1 << 30))
    whole = Sequence(lab, np.random.default_rng(seed), tokens, dtype=dtype, hadamard=True)
    whole.step(0, tokens)
    schedules = [[*range(1, tokens + 1)], [3, 4, 6, 9, 18], [1, 13, 18], *([border, 18] for border in (5, 6, 7, 8))]
    for steps in schedules[: 3 if lab.tiny else None]:
        parts = Sequence(lab, np.random.default_rng(seed), tokens, dtype=dtype, hadamard=True)
        for first, end in zip([0, *steps], steps, strict=False):
            parts.step(first, end, padding=first % 3)
        same_bytes(parts.keys, whole.keys)
        last = np.arange(tokens - 8, tokens) % 8
        same_bytes(lab.get(parts.state)[1, last], lab.get(whole.state)[1, last])
        assert np.isnan(lab.get(parts.state)[[0, 2]].astype(np.float32)).all()


@pytest.mark.parametrize("drafts", [1, 3, 5, 6])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("drafts") in (1, 5))
def test_rejected_drafts(lab, rng, drafts):
    """Every number of accepted tokens, at every phase of a pool; a step may be run again."""
    pool, phases = 4, (1,) if lab.tiny else range(4)
    capacity = cumla.metadata.ring_capacity(drafts, pool)
    seed = int(rng.integers(1 << 30))
    for phase in phases:
        for accepted in range(1, drafts + 2):
            tokens = 8 + phase + accepted + 2 * pool
            right = Sequence(lab, np.random.default_rng(seed), tokens, pool, capacity, BF16)
            got = Sequence(lab, np.random.default_rng(seed), tokens, pool, capacity, BF16)
            right.step(0, tokens)
            got.step(0, 8 + phase)
            first = 8 + phase
            k, gate = got.k.copy(), got.gate.copy()
            for x in (got.k, got.gate):
                x[first + accepted :] = rng.normal(size=x[first + accepted :].shape)
            for _ in range(2):
                got.step(first, min(first + 1 + drafts, tokens))
            got.k, got.gate = k, gate
            got.step(first + accepted, tokens)
            same_bytes(got.keys, right.keys)


def test_ring_capacity():
    """pool + d slots: pool - 1 + d rows survive a step that verifies 1 + d tokens, and it may be run again."""
    found = [cumla.metadata.ring_capacity(d, pool) for d, pool in ((6, 4), (4, 4), (5, 4), (0, 16), (1, 16), (0, 2))]
    assert found == [16, 8, 16, 16, 32, 8]
    assert all(cumla.metadata.ring_capacity(d, p) >= p + d for d in range(40) for p in (2, 3, 4, 16, 64))
    with pytest.raises(ValueError, match=r"^pool: got 1"):
        cumla.metadata.ring_capacity(0, 1)


@pytest.mark.parametrize("first", [12, 13, 15, 22])
@pytest.mark.parametrize("count", [3, 5, 6, 8, 9, 17])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("first") + x.get("count")) % 3)
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("count") not in (6, 9))
def test_a_step_that_is_run_again(lab, rng, first, count):
    """At every phase of a pool, shorter and longer than the ring: the same keys, ring and saved rows."""
    seed = int(rng.integers(1 << 30))
    right = Sequence(lab, np.random.default_rng(seed), first + count)
    right.step(0, first + count)
    sequence = Sequence(lab, np.random.default_rng(seed), first + count).with_restart()
    sequence.step(0, first)
    found = []
    for _ in range(3):
        sequence.step(first, first + count, padding=2)
        arrays = (sequence.state, sequence.options["restart_rows"], sequence.options["restart_positions"])
        found.append([sequence.keys.copy(), *(lab.get(x).copy() for x in arrays)])
        for got, once in zip(found[-1], found[0], strict=True):
            same_bytes(got, once)
    same_bytes(found[0][0], right.keys)
    phase = first % 4
    assert lab.get(sequence.options["restart_positions"])[1] == (first if phase and count > 8 - phase else 0)


def test_steps_run_again_in_any_schedule(lab, rng):
    """Drafts, chunks, rejections, a ring that the next request gets: each step up to three times, of any length."""
    longest, state, options = 40, None, {}
    for _ in range(1 if lab.tiny else 4):
        sequence = Sequence(lab, rng, longest, capacity=4).with_restart()
        if state is not None:
            sequence.state, sequence.options = state, options
        state, options = sequence.state, sequence.options
        done = 0
        while done < longest - 12:
            count = int(rng.integers(1, 13))
            accepted = count if count > 1 else 1  # a ring of 4 has no row for drafts
            for _ in range(rng.integers(0, 3)):  # attempts that fail later, of any length
                sequence.step(done, done + int(rng.integers(1, 13)))
            sequence.step(done, done + count)
            done += accepted
        bound = {"rtol": 0.01, "atol": 0.002}
        np.testing.assert_allclose(
            sequence.keys[: done // 4].astype(np.float64), sequence.wanted()[: done // 4], **bound
        )


def test_several_requests(lab, rng):
    """A decode, an empty request, a chunk that begins within a pool, a padded request; rings in another order."""
    sequences = [Sequence(lab, rng, 24, ring=ring) for ring in (2, 0, 1)]
    state = lab.put(np.full((3, 8, 2 * DIM), np.nan, np.float32))
    for one in sequences:
        one.state, one.norm, one.ape = state, sequences[0].norm, sequences[0].ape
    done = (7, 13, 9)
    for one, first in zip(sequences, done, strict=True):
        one.step(0, first)
    lens = (1, 9, 4)
    cache, block = lab.put(np.full((3 * 6, DIM), 7, BF16).reshape(9, 2, DIM)), 6
    positions = np.concatenate([np.arange(first, first + n) for first, n in zip(done, lens, strict=True)])
    owner = np.repeat([2, 0, 1], lens)
    rings = owner * 8 + positions % 8
    rings[10:] = [-1, *rings[11:]]  # the last request's first token is padding
    slots = np.where((positions + 1) % 4 == 0, np.repeat(np.arange(3), lens) * block + positions // 4, -1)
    k, gate = (
        np.concatenate([getattr(x, name)[a : a + n] for x, a, n in zip(sequences, done, lens, strict=True)])
        for name in ("k", "gate")
    )
    before = lab.get(state).copy()
    cumla.indexer_kpool_and_insert(
        *(lab.put(x) for x in (k, gate, *sequences[0].norm, sequences[0].ape)), state, lab.put(rings), cache,
        lab.put(slots), lab.put(positions), lab.put(np.array([0, 1, 1, 10, 14], np.int32)), eps=EPS, hadamard=False,
        layout="INDEXER_BF16", backend=lab.backend,
    )  # fmt: skip
    found, bound = lab.get(cache).reshape(-1, DIM).astype(np.float64), {"rtol": 0.01, "atol": 0.002}
    np.testing.assert_allclose(found[1], sequences[0].wanted()[1], **bound)
    np.testing.assert_allclose(found[block + 3 : block + 5], sequences[1].wanted()[3:5], **bound)
    np.testing.assert_array_equal(lab.get(state)[1], before[1])  # nothing saved of a request that starts with padding
    written = {1, block + 3, block + 4, 2 * block + 2}
    assert {i for i in range(18) if (found[i] != 7).any()} == written


@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf])
def test_gates_that_are_not_finite(lab, rng, value):
    sequence = Sequence(lab, rng, 8)
    sequence.gate[1, :40] = value
    sequence.gate[4:, 40:50] = value
    sequence.step(0, 8)
    found, want = sequence.keys[:2].astype(np.float64), sequence.wanted()
    if value == -np.inf:
        want[1, 40:50] = 0
        np.testing.assert_allclose(found, want, rtol=0.01, atol=0.002)
    else:
        assert np.isnan(found[0, :40]).all()
        assert np.isnan(found[1, 40:50]).all()
        np.testing.assert_allclose(found[0, 40:], want[0, 40:], rtol=0.01, atol=0.002)


def test_many_tokens(lab, rng):
    """Warps that take several tokens, and those that take one, give the same bytes."""
    if lab.tiny:
        pytest.skip("4,097 tokens take minutes in the simulator")
    tokens, seed = 4104, int(rng.integers(1 << 30))
    whole, parts = (Sequence(lab, np.random.default_rng(seed), tokens, dtype=BF16) for _ in range(2))
    whole.step(0, tokens)
    for first, end in ((0, 2050), (2050, 4104)):
        parts.step(first, end)
    same_bytes(parts.keys, whole.keys)
    same_bytes(lab.get(parts.state)[1], lab.get(whole.state)[1])
    np.testing.assert_allclose(whole.keys[: tokens // 4].astype(np.float64), whole.wanted(), rtol=0.01, atol=0.004)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ape": np.zeros((1, DIM), np.float32)}, "ape: got 1 rows, expected the 2 to 128 positions of a pool"),
        ({"ape": np.zeros((129, DIM), np.float32)}, "ape: got 129 rows"),
        ({"state_cache": np.zeros((2, 3, 256), np.float32)}, "state_cache: got rings of 3 rows, expected at least"),
        ({"state_cache": np.zeros((2, 8, 128), np.float32)}, "state_cache: got shape"),
        ({"gate": np.zeros((5, DIM), BF16)}, "gate: got dtype bfloat16"),
        ({"bias": np.zeros(DIM, BF16)}, "bias: got dtype bfloat16"),
        ({"restart_positions": np.zeros(2, np.int32)}, "restart_positions: got one of"),
        ({"restart_rows": np.zeros((2, 4, 256), np.float32), "restart_positions": np.zeros(2, np.int32)},
         r"restart_rows: got shape \(2, 4, 256\)"),
        ({"query_start_loc": np.zeros(0, np.int32)}, "query_start_loc: got no entries"),
        ({"hadamard": 1}, "hadamard: got 1"),
        ({"layout": "DSV4_FP8"}, "layout: got DSV4_FP8"),
        ({"eps": 0.0}, "eps: got 0"),
        ({"slot_mapping": np.zeros(6, np.int64)}, "slot_mapping: got 6 slots"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_refused(rng, changes, message):
    """Before anything is written."""
    arguments = {
        "k": np.ones((5, DIM), np.float32), "gate": np.ones((5, DIM), np.float32),
        "weight": np.ones(DIM, np.float32), "bias": np.ones(DIM, np.float32), "ape": np.zeros((4, DIM), np.float32),
        "state_cache": np.zeros((2, 8, 256), np.float32), "state_slot_mapping": np.arange(5),
        "k_cache": np.zeros((1, 8, 132), np.uint8), "slot_mapping": np.array([-1, -1, -1, 3, -1]),
        "positions": np.arange(5), "query_start_loc": np.array([0, 5], np.int32),
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        cumla.indexer_kpool_and_insert(**(arguments | changes))
    assert not arguments["state_cache"].any()
    assert not arguments["k_cache"].any()
    cumla.indexer_kpool_and_insert(**arguments)
    assert arguments["state_cache"].any()
    assert arguments["k_cache"].any()


def test_debug_finds_slots_of_open_pools(rng):
    sequence = Sequence(_Host, rng, 8)
    wrong = np.array([-1, -1, 0, 1, -1, -1, -1, -1])
    arrays = (sequence.k, sequence.gate, *sequence.norm, sequence.ape, sequence.state)
    with cumla.debug(), pytest.raises(ValueError, match=r"^slot_mapping: row 2 .position 2. has slot 0, expected -1"):
        cumla.indexer_kpool_and_insert(
            *arrays, 8 + np.arange(8), sequence.cache, wrong, np.arange(8), np.array([0, 8], np.int32)
        )
    with cumla.debug(), pytest.raises(ValueError, match=r"^state_slot_mapping: row 0 .* modulo the capacity 8"):
        cumla.indexer_kpool_and_insert(
            *arrays, 9 + np.arange(8), sequence.cache, np.full(8, -1), np.arange(8), np.array([0, 8], np.int32)
        )


class _Host:
    backend = "cpu"
    put = get = staticmethod(lambda x: x)
