"""The compressor of V4.1 on every backend: rows of one and two tokens, and the ring between steps."""

import ml_dtypes
import numpy as np
import pytest

import cumla
from oracles.basics import rms_norm
from oracles.selection import scores as scores_of
from oracles.v41 import pooled
from support.guarded import Guarded
from support.indexing import anything
from support.lab import BF16, Lab
from support.v41_stack import GOLDEN, golden_arrays, hidden_states, oracle_of

DIM, EPS = 512, 1e-20


def wanted(given, weight, ratio, round_pooled=False):
    """Rows in float64: [T // ratio, 512]."""
    rows = pooled(given.astype(np.float64), ratio)
    if round_pooled:
        rows = rows.astype(ml_dtypes.bfloat16).astype(np.float64)
    return rms_norm(rows, EPS, weight.astype(np.float64))


class Sequence:
    """A request whose tokens go through the operation step by step. rows: by token, NaN if no row was written."""

    def __init__(self, lab, given, weight, capacity=8, ring=1, **options):
        self.lab, self.given, self.weight, self.ring, self.options = lab, given, weight, ring, options
        self.state = lab.put(np.full((ring + 2, capacity, 2 * DIM), np.nan, np.float32))
        self.rows = np.full((len(given), DIM), np.nan, np.float32)
        self.capacity = capacity

    def step(self, first, end, padding=0):
        """Tokens [first, end), then padding tokens at positions that would complete rows."""
        positions = np.concatenate([np.arange(first, end), np.arange(1, 2 * padding, 2)])
        slots = self.ring * self.capacity + positions % self.capacity
        slots[end - first :] = -1
        latents = self.lab.put(np.full((len(positions), DIM), np.nan, np.float32))
        given = np.concatenate([self.given[first:end], np.full((padding, 2 * DIM), np.nan, self.given.dtype)])
        starts = np.array([0, 0, end - first, end - first], np.int32)
        arrays = [self.lab.put(x) for x in (given, self.weight, slots)]
        cumla.compress_latents(
            *arrays, latents, positions=self.lab.put(positions), query_start_loc=self.lab.put(starts),
            state_cache=self.state, compress_ratio=2, backend=self.lab.backend, **self.options,
        )  # fmt: skip
        found = self.lab.get(latents)
        assert np.isnan(found[end - first :]).all()
        self.rows[first:end] = found[: end - first]


def random_tokens(rng, tokens, dtype=np.float32):
    return rng.normal(size=(tokens, 2 * DIM)).astype(dtype), rng.normal(1, 0.1, DIM).astype(dtype)


@pytest.mark.parametrize("round_pooled", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_rows(lab, rng, ratio, dtype, round_pooled):
    tokens = 7
    given, weight = random_tokens(rng, tokens, dtype)
    given = given[:, : ratio * DIM]
    arrays = [lab.put(x) for x in (given, weight)]
    options = {"compress_ratio": ratio, "round_pooled": round_pooled, "backend": lab.backend}
    want = wanted(given.astype(np.float32), weight, ratio, round_pooled)
    for out, bound in ((np.float32, 1e-5 if not round_pooled else 0.02), (BF16, 0.02)):
        latents = lab.put(np.full((tokens, DIM), 7, out))
        if ratio == 1:
            slots = lab.put(np.array([4, 9, -1, 0, 2, 3], np.int64))
            cumla.compress_latents(*arrays, slots, latents, **options)
            kept = [0, 1, 3, 4, 5]
        else:
            positions = np.arange(tokens)
            slots, state = lab.put(positions % 8), lab.put(np.zeros((1, 8, 2 * DIM), np.float32))
            starts = lab.put(np.array([0, tokens], np.int32))
            pairs = {"positions": lab.put(positions), "query_start_loc": starts, "state_cache": state}
            cumla.compress_latents(*arrays, slots, latents, **pairs, **options)
            kept = [1, 3, 5]
            np.testing.assert_array_equal(lab.get(state)[0, :tokens], given.astype(np.float32))
        found = lab.get(latents).astype(np.float64)
        np.testing.assert_array_equal(found[np.setdiff1d(np.arange(tokens), kept)], 7)
        np.testing.assert_allclose(found[kept], want if ratio == 2 else want[kept], rtol=bound, atol=bound / 10)


@pytest.mark.parametrize("capacity", [8, 16])
def test_any_steps_give_the_same_rows(lab, rng, capacity):
    """Steps of one token, of odd and even starts, and longer than the ring."""
    tokens = 24
    given, weight = random_tokens(rng, tokens)
    whole = Sequence(lab, given, weight, capacity)
    whole.step(0, tokens)
    np.testing.assert_allclose(whole.rows[1::2], wanted(given, weight, 2), rtol=1e-5, atol=1e-5)
    assert np.isnan(whole.rows[::2]).all()
    for steps in ([1, 2, 3, 5, 6, 17, 18, 24], [9, 10, 13, 24], [*range(1, 25)]):
        parts = Sequence(lab, given, weight, capacity)
        for first, end in zip([0, *steps], steps, strict=False):
            parts.step(first, end, padding=first % 3)
        np.testing.assert_array_equal(parts.rows, whole.rows)
        last = np.arange(tokens - capacity, tokens)
        np.testing.assert_array_equal(lab.get(parts.state)[1, last % capacity], given[last])
        assert np.isnan(lab.get(parts.state)[[0, 2]]).all()


def test_rejected_drafts_and_replay(lab, rng):
    """Drafts are overwritten by position; a sequence may go back by the ring's capacity."""
    given, weight = random_tokens(rng, 12)
    right = Sequence(lab, given, weight)
    right.step(0, 12)
    drafts = Sequence(lab, given.copy(), weight)
    assert [cumla.metadata.ring_capacity(n) for n in (0, 6, 7, 14, 15)] == [8, 8, 16, 16, 32]
    drafts.step(0, 3)
    for accepted in (4, 5, 9):
        drafts.given[accepted:] = rng.normal(size=(12 - accepted, 2 * DIM))  # tokens from here on are rejected
        drafts.step(accepted - 1, min(accepted + 5, 12))
        drafts.given[:] = given
    drafts.step(9, 12)
    np.testing.assert_array_equal(drafts.rows[[1, 3, 9, 11]], right.rows[[1, 3, 9, 11]])
    drafts.step(5, 12)
    np.testing.assert_array_equal(drafts.rows[5:], right.rows[5:])


def restart_of(lab, state):
    """Zeroed arrays for the values that repeated steps need."""
    rings = len(lab.get(state))
    return {
        "restart_rows": lab.put(np.zeros((rings, 2 * DIM), np.float32)),
        "restart_positions": lab.put(np.zeros(rings, np.int32)),
    }


@pytest.mark.parametrize("first", [12, 13, 21])
@pytest.mark.parametrize("count", [3, 7, 8, 9, 16, 19])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("count") not in (7, 8))
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("count") not in (7, 8))
def test_a_step_that_is_run_again(lab, rng, first, count):
    """At even and odd positions, shorter and longer than the ring: the same rows, ring and saved values."""
    given, weight = random_tokens(rng, first + count)
    sequence = Sequence(lab, given, weight)
    sequence.options |= restart_of(lab, sequence.state)
    sequence.step(0, first)
    found = []
    for _ in range(3):
        sequence.rows[:] = np.nan
        sequence.step(first, first + count, padding=2)
        arrays = (sequence.state, *sequence.options.values())
        found.append([sequence.rows.copy(), *(lab.get(x).copy() for x in arrays)])
        for got, once in zip(found[-1], found[0], strict=True):
            np.testing.assert_array_equal(got, once)
    want = wanted(given, weight, 2)
    odd = np.arange(first | 1, first + count, 2)
    np.testing.assert_allclose(found[0][0][odd], want[odd // 2], rtol=1e-5, atol=1e-5)
    sequence.step(first, first + min(count, 5))  # again, and shorter
    np.testing.assert_array_equal(sequence.rows[first : first + 3], found[0][0][first : first + 3])


def test_steps_run_again_in_any_schedule(lab, rng):
    """Drafts, chunks, rejections, a ring that the next request gets: each step up to three times, of any length."""
    capacity, longest = 4, 40
    sequences = []
    state = lab.put(np.full((3, capacity, 2 * DIM), np.nan, np.float32))
    restart = restart_of(lab, state)
    for _ in range(1 if lab.tiny else 4):
        given, weight = random_tokens(rng, longest)
        sequences.append(Sequence(lab, given, weight, capacity, **restart))
        sequences[-1].state = state
    for sequence in sequences:
        done = 0
        while done < longest - 12:
            count = int(rng.integers(1, 13))
            accepted = count if count >= capacity else int(rng.integers(1, count + 1))
            for _ in range(rng.integers(0, 3)):  # attempts that fail later, of any length
                sequence.step(done, done + int(rng.integers(1, 13)))
            sequence.given[done + accepted :] = rng.normal(size=(longest - done - accepted, 2 * DIM))
            sequence.step(done, done + count)
            done += accepted
        want = wanted(sequence.given, sequence.weight, 2)
        odd = np.arange(1, done, 2)
        np.testing.assert_allclose(sequence.rows[odd], want[odd // 2], rtol=1e-5, atol=1e-5)


def test_a_ring_that_the_next_request_gets(lab, rng):
    """Saved values of the previous request are not used, wherever the next request's steps begin."""
    state, requests = lab.put(np.full((3, 8, 2 * DIM), np.nan, np.float32)), []
    restart = restart_of(lab, state)
    for steps in ([13, 24], [7, 13, 24], [6, 13, 24], [3, 13, 22]):
        given, weight = random_tokens(rng, steps[-1])
        requests.append(Sequence(lab, given, weight, **restart))
        requests[-1].state, first = state, 0
        for end in steps:
            requests[-1].step(first, end)
            first = end
        np.testing.assert_allclose(requests[-1].rows[1::2], wanted(given, weight, 2), rtol=1e-5, atol=1e-5)


def strided(shape, strides):
    return np.lib.stride_tricks.as_strided(np.zeros(1 << 16, np.float32), shape, strides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"restart_positions": None}, "restart_positions: got one of restart_rows and restart_positions"),
        ({"restart_rows": np.zeros((2, 1024), np.float32)}, r"restart_rows: got shape \(2, 1024\)"),
        ({"restart_rows": np.zeros((3, 1024))}, "restart_rows: got dtype float64"),
        ({"restart_positions": np.zeros(3, np.int64)}, "restart_positions: got dtype int64"),
        ({"restart_positions": np.zeros(2, np.int32)}, "restart_positions: got shape"),
        ({"restart_rows": strided((3, 1024), (2048, 4))}, "restart_rows: got strides .*, expected elements"),
        ({"state_cache": strided((3, 8, 1024), (8192, 4096, 4))}, "state_cache: got strides .*, expected elements"),
        ({"state_cache": strided((3, 8, 1024), (32768, 2048, 4))}, "state_cache: got strides .*, expected elements"),
        ({"query_start_loc": np.zeros(0, np.int32)}, "query_start_loc: got no entries, expected one more than"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_rings_that_are_refused(rng, changes, message):
    """Before anything is written."""
    given, weight = random_tokens(rng, 3)
    latents = np.full((3, DIM), 7, np.float32)
    arguments = {
        "positions": np.arange(3), "query_start_loc": np.array([0, 3], np.int32),
        "state_cache": np.zeros((3, 8, 2 * DIM), np.float32), "restart_rows": np.zeros((3, 2 * DIM), np.float32),
        "restart_positions": np.zeros(3, np.int32),
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        cumla.compress_latents(given, weight, np.arange(3), latents, compress_ratio=2, **(arguments | changes))
    assert (latents == 7).all()
    assert not arguments["state_cache"].any()
    cumla.compress_latents(given, weight, np.arange(3), latents, compress_ratio=2, **arguments)
    assert arguments["state_cache"].any()


def test_ratio_1_has_nothing_to_run_again():
    row = np.zeros((1, DIM), np.float32)
    restart = {"restart_rows": np.zeros((1, 2 * DIM), np.float32), "restart_positions": np.zeros(1, np.int32)}
    with pytest.raises(ValueError, match=r"^restart_rows: got an array for compress_ratio 1, expected None"):
        cumla.compress_latents(row, row[0] + 1, np.zeros(1, np.int64), row.copy(), compress_ratio=1, **restart)


def test_rings_between_one_another(lab, rng):
    """Rows of a ring need not be adjacent: [capacity, rings, 1024] in memory."""
    given, weight = random_tokens(rng, 14)
    plain, between = Sequence(lab, given, weight), Sequence(lab, given, weight)
    between.state = lab.put(np.full((8, 3, 2 * DIM), np.nan, np.float32)).transpose(1, 0, 2)
    for sequence in (plain, between):
        for first, end in ((0, 3), (3, 13), (13, 14)):
            sequence.step(first, end)
    np.testing.assert_array_equal(between.rows, plain.rows)
    np.testing.assert_array_equal(lab.get(between.state), lab.get(plain.state))


def test_starts_below_0_and_ends_beyond_the_slots(lab, rng):
    """Such a request begins with token 0; its last tokens in slot_mapping are saved."""
    given, weight = random_tokens(rng, 12)
    positions, capacity = np.arange(3, 15), 4
    state = rng.normal(size=(1, capacity, 2 * DIM)).astype(np.float32)
    for starts, slots in (([-2, 12], 12), ([-5, 40], 12), ([0, 12], 7), ([-1, 30], 9), ([0, 12], 3)):
        found = []
        for place in (lab, Lab("reference", False)):
            latents, its = place.put(np.full((12, DIM), 7, np.float32)), place.put(state.copy())
            arrays = [place.put(x) for x in (given, weight, (positions % capacity)[:slots])]
            pairs = {"positions": positions, "query_start_loc": np.array(starts, np.int32)}
            restart = restart_of(place, its)
            cumla.compress_latents(
                *arrays, latents, **{name: place.put(x) for name, x in pairs.items()}, state_cache=its, **restart,
                compress_ratio=2, backend=place.backend,
            )  # fmt: skip
            found.append([place.get(x) for x in (latents, its, *restart.values())])
        np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
        for got, same in zip(found[0][1:], found[1][1:], strict=True):
            np.testing.assert_array_equal(got, same)
        saved = slice(max(slots - capacity, 0), slots)
        np.testing.assert_array_equal(found[1][1][0, positions[saved] % capacity], given[saved])
        assert found[1][3].tolist() == [3 if slots >= capacity else 0]  # the position at which the step can be repeated
        pairs = np.stack([state[0, 2], given[0]])
        np.testing.assert_allclose(found[0][0][0], wanted(pairs, weight, 2)[0], rtol=1e-5, atol=1e-5)


def test_requests_whose_first_token_is_padding(lab, rng):
    """Such requests save nothing, but complete the rows within the step."""
    given, weight = random_tokens(rng, 6)
    state = np.full((2, 8, 2 * DIM), np.nan, np.float32)
    latents, positions = np.full((6, DIM), np.nan, np.float32), np.array([3, 4, 5, 3, 4, 5])
    slots = np.array([-1, 4, 5, 99, 12, 13])
    arrays = [lab.put(x) for x in (given, weight, slots, latents)]
    pairs = {"positions": positions, "query_start_loc": np.array([0, 3, 6], np.int32), "state_cache": state}
    pairs = {name: lab.put(x) for name, x in pairs.items()}
    cumla.compress_latents(*arrays, **pairs, compress_ratio=2, backend=lab.backend)
    assert np.isnan(lab.get(pairs["state_cache"])).all()
    written = ~np.isnan(lab.get(arrays[3])).all(axis=1)
    np.testing.assert_array_equal(written, [False, False, True, False, False, True])


@pytest.mark.nowhere(when=lambda x: x.simulated or x.backend == "reference")  # hundreds of tokens
@pytest.mark.parametrize(("requests", "longest"), [(1, 40), (33, 3), (70, 4), (1100, 1)])
def test_many_requests(lab, rng, requests, longest):
    """Includes requests without tokens, tokens before the first and after the last request, and repeated steps."""
    counts = rng.integers(0, longest + 1, requests)
    counts[-1] = longest
    starts = (1 + np.concatenate([[0], np.cumsum(counts)])).astype(np.int32)
    of = np.searchsorted(starts[1:], np.arange(starts[-1] + 2), side="right").clip(0, requests - 1)
    positions = np.arange(len(of)) - starts[of] + rng.integers(0, 9, requests)[of] + 1
    given, weight = random_tokens(rng, len(of))
    firsts, found = positions[starts[:-1].clip(0, len(of) - 1)], []
    kept, again = rng.normal(size=(requests, 2 * DIM)).astype(np.float32), rng.random(requests) < 0.4
    for place in (lab, Lab("reference", False)):
        state = place.put(np.ones((requests, 8, 2 * DIM), np.float32))
        restart = {
            "restart_rows": place.put(kept.copy()),
            "restart_positions": place.put(np.where(again, firsts, 3).astype(np.int32)),
        }
        latents = place.put(np.full((len(of), DIM), 7, np.float32))
        arrays = [place.put(x) for x in (given, weight, of * 8 + positions % 8)]
        pairs = {"positions": place.put(positions), "query_start_loc": place.put(starts), "state_cache": state}
        cumla.compress_latents(*arrays, latents, **pairs, **restart, compress_ratio=2, backend=place.backend)
        found.append([place.get(x) for x in (latents, state, *restart.values())])
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for got, want in zip(found[0][1:], found[1][1:], strict=True):
        np.testing.assert_array_equal(got, want)
    assert (found[0][0] != 7).any()


def test_special_values(lab, rng):
    given, weight = random_tokens(rng, 2)
    given[0, DIM], given[:, DIM + 1], given[1, DIM + 2] = -np.inf, -np.inf, np.nan
    found = Sequence(lab, given, weight)
    found.step(0, 2)
    assert np.isnan(found.rows[1]).all()  # the norm gives NaN
    given[1, DIM + 2] = 0
    found.step(0, 2)
    before = pooled(given.astype(np.float64), 2)[0]
    before[1] = 0
    want = rms_norm(before, EPS, weight.astype(np.float64))
    np.testing.assert_allclose(found.rows[1], want, rtol=1e-5, atol=1e-5)
    given[:] = 0
    found.step(0, 2)
    assert (found.rows[1] == 0).all()


def test_no_tokens(lab):
    nothing = np.zeros((0, 2 * DIM), np.float32)
    arrays = [nothing, np.ones(DIM, np.float32), np.zeros(0, np.int64), nothing[:, :DIM]]
    pairs = {
        "positions": np.zeros(0, np.int64), "query_start_loc": np.zeros(1, np.int32),
        "state_cache": np.zeros((0, 8, 2 * DIM), np.float32),
    }  # fmt: skip
    pairs = {name: lab.put(x) for name, x in pairs.items()}
    cumla.compress_latents(*map(lab.put, arrays), **pairs, compress_ratio=2, backend=lab.backend)


def test_no_value_leaves_the_arrays(lab, rng):
    for _ in range(1 if lab.tiny else 6):
        tokens = 7
        given, weight = random_tokens(rng, tokens)
        state = Guarded(lab, rng.normal(size=(3, 8, 2 * DIM)).astype(np.float32), (0, 16))
        latents = Guarded(lab, np.zeros((tokens, DIM), np.float32), (0, 4))
        slots, starts = anything(rng, tokens), np.sort(anything(rng, 4))
        slots[::2] = rng.integers(0, 24, 4)
        arrays = [lab.put(x) for x in (given, weight, slots)]
        pairs = {"positions": lab.put(anything(rng, tokens)), "query_start_loc": lab.put(starts)}
        cumla.compress_latents(
            *arrays, latents.array, **pairs, state_cache=state.array, compress_ratio=2, backend=lab.backend
        )
        latents.assert_margins()
        state.assert_margins()


@pytest.mark.nowhere(when=lambda x: x.simulated)  # hundreds of tokens
@pytest.mark.parametrize(("case", "number"), [(0, 1), (0, 3), (2, 0)])
def test_choices_of_published_code(lab, case, number):
    """Index keys of rows that were computed in the golden data's steps give its selections (tests/data/v41.npz)."""
    layer, splits = oracle_of(case, number), GOLDEN["cases"][case]["requests"][0]
    x = hidden_states(case, 0)[number].astype(np.float64)
    given = layer.pooled_input(x).astype(np.float32)
    weight = layer.weights["compressor.norm.weight"].astype(np.float32)
    if layer.ratio == 2:
        sequence = Sequence(lab, given, weight)
        for first, end in zip(np.cumsum([0, *splits[:-1]]).tolist(), np.cumsum(splits).tolist(), strict=True):
            sequence.step(first, end)
        rows = sequence.rows[1::2]
    else:
        latents = lab.put(np.zeros((len(given), DIM), np.float32))
        arrays = [lab.put(x) for x in (given, weight, np.arange(len(given)))]
        cumla.compress_latents(*arrays, latents, compress_ratio=1, backend=lab.backend)
        rows = lab.get(latents)
    np.testing.assert_allclose(rows, layer.latents(x), rtol=2e-5, atol=2e-5)
    gap, tokens = (golden_arrays()[f"{case}/0/{name}"] for name in (f"gap{number}", "pick_rows"))
    kept = np.flatnonzero(gap > 1e-4)
    tokens = tokens[kept].astype(np.int64)
    q, weights = (of[tokens] for of in layer.index_queries(x, np.arange(len(x))))
    scores = scores_of(q, weights, layer.index_keys(rows.astype(np.float64))).astype(np.float32)
    lens = ((tokens + 1) // layer.ratio).astype(np.int32)
    chosen = cumla.top_k_per_row(scores, layer.config.index_topk, seq_lens=lens, backend="cpu")
    np.testing.assert_array_equal(chosen, golden_arrays()[f"{case}/0/picks{number}"][kept])
