"""The compressor against the plain formula, on every backend."""

import ml_dtypes
import numpy as np
import pytest

import emulation
from cumla import (
    DSV4_BF16,
    DSV4_F32,
    DSV4_FP8,
    INDEXER_BF16,
    INDEXER_F32,
    INDEXER_FP8,
    compress_and_insert,
    dequantize_and_gather_k_cache,
)
from emulation.launches import Schedule
from oracles.basics import rms_norm, rotated
from support.lab import Lab

BF16 = ml_dtypes.bfloat16
KINDS = {"ratio4": (4, 2), "ratio128": (128, 1)}
DTYPES = {"bfloat16": BF16, "float32": np.float32}


def is_float32_off_the_host(x):
    """Bounds for float32 activations and rows."""
    float32 = x.get("dtype") == "float32" or x.get("layout") in (DSV4_F32, INDEXER_F32)
    return float32 and x.backend not in ("reference", "cpu")


def takes_the_simulator_long(x):
    return x.simulated and (x.get("kind") == "ratio128" or x.get("layout") not in (DSV4_FP8, INDEXER_BF16))


def cache_of(layout, blocks, block_size):
    """Bytes of 0xA5, or random values."""
    if layout.quantized_dim:
        cache = layout.allocate(blocks, block_size)
        cache.base[...] = 0xA5
        return cache
    return np.full((blocks, block_size, layout.head_dim), 7, DTYPES[layout.value_type])


def rows_of(cache, layout):
    """The contents of all slots of a cache, float32."""
    blocks, block_size, _ = cache.shape
    out = np.empty((1, blocks * block_size, layout.head_dim), np.float32)
    table = np.arange(blocks, dtype=np.int32)[None]
    lens = np.array([blocks * block_size], np.int32)
    dequantize_and_gather_k_cache(out, cache, lens, None, table, block_size, 0, layout=layout, backend="reference")
    return out[0]


class Case:
    """Two requests at positions across windows, states of earlier positions in randomly placed pages."""

    def __init__(self, rng, layout, kind, tokens=9, dtype=np.float32):
        self.layout, (self.ratio, coff) = layout, KINDS[kind]
        dim, first = layout.head_dim, (self.ratio - 3, 5 * self.ratio - 6)
        self.kv_score = rng.standard_normal((2 * tokens, 2 * coff * dim), np.float32).astype(dtype)
        self.bias = rng.standard_normal((self.ratio, coff * dim), np.float32)
        self.weight = rng.standard_normal(dim, np.float32)
        self.state = rng.standard_normal((2 * 100, 8, 2 * coff * dim), np.float32)
        self.table = rng.permutation(len(self.state)).astype(np.int32).reshape(2, -1)
        self.cos_sin = np.random.default_rng(3).standard_normal((1024, 64), np.float32)
        self.positions = np.concatenate([np.arange(at, at + tokens) for at in first]).astype(np.int64)
        self.requests = np.repeat([0, 1], tokens).astype(np.int32)
        self.starts = np.array([0, tokens, 2 * tokens], np.int32)
        self.slots = np.where(
            (self.positions + 1) % self.ratio == 0, rng.permutation(max(64, 2 * tokens))[: 2 * tokens], -1
        )
        block = self.positions // 8
        self.state_slots = self.table[self.requests, block].astype(np.int64) * 8 + self.positions % 8
        self.state_slots[::3] = -1

    def run(self, lab, cache, state=None):
        state = lab.put(self.state.copy() if state is None else state)
        placed = lab.put(cache)
        self.into(lab, state, placed)
        return lab.get(placed), lab.get(state)

    def into(self, lab, state, cache):
        """`run` with caches in the backend's memory."""
        compress_and_insert(
            lab.put(self.kv_score), lab.put(self.bias), lab.put(self.weight), state, lab.put(self.state_slots),
            lab.put(self.table), cache, lab.put(self.slots), lab.put(self.positions), lab.put(self.requests),
            lab.put(self.starts), lab.put(self.cos_sin), compress_ratio=self.ratio, layout=self.layout,
            backend=lab.backend,
        )  # fmt: skip

    def rows(self):
        """slot -> row in float64: softmax over the window, norm, RoPE; one position at a time."""
        dim, coff = self.layout.head_dim, self.bias.shape[1] // self.layout.head_dim
        rows = {}
        for token, slot in enumerate(self.slots):
            if slot < 0:
                continue
            position, request = int(self.positions[token]), int(self.requests[token])
            kv, score = [], []
            for p in range(max(0, position + 1 - coff * self.ratio), position + 1):
                at = token - (position - p)
                if at >= self.starts[request]:
                    state = self.kv_score[at].astype(np.float64)
                    state[coff * dim :] += self.bias[p % self.ratio]
                else:
                    state = self.state[self.table[request, p // 8], p % 8].astype(np.float64)
                half = slice(dim, 2 * dim) if coff == 2 and p > position - self.ratio else slice(0, dim)
                kv.append(state[: coff * dim][half])
                score.append(state[coff * dim :][half])
            weights = np.exp(np.array(score) - np.maximum(np.max(score, axis=0), -1e30))
            row = (weights * kv).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-30)  # 0 without positions
            row = rms_norm(row, 1e-6, self.weight)
            rows[int(slot)] = rotated(row, self.cos_sin[position // self.ratio * self.ratio])
        return rows


def assert_rows(got, want, layout):
    """float32 sums in float32 rows; otherwise one step of bfloat16, or of e4m3 within its tile."""
    if layout.value_type == "float32":
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        return
    allowed = 2.0**-7 * np.abs(want) + 2.0**-12
    if layout.quantized_dim:
        tile, n = layout.scale_tile, layout.quantized_dim
        largest = np.abs(want[:n]).reshape(-1, tile).max(axis=1).repeat(tile)
        relative, absolute = (1 / 8, 1 / 256) if layout.value_type == "e4m3" else (1 / 3, 1 / 10)
        allowed[:n] = np.abs(want[:n]) * relative + largest * absolute
    assert (np.abs(got - want) <= allowed).all()


@pytest.mark.nowhere(when=is_float32_off_the_host)
@pytest.mark.nowhere(when=takes_the_simulator_long)
@pytest.mark.parametrize("layout", [DSV4_FP8, DSV4_BF16, DSV4_F32, INDEXER_FP8, INDEXER_BF16, INDEXER_F32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_compressor(lab, rng, layout, kind):
    case = Case(rng, layout, kind)
    before = cache_of(layout, 4, 16)
    cache, state = case.run(lab, before.copy() if before.base is None else cache_of(layout, 4, 16))
    rows, want = rows_of(cache, layout), case.rows()
    assert len(want) >= 2
    for slot, row in want.items():
        assert_rows(rows[slot], row, layout)
    untouched = np.setdiff1d(np.arange(64), list(want))
    np.testing.assert_array_equal(rows[untouched], rows_of(before, layout)[untouched])
    saved = case.state.copy()
    biased = case.kv_score.copy()
    biased[:, biased.shape[1] // 2 :] += case.bias[case.positions % case.ratio]
    for token, slot in enumerate(case.state_slots):
        if slot >= 0:
            saved[slot // 8, slot % 8] = biased[token]
    np.testing.assert_array_equal(state, saved)


@pytest.mark.nowhere(when=lambda x: is_float32_off_the_host(x) or takes_the_simulator_long(x))
@pytest.mark.parametrize("layout", [DSV4_FP8, DSV4_BF16, DSV4_F32, INDEXER_BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_minus_infinity_leave_their_positions_out(lab, rng, layout, kind):
    """Each channel loses other positions, in this step and earlier: some all but one, others all, which gives 0."""
    case = Case(rng, layout, kind)
    score = case.bias.shape[1]
    channels = np.arange(score)
    every = np.minimum(case.ratio, 7)  # one of that many positions

    def leave_out(states, position):
        out = (channels + position) % every == 0
        out |= (channels % 16 == 3) & (position % case.ratio != channels % case.ratio) | (channels % 16 == 5)
        states[score:][out] = -np.inf

    for token, position in enumerate(case.positions):
        leave_out(case.kv_score[token], position)
    for pages in case.table:
        for position in range(8 * len(pages)):
            leave_out(case.state[pages[position // 8], position % 8], position)
    cache, _ = case.run(lab, cache_of(layout, 4, 16))
    rows, want = rows_of(cache, layout), case.rows()
    assert len(want) >= 2
    for slot, row in want.items():
        assert np.isfinite(row).all()
        assert_rows(rows[slot], row, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_before_its_sequence_has_no_window(lab, rng, kind):
    """Positions at any distance before it and with any low bits: a row of zeros, and nothing is read."""
    case = Case(rng, DSV4_BF16, kind)
    before = [-1, -(2**31), -(2**32), 3 - 2**32, 2**20 - 2**33, 7 - 2**63]
    case.positions[: len(before)] = before
    case.slots[:] = -1
    case.slots[: len(before)] = np.arange(len(before))
    cache, _ = case.run(lab, cache_of(DSV4_BF16, 4, 16))
    np.testing.assert_array_equal(rows_of(cache, DSV4_BF16)[: len(before)], 0)


@pytest.mark.nowhere(when=lambda x: x.simulated)  # slow
def test_states_in_pages_give_the_bits_of_states_at_hand(lab, rng):
    """A prompt at once, and token by token."""
    case = Case(rng, DSV4_FP8, "ratio4")
    tokens = 9
    case.positions = np.tile(np.arange(tokens), 2)
    case.slots = np.where((case.positions + 1) % 4 == 0, np.arange(2 * tokens), -1)
    case.state_slots = case.table[case.requests, case.positions // 8].astype(np.int64) * 8 + case.positions % 8
    whole, state = case.run(lab, cache_of(DSV4_FP8, 4, 16))
    parts, states, everything = cache_of(DSV4_FP8, 4, 16), case.state.copy(), vars(case).copy()
    for first, last in ((0, 2), (2, 3), (3, 7), (7, 9)):
        tokens_of = np.concatenate([np.arange(first, last), tokens + np.arange(first, last)])
        for name in ("kv_score", "positions", "requests", "slots", "state_slots"):
            setattr(case, name, everything[name][tokens_of])
        case.starts = np.array([0, last - first, 2 * (last - first)], np.int32)
        parts, states = case.run(lab, parts, states)
        parts, states = np.array(parts), np.array(states)
        parts = parts if parts.strides[0] == whole.strides[0] else DSV4_FP8.view(padded(parts), 16)
    np.testing.assert_array_equal(parts, np.asarray(whole))
    np.testing.assert_array_equal(states, state)


def padded(cache):
    pages = np.full((len(cache), DSV4_FP8.page_bytes(16)), 0xA5, np.uint8)
    pages[:, : 16 * 584] = cache.reshape(len(cache), -1)
    return pages


@pytest.mark.nowhere(when=lambda x: takes_the_simulator_long(x))
@pytest.mark.parametrize("kind", KINDS)
def test_caches_may_be_views_of_the_same_pages(lab, rng, kind):
    """A hybrid allocator creates such views, each with its pages: the rows and states of caches are separate."""
    case = Case(rng, DSV4_FP8, kind)
    cache, state = case.run(lab, cache_of(DSV4_FP8, 4, 16))
    first = len(case.state)  # first block of the cache's pages
    memory = np.full((first + 4, case.state[0].nbytes), 0xA5, np.uint8)
    memory[:first] = case.state.view(np.uint8).reshape(first, -1)
    case.slots = np.where(case.slots >= 0, case.slots + 16 * first, -1)
    memory = lab.put(memory)
    states = memory.view(np.float32).reshape(-1, *case.state.shape[1:])
    pages = DSV4_FP8.view(memory, 16)
    case.into(lab, states, pages)
    np.testing.assert_array_equal(lab.get(pages)[first:], np.asarray(cache))
    np.testing.assert_array_equal(lab.get(states)[:first], state)


def both(lab, cases, states, caches, cos_sin=None):
    """compress_and_insert of a layer's two compressors."""
    first, second = cases
    compress_and_insert(
        lab.put(first.kv_score), lab.put(first.bias), lab.put(first.weight), states[0], lab.put(first.state_slots),
        lab.put(first.table), caches[0], lab.put(first.slots), lab.put(first.positions), lab.put(first.requests),
        lab.put(first.starts), lab.put(first.cos_sin if cos_sin is None else cos_sin), compress_ratio=first.ratio,
        backend=lab.backend, index_kv_score=lab.put(second.kv_score), index_position_bias=lab.put(second.bias),
        index_norm_weight=lab.put(second.weight), index_state_cache=states[1], index_k_cache=caches[1],
    )  # fmt: skip


def test_both_compressors_have_the_columns_of_the_rotation(rng):
    """A head of 512 values has 192 that rotate; the indexer's of 128 has not."""
    lab, wide = Lab("cpu", on_device=False), np.zeros((64, 192), np.float32)
    cases = [Case(rng, layout, "ratio4") for layout in (DSV4_BF16, INDEXER_BF16)]
    states, caches = [case.state.copy() for case in cases], [cache_of(case.layout, 4, 16) for case in cases]
    with pytest.raises(ValueError, match=r"cos_sin_cache: got shape .*, expected .* even number of columns up to 128"):
        both(lab, cases, states, caches, cos_sin=wide)
    for case, state in zip(cases, states, strict=True):
        np.testing.assert_array_equal(state, case.state)


@pytest.mark.parametrize("formats", [(DSV4_FP8, INDEXER_FP8), (DSV4_BF16, INDEXER_BF16)], ids=["fp8", "bf16"])
@pytest.mark.parametrize(("kind", "tokens"), [("ratio4", 9), ("ratio4", 140), ("ratio128", 9)])
@pytest.mark.nowhere(when=lambda c: c.simulated and (c.get("kind") == "ratio128" or c.get("tokens") > 9))  # slow
def test_both_compressors_of_a_layer_at_once(lab, rng, kind, tokens, formats):
    """The bits are the same as in two calls."""
    cases = [Case(rng, layout, kind, tokens=3 if lab.tiny else tokens) for layout in formats]
    for name in ("table", "slots", "state_slots"):
        setattr(cases[1], name, getattr(cases[0], name))
    blocks = 2 * tokens // 16 + 4
    want = [case.run(lab, cache_of(case.layout, blocks, 16)) for case in cases]
    states = [lab.put(case.state.copy()) for case in cases]
    caches = [lab.put(cache_of(case.layout, blocks, 16)) for case in cases]
    both(lab, cases, states, caches)
    for (cache, state), got_cache, got_state in zip(want, caches, states, strict=True):
        np.testing.assert_array_equal(np.asarray(lab.get(got_cache)).view(np.uint8), np.asarray(cache).view(np.uint8))
        np.testing.assert_array_equal(lab.get(got_state), state)


@pytest.mark.nowhere(when=lambda c: c.simulated)  # slow there
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt(lab, rng, kind):
    """Many tokens; few of them complete a row or save a state. States equal the reference's bits, rows its values."""
    case = Case(rng, INDEXER_BF16, kind, tokens=140)
    case.state_slots[:-7] = -1
    want, states = case.run(Lab("reference", on_device=False), cache_of(INDEXER_BF16, 18, 16))
    got, state = case.run(lab, cache_of(INDEXER_BF16, 18, 16))
    np.testing.assert_array_equal(state, states)
    want, got = (np.asarray(x).astype(np.float64) for x in (want, got))
    np.testing.assert_allclose(got, want, rtol=2.0**-6, atol=1e-4)


@pytest.mark.nowhere(when=lambda c: c.backend != "cuda")
@pytest.mark.parametrize("layout", [DSV4_FP8, DSV4_BF16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_few_and_of_many_have_the_same_bits(lab, rng, layout, dtype, monkeypatch):
    """Long windows: clusters of either size, few or many tokens per cluster, states saved by any warp."""
    from cumla.kernels.cuda import compressor

    case = Case(rng, layout, "ratio128", tokens=150, dtype=DTYPES[dtype])
    if lab.emulated:  # an emulated device reports no clusters
        monkeypatch.setattr(compressor, "has_clusters", lambda device: True)
    elif not compressor.has_clusters(0):
        pytest.skip("no clusters there")
    found = []
    for most_of_few, together in ((1000, 32), (1000, 3), (0, 128), (0, 40)):
        monkeypatch.setattr(compressor, "MOST_CLUSTERS_OF_FEW", most_of_few)
        monkeypatch.setattr(compressor, "MOST_TOGETHER", together)
        monkeypatch.setattr(compressor, "MOST_TOGETHER_OF_MANY", together)
        monkeypatch.setattr(compressor, "FEW_OF_LONG", 1)
        found.append(case.run(lab, cache_of(layout, 8, 64)))
    assert case.slots.max() >= 0
    for pages, state in found[1:]:
        assert pages.tobytes() == found[0][0].tobytes()
        assert state.tobytes() == found[0][1].tobytes()
    got = rows_of(found[0][0], layout)
    for slot, row in case.rows().items():
        assert_rows(got[slot], row, layout)


@pytest.mark.parametrize("most_of_few", [1000, 0], ids=["clusters of 8", "clusters of 4"])
@pytest.mark.parametrize("seed", range(1, 4))
def test_thread_blocks_of_a_cluster_in_any_order(emulated, rng, monkeypatch, most_of_few, seed):
    """No CTA writes to another that may not have started."""
    from cumla.kernels.cuda import compressor

    monkeypatch.setattr(compressor, "has_clusters", lambda device: True)
    monkeypatch.setattr(compressor, "MOST_CLUSTERS_OF_FEW", most_of_few)
    monkeypatch.setattr(compressor, "FEW_OF_LONG", 1)
    case = Case(rng, DSV4_FP8, "ratio128")
    with emulation.scheduled(Schedule(seed=seed)):
        pages, _ = case.run(Lab("cuda", on_device=True, emulated=True), cache_of(DSV4_FP8, 4, 16))
    got = rows_of(pages, DSV4_FP8)
    for slot, row in case.rows().items():
        assert_rows(got[slot], row, DSV4_FP8)


@pytest.mark.parametrize(
    ("layout", "kind"), [(INDEXER_FP8, "ratio4"), (DSV4_FP8, "ratio128")], ids=["indexer", "ratio128"]
)
@pytest.mark.nowhere(when=lambda c: c.simulated and c.get("kind") == "ratio128")  # slow there
def test_numbers_of_any_value_stay_inside(lab, rng, layout, kind, monkeypatch):
    """Slots, positions, requests and starts have any values; unused states and rows do not change."""
    case = Case(rng, layout, kind, tokens=3 if lab.tiny else 9)
    if lab.emulated:
        from cumla.kernels.cuda import compressor

        monkeypatch.setattr(compressor, "has_clusters", lambda device: True)
    wild = np.array([-(2**31), -1, 2**31 - 1, 2**20, 0, 3, -7], np.int64)
    n = len(case.positions)
    case.positions = rng.choice(wild, n)
    case.requests = rng.choice(wild, n).astype(np.int32)
    case.starts = np.array([-5, 2**30, -(2**31)], np.int32)
    case.slots = rng.choice(np.append(wild, 2**40), n)
    case.state_slots = rng.choice([-1, -(2**50), 2**40, len(case.state) * 8], n)
    case.table[...] = rng.choice(wild, case.table.shape).astype(np.int32)
    _, state = case.run(lab, cache_of(layout, 4, 16))
    np.testing.assert_array_equal(state, case.state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nowhere(when=lambda c: c.simulated and c.get("kind") == "ratio128")  # slow there
def test_a_start_before_the_batch_is_its_first_token(lab, rng, kind):
    """States of positions before the step's own are not read."""
    case = Case(rng, INDEXER_BF16, kind, tokens=4 if lab.tiny else 9)
    want, _ = case.run(lab, cache_of(INDEXER_BF16, 4, 16))
    for start in (-1, -5, -(2**31)):
        case.starts[0] = start
        got, _ = case.run(lab, cache_of(INDEXER_BF16, 4, 16))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nowhere(when=lambda c: c.simulated and c.get("kind") == "ratio128")  # slow there
def test_state_blocks_outside_of_the_cache_are_absent(lab, rng, kind):
    """Memory after the cache is NaN, which would show in any result that reads it."""
    case = Case(rng, INDEXER_BF16, kind, tokens=4 if lab.tiny else 9)
    blocks = len(case.state)
    case.state = np.concatenate([case.state, np.full_like(case.state[:8], np.nan)])[:blocks]
    case.state_slots[:] = -1
    table = case.table.copy()
    table[:, ::2] = -1
    want = None
    for absent in (-1, blocks, blocks + 3, 2**28 - 1, -(2**31)):
        case.table = np.where(table < 0, absent, table).astype(np.int32)
        state = case.state if not lab.on_device else None
        got, _ = case.run(lab, cache_of(INDEXER_BF16, 4, 16), state)
        want = got if want is None else want
        np.testing.assert_array_equal(got, want)
    assert (want != 7).any(axis=2).sum() >= 2


def test_a_window_without_states_gives_nothing(lab, rng):
    case = Case(rng, INDEXER_FP8, "ratio4", tokens=3 if lab.tiny else 9)
    case.table[...] = -1
    case.state[...] = np.nan  # NaN must not reach a result
    case.state_slots[...] = -1
    cache, _ = case.run(lab, cache_of(INDEXER_FP8, 4, 16))
    rows = rows_of(cache, INDEXER_FP8)
    for slot in case.slots[case.slots >= 0]:
        assert np.isfinite(rows[slot]).all()


WRONG = [
    ("kv_score", lambda c: c["kv_score"][:, :-1], ValueError),
    ("kv_score", lambda c: c["kv_score"].astype(np.float64), TypeError),
    ("position_bias", lambda c: c["position_bias"][:-1], ValueError),
    ("norm_weight", lambda c: c["norm_weight"][:5], ValueError),
    ("state_cache", lambda c: c["state_cache"][..., :-4], ValueError),
    ("state_slot_mapping", lambda c: np.zeros(99, np.int64), ValueError),
    ("slot_mapping", lambda c: np.zeros(99, np.int64), ValueError),
    ("positions", lambda c: c["positions"][:-1], ValueError),
    ("token_to_req_indices", lambda c: c["token_to_req_indices"][:-1], ValueError),
    ("query_start_loc", lambda c: c["query_start_loc"][:-1], ValueError),
    ("cos_sin_cache", lambda c: c["cos_sin_cache"][:, :63], ValueError),
    ("k_cache", lambda c: c["k_cache"][..., :-1], ValueError),
    ("eps", lambda c: -1.0, ValueError),
    ("eps", lambda c: 0.0, ValueError),
    ("compress_ratio", lambda c: 0, ValueError),
]


@pytest.mark.parametrize(
    ("name", "change", "error"), WRONG, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(WRONG)]
)
def test_wrong_arguments_are_named_before_anything_is_written(rng, name, change, error):
    case = Case(rng, DSV4_FP8, "ratio4")
    arguments = {
        "kv_score": case.kv_score, "position_bias": case.bias, "norm_weight": case.weight,
        "state_cache": case.state.copy(), "state_slot_mapping": case.state_slots, "state_block_table": case.table,
        "k_cache": cache_of(DSV4_FP8, 4, 16), "slot_mapping": case.slots, "positions": case.positions,
        "token_to_req_indices": case.requests, "query_start_loc": case.starts, "cos_sin_cache": case.cos_sin,
        "compress_ratio": 4,
    }  # fmt: skip
    wrong = {name: change(arguments | {"eps": 1e-6})}
    with pytest.raises(error, match=name):
        compress_and_insert(**(arguments | wrong))
    np.testing.assert_array_equal(arguments["state_cache"], case.state)
    assert (arguments["k_cache"].base == 0xA5).all()
